"""The totals that two ends of a verbs connection tell each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvd.fabric.base import EndpointCounters
from kvd.fabric.verbs.totals import NOTE_BYTES, NOTE_S, Notes, Totals
from kvd.fabric.verbs.wire import Header, Kind


class End:
    def __init__(self) -> None:
        self.counters = EndpointCounters()
        self.totals = Totals(self.counters)

    def header(self) -> Header:
        return self.totals.header(Kind.STATE, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 1000))))
def test_both_ends_agree_in_the_end(steps: list[tuple[int, bool, int]]) -> None:
    """Bytes move both ways, frames cross, and older ones come later."""
    ends = End(), End()
    kept: list[tuple[bool, Header]] = []
    for what, side, nbytes in steps:
        near = ends[side]
        if what == 0:
            near.counters.bytes_sent += nbytes
        elif what == 1:
            near.counters.bytes_received += nbytes
        elif what == 2:
            near.totals.refused += 1
        elif what == 3:
            kept.append((side, near.header()))
        elif kept:
            origin, header = kept.pop(nbytes % len(kept))
            ends[not origin].totals.learn(header)
    left, right = ends
    right.totals.learn(left.header())
    left.totals.learn(right.header())
    for origin, header in kept:
        ends[not origin].totals.learn(header)
    assert left.counters.bytes_sent == right.counters.bytes_received
    assert left.counters.bytes_received == right.counters.bytes_sent
    assert left.counters.access_errors == right.totals.refused
    assert right.counters.access_errors == left.totals.refused
    assert left.totals.untold == right.totals.untold == 0


class Clock:
    """What notes use of an event loop."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> SimpleNamespace:
        self.timers.append((delay, callback))
        return SimpleNamespace(cancel=self.timers.clear)

    def pass_time(self) -> None:
        (_, callback), *self.timers = self.timers
        callback()


def test_the_peer_is_told_after_so_many_bytes_or_after_so_long_and_once() -> None:
    end, clock, told, over = End(), Clock(), [], []
    notes = Notes(
        cast(asyncio.AbstractEventLoop, clock), end.totals, lambda: told.append(end.header()), lambda: bool(over)
    )
    notes.progress()
    assert (told, clock.timers) == ([], []), "nothing to tell"
    end.counters.bytes_sent += 1
    notes.progress()
    notes.progress()
    assert [delay for delay, _ in clock.timers] == [NOTE_S]
    clock.pass_time()
    assert [header.placed for header in told] == [1]
    end.counters.bytes_sent += 1
    notes.progress()
    end.counters.bytes_sent += NOTE_BYTES
    notes.progress()
    assert [header.placed for header in told] == [1, NOTE_BYTES + 2]
    assert clock.timers == [], "the note that waited has been told, too"
    over.append(True)
    notes.soon()
    assert clock.timers == []
