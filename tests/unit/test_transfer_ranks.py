"""The ranks of a request: one that fails ends them all, one that succeeds only itself."""

from __future__ import annotations

import pytest

from kvd.errors import Aborted
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.part import State
from kvd.types import Role
from kvd.wire import messages as wire
from tests.unit.counting import operations
from tests.unit.transfer_helpers import (
    SESSION,
    Node,
    kinds,
    only,
    open_message,
    sent,
    source_waiting,
)


def ranked(role: Role) -> Node:
    """Four ranks of one request, three of them running on two sessions, one waiting; and one more request."""
    node = Node()
    for rank in range(4):
        if role is Role.SOURCE:
            node.source(rank + 1, client=rank + 1, rank=rank, ranks=4, head_start=2 * rank)
        else:
            node.sink(rank + 1, client=rank + 1, rank=rank, ranks=4, head_start=2 * rank, peer="p")
    for rank in range(3):
        session = SESSION + rank % 2
        if role is Role.SOURCE:
            node.hear(open_message(sink=20 + rank, rank=rank, ranks=4, head_start=2 * rank), session=session)
        else:
            node(ev.SessionReady(rank + 1, session, "p"))
            node.hear(wire.Accepted(transfer=rank + 1, source=20 + rank), session=session)
    node.source(9, request="another", client=9)
    return node


@pytest.mark.parametrize("role", Role)
def test_one_rank_fails_and_all_of_the_request_end(role: Role) -> None:
    node = ranked(role)
    out = node(ev.AbortRequested(2, Aborted("rank 1 gave up")))
    assert {(end.transfer, end.code) for end in only(out, do.ReportEnd)} == {(n, "ABORTED") for n in (1, 2, 3, 4)}
    assert len(only(out, do.ReportEnd)) == 4
    assert {abort.transfer for abort in sent(out, wire.Abort)} == {20, 21, 22}
    assert node.state(9) is State.WAITING
    for transfer in (1, 2, 3, 4):
        assert kinds(node(ev.ReleaseRequested(transfer))) == ["FreeMemory"]


@pytest.mark.parametrize("role", Role)
def test_one_ranks_process_dies_and_all_of_the_request_end(role: Role) -> None:
    node = ranked(role)
    out = node(ev.ClientLost(3))
    assert {end.transfer for end in only(out, do.ReportEnd)} == {1, 2, 3, 4}
    assert [free.transfer for free in only(out, do.FreeMemory)] == [3]


def test_a_session_lost_by_some_ranks_ends_the_others_and_tells_their_peers() -> None:
    node = ranked(Role.SINK)
    out = node.lose(SESSION)
    assert sorted(end.transfer for end in only(out, do.ReportEnd)) == [1, 2, 3, 4]
    assert 21 in {abort.transfer for abort in sent(out, wire.Abort)}


def test_one_ranks_success_ends_only_that_rank() -> None:
    node = ranked(Role.SOURCE)
    assert kinds(node.hear(wire.Delivered(transfer=1))) == ["ReportEnd"]
    assert node.state(2) is State.RUNNING
    node(ev.AbortRequested(2, Aborted("rank 1 gave up")))
    assert node.part(1).code == "OK"


def test_as_many_ranks_as_there_are() -> None:
    """A failure reaches them without one call inside another for each."""
    node = Node()
    for rank in range(2000):
        node.source(rank + 1, rank=rank, ranks=2000)
    assert len(only(node(ev.AbortRequested(1, Aborted("given up"))), do.ReportEnd)) == 2000


def test_source_and_sink_of_one_request_on_one_node_are_not_each_others_ranks() -> None:
    node = source_waiting()
    node.sink(2, peer="p")
    out = node(ev.AbortRequested(1, Aborted("given up")))
    assert [end.transfer for end in only(out, do.ReportEnd)] == [1]
    assert node.state(2) is State.CONNECTING


@pytest.mark.parametrize("role", Role)
def test_what_ends_together_costs_each_the_same_however_many_there_are(role: Role) -> None:
    """Requests of one session that is lost: each looks at its own ranks, and at nobody else's."""

    def cost(many: int) -> int:
        node = Node()
        for number in range(many):
            if role is Role.SOURCE:
                node.source(number + 1, request=f"r{number}")
                node.hear(open_message(sink=number, request=f"r{number}"))
            else:
                node.sink(number + 1, request=f"r{number}", peer="p")
                node(ev.SessionReady(number + 1, SESSION, "p"))
        return operations(node.lose)

    few, many = cost(50), cost(400)
    assert many <= 8 * few


def test_a_withdrawn_open_costs_the_same_however_many_are_paired() -> None:
    def cost(many: int) -> int:
        node = Node()
        for number in range(many):
            node.source(number + 1, request=f"r{number}")
            node.hear(open_message(sink=number, request=f"r{number}"))
        withdrawn = wire.Withdraw(sink=many // 2, code="ABORTED", message="given up", fields={})
        ended: list[do.ReportEnd] = []
        count = operations(lambda: ended.extend(only(node.hear(withdrawn), do.ReportEnd)))
        assert [end.transfer for end in ended] == [many // 2 + 1]
        return count

    assert cost(400) <= cost(50) + 20
