"""The budget, the bound, groups by length, and windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvd.blocks import block_range
from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget, needed_share, rest_s, ttst_bound
from kvd.importance.groups import Group, Groups, ImportanceStore
from kvd.importance.matrix import ImportanceMatrix
from kvd.importance.windows import needed_blocks, needed_ranges
from kvd_client.spec import TokenRange

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


def test_only_needed_blocks_count() -> None:
    needed = np.ones((4, 10), bool)
    needed[1, :6] = needed[3, :8] = False
    assert block_budget(4, 10, 0.0, 5.0, needed=needed) == 14
    assert block_budget(4, 10, 50.0, 5.0, needed=needed) == 26
    assert block_budget(4, 10, 4.0, 4.0, needed=needed) == math.floor(26 * 0.75)
    with pytest.raises(InvalidArgument, match="shape"):
        block_budget(4, 9, 1.0, 1.0, needed=needed)


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


def test_replacing_a_profile_leaves_running_transfers_theirs() -> None:
    store = ImportanceStore()
    assert store.current("m") is None
    old = store.replace("m", Groups([group(1, 100)]), layers=3)
    running = store.current("m")
    assert running is old
    order = running.matrix(50).order().tolist()
    newer = ImportanceMatrix([[0] * 4, [0] * 4, [1, 2, 3, 4]])
    fresh = store.replace("m", Groups([Group(1, 100, newer)]), layers=3)
    assert store.current("m") is fresh
    assert fresh.version > old.version
    assert running.matrix(50).order().tolist() == order != fresh.matrix(50).order().tolist()
    other = store.replace("other", Groups([group(1, 100, layers=7)]), layers=7)
    assert store.current("m") is fresh
    assert other.version > fresh.version
    with pytest.raises(InvalidArgument, match="3 layers and the model 7"):
        store.replace("other", Groups([group(1, 100)]), layers=7)
    assert store.current("other") is other
    store.remove("other")
    store.remove("other")
    assert store.current("other") is None


# --- windows ------------------------------------------------------------------------------------------------------


def test_a_window_needs_only_its_tokens() -> None:
    assert needed_ranges(0, [10, 3]) == [TokenRange(0, 0, 10), TokenRange(1, 0, 3)]
    assert needed_ranges(4, [10, 3]) == [TokenRange(0, 6, 10), TokenRange(1, 0, 3)]
    assert needed_blocks([], [10], 2, 5).all()
    assert needed_blocks([0, 4, 3], [10], 3, 5).tolist() == [
        [True] * 5,
        [False, False, False, True, True],
        [False, False, False, True, True],
    ]
    with pytest.raises(InvalidArgument, match="2 windows for 3 layers"):
        needed_blocks([1, 2], [10], 3, 5)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.lists(st.integers(1, 25), min_size=1, max_size=3),
    st.integers(1, 30),
)
def test_needed_blocks_are_those_with_a_needed_token(windows: list[int], lengths: list[int], blocks: int) -> None:
    needed = needed_blocks(windows, lengths, len(windows), blocks)
    assert needed.shape == (len(windows), blocks)
    for layer, window in enumerate(windows):
        ranges = needed_ranges(window, lengths)
        for block in range(blocks):
            tokens = [
                token
                for part in ranges
                for token in range(*block_range(lengths[part.row], blocks, block))
                if part.start <= token < part.stop
            ]
            assert needed[layer, block] == bool(tokens)
