"""Waiting for what another process does.

Where a call of it blocks, or something becomes readable, tests wait for that. What is left is state that can only be
asked for (whether a daemon has its memory back, or a peer is given up): nothing tells of its changes.
:func:`eventually` is the one place that asks again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

PATIENCE_S = 40.0
"""Far beyond all time-outs of the daemons under test, reached only by a hang."""


def eventually(what: str, condition: Callable[[], Answer], seconds: float = PATIENCE_S, every: float = 0.01) -> Answer:
    """The first answer that is true; AssertionError with ``what`` if there is none in time.

    Between two questions, ``every`` seconds apart, the core is the other process's, which may have no other.
    """
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(every)
    return answer
