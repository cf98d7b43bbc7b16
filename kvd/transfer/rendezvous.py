"""The messages of peers that wait for a local process: opens without a source, announcements without a sink."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import TypeAlias, TypeVar

from kvd.errors import Busy
from kvd.transfer.events import SessionId
from kvd.types import NodeId, TransferId
from kvd.wire.messages import Open

MAX_WAITING = 4096
"""Opens (and likewise announcements) that one session may have waiting here."""
SLACK = 64
"""Limits out of date that may be kept in any case."""

Rank: TypeAlias = tuple[str, int]
"""What both sides of a pair name: the request id and the rank."""
Sink: TypeAlias = tuple[SessionId, TransferId]
"""Who asks: the session, and its peer's number of the part."""

K = TypeVar("K")
V = TypeVar("V")


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingOpen:
    """An open whose source has not been opened here yet."""

    session: SessionId
    node: NodeId
    message: Open
    until: float

    @property
    def sink(self) -> Sink:
        return self.session, self.message.sink

    @property
    def wanted(self) -> Rank:
        return self.message.request, self.message.rank


class Rendezvous:
    """Bounded per session; everything of a session goes with it.

    What a call costs does not grow with what waits here besides, so opens are indexed by session and by what they want,
    and their limits are a heap as in :mod:`kvd.transfer.timers`: a limit whose open waits no longer is dropped when it
    comes to the top, or when such limits are as many as the others.
    """

    def __init__(self) -> None:
        self._opens: dict[Sink, WaitingOpen] = {}
        self._opens_for: dict[Rank, dict[Sink, None]] = {}
        """The keys of ``_opens`` by what they want, oldest first."""
        self._opens_on: dict[SessionId, dict[Sink, None]] = {}
        """The keys of ``_opens`` by session."""
        self._limits: list[tuple[float, Sink]] = []
        self._announced: dict[Rank, tuple[SessionId, NodeId]] = {}
        self._announced_on: dict[SessionId, dict[Rank, None]] = {}
        """The keys of ``_announced`` by session, oldest first."""

    def add_open(self, waiting: WaitingOpen) -> None:
        """Let an open wait; one of the same sink that waits already is replaced. Raises :class:`Busy` when the session
        has too many waiting."""
        sink = waiting.sink
        self._remove(sink)
        if len(self._opens_on.get(waiting.session, ())) >= MAX_WAITING:
            raise Busy(
                f"{MAX_WAITING} requests of this node wait here for their source; retry later",
                retry_after_s=1.0,
            )
        self._opens[sink] = waiting
        self._opens_for.setdefault(waiting.wanted, {})[sink] = None
        self._opens_on.setdefault(waiting.session, {})[sink] = None
        heapq.heappush(self._limits, (waiting.until, sink))
        if len(self._limits) > 2 * len(self._opens) + SLACK:
            self._limits = [(one.until, one.sink) for one in self._opens.values()]
            heapq.heapify(self._limits)

    def take_opens(self, request: str, rank: int) -> list[WaitingOpen]:
        """The opens for this rank, first come first; they wait no longer."""
        return self._take(self._opens_for.get((request, rank), {}))

    def withdraw(self, session: SessionId, sink: TransferId) -> None:
        self._remove((session, sink))

    def expire(self, now: float) -> list[WaitingOpen]:
        """Opens that have waited long enough, by their limits; they wait no longer."""
        found = []
        while (until := self.next_expiry()) is not None and until <= now:
            _, sink = heapq.heappop(self._limits)
            found += self._take([sink])
        return found

    def take_all_opens(self) -> list[WaitingOpen]:
        return self._take(self._opens)

    def next_expiry(self) -> float | None:
        """When the first open will have waited long enough; None without one."""
        limits = self._limits
        while limits:
            until, sink = limits[0]
            waiting = self._opens.get(sink)
            if waiting is not None and waiting.until == until:
                return until
            heapq.heappop(limits)
        return None

    def announce(self, request: str, rank: int, session: SessionId, node: NodeId) -> None:
        """Remember an announcement; beyond the bound the session's oldest is dropped: most likely nobody wants it."""
        self.take_announced(request, rank)
        mine = self._announced_on.setdefault(session, {})
        if len(mine) >= MAX_WAITING:
            self.take_announced(*next(iter(mine)))
        self._announced[request, rank] = (session, node)
        self._announced_on.setdefault(session, mine)[request, rank] = None

    def retract(self, request: str, rank: int, session: SessionId) -> None:
        """The session's peer has no such source any more; another one's announcement stays."""
        if self._announced.get((request, rank), (None, ""))[0] == session:
            self.take_announced(request, rank)

    def take_announced(self, request: str, rank: int) -> tuple[SessionId, NodeId] | None:
        found = self._announced.pop((request, rank), None)
        if found is not None:
            _discard(self._announced_on, found[0], (request, rank))
        return found

    def session_lost(self, session: SessionId) -> None:
        self._take(self._opens_on.get(session, {}))
        for key in self._announced_on.pop(session, {}):
            del self._announced[key]

    def _take(self, sinks: Iterable[Sink]) -> list[WaitingOpen]:
        return [found for sink in list(sinks) if (found := self._remove(sink)) is not None]

    def _remove(self, sink: Sink) -> WaitingOpen | None:
        """Its limit stays in the heap, out of date."""
        waiting = self._opens.pop(sink, None)
        if waiting is not None:
            _discard(self._opens_for, waiting.wanted, sink)
            _discard(self._opens_on, waiting.session, sink)
        return waiting


def _discard(index: dict[K, dict[V, None]], key: K, value: V) -> None:
    """Take a value that is there out of an index; a key without values goes."""
    values = index[key]
    del values[value]
    if not values:
        del index[key]
