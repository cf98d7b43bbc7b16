"""Messages between two daemons, on the control connection of a peer session (after the handshake).

Framing and limits are those of the local API (:mod:`kvd_client.protocol`). ``transfer`` always names the
*receiver's* part, except in :class:`Open` and :class:`Announce`, where the sender tells its own.

Version history: 1, first version. 2, key shares in the handshake, encrypted control frames; tensors in a device's
layout: ``target`` of :class:`Open`, and the pulling of what the source has regrouped; masks by head, and fetched
entries that are not sent again: ``sequence_rows`` of layouts, ``keep`` of :class:`Fetch`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvd_client.layouts import Target
from kvd_client.spec import KVSpec, PartLayout, TokenRange

WIRE_VERSION = 2


class WireMessage(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of the messages between daemons."""


class Announce(WireMessage, tag="announce"):
    """Source to sink node: this request is here, come and open it. Sent where the source knows its sink."""

    source: int
    request: str
    rank: int


class Retract(WireMessage, tag="retract"):
    """Source to sink node: what I announced for this request is not here any more."""

    request: str
    rank: int


class Open(WireMessage, tag="open"):
    """Sink to source: send me this rank of a transfer, into the memory behind ``grant``."""

    sink: int
    request: str
    handle: str
    """The source's handle; if not empty, it must exist already, and decides instead of ``request``."""
    rank: int
    ranks: int
    head_start: int
    spec: KVSpec
    layout: PartLayout
    """The sink's; heads, rows and entry size must be the source's, the capacity may differ."""
    lengths: list[int]
    held: list[TokenRange]
    grant: bytes
    deadline_s: float
    """Seconds left for the transfer on the sink's clock."""
    mode: str = ""
    """One of :data:`kvd_client.protocol.MODES`, or empty: the source decides."""
    selector: str = ""
    target: Target | None = None
    """Where and how the tensors lie at the sink, if not token-major behind ``grant``."""


class Accepted(WireMessage, tag="accepted"):
    """Source to sink: the two sides are paired."""

    transfer: int
    source: int
    mode: str = "full"


class Refused(WireMessage, tag="refused"):
    """Source to sink: this open can't be served. ``code`` is one of :mod:`kvd.errors`."""

    transfer: int
    code: str
    message: str
    fields: dict[str, Any]


class Withdraw(WireMessage, tag="withdraw"):
    """Sink to source: forget the open that I sent as part ``sink``; sent while no :class:`Accepted` has come."""

    sink: int
    code: str
    message: str
    fields: dict[str, Any]


class Delivered(WireMessage, tag="delivered"):
    """Sink to source: every token that the sink wants is in place; the source's memory is not needed any more."""

    transfer: int


class Abort(WireMessage, tag="abort"):
    """Either way: the transfer has ended on my side for this reason."""

    transfer: int
    code: str
    message: str
    fields: dict[str, Any]


class RejectHandle(WireMessage, tag="reject"):
    """Sink node to source: nobody will open this handle (or request); free it."""

    handle: str
    request: str
    reason: str


class Fetch(WireMessage, tag="fetch"):
    """Sink to source: gather these entries and write them into my memory; answered by :class:`FetchArrived` behind
    them, or :class:`FetchFailed`."""

    transfer: int
    sink: int
    """The sender's part."""
    fetch: int
    layer: int
    counts: bytes
    """int32: entries of each (row, head)."""
    index: bytes
    """int32: token positions, row after row."""
    offset: int
    """Where the first row goes, in the grant."""
    stride: int
    """Bytes from one row to the next."""
    keep: bool = False
    """The sink puts these entries in place, too, and counts them as arrived: they need not be sent again."""


class FetchFailed(WireMessage, tag="fetch_failed"):
    """Source to sink: a fetch can't be served."""

    transfer: int
    fetch: int
    code: str
    message: str
    fields: dict[str, Any]


class Idle(WireMessage, tag="idle"):
    """Sink to source: so many decode attention layers have begun; the network is free for a while."""

    transfer: int
    windows: int


LEARNT_VERSION = 1
"""Of what :class:`Learnt` means; a message of another version is dropped."""


class Learnt(WireMessage, tag="learnt"):
    """Sink to source: what requests with prompts of ``low`` to ``2 * low - 1`` tokens have selected, on average; the
    source's importance is to follow it. About no transfer, and not answered."""

    model: str
    revision: str
    selector: str
    layers: int
    kv_heads: int
    entry_bytes: int
    low: int
    """A power of two."""
    blocks: int
    requests: float
    tokens: float
    """Decoded by these requests."""
    scale: float
    rates: bytes
    """uint8, layers * blocks: 255 * sqrt(rate / scale), where rate is the share of its chances in which an entry of the
    block was selected."""
    cells: int = 0
    """0 where heads are not told apart."""
    head_scale: float = 0.0
    head_rates: bytes = b""
    """uint8, layers * kv_heads * cells: the same by KV head, in as many equal parts of the prompt."""
    version: int = LEARNT_VERSION


class LayerRanges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of one layer."""

    layer: int
    ranges: list[TokenRange]


class Staged(WireMessage, tag="staged"):
    """Source to sink: these tokens are regrouped and wait in my memory; read them. Answered by :class:`Pulled`."""

    transfer: int
    source: int
    """The sender's part."""
    stage: int
    layers: list[LayerRanges]
    grant: bytes
    nbytes: int
    """Of the staging memory, from the grant's start: as many as the plan of these tokens has."""
    path: str


class Pulled(WireMessage, tag="pulled"):
    """Sink to source: a stage has been read and is in place, or (with a code of :mod:`kvd.errors`) could not be."""

    transfer: int
    stage: int
    code: str = ""
    message: str = ""
    fields: dict[str, Any] = {}


class Ping(WireMessage, tag="ping"):
    """Liveness; answered by :class:`Pong` with the same number."""

    number: int


class Pong(WireMessage, tag="pong"):
    number: int


PeerMessage = (
    Announce
    | Retract
    | Open
    | Accepted
    | Refused
    | Withdraw
    | Delivered
    | Abort
    | RejectHandle
    | Fetch
    | FetchFailed
    | Idle
    | Learnt
    | Staged
    | Pulled
    | Ping
    | Pong
)


class FabricBlob(WireMessage, tag="fabric"):
    """What the fabrics of the two sides tell each other while they connect, in the order of sending."""

    blob: bytes


class Closing(WireMessage, tag="closing"):
    """Last message of a session that its sender ends on purpose. ``code`` is one of :mod:`kvd.errors`."""

    code: str
    message: str


SessionMessage = FabricBlob | Closing
"""Messages that the peer session itself consumes."""


class Arrived(msgspec.Struct, array_like=True, tag="a", forbid_unknown_fields=True):
    """What a write's ``notify`` carries: these token ranges of a layer are in place at the sink, mask included."""

    transfer: int
    """The sink's part."""
    layer: int
    ranges: list[TokenRange]
    path: str = "proactive"


class TensorsArrived(msgspec.Struct, array_like=True, tag="t", forbid_unknown_fields=True):
    """What the notification of tensors' masks carries: these tokens of some layers are in place, masks included."""

    transfer: int
    layers: list[LayerRanges]
    path: str


class MetadataArrived(msgspec.Struct, array_like=True, tag="m", forbid_unknown_fields=True):
    """A layer's metadata is in place, its mask byte included."""

    transfer: int
    layer: int


class FetchArrived(msgspec.Struct, array_like=True, tag="f", forbid_unknown_fields=True):
    """The entries of a fetch are in place."""

    transfer: int
    fetch: int


Notification = Arrived | TensorsArrived | MetadataArrived | FetchArrived
