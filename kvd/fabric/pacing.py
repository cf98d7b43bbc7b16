"""How much goes out at once, and how long to wait before the next piece may: as pure objects."""

from __future__ import annotations

from kvd.errors import InvalidArgument


class Pacer:
    """Holds a link to ``rate`` bytes per second (the generic cell rate algorithm, in bytes).

    A piece may go out whenever :meth:`wait` is 0, however large it is; the pieces after it wait until it is paid for.
    So what crosses in any span of ``t`` seconds is at most ``rate * (t + burst_s)`` plus one piece. ``burst_s`` is the
    lateness of the caller's timer that is made up for: time that passes unused beyond it is lost.
    """

    __slots__ = ("_paid_until", "burst_s", "rate")

    def __init__(self, rate: float, burst_s: float = 0.003) -> None:
        if not rate > 0 or not burst_s >= 0:
            raise InvalidArgument(
                f"a rate of {rate} bytes/s with bursts of {burst_s} s makes no sense; give a positive rate and bursts "
                "of at least 0 s",
                rate=rate,
                burst_s=burst_s,
            )
        self.rate = rate
        self.burst_s = burst_s
        self._paid_until = float("-inf")

    def wait(self, now: float) -> float:
        """Seconds from ``now`` until a piece may go out; 0 if one may go at once."""
        return max(0.0, self._paid_until - now)

    def sent(self, nbytes: float, now: float) -> None:
        """Account for ``nbytes`` that go out at ``now``."""
        self._paid_until = max(self._paid_until, now - self.burst_s) + nbytes / self.rate


class Slice:
    """How many bytes keep the event loop for about ``seconds``, by how long the last ones did.

    A call that hands bytes to the kernel often does the work of sending them, too. Over a fast path a few megabytes
    take it a millisecond. Where the host shapes the traffic or cuts it into packets, a hundredth of that does, and
    whoever asks for something urgent meanwhile is kept waiting.
    """

    __slots__ = ("_speed", "least", "most", "seconds")

    def __init__(self, least: int, most: int, seconds: float) -> None:
        self.least = min(least, most)
        self.most = most
        self.seconds = seconds
        self._speed = 0.0

    @property
    def nbytes(self) -> int:
        """The most of a slice; ``most`` while nothing is known."""
        return max(self.least, min(self.most, int(self._speed * self.seconds))) if self._speed else self.most

    def took(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` kept the loop for ``seconds``. A few bytes say more about the call than about the path."""
        if nbytes >= self.least // 2:
            # The mean of speeds, not of times: that a busy processor has interrupted a call changes it by little.
            speed = nbytes / max(seconds, 1e-6)
            self._speed += (speed - self._speed) * (0.25 if self._speed else 1.0)
