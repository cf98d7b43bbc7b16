"""The budget, the bound, and groups by length."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget, needed_share, rest_s, ttst_bound
from kvd.importance.groups import Group, Groups
from kvd.importance.matrix import ImportanceMatrix

seconds = st.floats(0, 100)


def test_equation_2_by_hand() -> None:
    # 40 layers, 1000 blocks, a transfer of 5 prefills: 40000 * 39/40 / 5.
    assert block_budget(40, 1000, 1.0, 5.0) == 7800
    assert block_budget(40, 1000, 1.0, 5.0, metadata_s=0.075) == 7200


def test_the_budget_is_clipped_to_two_layers_and_to_all() -> None:
    assert block_budget(40, 1000, 0.0, 5.0) == 2000
    assert block_budget(40, 1000, 1.0, 1000.0) == 2000
    assert block_budget(40, 1000, 1.0, 5.0, metadata_s=3.0) == 2000
    assert block_budget(40, 1000, 10.0, 1.0) == 40_000
    assert block_budget(40, 1000, 1.0, 0.0) == 40_000
    assert block_budget(1, 1000, 1.0, 5.0) == 1000
    assert block_budget(2, 1000, 1.0, 5.0) == 2000


@given(st.integers(2, 60), st.integers(1, 2000), st.floats(0.001, 100), st.floats(0.001, 100), st.floats(0.01, 10))
def test_the_budget_follows_the_equation(
    layers: int, blocks: int, prefill: float, transfer: float, scale: float
) -> None:
    budget = block_budget(layers, blocks, prefill, transfer)
    exact = layers * blocks * ((layers - 1) / layers * prefill) / transfer
    assert 2 * blocks <= budget <= layers * blocks
    if 2 * blocks <= exact <= layers * blocks:
        assert exact - 1 <= budget <= exact + 1e-6 * exact
    assert block_budget(layers, blocks, prefill * 2, transfer) >= budget
    assert block_budget(layers, blocks, prefill, transfer * 2) <= budget
    assert block_budget(layers, blocks, prefill, transfer, metadata_s=scale) <= budget


@given(st.integers(2, 60), st.floats(0.001, 100))
def test_a_transfer_that_just_fits_is_a_full_one(layers: int, transfer: float) -> None:
    assert block_budget(layers, 1000, transfer * layers / (layers - 1), transfer) == layers * 1000


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["prefill_s", "transfer_s", "metadata_s"])
def test_times_that_are_none_are_named(name: str, bad: float) -> None:
    times = {"prefill_s": 1.0, "transfer_s": 1.0, "metadata_s": 0.0, name: bad}
    with pytest.raises(InvalidArgument, match=name):
        block_budget(4, 10, **times)


def test_the_needed_share_of_known_models() -> None:
    assert needed_share(30, 0.10, 1 / 16) == pytest.approx(0.22, abs=0.005)
    assert needed_share(30, 0.20, 1 / 16) == pytest.approx(0.32, abs=0.005)
    assert needed_share(40, 0.10, 34 / 512) == pytest.approx(0.21, abs=0.005)
    assert needed_share(2, 0.1) == needed_share(1, 0.1) == 1
    assert needed_share(30, 1.0) == pytest.approx(1)


@given(seconds, seconds, st.floats(0, 1), seconds)
def test_nothing_beats_the_bound_and_full_transfer_never_does(
    prefill: float, transfer: float, f: float, step: float
) -> None:
    bound = ttst_bound(prefill, transfer, f, step)
    assert bound >= prefill + step
    assert bound >= f * transfer + step
    assert bound <= ttst_bound(prefill, transfer, 1.0, step) == max(prefill, transfer) + step
    assert rest_s(transfer, f) == pytest.approx(transfer - f * transfer)


def test_shares_that_are_none_are_refused() -> None:
    for refuse in (
        lambda: needed_share(30, 1.1),
        lambda: needed_share(30, math.nan),
        lambda: needed_share(30, 0.1, -1.0),
        lambda: needed_share(0, 0.1),
        lambda: ttst_bound(1, 1, -0.1, 1),
        lambda: rest_s(math.inf, 0.1),
        lambda: block_budget(0, 1, 1, 1),
    ):
        with pytest.raises(InvalidArgument):
            refuse()
    assert rest_s(5.0, 1.06) == 0


# --- groups -------------------------------------------------------------------------------------------------------


def group(low: int, high: int, layers: int = 3, blocks: int = 4) -> Group:
    return Group(low, high, ImportanceMatrix.sequential(layers, blocks))


def test_a_prompt_gets_the_group_of_its_length_or_the_nearest_by_factor() -> None:
    short, middle, long = group(100, 401), group(1000, 4001), group(16_000, 64_000)
    groups = Groups([long, short, middle])
    assert len(groups) == 3
    for length, expected in (
        (1, short),
        (100, short),
        (400, short),
        (600, short),
        (700, middle),
        (1000, middle),
        (4000, middle),
        (7900, middle),
        (8100, long),
        (1_000_000, long),
    ):
        assert groups.nearest(length) is expected, length


@given(st.lists(st.integers(1, 1 << 16), min_size=2, max_size=8, unique=True), st.integers(1, 1 << 18))
def test_no_other_group_is_nearer(edges: list[int], length: int) -> None:
    edges = sorted(edges)
    all_groups = [group(low, high) for low, high in zip(edges[::2], edges[1::2], strict=False)]
    nearest = Groups(all_groups).nearest(length)
    inside = [one for one in all_groups if one.low <= length < one.high]
    assert nearest in (inside or all_groups)
    assert all(nearest.distance(length) <= other.distance(length) for other in all_groups)
    assume(not inside)
    assert nearest.distance(length) > 1


def test_groups_that_make_no_sense_are_refused() -> None:
    for bad, why in (
        ([], "at least one"),
        ([group(0, 5)], "0 to 5"),
        ([group(5, 5)], "5 to 5"),
        ([group(1, 10), group(9, 20)], "9 to 20 tokens overlaps that of 1 to 10"),
        ([group(1, 10), group(10, 20, layers=4)], "4 layers, the first group 3"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            Groups(bad)
    assert Groups([group(1, 10), group(10, 20, blocks=9)]).nearest(10).matrix.blocks == 9
