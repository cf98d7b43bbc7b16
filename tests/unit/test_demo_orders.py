"""On-demand ratios by the order in which blocks were sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.demo.orders import compare, on_demand_ratio, orders
from kvd.importance.matrix import ImportanceMatrix


def counts_of(seed: int, layers: int = 6, blocks: int = 10) -> np.ndarray:
    found = np.random.default_rng(seed).integers(0, 20, (layers, blocks))
    found[:2] = 0
    return found


def test_what_was_not_sent_is_fetched() -> None:
    counts = np.array([[0, 0], [0, 0], [3, 1], [2, 4]])
    assert on_demand_ratio(counts, np.arange(8), 0.5) == 1.0  # layers 0 and 1 only
    assert on_demand_ratio(counts, np.arange(8), 0.75) == 0.6
    assert on_demand_ratio(counts, np.array([0, 1, 2, 3, 7, 4, 5, 6]), 0.75) == pytest.approx(0.3)
    assert on_demand_ratio(counts, np.arange(8), 1.0) == 0.0


def test_nothing_selected_has_no_ratio() -> None:
    assert on_demand_ratio(np.zeros((4, 3), int), np.arange(12)) is None


def test_layers_0_and_1_do_not_count() -> None:
    counts = counts_of(1)
    more = counts.copy()
    more[:2] += 1000
    order = np.arange(counts.size)[::-1]
    assert on_demand_ratio(more, order) == on_demand_ratio(counts, order)


@given(st.integers(0, 2**32 - 1), st.integers(3, 8), st.integers(1, 12))
def test_orders_are_permutations_and_none_beats_the_optimal_one(seed: int, layers: int, blocks: int) -> None:
    counts = counts_of(seed, layers, blocks)
    profile = ImportanceMatrix(counts_of(seed + 1, layers, 7))
    found = orders(counts, 40, profile)
    assert list(found) == ["sequential", "random", "streaming", "profile", "optimal"]
    for name, order in found.items():
        assert sorted(order.tolist()) == list(range(counts.size)), name
        if name != "sequential":  # which has them first as well, being in the order of addresses
            assert set(order[: 2 * blocks].tolist()) == set(range(2 * blocks)), name
    ratios = compare(counts, 40, profile)
    if ratios["optimal"] is not None:
        assert all(ratios["optimal"] <= ratio for ratio in ratios.values() if ratio is not None)


def test_streaming_is_sinks_and_then_the_newest() -> None:
    order = orders(np.zeros((3, 10), int), 100)["streaming"]
    assert order[20:].tolist() == [20, *range(29, 20, -1)]


def test_a_perfect_profile_is_optimal() -> None:
    counts = counts_of(5)
    ratios = compare(counts, 40, ImportanceMatrix(counts))
    assert ratios["profile"] == ratios["optimal"]
    assert "profile" not in compare(counts, 40)
