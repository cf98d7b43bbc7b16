"""How many bytes a lane keeps outstanding, as a pure object: enough for the wire, little enough to take back soon."""

from __future__ import annotations

LEAST, MOST = 256 << 10, 8 << 20
"""The most covers 400 Gbit/s times 160 us, and bounds what bulk work puts before urgent work in the device."""
FIRST = 1 << 20
DRAIN_S = 0.05
"""What is outstanding should be through in this time: a cancelled or revoked operation waits for it."""
MEASURED_S = 0.01


class Window:
    """``size`` follows the rate at which the device completes bytes while it is busy."""

    __slots__ = ("_moved", "_since", "outstanding", "size")

    def __init__(self) -> None:
        self.size = FIRST
        self.outstanding = 0
        self._since = 0.0
        self._moved = 0

    @property
    def room(self) -> int:
        return self.size - self.outstanding

    def posted(self, nbytes: int, now: float) -> None:
        if not self.outstanding:
            self._since, self._moved = now, 0
        self.outstanding += nbytes

    def completed(self, nbytes: int, now: float) -> None:
        self.outstanding -= nbytes
        self._moved += nbytes
        elapsed = now - self._since
        if elapsed >= MEASURED_S:
            self.size = int(min(MOST, max(LEAST, self._moved / elapsed * DRAIN_S)))
            self._since, self._moved = now, 0

    def dropped(self, nbytes: int) -> None:
        """Posted in vain."""
        self.outstanding -= nbytes
