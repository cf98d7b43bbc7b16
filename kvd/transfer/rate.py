"""What a link carries, and how much may be under way on it, from nothing but submissions and confirmations."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math

MEMORY_S = 0.25
"""How far back the measured rate looks, about."""
MIN_SAMPLE_S, MIN_SAMPLE_BYTES = 0.01, 128 << 10
"""Smaller samples say more about the clock and the event loop than about the link."""

ROUND, RECENT = 3, 6
"""Writes that filled the room, of about one round trip and of two: while it stays full, each does, and there are three
turns in it."""

GROWTH, SHRINKAGE = 0.25, 0.5
"""By how much the room can change in one round trip: a queue that is too long is in somebody's way."""


@dataclasses.dataclass(slots=True)
class RateEstimate:
    """Bytes a second that the link has carried while it was kept busy; 0 while that is unknown."""

    rate: float = 0.0
    _since: float = 0.0
    _bytes: int = 0

    def begin(self, now: float) -> None:
        """The link was idle and is not any more."""
        self._since, self._bytes = now, 0

    def completed(self, nbytes: int, now: float, *, busy: bool) -> None:
        """A write was confirmed. A link that was not ``busy`` could have carried more: that says nothing."""
        if not busy:
            self.begin(now)
            return
        self._bytes += nbytes
        took = now - self._since
        if took >= MIN_SAMPLE_S and self._bytes >= MIN_SAMPLE_BYTES:
            weight = min(1.0, took / MEMORY_S) if self.rate else 1.0
            self.rate += weight * (self._bytes / took - self.rate)
            self.begin(now)


SHORT_QUEUE = 0.25
"""Of the queue that is aimed at, what is left while fetches come."""


class Fill(enum.Enum):
    """What was full with a write: nothing, the short room or the whole one."""

    NONE = enum.auto()
    SHORT = enum.auto()
    WHOLE = enum.auto()


@dataclasses.dataclass(slots=True)
class Room:
    """Bytes under way such that they wait about ``delay_s`` in the link's queues, whatever its rate (as LEDBAT does).

    The shortest time that a write has ever taken is the path without a queue; what a write takes beyond it is queue.
    Steering by that delay needs no estimate of the rate, which would feed on itself: less under way, less carried,
    a lower estimate, still less under way.

    Only writes that filled the room tell how long the queue is that a full room makes. Where bulk goes out in bursts,
    since it holds back while fetches are served, the first writes of each burst find nothing before them.
    """

    delay_s: float
    least: int
    most: int
    nbytes: float
    _base_s: float = math.inf
    _recent: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=RECENT))
    _bytes: int = 0
    """Confirmed since the room was changed last."""
    _in_row: int = 0
    """Writes that filled the whole room, since the last one that filled the short one."""

    @property
    def short(self) -> int:
        """Bytes under way while fetches come: a quarter of the queue, and all that the path itself holds. A quarter of
        the whole would leave the link idle where the path is long."""
        path = self._base_s if self.measured else 0.0
        return int(self.nbytes * (path + SHORT_QUEUE * self.delay_s) / (path + self.delay_s))

    @property
    def measured(self) -> bool:
        """Whether anything is known of the path."""
        return self._base_s < math.inf

    def completed(self, nbytes: int, took_s: float, fill: Fill) -> None:
        """A write was confirmed ``took_s`` after its submission; ``fill``: what was full with it then."""
        self._base_s = min(self._base_s, took_s)
        self._bytes += nbytes
        if fill is Fill.NONE:
            return  # nobody knows what more would have done
        self._recent.append(took_s)
        self._in_row = self._in_row + 1 if fill is Fill.WHOLE else 0
        weight, self._bytes = min(1.0, self._bytes / self.nbytes), 0
        # A queue delays every write, a busy processor some of them: the least of a few tells the two apart. To grow,
        # what was sent before the last change must not count any more: the room would overshoot.
        newest = itertools.islice(reversed(self._recent), ROUND)
        if (off := self._off(min(self._recent))) < 0:
            change = SHRINKAGE * max(-1.0, off)
        elif self._in_row >= ROUND:
            change = GROWTH * max(0.0, self._off(min(newest)))
        else:
            change = 0.0  # a short room's queue tells that the link has become slow, not what more would have done
        self.nbytes = max(self.least, min(self.most, self.nbytes * (1.0 + weight * change)))

    def _off(self, took_s: float) -> float:
        """1 for a write that has met no queue, 0 for one that has met what is aimed at, below 0 for a longer one."""
        return 1.0 - (took_s - self._base_s) / self.delay_s


UNBOUNDED = 1 << 62


@dataclasses.dataclass(slots=True)
class IdleTime:
    """How long idle windows last: from the beginning of an attention layer to the next fetch, or to the next window.

    What is sent in a window should be through when the fetch comes: in the first steps a decode fetches in every
    layer, and the link's idle time is no more than the attention itself.
    """

    room: int = 0
    """Bytes that may still be sent in the current window."""
    expected_s: float | None = None
    _since: float | None = None
    """Beginning of a window whose length is not known yet."""

    def window(self, now: float, rate: float, least: int) -> None:
        """A window begins on a link of ``rate`` bytes a second (0: unknown). ``least`` bytes may be sent in any case,
        any number while nothing is known."""
        self._end(now)
        self._since = now
        self.room = max(least, int(self.expected_s * rate) if self.expected_s and rate else UNBOUNDED)

    def fetch(self, now: float) -> None:
        """A fetch comes: the window is over."""
        self._end(now)
        self.room = 0

    def _end(self, now: float) -> None:
        if self._since is not None:
            sample, self._since = now - self._since, None
            self.expected_s = sample if self.expected_s is None else self.expected_s + 0.25 * (sample - self.expected_s)
