"""Holding back who sends more than it may: what it sent too early waits where it is, in its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.fabric.pacing import Pacer

HOLD_S = 0.01
"""Least time for which somebody over the rate is not read: event loops count milliseconds."""


class Throttle:
    """``rate`` messages a second, a second's worth at once; 0: no limit. ``resume`` is called when a hold is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float, resume: Callable[[], None]) -> None:
        self.held = False
        """The sender is over its rate: take nothing of it."""
        self._loop, self._resume = loop, resume
        self._pacer = Pacer(rate, burst_s=1.0) if rate else None
        self._timer: asyncio.TimerHandle | None = None

    def count(self) -> bool:
        """Account for one message; True where a hold begins with it. Not to be called during a hold."""
        if self._pacer is None:
            return False
        now = self._loop.time()
        self._pacer.sent(1, now)
        wait_s = self._pacer.wait(now)
        if wait_s:
            self.held = True
            self._timer = self._loop.call_later(max(wait_s, HOLD_S), self._go_on)
        return self.held

    def cancel(self) -> None:
        """Call ``resume`` no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self.held = False
        self._resume()
