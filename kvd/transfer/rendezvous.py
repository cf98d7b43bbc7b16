"""The messages of peers that wait for a local process: opens without a source, announcements without a sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kvd.errors import Busy
from kvd.transfer.events import SessionId
from kvd.types import NodeId
from kvd.wire.messages import Open

MAX_WAITING = 4096
"""Opens (and likewise announcements) that one session may have waiting here."""


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingOpen:
    """An open whose source has not been opened here yet."""

    session: SessionId
    node: NodeId
    message: Open
    until: float


class Rendezvous:
    """Bounded per session; everything of a session goes with it."""

    def __init__(self) -> None:
        self._opens: dict[tuple[str, int], list[WaitingOpen]] = {}
        self._announced: dict[tuple[str, int], tuple[SessionId, NodeId]] = {}
        self._announced_on: dict[SessionId, dict[tuple[str, int], None]] = {}
        """The keys of ``_announced`` by session, oldest first."""

    def add_open(self, waiting: WaitingOpen) -> None:
        """Raises :class:`Busy` when the session has too many waiting."""
        if sum(other.session == waiting.session for other in self._all()) >= MAX_WAITING:
            raise Busy(
                f"{MAX_WAITING} requests of this node wait here for their source; retry later",
                retry_after_s=1.0,
            )
        self._opens.setdefault((waiting.message.request, waiting.message.rank), []).append(waiting)

    def take_opens(self, request: str, rank: int) -> list[WaitingOpen]:
        """The opens for this rank, first come first; they wait no longer."""
        return self._opens.pop((request, rank), [])

    def withdraw(self, session: SessionId, sink: int) -> None:
        self._remove(w for w in list(self._all()) if (w.session, w.message.sink) == (session, sink))

    def expire(self, now: float) -> list[WaitingOpen]:
        """Opens that have waited long enough; they wait no longer."""
        expired = [w for w in self._all() if w.until <= now]
        self._remove(iter(expired))
        return expired

    def take_all_opens(self) -> list[WaitingOpen]:
        found = list(self._all())
        self._opens.clear()
        return found

    def next_expiry(self) -> float | None:
        return min((w.until for w in self._all()), default=None)

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
            mine = self._announced_on[found[0]]
            del mine[request, rank]
            if not mine:
                del self._announced_on[found[0]]
        return found

    def session_lost(self, session: SessionId) -> None:
        self._remove(w for w in list(self._all()) if w.session == session)
        for key in self._announced_on.pop(session, {}):
            del self._announced[key]

    def _all(self) -> Iterator[WaitingOpen]:
        for waiting in self._opens.values():
            yield from waiting

    def _remove(self, gone: Iterator[WaitingOpen]) -> None:
        for waiting in gone:
            key = (waiting.message.request, waiting.message.rank)
            kept = [w for w in self._opens[key] if w is not waiting]
            if kept:
                self._opens[key] = kept
            else:
                del self._opens[key]
