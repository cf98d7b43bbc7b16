"""Importance that knows the prompt: the formula, the classes behind it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ImportanceMatrix, resampled_columns
from kvd.importance.prompt import WEIGHT, Scale, combined, mixed

SHARES = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.floats(0, 1, width=32)
)


def test_the_formula_of_equal_means() -> None:
    profile = np.array([0.4, 0.2, 0.0, 0.2], np.float32)
    first, all_ = np.array([[1.0, 0, 0, 0]], np.float32), np.array([[0.25, 0.25, 0.5, 0.0]], np.float32)
    found = combined(profile, mixed(0.8 * first, 0.8 * all_))
    np.testing.assert_allclose(found, 0.15 * profile + 0.85 * (0.8 * first + 1.6 * all_) / 3, rtol=1e-6)


def test_shares_are_brought_to_the_profiles_mean() -> None:
    profile = np.array([0.1, 0.1, 0.2, 0.0], np.float32)
    shares = np.array([[0.8, 0, 0.4, 0], [0.2, 0.2, 0, 0]], np.float32)
    found = combined(profile, shares)
    np.testing.assert_allclose(found.mean(axis=1), profile.mean(), rtol=1e-6)
    np.testing.assert_allclose(found, combined(profile, shares / 4), rtol=1e-6)
    np.testing.assert_array_equal(combined(profile, shares, 0.0), np.stack([profile, profile]))


def test_who_knows_nothing_leaves_it_to_the_other() -> None:
    shares = np.array([[0.8, 0, 0.4, 0]], np.float32)
    assert combined(None, shares) is shares
    assert combined(np.zeros(4, np.float32), shares) is shares
    profile = np.array([0.1, 0.1, 0.2, 0.0], np.float32)
    np.testing.assert_allclose(combined(profile, 0 * shares), [(1 - WEIGHT) * profile], rtol=1e-6)


@pytest.mark.parametrize(
    ("shares", "weight", "says"),
    [
        ([[0.5, 1.5]], 0.5, "row 0, block 1"),
        ([[0.5], [-0.1]], 0.5, "row 1, block 0"),
        ([[float("nan")]], 0.5, "nan"),
        ([[0.5]], 1.5, "weight"),
        ([[0.5]], float("nan"), "weight"),
        ([0.5], 0.5, "shape"),
        ([[]], 0.5, "shape"),
        ([[0.5, 0.5, 0.5]], 0.5, "3 blocks"),
    ],
)
def test_what_is_no_ranking(shares: list[list[float]], weight: float, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        combined(np.array([0.1, 0.2], np.float32), np.array(shares, np.float32), weight)


@settings(deadline=None)
@given(SHARES, st.integers(1, 9))
def test_a_scale_of_classes_puts_their_values_where_they_were(values: np.ndarray, count: int) -> None:
    matrix = ImportanceMatrix(values)
    step = -(-values.size // count)
    classes = (matrix.ranks() // step).astype(np.int16)
    found = Scale.of_classes(matrix.values, classes).classes(matrix.values)
    # Equal values may stand in several classes; a scale knows the first of them only.
    assert (found <= classes).all()
    least = np.array([matrix.values[classes == c].min() for c in range(int(classes.max()) + 1)])
    for mine, its, value in zip(found.ravel(), classes.ravel(), matrix.values.ravel(), strict=True):
        assert mine == its or value == least[mine]


@settings(deadline=None)
@given(SHARES, SHARES, st.integers(1, 9))
def test_more_important_is_never_behind(values: np.ndarray, others: np.ndarray, count: int) -> None:
    scale = Scale.of_values(values, count, 3)
    classes, flat = scale.classes(others).ravel(), others.ravel()
    assert classes.min() >= 3
    assert classes.max() < 3 + count
    order = np.argsort(-flat, kind="stable")
    assert (np.diff(classes[order]) >= 0).all()


@settings(deadline=None)
@given(SHARES, st.integers(1, 30))
def test_resampling_keeps_means(values: np.ndarray, blocks: int) -> None:
    found = resampled_columns(values, blocks)
    assert found.shape == (len(values), blocks)
    np.testing.assert_allclose(found.mean(axis=1), values.mean(axis=1, dtype=np.float64), atol=1e-6)
    assert (found <= values.max(axis=1, keepdims=True) + 1e-6).all()
