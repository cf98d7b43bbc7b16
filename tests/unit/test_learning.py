"""Importance that follows the workload: the half-life, what it begins with, and its compact form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvd.errors import InvalidArgument
from kvd.importance.learning import FRESH, HalfLife, Learnt, packed, unpacked

RATES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 20)),
    elements=st.floats(0, 1, width=32),
)
SHAPE = (4, 5)
FIXED = hnp.arrays(np.float32, SHAPE, elements=st.floats(0, 1, width=32))


def rates(value: float) -> np.ndarray:
    return np.full(SHAPE, value, np.float32)


@pytest.mark.parametrize(
    ("text", "amount", "unit"), [("64 requests", 64, "requests"), (" 1e5  tokens ", 1e5, "tokens")]
)
def test_half_lives(text: str, amount: float, unit: str) -> None:
    assert HalfLife.parse(text) == HalfLife(amount, unit)


@pytest.mark.parametrize(
    "text", ["", "64", "requests", "0 requests", "-1 tokens", "inf tokens", "nan tokens", "3 days"]
)
def test_what_is_no_half_life(text: str) -> None:
    with pytest.raises(ValueError, match="no half-life"):
        HalfLife.parse(text)


def test_the_profile_of_the_start_counts_one_half_after_a_half_life() -> None:
    learnt = Learnt(*SHAPE, rates(0.8))
    for _ in range(10):
        learnt.learn(rates(0.0), HalfLife(10), requests=1, tokens=100)
    np.testing.assert_allclose(learnt.values[2:], 0.4, rtol=1e-5)
    learnt.learn(rates(0.0), HalfLife(500, "tokens"), requests=1, tokens=500)
    np.testing.assert_allclose(learnt.values[2:], 0.2, rtol=1e-5)
    assert learnt.weight == pytest.approx(1.0)


def test_without_a_profile_the_first_reports_are_a_mean() -> None:
    learnt = Learnt(*SHAPE)
    learnt.learn(rates(0.3), HalfLife(1000), requests=1, tokens=1)
    np.testing.assert_allclose(learnt.values[2:], 0.3, rtol=1e-5)
    for _ in range(9):
        learnt.learn(rates(0.5), HalfLife(1000), requests=1, tokens=1)
    np.testing.assert_allclose(learnt.values[2:], 0.48, rtol=1e-2)
    assert learnt.requests == 10
    assert learnt.weight == pytest.approx(HalfLife(1000).moved(10, 0), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(FIXED, st.integers(1, 50)), max_size=8))
def test_one_report_of_many_is_as_many_reports_of_one(reports: list[tuple[np.ndarray, int]]) -> None:
    one, other = Learnt(*SHAPE, rates(0.1)), Learnt(*SHAPE, rates(0.1))
    for what, count in reports:
        one.learn(what, HalfLife(7), requests=count, tokens=0)
        for _ in range(count):
            other.learn(what, HalfLife(7), requests=1, tokens=0)
    np.testing.assert_allclose(one.values, other.values, atol=1e-4)
    assert one.values.min() >= -1e-6
    assert one.values.max() <= 1 + 1e-5


def test_the_matrix_of_running_transfers_stays_as_it_is() -> None:
    learnt = Learnt(*SHAPE, rates(0.5))
    held = learnt.matrix()
    before = held.values.copy()
    learnt.learn(rates(1.0), HalfLife(2), requests=1, tokens=1)
    assert learnt.matrix() is not held
    np.testing.assert_array_equal(held.values, before)
    with pytest.raises(ValueError, match="read-only"):
        held.values[2, 0] = 1
    # A little news does not pay for sorting anew, but adds up.
    held, count = learnt.matrix(), 0
    while learnt.matrix() is held:
        learnt.learn(rates(1.0), HalfLife(1000), requests=1, tokens=1)
        count += 1
    assert count == pytest.approx(FRESH / HalfLife(1000).moved(1, 0), abs=2)
    assert np.isinf(learnt.newest().values[:2]).all()


@pytest.mark.parametrize(
    ("reported", "how", "says"),
    [
        (np.zeros((4, 6), np.float32), {}, r"shape \(4, 6\)"),
        (rates(1.5), {}, "layer 2, block 0"),
        (rates(float("nan")), {}, "nan"),
        (rates(0.5), {"requests": 0}, "0 requests"),
        (rates(0.5), {"requests": float("inf")}, "inf requests"),
        (rates(0.5), {"tokens": -1}, "-1 tokens"),
    ],
)
def test_nonsense_teaches_nothing(reported: np.ndarray, how: dict[str, float], says: str) -> None:
    learnt = Learnt(*SHAPE, rates(0.5))
    with pytest.raises(InvalidArgument, match=says):
        learnt.learn(reported, HalfLife(2), **({"requests": 1, "tokens": 1} | how))
    np.testing.assert_array_equal(learnt.values[2:], 0.5)
    assert learnt.requests == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0.25, 20), st.floats(1, 500)), min_size=1, max_size=8),
    st.sampled_from([HalfLife(4), HalfLife(200, "tokens")]),
    st.booleans(),
)
def test_reports_told_as_one_teach_what_they_do_one_by_one(
    reports: list[tuple[float, float, float]], half_life: HalfLife, started: bool
) -> None:
    start = rates(0.3) if started else None
    one_by_one, at_once, told = Learnt(*SHAPE, start), Learnt(*SHAPE, start), Learnt(*SHAPE)
    for value, requests, tokens in reports:
        for learnt in (one_by_one, told):
            learnt.learn(rates(value), half_life, requests=requests, tokens=tokens)
    at_once.learn(np.clip(told.values, 0, 1), half_life, requests=told.requests, tokens=told.tokens)
    np.testing.assert_allclose(at_once.values[2:], one_by_one.values[2:], atol=1e-5)
    assert at_once.weight == pytest.approx(one_by_one.weight)


@settings(deadline=None)
@given(RATES)
def test_packed_rates_keep_their_order(values: np.ndarray) -> None:
    scale, data = packed(values)
    assert len(data) == values.size
    found = unpacked(scale, data, *values.shape)
    assert found.shape == values.shape
    np.testing.assert_array_equal(found[:2], 0)
    np.testing.assert_allclose(found[2:], values[2:], atol=max(scale, 1e-30) / 200)
    mine, its = values[2:].ravel(), found[2:].ravel()
    assert (np.diff(its[np.argsort(mine, kind="stable")]) >= -1e-7).all()


@settings(deadline=None)
@given(st.binary(max_size=40), st.floats(allow_nan=True), st.integers(1, 5), st.integers(1, 8))
def test_foreign_bytes_are_rates_or_refused(data: bytes, scale: float, layers: int, blocks: int) -> None:
    try:
        found = unpacked(scale, data, layers, blocks)
    except InvalidArgument:
        return
    assert found.shape == (layers, blocks)
    assert ((found >= 0) & (found <= 1)).all()
