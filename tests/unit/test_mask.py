"""Masks in a lease's memory, and sets of tokens against a bitmap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.mask import (
    IntervalSet,
    TokenSet,
    check_lengths,
    check_ranges,
    every_row,
    init_masks,
    mark,
    mask_view,
    mask_views,
    remaining,
)
from kvd_client.spec import PartLayout, TokenRange

LAYOUT = PartLayout(layers=3, heads=2, entry_bytes=8, rows=2, capacity=37)
SIZE = 64


def memory(fill: int = 0xAA) -> memoryview:
    return memoryview(bytearray([fill]) * LAYOUT.nbytes)


def test_masks_lie_where_the_layout_says() -> None:
    lease = memory(0)
    for layer in range(3):
        view = mask_view(lease, LAYOUT, layer)
        assert view.shape == (2, 37)
        view[1, 5] = layer + 1
        assert lease[LAYOUT.token_mask_offset(layer, 1, 5)] == layer + 1
    assert mask_views(lease, LAYOUT)[:, 1, 5].tolist() == [1, 2, 3]
    assert bytes(lease).count(0) == len(lease) - 3


def test_a_fresh_mask_is_remote_within_the_length_and_padding_beyond() -> None:
    lease = memory()
    init_masks(lease, LAYOUT, [37, 12])
    for layer in range(3):
        view = mask_view(lease, LAYOUT, layer)
        assert view[0].tolist() == [2] * 37
        assert view[1].tolist() == [2] * 12 + [0] * 25
    assert set(lease[: LAYOUT.masks_offset]) == {0xAA}, "the entries' bytes are not touched"
    assert remaining(mask_views(lease, LAYOUT)) == 3 * 49


def test_marking_leaves_fewer_tokens_to_come() -> None:
    lease = memory()
    init_masks(lease, LAYOUT, [37, 12])
    view = mask_view(lease, LAYOUT, 1)
    mark(view, [TokenRange(0, 3, 10), TokenRange(1, 0, 12)])
    assert remaining(view) == 30
    assert view[0, 2:11].tolist() == [2] + [1] * 7 + [2]
    assert remaining(mask_views(lease, LAYOUT)) == 3 * 49 - 19
    mark(view, [TokenRange(0, 3, 10)], 2)
    assert remaining(view) == 37


def test_wrong_layers_memory_and_lengths_are_named() -> None:
    with pytest.raises(InvalidArgument, match="layer 3"):
        mask_view(memory(), LAYOUT, 3)
    with pytest.raises(InvalidArgument, match=f"needs {LAYOUT.nbytes}"):
        mask_views(memory()[:-1], LAYOUT)
    with pytest.raises(InvalidArgument, match=r"lengths\[1\] is 38"):
        init_masks(memory(), LAYOUT, [37, 38])
    with pytest.raises(InvalidArgument, match=r"lengths\[0\] is 0"):
        check_lengths([0], 1, 5)
    with pytest.raises(InvalidArgument, match="3 lengths for 2 rows"):
        init_masks(memory(), LAYOUT, [1, 2, 3])


@pytest.mark.parametrize(
    "bad",
    [
        TokenRange(2, 0, 1),
        TokenRange(-1, 0, 1),
        TokenRange(0, -1, 1),
        TokenRange(0, 3, 3),
        TokenRange(0, 4, 3),
        TokenRange(1, 0, 13),
    ],
)
def test_a_range_outside_its_row_is_named(bad: TokenRange) -> None:
    with pytest.raises(InvalidArgument, match=r"held\[1\] is tokens") as caught:
        check_ranges([TokenRange(0, 0, 37), bad], [37, 12], "held")
    fields = caught.value.fields
    assert (fields["index"], fields["row"], fields["start"], fields["stop"]) == (1, bad.row, bad.start, bad.stop)
    check_ranges([TokenRange(0, 0, 37), TokenRange(1, 11, 12)], [37, 12])


def test_a_range_of_every_row_is_clipped_to_each() -> None:
    assert every_row(5, 10, [20, 7, 5]) == [TokenRange(0, 5, 10), TokenRange(1, 5, 7)]


# --- intervals ----------------------------------------------------------------------------------------------------

spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))


def intervals_of(bits: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], bits.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def between(bits: np.ndarray, start: int, stop: int) -> list[tuple[int, int]]:
    only = np.zeros_like(bits)
    only[start:stop] = bits[start:stop]
    return intervals_of(only)


@given(st.lists(st.tuples(st.booleans(), spans), max_size=40), spans)
def test_an_interval_set_agrees_with_a_bitmap(steps: list[tuple[bool, tuple[int, int]]], ask: tuple[int, int]) -> None:
    intervals, bits = IntervalSet(), np.zeros(SIZE, bool)
    for add, (start, stop) in steps:
        twin, before = intervals.copy(), list(intervals)
        if add:
            assert intervals.add(start, stop) == between(~bits, start, stop)
        else:
            assert intervals.subtract(start, stop) == between(bits, start, stop)
        bits[start:stop] = add
        assert list(intervals) == intervals_of(bits)
        assert intervals.total == bits.sum()
        assert list(twin) == before, "a copy has a life of its own"
        assert (twin == intervals) == (before == list(intervals))
        start, stop = ask
        assert intervals.contains(start, stop) == bits[start:stop].all()
        assert intervals.within(start, stop) == between(bits, start, stop)
        assert intervals.gaps(start, stop) == between(~bits, start, stop)
    assert IntervalSet(list(intervals)) == intervals
    assert len(intervals) == len(list(intervals))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), spans), max_size=25))
def test_a_token_set_agrees_with_a_bitmap_of_each_row(steps: list[tuple[bool, int, tuple[int, int]]]) -> None:
    tokens, bits, lengths = TokenSet(3), np.zeros((3, SIZE), bool), [SIZE, 10, 1]
    for add, row, (start, stop) in steps:
        part = TokenRange(row, start, stop)
        had = [TokenRange(row, *piece) for piece in between(bits[row], start, stop)]
        lacked = [TokenRange(row, *piece) for piece in between(~bits[row], start, stop)]
        assert tokens.within([part]) == had
        assert (tokens.add([part]) if add else tokens.subtract([part])) == (lacked if add else had)
        bits[row, start:stop] = add
        assert tokens.total == bits.sum()
        assert tokens.contains(part) == bits[row, start:stop].all()
        assert list(tokens) == [TokenRange(row, *piece) for row in range(3) for piece in intervals_of(bits[row])]
        missing = [TokenRange(r, *piece) for r in range(3) for piece in between(~bits[r], 0, lengths[r])]
        assert tokens.missing(lengths) == missing
        assert tokens.covers(lengths) == (not missing)
    assert TokenSet(3, tokens) == tokens
    twin = tokens.copy()
    twin.add([TokenRange(0, 0, SIZE)])
    assert tokens.total == bits.sum()
