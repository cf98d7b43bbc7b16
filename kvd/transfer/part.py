"""One rank of a transfer at one of its ends, as the core sees it: plain state, no behaviour of its own.

States and what moves a part between them (``*``: from any state but ENDED):

====== =========== ============================================= ===========
role   from        event                                         to
====== =========== ============================================= ===========
source WAITING     a matching Open arrives                       RUNNING
source RUNNING     Delivered                                     ENDED, OK
sink   WAITING     Announce, or opened with a source             OPENING
sink   CONNECTING  a session with the source exists, Open sent   OPENING
sink   OPENING     Accepted                                      RUNNING
sink   OPENING     Refused                                       ENDED
sink   RUNNING     the last token arrived                        ENDED, OK
both   *           abort, process or session lost, deadline      ENDED
====== =========== ============================================= ===========

An ended part keeps its memory until its process releases it or is lost; then it is forgotten.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from kvd.errors import KvdError
from kvd.mask import IntervalSet, Places, TokenFlags
from kvd.transfer.events import BlocksRanked, ClientId, FetchRequested, SessionId
from kvd.transfer.queue import ReadyTokens, SendQueue
from kvd.transfer.rate import IdleTime
from kvd.types import NodeId, Role, TransferId
from kvd.wire.messages import Fetch, LayerRanges
from kvd_client.layouts import Placement, Target
from kvd_client.spec import KVSpec, PartLayout, TokenRange


class State(enum.Enum):
    """See the module's table."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    OPENING = "opening"
    RUNNING = "running"
    ENDED = "ended"


@dataclasses.dataclass(slots=True, kw_only=True)
class Part:
    """What both roles have."""

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
    peer: NodeId
    opened: float
    deadline: float
    rendezvous_until: float | None
    """When the wait for the other side ends; None: not limited (yet)."""
    state: State = State.WAITING
    session: SessionId | None = None
    peer_transfer: TransferId | None = None
    """The part's number at the other side, once known."""
    code: str = ""
    """How it ended: ``OK`` or an error's code."""
    error: KvdError | None = None
    """What ended it, if something went wrong."""
    bytes_total: int = 0
    bytes_done: int = 0
    mode: str = ""
    """Source: what its process asked for, and from the pairing on what holds. Sink: likewise, told by the source."""
    selector: str = ""
    paths: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Bytes by path, metadata included; fetches; windows."""
    refused_until: float | None = None
    """The other side's memory refused a write or a read, or the link broke: its reason should arrive by then on the
    control connection."""
    refusal: str = ""
    """The code of that refusal."""

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    @property
    def expiry(self) -> float:
        """When its next limit is reached."""
        first = self.deadline
        if self.rendezvous_until is not None and self.state is not State.RUNNING:
            first = min(first, self.rendezvous_until)
        if self.refused_until is not None:
            first = min(first, self.refused_until)
        return first


@dataclasses.dataclass(slots=True, kw_only=True)
class SourcePart(Part):
    """The end that has the KV cache."""

    ready: ReadyTokens
    queue: SendQueue | None = None
    """Exists once the part is paired."""
    metadata_ready: set[int] = dataclasses.field(default_factory=set)
    """Layers whose metadata is complete."""
    metadata_queue: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    """Those to be sent yet."""
    rankings: dict[int, BlocksRanked] = dataclasses.field(default_factory=dict)
    """By layer, what came before there was a queue to sort."""
    idle: IdleTime = dataclasses.field(default_factory=IdleTime)
    early: list[Fetch] = dataclasses.field(default_factory=list)
    """Fetches of layers that are not ready yet: they can overtake the ring's last events."""
    prefill_s: float = 0.0
    """T_p as the process says; 0: unknown."""
    placement: Placement | None = None
    """Where its tensors lie, if not in the lease."""
    regroups: bool = False
    """Either end's tensors lie in a layout of their own."""
    pulled: bool = False
    """The sink reads what this side has regrouped."""
    staged: dict[int, tuple[str, list[LayerRanges]]] = dataclasses.field(default_factory=dict)
    """By write: path and tokens of what it has not read yet."""
    announced_on: SessionId | None = None
    """Where the sink's node was told of this part."""
    finished: bool = False
    writes: set[int] = dataclasses.field(default_factory=set)
    """Writes that have been instructed and not completed."""
    dropped: dict[int, tuple[int, Places]] = dataclasses.field(default_factory=dict)
    """By fetch in service: its layer, and what it took out of the queue."""


@dataclasses.dataclass(slots=True, kw_only=True)
class SinkPart(Part):
    """The end that receives it."""

    held: tuple[TokenRange, ...]
    announced: bool
    """Its process named no source: an announcement told where it is."""
    arrived: dict[tuple[int, int], IntervalSet] = dataclasses.field(default_factory=dict)
    """Tokens in place (or held from the start), by (layer, row)."""
    missing: int = 0
    """Tokens, summed over layers, that are neither held nor arrived."""
    missing_metadata: set[int] = dataclasses.field(default_factory=set)
    """Layers whose metadata has not arrived."""
    places: TokenFlags | None = None
    """Instead of ``arrived``, where what is fetched is kept: it comes in single tokens."""
    fetches: dict[int, FetchRequested] = dataclasses.field(default_factory=dict)
    """Fetches under way, by number."""
    keeping: dict[int, tuple[int, Places]] = dataclasses.field(default_factory=dict)
    """Those of them that have arrived and are being put in place: layer and places."""
    target: Target | None = None
    """Where its tensors lie, if not in the lease."""
    pulls: set[int] = dataclasses.field(default_factory=set)
    """Stages that are being read."""

    @property
    def complete(self) -> bool:
        """Everything is in place."""
        return self.missing == 0 and not self.missing_metadata
