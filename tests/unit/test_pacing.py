"""The rate limit, on a clock that the test turns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.fabric.pacing import Pacer

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
