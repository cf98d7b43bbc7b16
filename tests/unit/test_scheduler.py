"""Turns and windows of one link."""

from __future__ import annotations

from kvd.transfer.scheduler import Link


def test_turns_go_round_and_newcomers_wait_for_theirs() -> None:
    link = Link(window=100)
    link.add(1)
    link.add(2)
    link.add(1)
    assert [link.next_turn() for _ in range(3)] == [1, 2, 1]
    link.add(3)
    assert [link.next_turn() for _ in range(4)] == [2, 1, 3, 2]


def test_a_part_without_work_loses_its_turn() -> None:
    link = Link(window=100)
    for transfer in (1, 2, 3):
        link.add(transfer)
    link.remove(2)
    link.remove(7)
    assert [link.next_turn() for _ in range(3)] == [1, 3, 1]
    link.remove(1)
    link.remove(3)
    assert not link.open


def test_the_window_closes_when_full_and_opens_when_something_ends() -> None:
    link = Link(window=100)
    assert not link.open
    link.add(1)
    assert link.open
    link.submitted(10, 99, "proactive", 0.0)
    assert link.open
    link.submitted(11, 40, "proactive", 0.0)
    assert (link.in_flight, link.open) == (139, False)
    assert link.completed(11, 1.0)[0] == 40
    assert link.open
    assert link.completed(10, 1.0)[0] == 99
    assert link.in_flight == 0


def test_a_write_ends_once() -> None:
    link = Link(window=100)
    link.submitted(10, 60, "proactive", 0.0)
    assert link.completed(10, 1.0)[0] == 60
    assert link.completed(10, 1.0)[0] == 0
    assert link.completed(11, 1.0)[0] == 0
    assert link.in_flight == 0


def test_a_single_chunk_may_exceed_the_window() -> None:
    link = Link(window=100)
    link.add(1)
    link.submitted(10, 1000, "proactive", 0.0)
    assert not link.open
    link.completed(10, 1.0)
    assert link.open
