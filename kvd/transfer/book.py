"""The core's state: all parts, who waits for whom, what is under way. Changed only by the core's handlers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvd.errors import KvdError, NotFound, ShuttingDown
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.part import Part, SinkPart, SourcePart, State
from kvd.transfer.policy import Profiled, Selective
from kvd.transfer.rendezvous import Rendezvous
from kvd.transfer.scheduler import Link
from kvd.transfer.timers import Timers
from kvd.types import NodeId, Role, TransferId
from kvd.wire import messages as wire
from kvd_client.spec import KVSpec

REFUSED_GRACE_S = 5.0
"""How long a refused write waits for the control message that explains it: the two travel on different connections."""

SomePart = TypeVar("SomePart", bound=Part)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Limits of the core. Times in seconds, sizes in bytes."""

    rendezvous_s: float = 30.0
    chunk: int = 1 << 20
    window: int = 8 << 20
    bulk_delay_s: float = 0.0
    """Most time that bulk bytes under way may take the link, as a bound on what urgent work waits for; 0: none."""
    selective: Selective = dataclasses.field(default_factory=Selective)
    profiled: Callable[[KVSpec, str, tuple[int, ...]], Profiled] = lambda spec, selector, lengths: Profiled()
    """What is known about transfers of a model, a selector and prompt lengths."""


class Book:
    """What the handlers of :mod:`kvd.transfer.core` share."""

    def __init__(self, node: NodeId, boot: str, settings: Settings) -> None:
        self.node = node
        self.boot = boot
        self.settings = settings
        self.parts: dict[TransferId, Part] = {}
        self.unfinished = 0
        """Parts that have not ended."""
        self.timers = Timers(self.parts)
        self.by_rank: dict[tuple[Role, str], dict[int, TransferId]] = {}
        """The parts of each request by rank, in the order in which they were opened."""
        self.by_handle: dict[str, TransferId] = {}
        self.by_sink: dict[tuple[ev.SessionId, TransferId], TransferId] = {}
        """The source part that sends to each session's sink, until it ends: a peer may withdraw thousands at once."""
        self.rendezvous = Rendezvous()
        self.links: dict[ev.SessionId, Link] = {}
        self.writes: dict[int, ev.SessionId] = {}
        """The session of each write under way."""
        self.next_write = 1
        self.counters: collections.Counter[str] = collections.Counter()
        self.draining = False
        self.now = 0.0
        """Time of the event that is being handled."""
        self.out: list[do.Instruction] = []
        """Instructions of the event that is being handled."""

    def link(self, session: ev.SessionId) -> Link:
        """The session's link, made when it is first needed."""
        link = self.links.get(session)
        if link is None:
            settings = self.settings
            link = self.links[session] = Link(settings.window, settings.chunk, settings.bulk_delay_s)
        return link

    def add(self, part: Part) -> None:
        """Take a new part in."""
        self.parts[part.transfer] = part
        self.by_rank.setdefault((part.role, part.request), {})[part.rank] = part.transfer
        if part.role is Role.SOURCE:
            self.by_handle[part.handle] = part.transfer
        self.unfinished += 1
        self.timers.set(part)
        self.counters[f"transfers_opened_{part.role.value}"] += 1

    def refused(self, part: Part, error: KvdError) -> None:
        """The other side's memory refused a write or a read, or the link broke. Its reason should follow on the control
        connection; the part ends with this one if it does not come within :data:`REFUSED_GRACE_S`."""
        if part.refused_until is None:
            part.refused_until, part.refusal = self.now + REFUSED_GRACE_S, error.code
            self.timers.set(part)

    def end(self, part: Part, error: KvdError | None, *, tell_peer: bool = True) -> None:
        """End a part: with ``error``, or delivered. The other ranks of a failed transfer end too."""
        if part.ended:
            return
        self._end_one(part, error, tell_peer)
        if error is not None:
            for sibling in self._ranks(part):
                self._end_one(sibling, error, True)

    def _end_one(self, part: Part, error: KvdError | None, tell_peer: bool) -> None:
        before, part.state = part.state, State.ENDED
        self.unfinished -= 1
        part.code, part.error = error.code if error else "OK", error
        self.counters[f"transfers_ended_{part.role.value}_{part.code}"] += 1
        if part.session is not None and error is not None and tell_peer:
            self._tell_end(part, before, error)
        if isinstance(part, SourcePart) and before is State.WAITING and part.announced_on is not None:
            retract = wire.Retract(request=part.request, rank=part.rank)
            self.emit(do.SendMessage(part.announced_on, retract))
        if isinstance(part, SourcePart):
            self._unpair(part)
            if part.session in self.links:
                self.links[part.session].remove(part.transfer)
            # A delivered part whose tokens are all handed out has nothing to cancel: confirmations are on the way.
            unsent = part.queue is not None and part.queue.pending_tokens
            if part.writes and (error is not None or unsent or part.staged):
                part.staged.clear()
                self.emit(do.CancelWrites(part.transfer))
            self._fail_early(part)
        elif isinstance(part, SinkPart):
            if part.mode == "speculative" and before is State.RUNNING:
                self.emit(do.WantWindows(part.transfer, False))
            if error is not None:
                for number in part.fetches:
                    self.emit(do.FetchEnded(part.transfer, number, error))
                part.fetches.clear()
        fields = dict(error.fields) if error else {}
        self.emit(
            do.ReportEnd(part.transfer, part.code, error.message if error else "", fields, part, self.now - part.opened)
        )

    def pair(self, part: SourcePart, session: ev.SessionId, node: NodeId, sink: TransferId) -> None:
        """A source part has found its sink: ``sink`` of the session's peer."""
        part.session, part.peer, part.peer_transfer = session, node, sink
        self.by_sink[session, sink] = part.transfer

    def _unpair(self, part: SourcePart) -> None:
        if part.session is None or part.peer_transfer is None:
            return
        named = part.session, part.peer_transfer
        if self.by_sink.get(named) == part.transfer:
            del self.by_sink[named]

    def _fail_early(self, part: SourcePart) -> None:
        """Fetches that still wait for a layer get an answer; a sink that has everything serves them itself."""
        early, part.early = part.early, []
        for fetch in early:
            assert part.session is not None
            message = f"the source's side of request {part.request!r} ended before layer {fetch.layer} was computed"
            failed = wire.FetchFailed(
                transfer=fetch.sink, fetch=fetch.fetch, code=NotFound.code, message=message, fields={}
            )
            self.emit(do.SendMessage(part.session, failed))

    def _tell_end(self, part: Part, before: State, error: KvdError) -> None:
        assert part.session is not None
        message: wire.PeerMessage
        if part.peer_transfer is not None:
            message = wire.Abort(
                transfer=part.peer_transfer, code=error.code, message=error.message, fields=error.fields
            )
        elif before is State.OPENING:
            message = wire.Withdraw(sink=part.transfer, code=error.code, message=error.message, fields=error.fields)
        else:
            return
        self.emit(do.SendMessage(part.session, message))

    def forget(self, part: Part) -> None:
        """The process is done with an ended part: its memory goes back."""
        del self.parts[part.transfer]
        ranks = self.by_rank[part.role, part.request]
        del ranks[part.rank]
        if not ranks:
            del self.by_rank[part.role, part.request]
        if part.role is Role.SOURCE:
            del self.by_handle[part.handle]
        self.emit(do.FreeMemory(part.transfer))

    def _ranks(self, part: Part) -> Iterator[Part]:
        """The other ranks of a part's request that have not ended."""
        for transfer in self.by_rank[part.role, part.request].values():
            other = self.parts[transfer]
            if other is not part and not other.ended:
                yield other

    def rank(self, role: Role, request: str, rank: int) -> Part | None:
        """The part that was opened for a rank of a request, if it is not forgotten."""
        return self.parts.get(self.by_rank.get((role, request), {}).get(rank, -1))

    def named_by(self, event: ev.MessageReceived, kind: type[SomePart]) -> SomePart | None:
        """The part that a peer's message names, if it is that peer's to speak of."""
        part = self.parts.get(getattr(event.message, "transfer", -1))
        return part if isinstance(part, kind) and part.session == event.session else None

    def emit(self, instruction: do.Instruction) -> None:
        self.out.append(instruction)


def shutting_down() -> KvdError:
    """The answer to everything new while the daemon drains."""
    return ShuttingDown("this daemon is shutting down and takes no new transfers; use another node, or retry")
