"""A log that says the same again and again: the first lines, and how many more there were.

A peer that is down meets every request, a port scanner opens thousands of connections a second, and each of them is one
line. An operator needs the first of these, and their number; a disk needs no more either. Lines about transfers that
went well are never left out: they are as many as the work that was done.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import structlog
from structlog.typing import EventDict, WrappedLogger

WINDOW_S = 60.0
SAME = 20
"""Lines of one kind in a window: warnings and errors, and whatever is said of peers' sessions."""
FAILED = 300
"""Transfers that ended with one code, with one peer."""
KINDS = 1024
"""That are told apart; the one that was seen least recently is forgotten."""


class Repeated:
    """A structlog processor that drops what is above the rate of its kind: what was said, by which logger, of which
    peer or client, and for ends of transfers with which code. The last line that is let through says that there may be
    more (``more="counted"``), the first one of a later window how many were dropped (``left_out``)."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._kinds: collections.OrderedDict[tuple[str, ...], list[float]] = collections.OrderedDict()
        """Of each kind: when its window began, and its lines since."""

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        name, text, code = getattr(logger, "name", ""), str(event.get("event", "")), str(event.get("code", ""))
        if code and code != "OK":
            most = FAILED
        elif method in ("warning", "error", "exception", "critical") or (method == "info" and name == "kvd.peers"):
            most = SAME
        else:
            return event
        kind = (name, text, str(event.get("peer", "")), code)
        window = self._kinds.get(kind)
        now = self._now()
        if window is None or now - window[0] >= WINDOW_S:
            if window is not None and window[1] > most:
                event["left_out"] = int(window[1]) - most
            window = self._kinds[kind] = [now, 0.0]
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        window[1] += 1
        if window[1] > most:
            raise structlog.DropEvent
        if window[1] == most:
            event["more"] = f"counted, for up to {WINDOW_S:g} s"
        return event
