"""T_p and T_t by prompt length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget
from kvd.profiling.timing import TimeModel, Times, Timing

lengths = st.integers(1, 1 << 20)
durations = st.floats(0, 1e4)


@st.composite
def measured(draw: st.DrawFn) -> Times:
    points = draw(st.lists(st.tuples(lengths, durations), min_size=1, max_size=12))
    return Times(tuple(tokens for tokens, _ in points), tuple(seconds for _, seconds in points))


@st.composite
def rising(draw: st.DrawFn) -> Times:
    tokens = sorted(draw(st.sets(lengths, min_size=1, max_size=12)))
    seconds = sorted(draw(st.lists(durations, min_size=len(tokens), max_size=len(tokens))))
    return Times(tuple(tokens), tuple(seconds))


@given(measured(), st.lists(st.floats(0, 1 << 22), min_size=2, max_size=20))
def test_more_tokens_never_take_less_time(times: Times, asked: list[float]) -> None:
    model = TimeModel(times)
    answers = [model(tokens) for tokens in sorted([*asked, *times.tokens])]
    assert answers == sorted(answers)
    assert answers[0] >= 0
    assert math.isfinite(answers[-1])


@given(rising(), st.randoms())
def test_rising_measurements_are_met_exactly_in_any_order(times: Times, random: object) -> None:
    points = list(zip(times.tokens, times.seconds, strict=True))
    random.shuffle(points)  # type: ignore[attr-defined]
    model = TimeModel(Times(*map(tuple, zip(*points, strict=True))))  # type: ignore[arg-type]
    assert [model(tokens) for tokens in times.tokens] == list(times.seconds)


@given(measured())
def test_noise_is_averaged_away_and_nothing_leaves_the_measured_range(times: Times) -> None:
    model = TimeModel(times)
    low, high = min(times.seconds), max(times.seconds)
    for tokens in times.tokens:
        # A mean may be off by rounding.
        assert low * (1 - 1e-9) <= model(tokens) <= high * (1 + 1e-9)


def test_between_lengths_it_is_linear() -> None:
    model = TimeModel(Times((100, 300), (1.0, 2.0)))
    assert model(200) == pytest.approx(1.5)
    assert model(250) == pytest.approx(1.75)


def test_of_repeated_measurements_the_median_counts() -> None:
    assert TimeModel(Times((100, 100, 100, 200), (1.0, 9.0, 1.2, 3.0)))(100) == 1.2


def test_neighbours_that_fall_share_their_mean() -> None:
    model = TimeModel(Times((100, 200, 300), (2.0, 1.0, 4.0)))
    assert (model(100), model(200), model(300)) == (1.5, 1.5, 4.0)


def test_a_single_length_gives_proportionality() -> None:
    model = TimeModel(Times((1000,), (2.0,)))
    assert (model(0), model(500), model(1000), model(4000)) == (0, 1.0, 2.0, 8.0)


def test_a_constant_part_is_kept_below_the_first_length() -> None:
    model = TimeModel(Times((1000, 2000, 4000), (1.5, 2.5, 9.0)))
    assert model(0) == pytest.approx(0.5)
    assert model(500) == pytest.approx(1.0)


def test_a_steep_start_does_not_make_short_prompts_free() -> None:
    model = TimeModel(Times((1000, 2000), (1.0, 4.0)))
    assert model(500) == pytest.approx(0.5)


def test_beyond_the_last_length_the_last_doubling_goes_on() -> None:
    # 3.9 to 4.0 is the noise between close lengths; from 2,000 tokens on it is 2 s per 2,000.
    model = TimeModel(Times((1000, 2000, 3990, 4000), (1.5, 2.0, 3.9, 4.0)))
    assert model(6000) == pytest.approx(4.0 + 2000 * (4.0 - 2.0) / 2000)


def test_a_flat_end_does_not_make_long_prompts_free() -> None:
    assert TimeModel(Times((1000, 2000, 4000), (1.0, 4.0, 4.0)))(8000) == pytest.approx(4 + 4000 * 3 / 3000)
    assert TimeModel(Times((1000, 2000), (4.0, 4.0)))(4000) == pytest.approx(8.0)


@pytest.mark.parametrize("tokens", [-1, math.nan, math.inf])
def test_lengths_that_make_no_sense_are_refused(tokens: float) -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        TimeModel(Times((10,), (1.0,)))(tokens)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [((1, 2), (1.0,)), ((0,), (1.0,)), ((5,), (-1.0,)), ((5,), (math.nan,)), ((5,), (math.inf,)), ((1 << 25,), (1.0,))],
)
def test_measurements_that_can_not_be_are_refused(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument):
        Times(tokens, seconds)


def test_no_measurement_is_no_model() -> None:
    assert not Times()
    with pytest.raises(InvalidArgument, match="no measured time"):
        TimeModel(Times())


TIMING = Timing(TimeModel(Times((1000, 2000), (1.0, 2.5))), TimeModel(Times((1000, 2000), (6.5, 13.0))))


def test_a_budget_is_equation_2_at_that_length() -> None:
    assert (TIMING.prefill_s(2000), TIMING.transfer_s(2000)) == (2.5, 13.0)
    assert TIMING.budget(30, 100, 2000) == block_budget(30, 100, 2.5, 13.0)
