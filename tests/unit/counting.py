"""What something costs, counted and not timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(act: Callable[[], object]) -> int:
    """Calls and lines that an act takes. The collector rests: finalizers and callbacks of others would be counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
