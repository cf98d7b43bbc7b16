"""How a transfer's bytes go over, what refused writes do, and what happens when a node drains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument, NotFound, RemoteAccessError, ShuttingDown
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import REFUSED_GRACE_S
from kvd.types import Role
from kvd.wire import messages as wire
from kvd_client.spec import TokenRange
from tests.unit.transfer_helpers import (
    SESSION,
    SETTINGS,
    TOKEN,
    Node,
    kinds,
    layout,
    only,
    open_message,
    opened,
    sent,
    sink_connecting,
    sink_opening,
    sink_running,
    sink_waiting,
    source_running,
    source_waiting,
    why,
)

# --- the bytes --------------------------------------------------------------------------------------------------------


def test_tokens_are_written_as_they_are_rung_a_chunk_each_within_the_window() -> None:
    node = source_running()
    first, second = only(node.ring(0, 0, 4), do.WriteTokens)
    assert (first.layer, first.ranges, first.nbytes) == (0, (TokenRange(0, 0, 2),), 2 * TOKEN)
    assert (second.ranges, second.session) == ((TokenRange(0, 2, 4),), SESSION)
    assert node.ring(1, 0, 4) == []
    (third,) = only(node.done(first.write), do.WriteTokens)
    assert (third.layer, third.ranges) == (1, (TokenRange(0, 0, 2),))
    assert len({first.write, second.write, third.write}) == 3
    node.done(second.write)
    assert node.done(third.write) == []
    assert node.part().bytes_done == 6 * TOKEN


def test_bytes_that_are_confirmed_after_the_release_count_too() -> None:
    node = source_running()
    first, second = only(node.ring(0, 0, 4), do.WriteTokens)
    node.done(first.write)
    node.hear(wire.Delivered(transfer=1))
    node(ev.ReleaseRequested(1))
    assert 1 not in node.core.parts
    node.done(second.write)
    assert node.core.counters["bytes_sent_proactive"] == 4 * TOKEN


def test_what_was_rung_before_the_sink_came_is_written_when_it_does() -> None:
    node = source_waiting()
    assert node.ring(0, 0, 4) == []
    assert kinds(node.hear(open_message())) == ["BindSink", "SendAccepted", "WriteTokens", "WriteTokens"]


def test_parts_on_one_link_take_turns() -> None:
    node = Node()
    for transfer in (1, 2):
        node.source(transfer, request=f"r{transfer}")
        node.hear(open_message(sink=20 + transfer, request=f"r{transfer}"))
    writes = only(node.ring(0, 0, 4), do.WriteTokens)
    assert [write.transfer for write in writes] == [1, 1]
    node.ring(1, 0, 4)
    assert node.ring(0, 0, 4, transfer=2) == []
    turns = []
    while writes:
        done = writes.pop(0)
        new = only(node.done(done.write, transfer=done.transfer), do.WriteTokens)
        turns += [write.transfer for write in new]
        writes += new
    assert turns == [1, 2, 1, 2]


def test_sessions_have_a_window_each() -> None:
    node = Node()
    for transfer in (1, 2):
        node.source(transfer, request=f"r{transfer}")
        node.hear(open_message(sink=20 + transfer, request=f"r{transfer}"), session=transfer)
    assert len(only(node.ring(0, 0, 4), do.WriteTokens)) == 2
    assert len(only(node.ring(0, 0, 4, transfer=2), do.WriteTokens)) == 2


def test_vllm_48633_what_the_sink_holds_is_never_sent() -> None:
    node = source_waiting()
    node.ring(0, 0, 4)
    out = node.hear(open_message(held=[TokenRange(0, 0, 3)]))
    assert [write.ranges for write in only(out, do.WriteTokens)] == [(TokenRange(0, 3, 4),)]
    assert [write.ranges for write in only(node.ring(1, 0, 4), do.WriteTokens)] == [(TokenRange(0, 3, 4),)]


def test_vllm_48633_a_sink_waits_only_for_what_it_does_not_hold() -> None:
    node = Node("d")
    node.sink(peer="p", held=(TokenRange(0, 0, 3), TokenRange(0, 2, 3)))
    assert node.part().bytes_total == 2 * TOKEN
    (message,) = sent(node(ev.SessionReady(1, SESSION, "p")), wire.Open)
    assert message.held == [TokenRange(0, 0, 3), TokenRange(0, 2, 3)]
    node.hear(wire.Accepted(transfer=1, source=9))
    node.arrive(0, 3, 4)
    assert kinds(node.arrive(1, 3, 4)) == ["Publish", "SendDelivered", "ReportEnd"]


def test_a_sink_that_holds_everything_is_delivered_as_soon_as_it_is_accepted() -> None:
    node = Node("d")
    node.sink(peer="p", held=(TokenRange(0, 0, 4),))
    node(ev.SessionReady(1, SESSION, "p"))
    assert kinds(node.hear(wire.Accepted(transfer=1, source=9))) == ["SendDelivered", "ReportEnd"]


def test_data_may_overtake_the_answer() -> None:
    """The two travel on different connections."""
    node = sink_opening()
    assert kinds(node.arrive(0, 0, 4)) == ["Publish"]
    assert kinds(node.arrive(1, 0, 4)) == ["Publish"]
    assert kinds(node.hear(wire.Accepted(transfer=1, source=9))) == ["SendDelivered", "ReportEnd"]


def test_tokens_count_once() -> None:
    node = sink_running()
    (publish,) = node.arrive(0, 0, 3)
    assert isinstance(publish, do.Publish)
    assert (publish.bytes_done, publish.new_bytes) == (3 * TOKEN, 3 * TOKEN)
    (publish,) = node.arrive(0, 1, 4)
    assert isinstance(publish, do.Publish)
    assert (publish.bytes_done, publish.new_bytes) == (4 * TOKEN, TOKEN)


@pytest.mark.parametrize(
    ("layer", "row", "start", "stop"),
    [(2, 0, 0, 4), (-1, 0, 0, 4), (0, 1, 0, 1), (0, -1, 0, 1), (0, 0, 3, 2), (0, 0, -1, 2), (0, 0, 0, 5)],
)
def test_tokens_that_do_not_exist_end_the_session(layer: int, row: int, start: int, stop: int) -> None:
    node = sink_running()
    ranges = [TokenRange(0, 0, 1), TokenRange(row, start, stop)]
    (close,) = node(ev.TokensArrived(SESSION, wire.Arrived(1, layer, ranges)))
    assert isinstance(close, do.CloseSession)
    assert "do not exist" in close.reason
    assert node.part().bytes_done == 0
    assert only(node.lose(), do.ReportEnd)[0].code == "PEER_LOST"


def test_tokens_that_are_said_to_have_arrived_and_are_not_marked_end_the_transfer_alone() -> None:
    """The process may have changed its masks itself, so the session, which others use, goes on."""
    node = sink_running()
    out = node(ev.TokensArrived(SESSION, wire.Arrived(1, 0, [TokenRange(0, 0, 4)]), marked=False))
    assert not only(out, do.CloseSession)
    assert sent(out, wire.Abort)[0].code == "PROTOCOL"
    assert only(out, do.ReportEnd)[0].code == "PROTOCOL"
    assert node.part().bytes_done == 0


def test_a_ring_that_does_not_exist_ends_the_transfer_on_both_sides() -> None:
    node = source_running()
    out = node.ring(2, 0, 4)
    assert kinds(out) == ["SendAbort", "ReportEnd"]
    assert sent(out, wire.Abort)[0].code == "INVALID_ARGUMENT"
    assert node.ring(0, 0, 4) == []


def test_finish_wants_everything_rung() -> None:
    node = source_waiting()
    node.ring(0, 0, 4)
    node.ring(1, 0, 2)
    with pytest.raises(InvalidArgument) as caught:
        node.core.check_finish(1)
    assert caught.value.fields == {"request": "r", "layer": 1, "row": 0, "token": 2}
    node.ring(1, 2, 4)
    node.core.check_finish(1)
    with pytest.raises(NotFound):
        node.core.check_finish(2)
    sink = sink_waiting()
    with pytest.raises(NotFound):
        sink.core.check_finish(1)


def test_finish_of_an_ended_transfer_is_no_error_of_its_own() -> None:
    node = source_running()
    node.lose()
    node.core.check_finish(1)
    assert node(ev.SourceFinished(1)) == []


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([None, 0, 1]), st.integers(0, 6), st.integers(0, 6))),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 3)), max_size=3),
    st.integers(0, 5),
)
def test_every_token_is_sent_once_whatever_is_rung(
    rings: list[tuple[int, int | None, int, int]], held: list[tuple[int, int, int]], sink_comes: int
) -> None:
    lengths = (6, 4)
    node = Node()
    node.source(lengths=lengths, layout=layout(rows=2))
    pieces = [TokenRange(row, min(a, b), max(a, b)) for row, a, b in held]
    written: list[tuple[int, int, int]] = []

    def write(out: list[do.Instruction]) -> None:
        for one in only(out, do.WriteTokens):
            written.extend((one.layer, r.row, token) for r in one.ranges for token in range(r.start, r.stop))
            write(node.done(one.write))

    rung: set[tuple[int, int, int]] = set()
    for number, (layer, row, one, other) in enumerate([*rings, (0, None, 0, 0)]):
        if number == min(sink_comes, len(rings)):
            write(node.hear(open_message(lengths=list(lengths), layout=layout(rows=2), held=pieces)))
        start, stop = sorted((one, other))
        if row is not None:
            start, stop = min(start, lengths[row]), min(stop, lengths[row])
        write(node.ring(layer, start, stop, row=row))
        for r in (0, 1) if row is None else (row,):
            rung |= {(layer, r, token) for token in range(start, min(stop, lengths[r]))}
    kept = {(layer, r.row, token) for layer in (0, 1) for r in pieces for token in range(r.start, r.stop)}
    assert sorted(written) == sorted(rung - kept)


# --- refused writes ---------------------------------------------------------------------------------------------------


def refused_write() -> tuple[Node, list[do.WriteTokens]]:
    node = source_running()
    node.now = 5.0
    writes = only(node.ring(0, 0, 4), do.WriteTokens)
    node.ring(1, 0, 4)
    assert node.done(writes[0].write, RemoteAccessError("the far side refused")) == []
    return node, writes


def test_a_refused_write_waits_for_its_reason_and_sends_nothing_more() -> None:
    node, writes = refused_write()
    assert node.done(writes[1].write) == []
    assert node.ring(1, 0, 4) == []
    assert node.core.next_timer() == 5.0 + REFUSED_GRACE_S
    assert node.tick(4.9 + REFUSED_GRACE_S) == []
    (end,) = node.hear(wire.Abort(transfer=1, **why("PROCESS_LOST")))
    assert isinstance(end, do.ReportEnd)
    assert end.code == "PROCESS_LOST"


def test_a_refused_write_without_a_reason_fails_with_its_own_code() -> None:
    node, _ = refused_write()
    out = node.tick(5.0 + REFUSED_GRACE_S)
    assert kinds(out) == ["SendAbort", "CancelWrites", "ReportEnd"]
    assert only(out, do.ReportEnd)[0].code == "REMOTE_ACCESS"
    assert node.core.next_timer() is None


def test_a_refused_write_leaves_the_other_parts_of_the_link_alone() -> None:
    node, writes = refused_write()
    node.source(2, request="s")
    node.hear(open_message(sink=22, request="s"))
    assert len(only(node.ring(0, 0, 4, transfer=2), do.WriteTokens)) == 1
    assert [w.transfer for w in only(node.done(writes[1].write), do.WriteTokens)] == [2]


# --- draining ---------------------------------------------------------------------------------------------------------


def test_a_draining_node_takes_nothing_new_and_ends_what_runs() -> None:
    node = source_running()
    node.source(2, request="s")
    node.hear(open_message(sink=40, request="unknown"))
    (refused,) = sent(node(ev.DrainRequested()), wire.Refused)
    assert (refused.transfer, refused.code) == (40, "SHUTTING_DOWN")
    assert node.core.draining
    with pytest.raises(ShuttingDown):
        node.core.check_open(opened(Role.SOURCE, 3, request="t"))
    (refused,) = sent(node.hear(open_message(sink=41, request="t")), wire.Refused)
    assert refused.code == "SHUTTING_DOWN"
    assert kinds(node.hear(open_message(sink=42, request="s"))) == ["BindSink", "SendAccepted"]
    assert only(node.ring(0, 0, 4), do.WriteTokens)
    assert node.core.unfinished == 2


def test_stop_ends_everything_with_its_error() -> None:
    node = source_running()
    node.sink(2, peer="p")
    node.hear(open_message(sink=40, request="unknown"))
    out = node(ev.StopRequested(ShuttingDown("the daemon stops")))
    assert [end.code for end in only(out, do.ReportEnd)] == ["SHUTTING_DOWN"] * 2
    assert [abort.code for abort in sent(out, wire.Abort)] == ["SHUTTING_DOWN"]
    assert [refused.transfer for refused in sent(out, wire.Refused)] == [40]
    assert node.core.unfinished == 0
    assert node(ev.StopRequested(ShuttingDown("the daemon stops"))) == []


# --- what is counted, what is not understood --------------------------------------------------------------------------


def test_vllm_21784_ends_are_counted_by_role_and_code() -> None:
    node = source_running()
    node.hear(open_message(sink=33), session=6)
    node.lose()
    assert dict(node.core.counters) == {
        "transfers_opened_source": 1, "opens_refused": 1, "transfers_ended_source_PEER_LOST": 1
    }  # fmt: skip


def test_a_message_that_is_none_of_the_cores_ends_the_session() -> None:
    (close,) = source_running().hear(wire.Ping(number=1))
    assert isinstance(close, do.CloseSession)
    assert "Ping" in close.reason


def test_a_core_that_waits_for_nothing_has_no_timer() -> None:
    assert Node().core.next_timer() is None
    assert sink_connecting().core.next_timer() == SETTINGS.rendezvous_s
    assert source_waiting().core.next_timer() == 100.0
