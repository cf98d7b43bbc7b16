"""What can happen to the transfer core. Times are seconds of the engine's clock; sessions are opaque numbers."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.types import NodeId, Role, TransferId
from kvd.wire import messages as wire
from kvd.wire.messages import Arrived, PeerMessage
from kvd_client.layouts import Placement, Target
from kvd_client.spec import KVSpec, PartLayout, TokenRange

SessionId: TypeAlias = int
ClientId: TypeAlias = int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartOpened:
    """A local process opened one rank of a transfer; its memory is reserved and its masks are initialised."""

    transfer: TransferId
    role: Role
    client: ClientId
    request: str
    rank: int
    ranks: int
    head_start: int
    spec: KVSpec
    layout: PartLayout
    lengths: tuple[int, ...]
    handle: str
    """Source: this part's own handle. Sink: the handle of the source to open, or empty."""
    peer: NodeId
    """Source: the sink to announce to, or empty. Sink: the source to open, or empty to wait for an announcement."""
    held: tuple[TokenRange, ...] = ()
    mode: str = ""
    selector: str = ""
    prefill_s: float = 0.0
    deadline_s: float
    """Seconds from now until the transfer must be delivered."""
    placement: Placement | None = None
    """Source: its tensors lie in a device's memory."""
    target: Target | None = None
    """Sink: its tensors lie in a device's memory; without the grants."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerReady:
    """The source's process has put these tokens of a layer in place. ``row`` None: in every row, clipped to it."""

    transfer: TransferId
    layer: int
    row: int | None
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class MetadataReady:
    """The source's process has put a layer's metadata arrays in place."""

    transfer: TransferId
    layer: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BlocksRanked:
    """The source's process knows what the prompt's last queries select of a layer."""

    transfer: TransferId
    layer: int
    shares: npt.NDArray[np.float32]
    """(rows, blocks): 0 to 1, as :func:`kvd.importance.prompt.combined` takes them."""
    weight: float


@dataclasses.dataclass(frozen=True, slots=True)
class IdleWindow:
    """A decode attention layer begins in the sink's process: the network is free for a while."""

    transfer: TransferId
    layer: int


@dataclasses.dataclass(frozen=True, slots=True)
class FetchRequested:
    """The sink's process wants entries now; answered by one ``FetchEnded`` instruction with the same number."""

    transfer: TransferId
    fetch: int
    layer: int
    counts: bytes
    """int32: entries of each (row, head)."""
    index: bytes
    """int32: token positions, row after row."""
    offset: int
    """Where the first row goes, in the lease."""
    stride: int


@dataclasses.dataclass(frozen=True, slots=True)
class FetchServed:
    """A ``ServeFetch`` instruction ended: the entries are placed at the sink, or not."""

    transfer: TransferId
    session: SessionId
    fetch: int
    sink: TransferId
    nbytes: int
    error: KvdError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFinished:
    """The source's process has rung everything; from now on the wait for a sink is limited."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """The process does not need the part's memory any more."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class AbortRequested:
    """The process gives the transfer up (or the engine does, with another error than ``Aborted``)."""

    transfer: TransferId
    error: KvdError


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLost:
    """A process's connection ended; everything it had opened ends with it."""

    client: ClientId


@dataclasses.dataclass(frozen=True, slots=True)
class SessionReady:
    """Answer to ``Connect``: a session with the wanted peer."""

    transfer: TransferId
    session: SessionId
    node: NodeId


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectFailed:
    """Answer to ``Connect``: the peer can't be reached."""

    transfer: TransferId
    error: KvdError


@dataclasses.dataclass(frozen=True, slots=True)
class SessionLost:
    """A session ended; nothing more comes from it."""

    session: SessionId
    error: KvdError


@dataclasses.dataclass(frozen=True, slots=True)
class MessageReceived:
    """A control message of a peer."""

    session: SessionId
    node: NodeId
    message: PeerMessage


@dataclasses.dataclass(frozen=True, slots=True)
class TokensArrived:
    """A write of the peer is in place, its mask bytes included."""

    session: SessionId
    arrived: Arrived | wire.TensorsArrived
    marked: bool = True
    """False where the masks in memory say otherwise: the peer has not written what it says."""


@dataclasses.dataclass(frozen=True, slots=True)
class MetadataArrived:
    """A layer's metadata is in place, its mask byte included."""

    session: SessionId
    arrived: wire.MetadataArrived
    marked: bool = True
    """As in :class:`TokensArrived`."""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchArrived:
    """The entries of a fetch are in place."""

    session: SessionId
    arrived: wire.FetchArrived


@dataclasses.dataclass(frozen=True, slots=True)
class FetchKept:
    """A ``KeepFetched`` instruction ended: the entries are in place and marked in the mask, or not."""

    transfer: TransferId
    fetch: int
    error: KvdError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WriteCompleted:
    """A ``WriteTokens``, ``WriteTensors`` or ``WriteMetadata`` instruction ended: placed at the sink, or failed."""

    transfer: TransferId
    write: int
    error: KvdError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Regrouped:
    """A ``WriteTensors`` instruction has its tokens in staging memory; their way begins."""

    transfer: TransferId
    write: int


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """A ``WriteTensors`` instruction of a part that the sink pulls has regrouped its tokens."""

    transfer: TransferId
    write: int
    grant: bytes
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Tensors have been regrouped, or read from the far side's staging memory: what that took, for the accounts."""

    transfer: TransferId
    requests: int
    """Pieces that were given to the fabric."""
    nbytes: int
    """Of the target layout, padding included."""
    regroup_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class PullCompleted:
    """A ``PullTensors`` instruction ended: everything is in place and marked in the masks, or not."""

    transfer: TransferId
    session: SessionId
    message: wire.Staged
    error: KvdError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; timers are looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainRequested:
    """The daemon is about to stop: what runs may end, nothing new begins."""


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested:
    """The daemon stops now: what still runs ends with this error."""

    error: KvdError


Event: TypeAlias = (
    PartOpened
    | LayerReady
    | MetadataReady
    | BlocksRanked
    | IdleWindow
    | FetchRequested
    | FetchServed
    | SourceFinished
    | ReleaseRequested
    | AbortRequested
    | ClientLost
    | SessionReady
    | ConnectFailed
    | SessionLost
    | MessageReceived
    | TokensArrived
    | MetadataArrived
    | FetchArrived
    | FetchKept
    | WriteCompleted
    | Regrouped
    | Staged
    | Moved
    | PullCompleted
    | Tick
    | DrainRequested
    | StopRequested
)
