"""The rate limit of a verbs endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.fabric.pacing import Pacer


class Pace:
    """Holds both lanes of an endpoint to ``rate`` bytes per second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float) -> None:
        self._loop = loop
        self._pacer = Pacer(rate)
        self._piece = max(16 << 10, int(rate / 1000))
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def allowance(self, again: Callable[[], None]) -> int:
        """Bytes that may go out now. If it is 0, ``again`` is called when some may."""
        wait = self._pacer.wait(self._loop.time())
        if not wait:
            return self._piece
        if again not in self._timers:
            self._timers[again] = self._loop.call_later(max(wait, 0.001), self._call, again)
        return 0

    def sent(self, nbytes: int) -> None:
        self._pacer.sent(nbytes, self._loop.time())

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _call(self, again: Callable[[], None]) -> None:
        del self._timers[again]
        again()
