"""Which part's work goes next onto a session's link, and how much may be under way.

One link per peer session. Bulk work of all parts takes turns, a chunk each: first what is pushed while prefill runs,
then what idle windows allow, and of that nothing while a fetch is being served. The bytes under way stay below what
the link carries in ``delay_s``, so that an urgent message finds the link's queues short (invariant 3).
"""

from __future__ import annotations

import collections
import dataclasses

from kvd.types import TransferId

MIN_WINDOW = 128 << 10
"""Less under way would leave a fast link idle between confirmations."""
FIRST_WINDOW = 1 << 20
"""Until the link's rate has been measured."""
MIN_CHUNK = 32 << 10
RATE_MEMORY_S = 0.25
"""How far back the measured rate looks, about."""


@dataclasses.dataclass(slots=True)
class Link:
    """Bulk work on one session. Times in seconds of one clock, rates in bytes a second."""

    window: int
    """Most bytes under way, whatever the rate (a single chunk may exceed it when nothing else is)."""
    chunk: int = 1 << 20
    """Most bytes of one turn."""
    delay_s: float = 0.0
    """Most time that the bytes under way may take the link; 0: no such bound."""
    in_flight: int = 0
    writes: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """Bytes and path of each write under way."""
    turns: collections.deque[TransferId] = dataclasses.field(default_factory=collections.deque)
    """Parts that may have something to push, next first; no duplicates."""
    late: collections.deque[TransferId] = dataclasses.field(default_factory=collections.deque)
    """The same, for speculative work."""
    urgent: int = 0
    """Fetches that are being served."""
    rate: float = 0.0
    """What the link has carried of late while it was kept busy; 0: not known yet."""
    _busy_since: float = 0.0
    _busy_bytes: int = 0

    def add(self, transfer: TransferId, *, late: bool = False) -> None:
        """The part has work; it gets its turn after those that wait already."""
        here, there = (self.late, self.turns) if late else (self.turns, self.late)
        if transfer in there:
            there.remove(transfer)
        if transfer not in here:
            here.append(transfer)

    def remove(self, transfer: TransferId) -> None:
        """The part has no work any more. Writes under way stay counted until they complete."""
        for queue in (self.turns, self.late):
            if transfer in queue:
                queue.remove(transfer)

    @property
    def limit(self) -> int:
        """Most bytes under way now."""
        if not self.delay_s:
            return self.window
        if not self.rate:
            return min(self.window, FIRST_WINDOW)
        return max(min(self.window, MIN_WINDOW), min(self.window, int(self.rate * self.delay_s)))

    @property
    def piece(self) -> int:
        """Bytes of the next turn: several turns fit below the limit, so that the link never waits for one."""
        return max(min(self.chunk, MIN_CHUNK), min(self.chunk, self.limit // 4)) if self.delay_s else self.chunk

    @property
    def open(self) -> bool:
        """Whether another write may be submitted now."""
        waiting = self.turns or (self.late and not self.urgent)
        return bool(waiting) and self.in_flight < self.limit

    def next_turn(self) -> TransferId:
        """The part whose turn it is; it goes to the end of its queue."""
        queue = self.turns or self.late
        transfer = queue[0]
        queue.rotate(-1)
        return transfer

    def submitted(self, write: int, nbytes: int, path: str, now: float) -> None:
        if not self.in_flight:
            self._busy_since, self._busy_bytes = now, 0
        self.writes[write] = (nbytes, path)
        self.in_flight += nbytes

    def completed(self, write: int, now: float) -> tuple[int, str]:
        """Bytes and path of a write that has ended; 0 if it is not of this link."""
        nbytes, path = self.writes.pop(write, (0, ""))
        self.in_flight -= nbytes
        self._busy_bytes += nbytes
        busy = now - self._busy_since
        # Short samples say more about the clock and the event loop than about the link.
        if busy >= 0.01 and self._busy_bytes >= MIN_WINDOW:
            sample = self._busy_bytes / busy
            weight = min(1.0, busy / RATE_MEMORY_S) if self.rate else 1.0
            self.rate += weight * (sample - self.rate)
            self._busy_since, self._busy_bytes = now, 0
        return nbytes, path
