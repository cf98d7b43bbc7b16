"""When to probe a silent peer, and when to call it lost. Pure: the caller brings the clock."""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What a tick finds."""

    ALIVE = enum.auto()
    PROBE = enum.auto()
    """Nothing was heard since the last tick: send a ping."""
    LOST = enum.auto()


class Liveness:
    """Tracks one peer. :meth:`tick` is to be called every ``heartbeat_s``; times are seconds on any one clock."""

    def __init__(self, *, heartbeat_s: float, timeout_s: float, now: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._heard = self._ticked = now

    def heard(self, now: float) -> None:
        """Something came from the peer."""
        self._heard = max(self._heard, now)

    def silence(self, now: float) -> float:
        """Seconds since something came from the peer."""
        return now - self._heard

    def tick(self, now: float) -> Verdict:
        """What to do now. A tick that comes late means that this process stood still, not the peer: what the peer
        sent meanwhile has not been read yet, so that time does not count."""
        late = now - self._ticked - self._heartbeat_s
        if late > self._heartbeat_s:
            self._heard = min(now, self._heard + late)
        fresh = self._heard > self._ticked
        self._ticked = now
        if now - self._heard > self._timeout_s:
            return Verdict.LOST
        return Verdict.ALIVE if fresh else Verdict.PROBE
