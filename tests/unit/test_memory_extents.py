"""Extents: gaps that join again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.memory.extents import Extents


def test_the_smallest_gap_that_fits_is_taken() -> None:
    extents = Extents(100, 10)
    assert [extents.take(n) for n in (30, 10, 20, 10, 30)] == [0, 30, 40, 60, 70]
    extents.give(0, 30)
    extents.give(40, 20)
    assert extents.take(15) == 40
    assert extents.take(25) == 0
    assert extents.take(1) is None
    assert extents.free == 0


def test_a_piece_given_back_twice_is_refused() -> None:
    extents = Extents(100, 10)
    extents.take(30)
    extents.take(10)
    extents.give(0, 30)
    for offset, nbytes in ((0, 30), (20, 20), (30, 80), (-10, 10)):
        with pytest.raises(InvalidArgument):
            extents.give(offset, nbytes)
    assert extents.gaps() == [(0, 30), (40, 60)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 1 << 30))), st.sampled_from([1, 8]))
def test_extents_agree_with_a_bitmap(steps: list[tuple[bool, int, int]], grain: int) -> None:
    size = 96
    extents, bitmap, pieces = Extents(size, grain), [False] * size, []
    for take, nbytes, pick in steps:
        if take or not pieces:
            need = -(-nbytes // grain) * grain
            fits = [at for at in range(size - need + 1) if not any(bitmap[at : at + need])]
            offset = extents.take(nbytes)
            assert (offset is None) == (not fits)
            if offset is not None:
                assert offset % grain == 0
                assert not any(bitmap[offset : offset + need])
                bitmap[offset : offset + need] = [True] * need
                pieces.append((offset, nbytes, need))
        else:
            offset, nbytes, need = pieces.pop(pick % len(pieces))
            extents.give(offset, nbytes)
            bitmap[offset : offset + need] = [False] * need
        gaps, at = [], 0
        while at < size:
            end = at
            while end < size and not bitmap[end]:
                end += 1
            if end > at:
                gaps.append((at, end - at))
            at = end + 1
        assert extents.gaps() == gaps, "gaps that touch are one"
        assert extents.free == bitmap.count(False)
        assert extents.empty == (not pieces)
