"""Descriptors, executed on real bytes: everything arrives in its place and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.plan import Plan, check_compatible, chop, merge, plan_masks, plan_tokens, ranges_of
from kvd_client.spec import PartLayout, TokenRange


@st.composite
def cases(draw: st.DrawFn) -> tuple[PartLayout, PartLayout, list[TokenRange], int]:
    common = {
        "layers": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "entry_bytes": draw(st.integers(1, 5)),
        "rows": draw(st.integers(1, 4)),
    }
    capacity = draw(st.integers(1, 12))
    other = draw(st.one_of(st.just(capacity), st.integers(1, 12)))
    source, sink = PartLayout(capacity=capacity, **common), PartLayout(capacity=other, **common)
    room = min(capacity, other)
    bounds = st.integers(0, room)
    ranges = draw(st.lists(st.tuples(st.integers(0, common["rows"] - 1), bounds, bounds), max_size=10))
    return (
        source,
        sink,
        [TokenRange(row, min(a, b), max(a, b)) for row, a, b in ranges],
        draw(st.integers(0, common["layers"] - 1)),
    )


def execute(plan: Plan, source: bytes, sink: bytearray) -> None:
    for table in (plan.data, plan.masks):
        for here, there, length in table.tolist():
            assert length > 0
            assert here >= 0
            assert there >= 0
            assert here + length <= len(source)
            assert there + length <= len(sink)
            sink[there : there + length] = source[here : here + length]


@given(cases(), st.integers(0, 100), st.lists(st.booleans(), max_size=4))
def test_masks_alone_are_those_of_the_plans(case, source_at, alike) -> None:
    source, sink, ranges, first = case
    layers = [(first, ranges), *((n % source.layers, ranges if same else ranges[::2]) for n, same in enumerate(alike))]
    found = plan_masks(source, sink, layers, source_offset=source_at)
    apart = [plan_tokens(source, sink, layer, some, source_offset=source_at).masks for layer, some in layers]
    assert np.array_equal(found, merge(np.concatenate(apart)))
    with pytest.raises(InvalidArgument, match=f"layer {source.layers} does not exist"):
        plan_masks(source, sink, [(source.layers, ranges)])


@given(cases(), st.integers(0, 100), st.integers(0, 100), st.randoms(use_true_random=False))
def test_every_byte_arrives_in_its_place_and_no_other_is_touched(case, source_at, sink_at, rng) -> None:
    source, sink, ranges, layer = case
    sent = bytes(rng.randrange(1, 128) for _ in range(source_at + source.nbytes))
    received = bytearray(b"\xff" * (sink_at + sink.nbytes))
    expected = bytearray(received)
    tokens = sorted({(part.row, token) for part in ranges for token in range(part.start, part.stop)})
    for row, token in tokens:
        here, there = source_at + source.token_offset(layer, row, token), sink_at + sink.token_offset(layer, row, token)
        expected[there : there + sink.token_bytes] = sent[here : here + source.token_bytes]
        mask = source_at + source.token_mask_offset(layer, row, token)
        expected[sink_at + sink.token_mask_offset(layer, row, token)] = sent[mask]

    plan = plan_tokens(source, sink, layer, ranges, source_offset=source_at, sink_offset=sink_at)
    execute(plan, sent, received)
    assert received == expected
    assert plan.tokens == len(tokens)
    assert plan.nbytes == len(tokens) * source.token_bytes == plan.data[:, 2].sum()
    back = ranges_of(plan, source, layer, source_offset=source_at)
    assert [(part.row, token) for part in back for token in range(part.start, part.stop)] == tokens

    for table in (plan.data, plan.masks):
        ends = table[:, :2] + table[:, 2:]
        assert not (ends[:-1] == table[1:, :2]).all(axis=1).any(), "two neighbours could be one"
        assert (ends[:-1, 0] <= table[1:, 0]).all(), "by source address, each byte once"

    same = plan_tokens(
        source,
        sink,
        layer,
        np.array([(part.row, part.start, part.stop) for part in ranges], np.int64).reshape(-1, 3),
        source_offset=source_at,
        sink_offset=sink_at,
    )
    assert (same.data == plan.data).all()
    assert (same.masks == plan.masks).all()


@given(cases(), st.integers(1, 60))
def test_pieces_are_bounded_whole_tokens_and_complete(case, max_bytes) -> None:
    source, sink, ranges, layer = case
    plan = plan_tokens(source, sink, layer, ranges)
    pieces = chop(plan, max_bytes)
    size = source.token_bytes
    fill = max(1, max_bytes // size)
    assert [piece.tokens for piece in pieces[:-1]] == [fill] * (len(pieces) - 1)
    assert all(0 < piece.tokens <= fill for piece in pieces)
    for piece in pieces:
        assert piece.nbytes <= max(max_bytes, size)
        assert len(piece.data) == len(piece.masks)
        assert (piece.data[:, 2] == piece.masks[:, 2] * size).all()
    if pieces:
        assert (merge(np.concatenate([piece.data for piece in pieces])) == plan.data).all()
        assert (merge(np.concatenate([piece.masks for piece in pieces])) == plan.masks).all()
        covered = [part for piece in pieces for part in ranges_of(piece, source, layer)]
        whole = ranges_of(plan, source, layer)
        assert sum(part.stop - part.start for part in covered) == sum(part.stop - part.start for part in whole)
    else:
        assert plan.tokens == 0


def test_a_full_batch_of_equal_capacity_is_one_descriptor() -> None:
    layout = PartLayout(layers=2, heads=3, entry_bytes=4, rows=5, capacity=7)
    plan = plan_tokens(layout, layout, 1, [TokenRange(row, 0, 7) for row in range(5)])
    assert plan.data.tolist() == [[layout.layer_offset(1), layout.layer_offset(1), layout.layer_bytes]]
    assert plan.masks.tolist() == [[layout.mask_offset(1), layout.mask_offset(1), 35]]
    assert ranges_of(plan, layout, 1) == [TokenRange(row, 0, 7) for row in range(5)]


def test_merging_keeps_the_order_given() -> None:
    table = np.array([[20, 120, 5], [25, 125, 5], [0, 100, 0], [30, 130, 1], [0, 131, 4], [4, 135, 2]], np.int64)
    assert merge(table).tolist() == [[20, 120, 11], [0, 131, 6]]
    assert merge(np.empty((0, 3), np.int64)).tolist() == []


def test_layouts_that_differ_in_more_than_capacity_are_refused() -> None:
    source = PartLayout(layers=2, heads=3, entry_bytes=4, rows=5, capacity=7)
    sink = PartLayout(layers=2, heads=1, entry_bytes=8, rows=5, capacity=70)
    with pytest.raises(UnsupportedLayout, match="heads 3 and 1, entry_bytes 4 and 8") as caught:
        plan_tokens(source, sink, 0, [])
    assert caught.value.fields == {"heads": [3, 1], "entry_bytes": [4, 8]}
    check_compatible(source, PartLayout(layers=2, heads=3, entry_bytes=4, rows=5, capacity=9))


def test_what_lies_outside_is_refused_by_number() -> None:
    layout = PartLayout(layers=2, heads=1, entry_bytes=1, rows=2, capacity=7)
    small = PartLayout(layers=2, heads=1, entry_bytes=1, rows=2, capacity=5)
    good = TokenRange(0, 0, 5)
    for bad in (TokenRange(2, 0, 1), TokenRange(0, -1, 1), TokenRange(0, 0, 6), TokenRange(1, 3, 2)):
        with pytest.raises(InvalidArgument, match=r"ranges\[1\]") as caught:
            plan_tokens(layout, small, 0, [good, bad])
        assert caught.value.fields["index"] == 1
    for layer in (-1, 2):
        with pytest.raises(InvalidArgument, match=f"layer {layer}"):
            plan_tokens(layout, layout, layer, [good])
    with pytest.raises(InvalidArgument):
        chop(plan_tokens(layout, layout, 0, [good]), 0)
