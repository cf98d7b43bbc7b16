"""When parts reach their next limit, in order, so that asking for the first costs the same with any number of parts."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from kvd.transfer.part import Part
from kvd.types import TransferId

SLACK = 64
"""Entries out of date that may be kept in any case."""


class Timers:
    """Over ``parts``, which others change.

    For each part that has not ended the heap has an entry no later than the part's ``expiry``: :meth:`set` adds one
    whenever that may have come forward. Entries that are out of date are dropped or put right when they come to the
    top, or when they are as many as the others.
    """

    def __init__(self, parts: Mapping[TransferId, Part]) -> None:
        self._parts = parts
        self._heap: list[tuple[float, TransferId]] = []

    def set(self, part: Part) -> None:
        """The part is new, or has got a limit."""
        heapq.heappush(self._heap, (part.expiry, part.transfer))
        if len(self._heap) > 2 * len(self._parts) + SLACK:
            self._heap = [(part.expiry, part.transfer) for part in self._parts.values() if not part.ended]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest expiry of a part that has not ended; None without one."""
        heap = self._heap
        while heap:
            when, transfer = heap[0]
            part = self._parts.get(transfer)
            if part is None or part.ended:
                heapq.heappop(heap)
            elif part.expiry > when:
                heapq.heapreplace(heap, (part.expiry, transfer))
            else:
                return when
        return None

    def expired(self, now: float) -> list[Part]:
        """The parts whose limit is reached, oldest first. Each is named once: the caller ends it."""
        found: dict[TransferId, Part] = {}
        while (when := self.next()) is not None and when <= now:
            _, transfer = heapq.heappop(self._heap)
            found[transfer] = self._parts[transfer]
        return [found[transfer] for transfer in sorted(found)]
