"""The rate limit, on a clock that the test turns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.fabric.pacing import Pacer, Slice

RATES = [100e6 / 8, 200e6 / 8, 1e9 / 8, 10e9 / 8]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.002])
def test_a_busy_link_gets_its_rate(rate, late_s):
    """Pieces of a millisecond, sent when a timer that may be late says so, add up to the rate."""
    pacer, now, sent = Pacer(rate), 0.0, 0
    piece = int(rate / 1000)
    while now < 2.0:
        wait = pacer.wait(now)
        if wait:
            now += wait + late_s
            continue
        pacer.sent(piece, now)
        sent += piece
    assert sent == pytest.approx(2 * rate, rel=0.01)


@pytest.mark.parametrize("rate", RATES)
def test_idle_time_is_not_saved_up(rate):
    """After an hour of silence no more than the burst goes out at once."""
    pacer = Pacer(rate, burst_s=0.003)
    pacer.sent(1, 0.0)
    now, sent, piece = 3600.0, 0, 1000
    while not pacer.wait(now):
        pacer.sent(piece, now)
        sent += piece
    assert sent <= rate * 0.003 + 2 * piece


@given(
    rate=st.floats(1e3, 1e10),
    burst=st.floats(0, 0.1),
    steps=st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 1 << 20)), min_size=1, max_size=60),
)
def test_never_above_the_rate(rate, burst, steps):
    """In every span of time at most rate * (span + burst) bytes begin, and the piece at its end."""
    pacer, now, log = Pacer(rate, burst), 0.0, []
    for gap, size in steps:
        now += gap
        now += pacer.wait(now)
        if pacer.wait(now):  # the sum above was rounded down
            now = math.nextafter(now, math.inf)
        if not pacer.wait(now):
            log.append((now, size))
            pacer.sent(size, now)
    for first in range(len(log)):
        total = 0
        for moment, size in log[first:]:
            assert total <= rate * (moment - log[first][0] + burst) * (1 + 1e-6) + 1
            total += size


@pytest.mark.parametrize(("rate", "burst"), [(0, 0.1), (-1, 0.1), (math.nan, 0.1), (1, -0.1)])
def test_senseless_limits(rate, burst):
    with pytest.raises(InvalidArgument):
        Pacer(rate, burst)


# --- slices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("speed", "slice_bytes"), [(10e6, 64 << 10), (200e6, 200_000), (5e9, 2 << 20)])
def test_a_slice_takes_its_time_within_its_bounds(speed, slice_bytes):
    slices = Slice(64 << 10, 2 << 20, 0.001)
    assert slices.nbytes == 2 << 20  # nothing is known
    slices.took(1 << 20, (1 << 20) / speed)
    assert slices.nbytes == pytest.approx(slice_bytes, rel=0.001)
    for _ in range(20):  # however often it's asked: no feedback of the slice on itself
        slices.took(slices.nbytes, slices.nbytes / speed)
    assert slices.nbytes == pytest.approx(slice_bytes, rel=0.001)


def test_slices_follow_a_path_that_changes():
    slices = Slice(64 << 10, 2 << 20, 0.001)
    for speed in (5e9, 100e6, 5e9):
        for _ in range(30):
            slices.took(slices.nbytes, slices.nbytes / speed)
        assert slices.nbytes == pytest.approx(min(2 << 20, speed / 1000), rel=0.05)


def test_neither_an_interruption_nor_a_few_bytes_make_slices_small():
    slices = Slice(64 << 10, 2 << 20, 0.001)
    slices.took(1 << 20, 1e-4)
    slices.took(1 << 20, 0.02)  # the processor had something else to do
    slices.took(100, 1.0)
    assert slices.nbytes == 2 << 20
    assert Slice(64 << 10, 1000, 0.001).nbytes == 1000
