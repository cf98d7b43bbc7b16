"""Which part's work goes next onto a session's link, and how much may be under way.

One link per peer session. Bulk work of all parts takes turns, a chunk each: first what is pushed while prefill runs,
then what idle windows allow, and of that nothing while a fetch is being served. The bytes under way stay so few that
they wait about ``delay_s`` in the link's queues, so that an urgent message finds these short (invariant 3).
"""

from __future__ import annotations

import collections
import dataclasses

from kvd.transfer.rate import Fill, RateEstimate, Room
from kvd.types import TransferId

MIN_WINDOW = 128 << 10
"""Less under way would cost more in small writes than it saves in delay."""
FIRST_WINDOW = 512 << 10
"""Until it has been seen how long a queue the bytes under way make."""
MIN_CHUNK = 32 << 10
"""Of a turn on a link with a bound on delay."""
PAUSE_S = 0.05
"""Bulk work holds back for so long at most while fetches are served; then it goes on with its short room."""
SHORT_WINDOW = 64 << 10
"""The least room while fetches come, for the same reason: two turns, so that the link need not wait for one."""
AFTERMATH = 4
"""Fetches come in rows, one for each layer: bulk keeps to its short room until it has carried so many whole ones since
the last."""


@dataclasses.dataclass(slots=True)
class Link:
    """Bulk work on one session. Times in seconds of one clock, rates in bytes a second."""

    window: int
    """Most bytes under way, whatever the rate (a single chunk may exceed it when nothing else is)."""
    chunk: int = 1 << 20
    """Most bytes of one turn."""
    delay_s: float = 0.0
    """How long bytes under way may wait in the link's queues; 0: no such bound. Half of it is aimed at, since steering
    by observed delay overshoots."""
    in_flight: int = 0
    writes: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """Bytes and path of each write under way."""
    turns: collections.deque[TransferId] = dataclasses.field(default_factory=collections.deque)
    """Parts that may have something to push, next first; no duplicates."""
    late: collections.deque[TransferId] = dataclasses.field(default_factory=collections.deque)
    """The same, for speculative work."""
    urgent: int = 0
    """Fetches that are being served."""
    urgent_since: float = 0.0
    """When the first of them began."""
    estimate: RateEstimate = dataclasses.field(default_factory=RateEstimate)
    room: Room | None = None
    _aftermath: int = 0
    """Bytes of bulk to be confirmed before fetches count as over."""
    _sent: dict[int, tuple[float, Fill]] = dataclasses.field(default_factory=dict)
    """Of each write under way: when it went out, and what was full with it."""

    def __post_init__(self) -> None:
        if self.delay_s:
            least, first = min(self.window, MIN_WINDOW), min(self.window, FIRST_WINDOW)
            self.room = Room(self.delay_s / 2, least, self.window, first)

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
    def rate(self) -> float:
        """What the link has carried of late, in bytes a second; 0: not known yet."""
        return self.estimate.rate

    @property
    def limit(self) -> int:
        """Most bytes under way now. While fetches come no more than the short room: enough to go on, too little to be
        in the way."""
        if self.room is None:
            return self.window
        return max(min(self.window, SHORT_WINDOW), self.room.short) if self._fetches_come else int(self.room.nbytes)

    @property
    def _fetches_come(self) -> bool:
        return self.urgent > 0 or self._aftermath > 0

    @property
    def piece(self) -> int:
        """Bytes of the next turn: several turns fit below the limit, so that the link never waits for one. The very
        first one is small, since it measures the path: its own bytes take time, too, which would pass for the path's
        where the link is slow. So is the first one behind a fetch, which finds the path idle: the next fetch may come
        at once, and a path that was slow to wake up the first time is measured again."""
        if self.room is None:
            return self.chunk
        small = not self.in_flight and (self._fetches_come or not self.room.measured)
        return max(min(self.chunk, MIN_CHUNK), 0 if small else min(self.chunk, self.limit // 3))

    @property
    def open(self) -> bool:
        """Whether another write may be submitted now."""
        waiting = self.turns or (self.late and not self.urgent)
        return bool(waiting) and not self._full

    @property
    def _full(self) -> bool:
        """Another turn would exceed the limit; with nothing under way there is always room for one, and for no more
        until that one has measured the path. A mere window may be exceeded by one turn."""
        if not self.in_flight:
            return False
        if self.room is None:
            return self.in_flight >= self.limit
        return not self.room.measured or self.in_flight + self.piece > self.limit

    def fetch_begins(self, now: float) -> None:
        """A fetch is being served from now on."""
        if not self.urgent:
            self.urgent_since = now
        self.urgent += 1
        if self.room is not None:
            self._aftermath = AFTERMATH * int(self.room.nbytes)

    def fetch_ended(self) -> None:
        self.urgent -= 1

    def paused(self, now: float) -> bool:
        """Whether bulk work holds back altogether: the queue that a fetch finds then drains at once, which matters
        most where the fetch's own connection has to grow its window first. Fetch upon fetch does not starve bulk."""
        return bool(self.urgent and self.delay_s) and now - self.urgent_since < PAUSE_S

    def next_turn(self) -> TransferId:
        """The part whose turn it is; it goes to the end of its queue."""
        queue = self.turns or self.late
        transfer = queue[0]
        queue.rotate(-1)
        return transfer

    def submitted(self, write: int, nbytes: int, path: str, now: float) -> None:
        if not self.in_flight:
            self.estimate.begin(now)
        self.writes[write] = (nbytes, path)
        self.in_flight += nbytes
        fill = Fill.NONE
        if self.in_flight + self.piece > self.limit and not self.urgent:  # else answers are in its way
            fill = Fill.SHORT if self._fetches_come else Fill.WHOLE
        self._sent[write] = now, fill

    def began(self, write: int, now: float) -> None:
        """The bytes of a write, which had to be made first, go over from now on."""
        if write in self._sent:
            self._sent[write] = now, self._sent[write][1]

    def completed(self, write: int, now: float, *, placed: bool = True) -> tuple[int, str]:
        """Bytes and path of a write that has ended; 0 if it is not of this link. ``placed``: its bytes went over;
        those of a cancelled or refused write say nothing about the link."""
        nbytes, path = self.writes.pop(write, (0, ""))
        busy = self.room is None or 4 * self.in_flight >= self.limit
        self.in_flight -= nbytes
        if placed and path:
            self.estimate.completed(nbytes, now, busy=busy)
            if self.room is not None:
                since, fill = self._sent[write]
                self.room.completed(nbytes, now - since, fill)
            if not self.urgent:
                self._aftermath = max(0, self._aftermath - nbytes)
        self._sent.pop(write, None)
        return nbytes, path
