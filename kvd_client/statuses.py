"""What :class:`~kvd_client.protocol.Status` consists of: transfers, peers, memory, devices, profiles."""

from __future__ import annotations

import msgspec


class TransferStatus(msgspec.Struct, kw_only=True):
    """One part of a transfer, as ``kvd status`` shows it."""

    transfer: int
    request: str
    role: str
    state: str
    peer: str
    rank: int
    ranks: int
    bytes_total: int
    bytes_done: int
    age_s: float
    mode: str = "full"
    paths: dict[str, int] = {}
    """Bytes by path, fetches, windows, and the budget in tokens, as far as they are not 0. ``filled``: bytes of
    fetches that the sink's own memory served, because everything had arrived meanwhile."""
    mask: str = "token"
    """What a mask byte stands for: one of :data:`kvd_client.spec.MASKS`."""
    budget_bytes: int = 0
    """Source: the KV blocks within the budget K_r; 0 where no such number decides."""


class PeerStatus(msgspec.Struct, kw_only=True):
    """A node that is configured, or has been connected; bytes of all its sessions since the start."""

    node: str
    address: str
    state: str
    """``connected``, ``connecting``, ``down``."""
    boot: str = ""
    fabric: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    error: str = ""
    """Why it is down; while it is connected, why not over the fabric that it would be otherwise."""
    down_s: float = 0.0
    """How long ago it was lost, or could not be reached for the first time; 0 while it is connected, and where nobody
    has tried."""
    trouble: str = ""
    """What is wrong though it may be connected: a second daemon goes by its id."""


class MemoryStatus(msgspec.Struct, kw_only=True):
    """Bytes of the pool."""

    limit: int
    registered: int
    in_use: int
    leases: int
    huge_pages: bool


class DeviceStatus(msgspec.Struct, kw_only=True):
    """Bytes of a device's memory channels; lists by channel."""

    name: str
    backing: str
    """``host`` or ``tenstorrent``."""
    channel_bytes: int
    """What each channel has."""
    alignment: int
    leases: int
    used: list[int]
    largest_free: list[int]
    """The largest extent that is free in the channel."""
    largest_common: int
    """The largest extent that is free at the same place in all channels."""


class ProfileStatus(msgspec.Struct, kw_only=True):
    """A profile that new transfers use."""

    model: str
    revision: str
    selector: str
    groups: list[tuple[int, int]]
    """Prompt lengths of each group: from (included), to (excluded)."""
    fingerprint: str
    """``sha256`` of the profile's content, as its file has it."""


class RecordingStatus(msgspec.Struct, kw_only=True):
    """What :class:`~kvd_client.protocol.ExportProfile` would bring, by group of prompt lengths."""

    model: str
    revision: str
    selector: str
    low: int
    high: int
    prompts: int
    steps: int


class LearntStatus(msgspec.Struct, kw_only=True):
    """What the daemon has learnt of a model's prompts of about one length."""

    model: str
    revision: str
    selector: str
    low: int
    high: int
    """Excluded."""
    requests: float
    """That it has learnt from."""
    heard: float
    """Those of them that peers told of."""
    tokens: float
    """Decoded by them."""
    filled: float
    """The share of the memory that the half-life allows; 1 where learning began with a profile."""
    age_s: float
    """Since the last of them."""
