"""What the vLLM connector's two halves tell each other, and what routers pass on: plain data, no vLLM and no torch.

A request that leaves an engine is named three ways. ``request`` is this engine's own id, which no other engine knows.
``transfer`` is the id under which the two daemons meet: a router's choice (``kvd_request``), else made of the engine's
id and the request's. ``handle`` is the source's, where its worker has opened the transfer in this very process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvd_client.arguments import seconds, whole
from kvd_client.errors import InvalidArgument

UNITS = ("block", "token")
"""What is a token of the transfer: one of vLLM's blocks, whose inside is the attention backend's own affair; or a
token, where a token's K and V of a head lie together in the cache."""

MAX_HANDLES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """``kv_connector_extra_config``."""

    socket: str | None = None
    """The daemon's; default as :func:`kvd_client.client.default_socket`."""
    model: str = ""
    """What the model is called on both sides; default the engine's ``--model``, which may be a path."""
    unit: str = "block"
    """One of :data:`UNITS`, the same on both sides. ``token`` lets the two have different block sizes."""
    peer_ranks: int = 0
    """The tensor-parallel degree of the other side; 0: this side's."""
    deadline_s: float = 120.0
    """From the begin of a transfer, at either side, until all is delivered; then it fails, and decode recomputes."""
    timeout_s: float = 5.0
    """How long one request to the daemon may take."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Raises :class:`InvalidArgument`, which names the key."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidArgument(
                    f"kv_connector_extra_config has {name!r}; KvdConnector knows {', '.join(known)}", field=name
                )
        found = cls(**given)
        if found.unit not in UNITS:
            raise InvalidArgument(f"unit is {found.unit!r}; it must be one of {', '.join(UNITS)}", field="unit")
        if whole("peer_ranks", found.peer_ranks) < 0:
            raise InvalidArgument("peer_ranks is negative; give a tensor-parallel degree", field="peer_ranks")
        for name in ("deadline_s", "timeout_s"):
            if not seconds(name, getattr(found, name)) > 0:
                raise InvalidArgument(f"{name} must be more than 0", field=name)
        return found


@dataclasses.dataclass(slots=True)
class Save:
    """A step computes tokens of a request whose cache another engine wants."""

    request: str
    transfer: str
    blocks: list[int]
    """Those that the request has got since the last step, in order; with ``anew`` all of them."""
    anew: bool
    computed: int
    """Tokens of the prompt whose K and V are in the blocks after this step."""
    tokens: int
    """Of the prompt."""
    prompt: str
    """:func:`prompt_digest`."""
    sink: str = ""


@dataclasses.dataclass(slots=True)
class Load:
    """A request waits for what another engine has computed."""

    request: str
    transfer: str
    blocks: list[int]
    """All of the prompt, in order."""
    held: int
    """Tokens at the begin that this engine has already: whole blocks."""
    tokens: int
    prompt: str
    source: str = ""
    handle: str = ""


@dataclasses.dataclass(slots=True)
class Rejection:
    """Nobody will fetch this: its source may give the memory back."""

    transfer: str
    source: str
    handle: str
    reason: str


@dataclasses.dataclass(slots=True)
class Plan:
    """What a worker does around one forward pass."""

    saves: list[Save] = dataclasses.field(default_factory=list)
    loads: list[Load] = dataclasses.field(default_factory=list)
    drop_saves: list[str] = dataclasses.field(default_factory=list)
    """Requests that ended before their prompt was computed."""
    drop_loads: list[str] = dataclasses.field(default_factory=list)
    """Requests that ended while they waited."""
    rejections: list[Rejection] = dataclasses.field(default_factory=list)
    idle: bool = False
    """The pass computes nothing."""


class Board:
    """Handles of transfers whose worker lives in the scheduler's process, as with one rank it does: the handle of a
    prompt that takes a single step is known in time for the answer. None: the transfer could not be opened."""

    def __init__(self) -> None:
        self._handles: dict[str, str | None] = {}

    def put(self, transfer: str, handle: str | None) -> None:
        self._handles[transfer] = handle
        while len(self._handles) > MAX_HANDLES:  # where no scheduler in this process takes them off
            self._handles.pop(next(iter(self._handles)))

    def has_failed(self, transfer: str) -> bool:
        return self._handles.get(transfer, "") is None

    def handle(self, transfer: str) -> str:
        return self._handles.get(transfer) or ""

    def remove(self, transfer: str) -> None:
        self._handles.pop(transfer, None)


BOARD = Board()


def prompt_digest(tokens: Sequence[int], *others: str) -> str:
    """A digest of whatever decides what the cache holds: token ids, adapter, images. Both ends give it as a part of
    their fingerprint, so that a prompt is never decoded from the cache of another one."""
    found = hashlib.blake2b(digest_size=16)
    found.update(struct.pack(f"<{len(tokens)}q", *tokens))
    for other in others:
        found.update(b"\0" + other.encode())
    return found.hexdigest()


def text_of(params: Mapping[str, Any], name: str) -> str:
    """A text among ``kv_transfer_params``, which come from the network. Raises :class:`InvalidArgument`."""
    value = params.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 512:
        raise InvalidArgument(f"kv_transfer_params has {name} = {str(value)[:100]!r}; it must be a text", field=name)
    return value
