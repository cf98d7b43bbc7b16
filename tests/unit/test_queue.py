"""Which ready tokens a full transfer sends next, and which there are."""

from __future__ import annotations

import pytest

from kvd.errors import InvalidArgument
from kvd.transfer.queue import MAX_RANGES
from kvd_client.spec import PartLayout, TokenRange
from tests.unit.queue_helpers import Source


def test_no_row_means_every_row_clipped_to_its_length() -> None:
    one = Source()
    one.ready(1, None, 2, 6)
    assert one.queue.pending_tokens == 4 + 1 + 3
    assert one.drain() == [(1, (TokenRange(0, 2, 6), TokenRange(1, 2, 3), TokenRange(2, 2, 5)))]
    assert one.queue.pending_tokens == 0


def test_full_transfer_goes_layer_by_layer() -> None:
    one = Source()
    one.ready(1, 0, 0, 2)
    one.ready(0, 0, 0, 2)
    one.ready(1, 0, 2, 4)
    assert one.drain() == [(0, (TokenRange(0, 0, 2),)), (1, (TokenRange(0, 0, 4),))]


def test_a_take_has_at_most_so_many_bytes_and_at_least_a_token() -> None:
    one = Source()
    one.ready(0, None, 0, 8)
    assert one.queue.take(35) == [(0, (TokenRange(0, 0, 3),))]
    assert one.queue.take(1) == [(0, (TokenRange(0, 3, 4),))]
    assert one.queue.take(60) == [(0, (TokenRange(0, 4, 8), TokenRange(1, 0, 2)))]
    assert one.queue.pending_tokens == 1 + 5


def test_neighbours_become_one_range() -> None:
    one = Source()
    for token in range(8):
        one.ready(0, 0, token, token + 1)
    assert one.drain() == [(0, (TokenRange(0, 0, 8),))]


def test_what_was_ready_before_is_not_pushed_again() -> None:
    one = Source()
    one.ready(0, 0, 2, 5)
    one.drain()
    one.ready(0, 0, 0, 8)
    one.ready(0, 0, 0, 8)
    assert one.drain() == [(0, (TokenRange(0, 0, 2), TokenRange(0, 5, 8)))]


def test_what_the_sink_holds_is_not_pushed() -> None:
    one = Source(held=(TokenRange(0, 1, 3), TokenRange(0, 2, 6), TokenRange(1, 0, 3)))
    one.ready(0, 0, 0, 4)
    assert one.queue.pending_tokens == 1
    one.ready(0, None, 0, 8)
    assert one.drain() == [(0, (TokenRange(0, 0, 1), TokenRange(0, 6, 8), TokenRange(2, 0, 5)))]


def test_a_take_has_a_bounded_number_of_ranges() -> None:
    one = Source(PartLayout(layers=1, heads=1, entry_bytes=1, rows=1, capacity=1 << 14), (1 << 14,))
    for token in range(0, 1 << 14, 2):
        one.ready(0, 0, token, token + 1)
    assert [len(ranges) for _, ranges in one.drain()] == [MAX_RANGES] * (8192 // MAX_RANGES)


def test_the_first_token_that_was_never_ready() -> None:
    one = Source()
    assert one.tokens.first_unready() == (0, 0, 0)
    one.ready(0, None, 0, 8)
    one.ready(1, None, 0, 2)
    assert one.tokens.first_unready() == (1, 0, 2)
    one.ready(1, 0, 2, 8)
    assert one.tokens.first_unready() == (1, 1, 2)
    one.ready(1, None, 0, 8)
    assert one.tokens.first_unready() is None


@pytest.mark.parametrize(
    ("ring", "fields"),
    [
        ((2, None, 0, 1), {"layer": 2}),
        ((-1, None, 0, 1), {"layer": -1}),
        ((0, 3, 0, 1), {"layer": 0, "row": 3}),
        ((0, -1, 0, 1), {"layer": 0, "row": -1}),
        ((0, None, 0, 9), {"layer": 0, "start": 0, "stop": 9}),
        ((0, 1, 0, 4), {"layer": 0, "start": 0, "stop": 4}),
        ((1, 1, -1, 2), {"layer": 1, "start": -1, "stop": 2}),
        ((1, 1, 2, 1), {"layer": 1, "start": 2, "stop": 1}),
    ],
)
def test_what_does_not_exist_is_refused_and_nothing_added(
    ring: tuple[int, int | None, int, int], fields: dict[str, int]
) -> None:
    one = Source()
    with pytest.raises(InvalidArgument) as caught:
        one.ready(*ring)
    assert caught.value.fields == fields
    assert one.queue.pending_tokens == 0
    assert one.queue.take(100) == []
