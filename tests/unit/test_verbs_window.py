"""The window of outstanding bytes on a virtual clock, against devices of known speed."""

import pytest

from kvd.fabric.verbs.window import DRAIN_S, FIRST, LEAST, MOST, Window


def run(window: Window, rate: float, seconds: float, latency: float = 0.0, piece: int = 64 << 10) -> None:
    """A device that completes pieces at ``rate``, each ``latency`` later, under a sender that keeps the window full."""
    now, free, under_way = 0.0, 0.0, []
    while now < seconds:
        while window.room >= piece:
            window.posted(piece, now)
            free = max(free, now) + piece / rate
            under_way.append(free + latency)
        now = under_way.pop(0)
        window.completed(piece, now)


@pytest.mark.parametrize("rate", [1e7, 3e7, 1e8])
def test_what_is_outstanding_drains_in_time(rate: float) -> None:
    window = Window()
    run(window, rate, 2.0)
    assert window.size / rate == pytest.approx(DRAIN_S, rel=0.3)


@pytest.mark.parametrize(("rate", "size"), [(1e5, LEAST), (50e9, MOST)])
def test_the_size_has_bounds(rate: float, size: int) -> None:
    window = Window()
    run(window, rate, max(1.0, 20 * LEAST / rate) if rate < 1e6 else 0.05)
    assert window.size == size


def test_a_fast_device_far_away_gets_the_most() -> None:
    """25 Gbit/s over 1 ms: the first window alone does not fill the wire, and yet it grows."""
    window = Window()
    run(window, 25e9 / 8, 0.5, latency=1e-3)
    assert window.size == MOST


def test_idle_time_is_not_measured() -> None:
    window = Window()
    window.posted(1000, 0.0)
    window.completed(1000, 0.001)
    window.posted(1000, 100.0)
    window.completed(1000, 100.001)
    assert window.size == FIRST
    assert window.outstanding == 0


def test_what_was_dropped_is_room_again() -> None:
    window = Window()
    window.posted(FIRST, 0.0)
    assert window.room == 0
    window.dropped(FIRST)
    assert window.room == FIRST
