"""Masks in a lease's memory, and sets of tokens against a bitmap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.mask import (
    IntervalSet,
    check_lengths,
    init_masks,
    mark,
    mask_view,
    mask_views,
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


def test_marking_sets_the_bytes_of_those_tokens_only() -> None:
    lease = memory()
    init_masks(lease, LAYOUT, [37, 12])
    mark(mask_view(lease, LAYOUT, 1), [TokenRange(0, 3, 10), TokenRange(1, 0, 12)])
    one = mask_views(lease, LAYOUT)
    assert one[1, 0].tolist() == [2] * 3 + [1] * 7 + [2] * 27
    assert one[1, 1].tolist() == [1] * 12 + [0] * 25
    assert np.count_nonzero(one == 1) == 19


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


# --- intervals ----------------------------------------------------------------------------------------------------

spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))


def intervals_of(bits: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], bits.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def between(bits: np.ndarray, start: int, stop: int) -> list[tuple[int, int]]:
    only = np.zeros_like(bits)
    only[start:stop] = bits[start:stop]
    return intervals_of(only)


@given(st.lists(spans, max_size=40), spans)
def test_an_interval_set_agrees_with_a_bitmap(steps: list[tuple[int, int]], ask: tuple[int, int]) -> None:
    intervals, bits = IntervalSet(), np.zeros(SIZE, bool)
    for start, stop in steps:
        assert intervals.add(start, stop) == between(~bits, start, stop)
        bits[start:stop] = True
        assert list(intervals) == intervals_of(bits)
        assert intervals.total == bits.sum()
        start, stop = ask
        assert intervals.contains(start, stop) == bits[start:stop].all()
        assert intervals.within(start, stop) == between(bits, start, stop)
        assert intervals.gaps(start, stop) == between(~bits, start, stop)
