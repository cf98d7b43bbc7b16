"""Selections of several transfers at a time: batches whose requests come from different nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd_client.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
)
from kvd_client.selection import as_completed, select_many
from tests.unit.selection_fakes import FakeConnection, FakeDaemon, index_of


def batch(*lengths: int) -> tuple[FakeConnection, list[FakeDaemon], list[Any]]:
    connection = FakeConnection()
    daemons = [FakeDaemon([length], connection=connection) for length in lengths]
    index = index_of([1, 2], [3, 0])
    return connection, daemons, [(daemon.transfer, 2, index, 0) for daemon in daemons]


def test_a_slow_source_holds_up_nobody_else() -> None:
    connection, daemons, requests = batch(7, 8, 9)
    daemons[1].push(2, 0, 0, 8)
    answers = select_many(requests)
    assert [fetch.transfer for fetch in connection.fetches] == [1, 3], "all were sent before anybody waits"
    connection.on_block = lambda: connection.serve(connection.fetches[1])  # the last one only
    at, pending = next(answers)
    assert at == 1, "everything local"
    assert np.array_equal(pending.wait(), daemons[1].expected(2, pending.index))
    at, pending = next(answers)
    assert at == 2
    assert np.array_equal(pending.wait(), daemons[2].expected(2, pending.index))
    connection.on_block = lambda: connection.serve(connection.fetches[0])
    at, pending = next(answers)
    assert at == 0
    assert np.array_equal(pending.wait(), daemons[0].expected(2, pending.index))
    assert list(answers) == []


def test_one_transfers_end_is_its_own_affair() -> None:
    connection, daemons, requests = batch(7, 8, 9)
    answers = select_many(requests)

    def block() -> bool:
        daemons[0].fail(PeerLost("the peer is gone"))
        return connection.answer_next()

    connection.on_block = block
    outcome = {}
    for at, pending in answers:
        try:
            outcome[at] = np.array_equal(pending.wait(), daemons[at].expected(2, pending.index))
        except PeerLost:
            outcome[at] = None
    assert outcome == {0: None, 1: True, 2: True}


def test_select_many_sends_nothing_if_one_index_is_bad() -> None:
    connection, _, requests = batch(7, 8)
    requests[1] = (*requests[1][:2], index_of([1, 2], [3, 9]), 0)
    with pytest.raises(InvalidArgument):
        select_many(requests)
    with pytest.raises(InvalidArgument, match="same transfer and slot"):
        select_many([requests[0], requests[0]])
    assert connection.sent == []


def test_select_many_ends_at_its_timeout_with_the_fetches_going_on() -> None:
    connection, daemons, requests = batch(7, 8)
    connection.on_block = None
    answers = select_many(requests, timeout_s=0.0)
    with pytest.raises(DeadlineExceeded, match="2 of 2"):
        next(answers)
    connection.on_block = connection.answer_next
    again = [daemon.transfer.select(2, index_of([1, 2], [3, 0])) for daemon in daemons]
    assert [len(entries) for entries in again] == [2, 2]


def test_transfers_of_two_clients_can_not_be_waited_for_together() -> None:
    daemons = [FakeDaemon([7]), FakeDaemon([7])]
    pending = [daemon.transfer.prepare_select(0, index_of([1], [2])) for daemon in daemons]
    for selection_ in pending:
        selection_.submit()
    with pytest.raises(InvalidArgument, match="one client"):
        list(as_completed(pending))
