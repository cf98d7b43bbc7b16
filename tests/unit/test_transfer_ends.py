"""Every way in which a transfer ends: reported once, told to the other side, and all memory given back."""

from __future__ import annotations

import pytest

from kvd.errors import Aborted, FabricError, PeerUnreachable, ShuttingDown
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.part import State
from kvd.wire import messages as wire
from kvd_client.spec import TokenRange
from tests.unit.transfer_helpers import (
    SESSION,
    STATES,
    TOLD,
    Node,
    handle,
    kinds,
    only,
    open_message,
    sent,
    sink_connecting,
    sink_ended,
    sink_opening,
    sink_running,
    sink_waiting,
    source_ended,
    source_running,
    source_waiting,
    why,
)


def reports(state: str) -> list[str]:
    return [] if state.endswith("ended") else ["ReportEnd"]


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state: str) -> None:
    node = STATES[state]()
    out = node(ev.AbortRequested(1, Aborted("given up", request="r")))
    assert kinds(out) == TOLD[state] + reports(state)
    assert [end.code for end in only(out, do.ReportEnd)] == ["ABORTED"] * len(reports(state))
    assert node.state() is State.ENDED
    assert node(ev.AbortRequested(1, Aborted("given up", request="r"))) == []


@pytest.mark.parametrize("state", STATES)
def test_the_process_is_lost_in_every_state(state: str) -> None:
    node = STATES[state]()
    assert node(ev.ClientLost(2)) == []
    out = node(ev.ClientLost(1))
    assert kinds(out) == TOLD[state] + reports(state) + ["FreeMemory"]
    for end in only(out, do.ReportEnd):
        assert (end.code, end.fields["role"]) == ("PROCESS_LOST", state.split()[0])
    assert node.left == []
    assert node(ev.ClientLost(1)) == []


@pytest.mark.parametrize("state", STATES)
def test_release_in_every_state_and_twice(state: str) -> None:
    node = STATES[state]()
    out = node(ev.ReleaseRequested(1))
    assert kinds(out)[-1] == "FreeMemory"
    told = ["SendDelivered"] if state == "sink running" else TOLD[state]
    assert kinds(out)[:-1] == told + reports(state)
    for end in only(out, do.ReportEnd):
        assert end.code == ("OK" if state == "sink running" else "ABORTED")
    assert node.left == []
    assert node(ev.ReleaseRequested(1)) == []
    assert node(ev.ClientLost(1)) == []


def test_a_decode_that_stops_early_is_no_failure() -> None:
    node = sink_running()
    node.arrive(0, 0, 2)
    out = node(ev.ReleaseRequested(1))
    assert sent(out, wire.Delivered) == [wire.Delivered(transfer=9)]
    assert only(out, do.ReportEnd)[0].code == "OK"


@pytest.mark.parametrize("make", [source_ended, sink_ended])
def test_vllm_29906_abort_at_completion_does_nothing_and_release_frees_at_once(make: type) -> None:
    node = make()
    for _ in range(2):
        assert node(ev.AbortRequested(1, Aborted("too late"))) == []
    assert node.part().code == "OK"
    assert kinds(node(ev.ReleaseRequested(1))) == ["FreeMemory"]
    assert node(ev.ReleaseRequested(1)) == []
    assert node(ev.AbortRequested(1, Aborted("too late"))) == []
    assert node.left == []


def test_vllm_29906_abort_races_delivered() -> None:
    """The source gives up while the last token's news is on its way: each side keeps the end it reported first."""
    node = source_running()
    node(ev.AbortRequested(1, Aborted("given up")))
    assert node.hear(wire.Delivered(transfer=1)) == []
    assert node.part().code == "ABORTED"
    sink = sink_ended()
    assert sink.hear(wire.Abort(transfer=1, **why())) == []
    assert sink.part().code == "OK"


@pytest.mark.parametrize("named", ["handle", "request"])
def test_vllm_41269_a_rejected_transfer_frees_its_source(named: str) -> None:
    node = source_waiting()
    message = wire.RejectHandle(
        handle=handle(1) if named == "handle" else "", request="r" if named == "request" else "", reason="no room"
    )
    (end,) = node.hear(message, node="d")
    assert isinstance(end, do.ReportEnd)
    assert end.code == "ABORTED"
    assert "no room" in end.message
    assert node.hear(message, node="d") == []
    assert kinds(node(ev.ReleaseRequested(1))) == ["FreeMemory"]
    assert node.left == []


def test_vllm_41269_rejecting_what_runs_or_is_unknown_changes_nothing() -> None:
    node = source_running()
    assert node.hear(wire.RejectHandle(handle=handle(1), request="", reason="")) == []
    assert node.hear(wire.RejectHandle(handle=handle(7), request="", reason="")) == []
    assert node.hear(wire.RejectHandle(handle="", request="s", reason="")) == []
    assert node.state() is State.RUNNING


# --- the peer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [source_running, sink_running, sink_opening])
def test_the_peers_abort_is_reported_and_not_answered(make: type) -> None:
    node = make()
    (end,) = node.hear(wire.Abort(transfer=1, **why("PROCESS_LOST")))
    assert isinstance(end, do.ReportEnd)
    assert (end.code, end.message, end.fields) == ("PROCESS_LOST", "the other side says so", {"request": "r"})
    assert node.hear(wire.Abort(transfer=1, **why())) == []


def test_withdraw_of_an_open_that_waits() -> None:
    node = Node()
    node.hear(open_message(sink=21))
    node.hear(open_message(sink=21), session=6)
    assert node.hear(wire.Withdraw(sink=21, **why())) == []
    out = node.source()
    assert [(bind.session, bind.sink) for bind in only(out, do.BindSink)] == [(6, 21)]


def test_withdraw_that_crosses_the_acceptance_ends_the_source() -> None:
    node = source_running()
    assert node.hear(wire.Withdraw(sink=21, **why("PROCESS_LOST")), session=6) == []
    (end,) = node.hear(wire.Withdraw(sink=21, **why("PROCESS_LOST")))
    assert isinstance(end, do.ReportEnd)
    assert end.code == "PROCESS_LOST"


@pytest.mark.parametrize("make", [source_running, sink_opening, sink_running])
def test_a_third_session_has_no_say(make: type) -> None:
    node = make()
    before = node.state()
    for message in (
        wire.Abort(transfer=1, **why()),
        wire.Delivered(transfer=1),
        wire.Accepted(transfer=1, source=3),
        wire.Refused(transfer=1, **why()),
        wire.Withdraw(sink=21, **why()),
    ):
        assert node.hear(message, session=6) == []
    assert node.arrive(0, 0, 4, session=6) == []
    assert node.lose(6) == []
    assert node.state() is before
    assert node.part().bytes_done == 0


@pytest.mark.parametrize("state", STATES)
def test_vllm_49238_the_session_is_lost_in_every_state(state: str) -> None:
    node = STATES[state]()
    out = node.lose()
    if state in ("source running", "sink opening", "sink running"):
        assert kinds(out) == ["ReportEnd"]
        assert only(out, do.ReportEnd)[0].code == "PEER_LOST"
    else:
        assert out == []
    assert node.lose() == []
    assert kinds(node(ev.ReleaseRequested(1)))[-1] == "FreeMemory"
    assert node.left == []


def test_a_lost_session_takes_its_opens_and_announcements_along() -> None:
    node = Node()
    node.hear(open_message())
    node.hear(wire.Announce(source=3, request="s", rank=0))
    node.hear(open_message(sink=22), session=6)
    assert node.lose() == []
    assert only(node.source(), do.BindSink)[0].session == 6
    assert node.sink(2, request="s") == []


@pytest.mark.parametrize("first", ["session", "writes"])
def test_writes_of_a_lost_session_end_in_either_order(first: str) -> None:
    node = source_running()
    writes = only(node.ring(0, 0, 4), do.WriteTokens)
    broken = FabricError("the connection broke")
    if first == "session":
        assert kinds(node.lose()) == ["CancelWrites", "ReportEnd"]
    for write in writes:
        assert node.done(write.write, broken) == []
    if first == "writes":
        (end,) = node.lose()
        assert isinstance(end, do.ReportEnd)
        assert end.code == "PEER_LOST"
    node(ev.ReleaseRequested(1))
    assert node.left == []


def test_late_news_of_what_has_ended_changes_nothing() -> None:
    node = source_running()
    (first, second) = only(node.ring(0, 0, 4), do.WriteTokens)
    assert kinds(node(ev.ClientLost(1))) == ["SendAbort", "CancelWrites", "ReportEnd", "FreeMemory"]
    assert node.done(first.write) == []
    assert node.done(second.write, Aborted("cancelled")) == []
    assert node.left == []
    sink = sink_running()
    sink(ev.AbortRequested(1, Aborted("given up")))
    assert sink.arrive(0, 0, 4) == []
    sink(ev.ReleaseRequested(1))
    assert sink.arrive(0, 0, 4) == []


def test_connecting_fails() -> None:
    unreachable = PeerUnreachable("node 'p' can't be reached", peer="p")
    (end,) = sink_connecting()(ev.ConnectFailed(1, unreachable))
    assert isinstance(end, do.ReportEnd)
    assert (end.code, end.fields) == ("PEER_UNREACHABLE", {"peer": "p"})
    node = Node()
    node.source(peer="d")
    (end,) = node(ev.ConnectFailed(1, unreachable))
    assert isinstance(end, do.ReportEnd)
    assert end.code == "PEER_UNREACHABLE"


@pytest.mark.parametrize("make", [sink_connecting, source_waiting])
def test_a_session_that_comes_too_late_is_not_used(make: type) -> None:
    node = make()
    node(ev.AbortRequested(1, Aborted("given up")))
    assert node(ev.SessionReady(1, SESSION, "p")) == []
    node(ev.ReleaseRequested(1))
    assert node(ev.SessionReady(1, SESSION, "p")) == []
    assert node(ev.ConnectFailed(1, Aborted("given up"))) == []


# --- and afterwards ---------------------------------------------------------------------------------------------------


def test_a_request_id_can_be_used_again_after_release() -> None:
    node = source_ended()
    node(ev.ReleaseRequested(1))
    node.source(2)
    out = node.hear(open_message(sink=22, held=[TokenRange(0, 0, 1)]))
    assert kinds(out) == ["BindSink", "SendAccepted"]
    assert node.state(2) is State.RUNNING
    assert node(ev.LayerReady(1, 0, None, 0, 4)) == []


def test_what_a_stopped_node_had_waiting_is_released_too() -> None:
    node = sink_waiting()
    node(ev.StopRequested(ShuttingDown("the daemon stops")))
    assert kinds(node(ev.ReleaseRequested(1))) == ["FreeMemory"]
    assert node.left == []
