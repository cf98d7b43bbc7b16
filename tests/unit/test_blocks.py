"""Blocks by relative position, against the plain definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.blocks import (
    block_bounds,
    block_of,
    join_runs,
    window_start,
)
from kvd.errors import InvalidArgument

lengths, counts = st.integers(0, 300), st.integers(1, 300)


def members(length: int, blocks: int) -> list[list[int]]:
    """The definition: token t belongs to block t * blocks // length."""
    found: list[list[int]] = [[] for _ in range(blocks)]
    for token in range(length):
        found[token * blocks // length].append(token)
    return found


def test_a_small_case_by_hand() -> None:
    assert block_bounds(10, 3).tolist() == [0, 4, 7, 10]
    assert block_bounds(2, 5).tolist() == [0, 1, 1, 2, 2, 2]
    assert block_of(2, 5, [0, 1]).tolist() == [0, 2]


@given(lengths, counts)
def test_bounds_and_numbers_are_two_views_of_one_cut(length: int, blocks: int) -> None:
    bounds, expected = block_bounds(length, blocks), members(length, blocks)
    assert len(bounds) == blocks + 1
    for block, tokens in enumerate(expected):
        assert list(range(bounds[block], bounds[block + 1])) == tokens
    where = block_of(length, blocks, np.arange(length))
    assert where.tolist() == [block for block, tokens in enumerate(expected) for _ in tokens]
    if length >= blocks:
        sizes = np.diff(bounds)
        assert sizes.max() - sizes.min() <= 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20))
def test_joined_runs_cover_what_was_given(pairs: list[tuple[int, int]]) -> None:
    runs = join_runs(np.array(pairs, np.int64).reshape(-1, 2)).tolist()
    assert [t for start, stop in runs for t in range(start, stop)] == sorted({t for a, b in pairs for t in range(a, b)})
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(runs))


def test_what_does_not_exist_is_refused_by_number() -> None:
    with pytest.raises(InvalidArgument, match="token 10 is outside"):
        block_of(10, 3, [0, 10])
    with pytest.raises(InvalidArgument, match="token -2 is outside"):
        block_of(10, 3, [-2])
    for length, blocks in ((-1, 3), (5, 0)):
        with pytest.raises(InvalidArgument):
            block_bounds(length, blocks)


def test_a_window_begins_behind_what_nobody_sees_any_more() -> None:
    assert window_start(100, 0) == 0
    assert window_start(100, 16) == 84
    assert window_start(10, 16) == 0
