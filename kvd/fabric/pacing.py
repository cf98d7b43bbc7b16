"""A rate limit as a pure object: how long to wait before the next piece may go out."""

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
