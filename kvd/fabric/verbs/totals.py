"""What each side of a connection tells the other in its frames' headers: the far CPU sees nothing of one-sided work."""

from __future__ import annotations

from kvd.fabric.base import EndpointCounters
from kvd.fabric.verbs.wire import Header, Kind


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
