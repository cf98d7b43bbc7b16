"""Which ready tokens are pushed next."""

from __future__ import annotations

import pytest

from kvd.errors import InvalidArgument
from kvd.transfer.proactive import MAX_RANGES, ProactivePath
from kvd_client.spec import PartLayout, TokenRange

LAYOUT = PartLayout(layers=2, heads=1, entry_bytes=10, rows=3, capacity=8)
LENGTHS = (8, 3, 5)


def path() -> ProactivePath:
    return ProactivePath(LAYOUT, LENGTHS)


def drain(one: ProactivePath, max_bytes: int = 1 << 20) -> list[tuple[int, tuple[TokenRange, ...]]]:
    found = []
    while (taken := one.take(max_bytes)) is not None:
        found.append(taken)
    return found


def test_no_row_means_every_row_clipped_to_its_length() -> None:
    one = path()
    one.ready(1, None, 2, 6)
    assert one.pending_tokens == 4 + 1 + 3
    assert drain(one) == [(1, (TokenRange(0, 2, 6), TokenRange(1, 2, 3), TokenRange(2, 2, 5)))]
    assert one.pending_tokens == 0


def test_a_take_is_of_one_layer_in_the_order_of_readiness() -> None:
    one = path()
    one.ready(1, 0, 0, 2)
    one.ready(0, 0, 0, 2)
    one.ready(1, 0, 2, 4)
    assert drain(one) == [
        (1, (TokenRange(0, 0, 2),)),
        (0, (TokenRange(0, 0, 2),)),
        (1, (TokenRange(0, 2, 4),)),
    ]


def test_a_take_has_at_most_so_many_bytes_and_at_least_a_token() -> None:
    one = path()
    one.ready(0, None, 0, 8)
    assert one.take(35) == (0, (TokenRange(0, 0, 3),))
    assert one.take(1) == (0, (TokenRange(0, 3, 4),))
    assert one.take(60) == (0, (TokenRange(0, 4, 8), TokenRange(1, 0, 2)))
    assert one.pending_tokens == 1 + 5


def test_neighbours_become_one_range() -> None:
    one = path()
    for token in range(8):
        one.ready(0, 0, token, token + 1)
    assert drain(one) == [(0, (TokenRange(0, 0, 8),))]


def test_what_was_ready_before_is_not_pushed_again() -> None:
    one = path()
    one.ready(0, 0, 2, 5)
    drain(one)
    one.ready(0, 0, 0, 8)
    one.ready(0, 0, 0, 8)
    assert drain(one) == [(0, (TokenRange(0, 0, 2), TokenRange(0, 5, 8)))]


def test_what_the_sink_holds_is_not_pushed_whether_ready_before_or_after() -> None:
    one = path()
    one.ready(0, 0, 0, 4)
    one.hold((TokenRange(0, 1, 3), TokenRange(0, 2, 6), TokenRange(1, 0, 3)))
    assert one.pending_tokens == 1
    one.ready(0, None, 0, 8)
    assert drain(one) == [(0, (TokenRange(0, 0, 1), TokenRange(0, 6, 8), TokenRange(2, 0, 5)))]


def test_a_take_has_a_bounded_number_of_ranges() -> None:
    one = ProactivePath(PartLayout(layers=1, heads=1, entry_bytes=1, rows=1, capacity=1 << 14), (1 << 14,))
    for token in range(0, 1 << 14, 2):
        one.ready(0, 0, token, token + 1)
    assert [len(ranges) for _, ranges in drain(one)] == [MAX_RANGES] * (8192 // MAX_RANGES)


def test_the_first_token_that_was_never_ready() -> None:
    one = path()
    assert one.first_unready() == (0, 0, 0)
    one.ready(0, None, 0, 8)
    one.ready(1, None, 0, 2)
    assert one.first_unready() == (1, 0, 2)
    one.ready(1, 0, 2, 8)
    assert one.first_unready() == (1, 1, 2)
    one.ready(1, None, 0, 8)
    assert one.first_unready() is None


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
    one = path()
    with pytest.raises(InvalidArgument) as caught:
        one.ready(*ring)
    assert caught.value.fields == fields
    assert one.pending_tokens == 0
    assert one.take(100) is None
