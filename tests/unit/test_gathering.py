"""From a fetch's counts and positions to addresses, against plain loops; and every number that does not fit."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.transfer.gathering import fetch_entries, landing_descriptors
from kvd_client.spec import PartLayout

LAYOUT = PartLayout(layers=2, heads=2, entry_bytes=8, rows=2, capacity=6)
LENGTHS = (5, 3)


def numbers(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


@st.composite
def fetches(draw: st.DrawFn) -> tuple[PartLayout, tuple[int, ...], list[list[int]]]:
    """A layout, its lengths, and the tokens wanted of each (row, head)."""
    rows, heads, capacity = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    layout = PartLayout(layers=1, heads=heads, entry_bytes=draw(st.integers(1, 40)), rows=rows, capacity=capacity)
    lengths = tuple(draw(st.integers(1, capacity)) for _ in range(rows))
    wanted = [
        draw(st.lists(st.integers(0, lengths[group // heads] - 1), max_size=capacity)) for group in range(rows * heads)
    ]
    return layout, lengths, wanted


@given(fetches(), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 100))
def test_entries_and_landing_agree_with_plain_loops(
    fetch: tuple[PartLayout, tuple[int, ...], list[list[int]]], source: int, target: int, spare: int
) -> None:
    layout, lengths, wanted = fetch
    counts = numbers(*(len(tokens) for tokens in wanted))
    index = numbers(*(token for tokens in wanted for token in tokens))
    entries, many = fetch_entries(layout, lengths, counts, index)
    assert many.tolist() == [len(tokens) for tokens in wanted]
    size = layout.entry_bytes
    expected = []
    for group, tokens in enumerate(wanted):
        row, head = divmod(group, layout.heads)
        expected += [(layout.token_offset(0, row, token) + head * size) // size for token in tokens]
    assert entries.tolist() == expected
    stride = max(len(tokens) for tokens in wanted) * size + spare
    descriptors = landing_descriptors(many, size, source=source, target=target, stride=stride)
    runs, at = [], source
    for group, tokens in enumerate(wanted):
        if tokens:
            runs.append([at, target + group * stride, len(tokens) * size])
            at += len(tokens) * size
    assert descriptors.dtype == np.int64
    assert descriptors.tolist() == runs


@given(fetches())
def test_each_entry_lands_in_its_row(fetch: tuple[PartLayout, tuple[int, ...], list[list[int]]]) -> None:
    """What gather and the descriptors do together, on real bytes."""
    layout, lengths, wanted = fetch
    size = layout.entry_bytes
    memory = np.random.default_rng(1).integers(0, 256, layout.layer_bytes, np.uint8)
    counts = numbers(*(len(tokens) for tokens in wanted))
    index = numbers(*(token for tokens in wanted for token in tokens))
    entries, many = fetch_entries(layout, lengths, counts, index)
    gathered = memory.reshape(-1, size)[entries].ravel()
    landing = np.zeros((layout.rows * layout.heads, layout.capacity, size), np.uint8)
    flat = landing.reshape(-1)
    for start, to, nbytes in landing_descriptors(
        many, size, source=0, target=0, stride=layout.capacity * size
    ).tolist():
        flat[to : to + nbytes] = gathered[start : start + nbytes]
    cache = memory.reshape(layout.rows, layout.capacity, layout.heads, size)
    for group, tokens in enumerate(wanted):
        row, head = divmod(group, layout.heads)
        for place, token in enumerate(tokens):
            assert (landing[group, place] == cache[row, token, head]).all()
        assert not landing[group, len(tokens) :].any()


def test_an_entry_may_be_asked_for_twice() -> None:
    entries, _ = fetch_entries(LAYOUT, LENGTHS, numbers(3, 0, 0, 0), numbers(4, 4, 0))
    assert entries.tolist() == [8, 8, 0]


def test_a_fetch_of_nothing_is_one() -> None:
    entries, counts = fetch_entries(LAYOUT, LENGTHS, numbers(0, 0, 0, 0), b"")
    assert (entries.size, counts.tolist()) == (0, [0, 0, 0, 0])
    assert landing_descriptors(counts, 8, source=0, target=0, stride=8).shape == (0, 3)


@pytest.mark.parametrize(
    ("counts", "index", "fields"),
    [
        (numbers(1, 0, 0), numbers(0), {"counts": 3}),
        (numbers(1, 0, 0, 0, 0), numbers(0), {"counts": 5}),
        (b"", b"", {"counts": 0}),
        (numbers(1, 0, 0, 0)[:-1], numbers(0), {"counts": 3}),
        (numbers(1, 0, 0, 0), numbers(0)[:-1], {"counts": 4}),
        (numbers(1, 0, 0, 0), numbers(0) + b"\0", {"counts": 4}),
        (numbers(1, 0, 0, 0), b"", {"entries": 0}),
        (numbers(1, 0, 0, 0), numbers(0, 0), {"entries": 2}),
        (numbers(2, -1, 0, 0), numbers(0), {"entries": 1}),
        (numbers(-1, 2, 0, 0), numbers(0), {"entries": 1}),
        (numbers(7, 0, 0, 0), numbers(0, 0, 0, 0, 0, 0, 0), {"entries": 7}),
        (numbers(2**31 - 1, 2**31 - 1, 2, 0), b"", {"entries": 0}),
        (numbers(1, 0, 0, 0), numbers(5), {"token": 5, "row": 0}),
        (numbers(1, 0, 0, 0), numbers(-1), {"token": -1, "row": 0}),
        (numbers(0, 0, 1, 0), numbers(3), {"token": 3, "row": 1}),
        (numbers(1, 0, 0, 1), numbers(4, 2**31 - 1), {"token": 2**31 - 1, "row": 1}),
        (numbers(0, 1, 0, 0), numbers(-(2**31)), {"token": -(2**31), "row": 0}),
    ],
)
def test_what_does_not_fit_is_refused(counts: bytes, index: bytes, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fetch_entries(LAYOUT, LENGTHS, counts, index)
    assert caught.value.fields == fields


@given(st.binary(max_size=40), st.binary(max_size=60), st.integers(1, 3), st.integers(1, 3))
def test_any_bytes_give_entries_that_exist_or_are_refused(counts: bytes, index: bytes, rows: int, heads: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, rows=rows, heads=heads)
    lengths = (5, 3, 1)[:rows]
    try:
        entries, many = fetch_entries(layout, lengths, counts, index)
    except InvalidArgument:
        return
    assert len(entries) == many.sum() == len(index) // 4
    row, token = entries // (6 * heads), entries // heads % 6
    assert ((row >= 0) & (row < rows)).all()
    assert (token < np.array(lengths)[row]).all()
