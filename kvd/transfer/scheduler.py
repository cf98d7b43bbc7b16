"""Which part's work goes next onto a session's link, and how much may be under way.

One link per peer session. Bulk work of all parts takes turns, a chunk each; the bytes under way stay below a
window, so that what is submitted can still be overtaken, and a cancelled transfer frees its memory soon.
"""

from __future__ import annotations

import collections
import dataclasses

from kvd.types import TransferId


@dataclasses.dataclass(slots=True)
class Link:
    """Bulk work on one session."""

    window: int
    """Most bytes under way (a single chunk may exceed it when nothing else is)."""
    in_flight: int = 0
    writes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Bytes of each write under way."""
    turns: collections.deque[TransferId] = dataclasses.field(default_factory=collections.deque)
    """Parts that may have something to push, next first; no duplicates."""

    def add(self, transfer: TransferId) -> None:
        """The part has work; it gets its turn after those that wait already."""
        if transfer not in self.turns:
            self.turns.append(transfer)

    def remove(self, transfer: TransferId) -> None:
        """The part has no work any more. Writes under way stay counted until they complete."""
        if transfer in self.turns:
            self.turns.remove(transfer)

    @property
    def open(self) -> bool:
        """Whether another write may be submitted now."""
        return bool(self.turns) and self.in_flight < self.window

    def next_turn(self) -> TransferId:
        """The part whose turn it is; it goes to the end of the queue."""
        transfer = self.turns[0]
        self.turns.rotate(-1)
        return transfer

    def submitted(self, write: int, nbytes: int) -> None:
        self.writes[write] = nbytes
        self.in_flight += nbytes

    def completed(self, write: int) -> int:
        """Bytes of a write that has ended; 0 if it is not of this link."""
        nbytes = self.writes.pop(write, 0)
        self.in_flight -= nbytes
        return nbytes
