"""Virtual time: what happens next, and when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.calls = 0
        """How many there have been."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at ``time``; now, if that is past."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, watch: Callable[[], None] | None = None, every: int = 20_000) -> None:
        """Until nothing is left to happen. ``watch`` is called after every so many calls; it may raise."""
        while self._queue:
            self.now, _, call, args = heapq.heappop(self._queue)
            call(*args)
            self.calls += 1
            if watch is not None and self.calls % every == 0:
                watch()
