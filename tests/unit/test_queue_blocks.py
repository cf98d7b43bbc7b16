"""The send queue where tensors lie in a layout of their own: whole blocks, whole layers, everything at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.importance.matrix import ImportanceMatrix
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import SendQueue
from kvd_client.layouts import UNITS
from kvd_client.spec import PartLayout, TokenRange
from tests.unit.queue_helpers import Source

LAYOUT = PartLayout(layers=2, heads=1, entry_bytes=10, rows=2, capacity=12)
LENGTHS = (12, 6)


def source(**options: Any) -> Source:
    """In blocks of 4 tokens, cut into chunks, unless ``options`` say otherwise."""
    return Source(LAYOUT, LENGTHS, **{"grain": 4, "unit": "chunk", **options})


def test_a_block_goes_when_it_is_whole() -> None:
    one = source()
    one.ready(0, 0, 1, 7)
    assert one.drain() == []
    one.ready(0, 0, 0, 1)
    assert one.drain() == [(0, (TokenRange(0, 0, 4),))]
    one.ready(0, 0, 7, 12)
    assert one.drain() == [(0, (TokenRange(0, 4, 12),))]


def test_the_last_block_of_a_row_is_whole_where_the_row_ends() -> None:
    one = source()
    one.ready(0, 1, 0, 5)
    assert one.drain() == [(0, (TokenRange(1, 0, 4),))]
    one.ready(0, 1, 5, 6)
    assert one.drain() == [(0, (TokenRange(1, 4, 6),))]


@pytest.mark.parametrize("room", [1, 39, 40, 79])
def test_a_take_is_cut_between_blocks_and_has_one_at_least(room: int) -> None:
    one = source()
    one.ready(0, 0, 0, 12)
    assert one.queue.take(room) == [(0, (TokenRange(0, 0, 4),))]


def test_a_take_does_not_begin_a_block_that_it_can_not_finish() -> None:
    one = source()
    one.ready(0, None, 0, 12)
    assert one.queue.take(60) == [(0, (TokenRange(0, 0, 4),))]
    assert one.queue.take(130) == [(0, (TokenRange(0, 4, 12), TokenRange(1, 0, 4)))]


def test_a_layer_goes_at_once_when_all_of_it_is_ready() -> None:
    one = source(unit="layer")
    one.ready(1, None, 0, 6)
    one.ready(0, None, 0, 12)
    assert one.queue.take(1) == [(0, (TokenRange(0, 0, 12), TokenRange(1, 0, 6)))]
    assert one.drain() == []
    one.ready(1, 0, 6, 12)
    (layer, ranges), *rest = one.queue.take(1)
    assert (layer, rest) == (1, [])
    assert sum(r.stop - r.start for r in ranges) == 18


def test_layers_go_together_as_far_as_there_is_room() -> None:
    for room, layers in ((1, [0]), (180, [0]), (181, [0]), (190, [0, 1]), (1 << 20, [0, 1])):
        one = source(unit="layer")
        one.ready(1, None, 0, 12)
        one.ready(0, None, 0, 12)
        assert [layer for layer, _ in one.queue.take(room)] == layers


def test_whole_waits_for_the_last_layer() -> None:
    one = source(unit="whole")
    one.ready(0, None, 0, 12)
    one.ready(1, None, 0, 11)
    assert one.drain() == []
    one.ready(1, 0, 11, 12)
    assert [layer for layer, _ in one.queue.take(1)] == [0, 1]
    assert one.drain() == []


@pytest.mark.parametrize("unit", UNITS)
def test_held_blocks_are_not_waited_for(unit: str) -> None:
    one = source(unit=unit, held=(TokenRange(0, 0, 8), TokenRange(1, 4, 6)))
    for layer in range(2):
        one.ready(layer, None, 0, 12)
    assert one.drain() == [(layer, (TokenRange(0, 8, 12), TokenRange(1, 0, 4))) for layer in range(2)]


def test_kv_blocks_end_where_the_layouts_blocks_do() -> None:
    matrix = ImportanceMatrix(np.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0]]))
    layout = PartLayout(layers=3, heads=1, entry_bytes=1, rows=1, capacity=16)
    policy = choose_policy(
        "profile",
        Selective(mode="profile", blocks=3),
        Profiled(matrix),
        layers=3,
        lengths=(16,),
        token_bytes=1 << 20,
    )
    queue = SendQueue(layout, (16,), policy, grain=4)
    queue.add([(2, TokenRange(0, 0, 16))])
    cut = set()
    while taken := queue.take(4):
        for _, ranges in taken:
            cut |= {edge for r in ranges for edge in (r.start, r.stop)}
    assert cut <= {0, 4, 8, 12, 16}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_everything_goes_once_in_whole_blocks(data: st.DataObject) -> None:
    grain, unit = data.draw(st.sampled_from([1, 2, 4, 5, 32])), data.draw(st.sampled_from(UNITS))
    one = source(grain=grain, unit=unit)
    rings = [(layer, row, token) for layer in range(2) for row in range(2) for token in range(LENGTHS[row])]
    rings = data.draw(st.permutations(rings))
    seen: set[tuple[int, int, int]] = set()
    for layer, row, token in rings:
        one.ready(layer, row, token, token + 1)
        while taken := one.queue.take(data.draw(st.integers(1, 400))):
            for of_layer, ranges in taken:
                for r in ranges:
                    assert r.start % grain == 0
                    assert r.stop % grain == 0 or r.stop == LENGTHS[r.row]
                    tokens = {(of_layer, r.row, t) for t in range(r.start, r.stop)}
                    assert not tokens & seen
                    seen |= tokens
    assert seen == set(rings)
    assert one.queue.pending_tokens == 0
