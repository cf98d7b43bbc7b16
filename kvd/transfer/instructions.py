"""What the transfer core wants done. The engine carries instructions out in order and reports back by events."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.tensors import Tensors
from kvd.transfer.events import FetchRequested, SessionId
from kvd.transfer.part import Part
from kvd.types import Lane, NodeId, Path, TransferId
from kvd.wire.messages import Fetch, Open, PeerMessage, Staged
from kvd_client.layouts import Target
from kvd_client.spec import PartLayout, TokenRange


@dataclasses.dataclass(frozen=True, slots=True)
class Connect:
    """Get a session with ``node``; answered by ``SessionReady`` or ``ConnectFailed``."""

    transfer: TransferId
    node: NodeId


@dataclasses.dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a control message; lost silently if the session has ended (``SessionLost`` tells)."""

    session: SessionId
    message: PeerMessage


@dataclasses.dataclass(frozen=True, slots=True)
class SendOpen:
    """Grant the sink part's memory to the session's peer, and send the open with the grant's token filled in."""

    transfer: TransferId
    session: SessionId
    message: Open


@dataclasses.dataclass(frozen=True, slots=True)
class BindSink:
    """A source part is paired: remember where its writes go."""

    transfer: TransferId
    session: SessionId
    sink: TransferId
    layout: PartLayout
    grant: bytes
    target: Target | None = None
    tensors: Tensors | None = dataclasses.field(default=None, repr=False)
    """The sink's, as ``target`` describes them."""


@dataclasses.dataclass(frozen=True, slots=True)
class WriteTokens:
    """Write tokens of one layer into the sink's memory, then their mask bytes, then tell the sink's daemon.

    Answered by exactly one ``WriteCompleted`` with the same ``write`` number."""

    transfer: TransferId
    session: SessionId
    write: int
    lane: Lane
    path: Path
    layer: int
    ranges: tuple[TokenRange, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class WriteTensors:
    """Regroup tokens of some layers for the sink's layout, write them as one batch into its buffers, then their mask
    bytes, then tell the sink's daemon; or, where the sink pulls, report them as ``Staged`` and keep them there.

    Answered by exactly one ``WriteCompleted``, but for what is staged: ``EndStage`` ends that."""

    transfer: TransferId
    session: SessionId
    write: int
    path: Path
    layers: tuple[tuple[int, tuple[TokenRange, ...]], ...]
    nbytes: int
    """Of the tokens, without padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndStage:
    """The sink has read a stage, or has failed to: give its memory back. Answered by ``WriteCompleted`` with
    ``error``, unless the stage has ended already."""

    transfer: TransferId
    write: int
    nbytes: int
    error: KvdError | None


@dataclasses.dataclass(frozen=True, slots=True)
class PullTensors:
    """Sink: read a stage into the part's buffers, then mark its tokens. Answered by one ``PullCompleted``."""

    transfer: TransferId
    session: SessionId
    message: Staged


@dataclasses.dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Write a layer's metadata arrays into the sink's memory, then their mask byte, then tell the sink's daemon.

    Answered by exactly one ``WriteCompleted``."""

    transfer: TransferId
    session: SessionId
    write: int
    layer: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ServeFetch:
    """Gather entries of a layer and write them into the sink's landing slot. Answered by one ``FetchServed``."""

    transfer: TransferId
    session: SessionId
    sink: TransferId
    message: Fetch


@dataclasses.dataclass(frozen=True, slots=True)
class FillFetch:
    """Sink: everything has arrived meanwhile; take a fetch's entries from the part's own memory, and report its end."""

    transfer: TransferId
    request: FetchRequested


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KeepFetched:
    """Sink: copy entries from a landing slot to their places in the layer, then mark them in its mask. Answered by one
    ``FetchKept``."""

    transfer: TransferId
    fetch: int
    layer: int
    offset: int
    """Where the slot's rows begin, in the lease."""
    entries: npt.NDArray[np.int64]
    """Shape (n,): entries of the slot."""
    places: npt.NDArray[np.int64]
    """Shape (n,): row * capacity + token of each, as entries of the layer and as bytes of its mask."""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchEnded:
    """Answer the process's fetch."""

    transfer: TransferId
    fetch: int
    error: KvdError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WantWindows:
    """Sink: whether the source has something to send in idle windows, so that the process need ring them."""

    transfer: TransferId
    wanted: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CancelWrites:
    """Drop the part's writes that have not been started; each still gets its ``WriteCompleted``."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Masks of a sink part have changed; wake its process if it waits."""

    transfer: TransferId
    bytes_done: int
    new_bytes: int
    """Those of this arrival."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportEnd:
    """Tell the part's process how the transfer ended. Comes once for a part. ``code`` is ``OK`` or an error's."""

    transfer: TransferId
    code: str
    message: str
    fields: dict[str, Any]
    part: Part
    """For the log; not to be changed."""
    seconds: float
    """Since the part was opened."""


@dataclasses.dataclass(frozen=True, slots=True)
class FreeMemory:
    """Withdraw the part's grant and give its lease back; comes once, as the last instruction for a part."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class CloseSession:
    """The peer broke the protocol; end the session with this reason."""

    session: SessionId
    reason: str


Instruction: TypeAlias = (
    Connect
    | SendMessage
    | SendOpen
    | BindSink
    | WriteTokens
    | WriteTensors
    | EndStage
    | PullTensors
    | WriteMetadata
    | ServeFetch
    | FillFetch
    | KeepFetched
    | FetchEnded
    | WantWindows
    | CancelWrites
    | Publish
    | ReportEnd
    | FreeMemory
    | CloseSession
)
