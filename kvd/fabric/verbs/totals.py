"""What each side of a connection tells the other in its frames' headers: the far CPU sees nothing of one-sided work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.fabric.base import EndpointCounters
from kvd.fabric.verbs.wire import Header, Kind

NOTE_BYTES = 4 << 20
NOTE_S = 0.01
"""The peer learns of bytes placed in its memory after so many, or after so long."""


class Totals:
    """The totals of :class:`~kvd.fabric.verbs.wire.Header`, told and learnt, kept with the endpoint's ``counters``."""

    def __init__(self, counters: EndpointCounters) -> None:
        self.refused = 0
        """Operations of this side that the peer's grants did not permit."""
        self._counters = counters
        self._told = 0
        self._placed = self._fetched = self._refused = 0  # the peer's

    def refuse(self, count: int) -> None:
        """So many more of this side's operations were not permitted."""
        self.refused += count

    @property
    def untold(self) -> int:
        """Bytes moved by this side of which the peer does not know."""
        return self._mine - self._told

    @property
    def _mine(self) -> int:
        return self._counters.bytes_sent - self._fetched + self._counters.bytes_received - self._placed

    def header(self, kind: Kind, length: int, consumed: int) -> Header:
        """Tell all; what of the counters is not the peer's doing is this side's."""
        self._told = self._mine
        placed = self._counters.bytes_sent - self._fetched
        return Header(kind, length, consumed, placed, self._told - placed, self.refused)

    def learn(self, header: Header) -> None:
        """The lanes' frames overtake each other, so an older one may come later."""
        counters = self._counters
        counters.bytes_received += max(0, header.placed - self._placed)
        counters.bytes_sent += max(0, header.fetched - self._fetched)
        counters.access_errors += max(0, header.refused - self._refused)
        self._placed = max(self._placed, header.placed)
        self._fetched = max(self._fetched, header.fetched)
        self._refused = max(self._refused, header.refused)


class Notes:
    """When the peer is told the totals without anything else to say to it: ``tell`` has a frame sent."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, totals: Totals, tell: Callable[[], None], ended: Callable[[], bool]
    ) -> None:
        self._loop, self._totals = loop, totals
        self._tell, self._ended = tell, ended
        self._timer: asyncio.TimerHandle | None = None

    def progress(self) -> None:
        """Something may have been moved."""
        if self._totals.untold >= NOTE_BYTES:
            self._now()
        elif self._totals.untold:
            self.soon()

    def soon(self) -> None:
        """Tell the peer in :data:`NOTE_S`; not after the end."""
        if self._timer is None and not self._ended():
            self._timer = self._loop.call_later(NOTE_S, self._now)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now(self) -> None:
        self.close()
        self._tell()
