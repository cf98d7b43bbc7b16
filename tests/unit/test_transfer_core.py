"""The table of states, and how the two sides of a transfer meet; test_transfer_delivery and _ends have the rest."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.errors import AlreadyExists, InvalidArgument, NotFound
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.part import State
from kvd.types import Role
from kvd.wire import messages as wire
from kvd_client.spec import KVSpec, TokenRange
from tests.unit.transfer_helpers import (
    SESSION,
    STATES,
    Node,
    handle,
    kinds,
    layout,
    only,
    open_message,
    opened,
    sent,
    sink_opening,
    sink_running,
    sink_waiting,
    source_running,
    source_waiting,
    why,
)

# --- the state table --------------------------------------------------------------------------------------------------


def test_a_matching_open_makes_a_waiting_source_run() -> None:
    node = source_waiting()
    out = node.hear(open_message(sink=21, layout=layout(capacity=9)))
    assert kinds(out) == ["BindSink", "SendAccepted"]
    assert only(out, do.BindSink) == [do.BindSink(1, SESSION, 21, layout(capacity=9), b"grant")]
    assert sent(out, wire.Accepted) == [wire.Accepted(transfer=21, source=1)]
    assert node.state() is State.RUNNING


def test_delivered_ends_a_running_source_well() -> None:
    node = source_running()
    (end,) = node.hear(wire.Delivered(transfer=1))
    assert isinstance(end, do.ReportEnd)
    assert (end.code, end.message, end.fields) == ("OK", "", {})
    assert node.state() is State.ENDED


def test_a_waiting_sink_opens_when_an_announcement_comes() -> None:
    node = sink_waiting()
    out = node.hear(wire.Announce(source=9, request="r", rank=0), node="p")
    assert kinds(out) == ["SendOpen"]
    assert only(out, do.SendOpen)[0].session == SESSION
    (message,) = sent(out, wire.Open)
    assert (message.sink, message.request, message.lengths, message.grant) == (1, "r", [4], b"")
    assert node.state() is State.OPENING


def test_a_sink_opened_with_a_source_connects_and_then_opens() -> None:
    node = Node("d")
    assert node.sink(peer="p") == [do.Connect(1, "p")]
    assert node.state() is State.CONNECTING
    node.now = 30.0
    out = node(ev.SessionReady(1, SESSION, "p"))
    assert sent(out, wire.Open)[0].deadline_s == 70.0
    assert node.state() is State.OPENING


def test_accepted_makes_an_opening_sink_run() -> None:
    node = sink_opening()
    assert node.hear(wire.Accepted(transfer=1, source=9)) == []
    assert node.state() is State.RUNNING


def test_refused_ends_an_opening_sink_with_the_sources_reason() -> None:
    node = sink_opening()
    (end,) = node.hear(wire.Refused(transfer=1, **why("NOT_FOUND")))
    assert isinstance(end, do.ReportEnd)
    assert (end.code, end.message, end.fields) == ("NOT_FOUND", "the other side says so", {"request": "r"})
    assert node.state() is State.ENDED


def test_the_last_token_ends_a_running_sink_well() -> None:
    node = sink_running()
    assert kinds(node.arrive(0, 0, 4)) == ["Publish"]
    out = node.arrive(1, 0, 4)
    assert kinds(out) == ["Publish", "SendDelivered", "ReportEnd"]
    assert sent(out, wire.Delivered) == [wire.Delivered(transfer=9)]
    assert only(out, do.ReportEnd)[0].code == "OK"
    assert node.state() is State.ENDED


@pytest.mark.parametrize("state", STATES)
def test_what_does_not_fit_the_state_changes_nothing(state: str) -> None:
    """Answers that were not asked for, late answers and repeated ones."""
    node = STATES[state]()
    before = node.state()
    late: list[ev.Event] = [ev.LayerReady(77, 0, None, 0, 4), ev.SourceFinished(77), ev.ReleaseRequested(77)]
    if state not in ("sink connecting", "source waiting"):
        late.append(ev.SessionReady(1, SESSION, "p"))
    if before not in (State.WAITING, State.CONNECTING):
        late.append(ev.ConnectFailed(1, NotFound("no such node")))
    messages: list[Any] = [
        wire.Withdraw(sink=99, **why()),
        wire.Delivered(transfer=77),
        wire.Abort(transfer=77, **why()),
    ]
    if before is not State.OPENING:
        messages += [wire.Accepted(transfer=1, source=8), wire.Refused(transfer=1, **why())]
    if before is not State.RUNNING or state.startswith("sink"):
        messages.append(wire.Delivered(transfer=1))
    for event in late:
        assert node(event) == []
    for message in messages:
        assert node.hear(message) == []
    assert node.state() is before


# --- meeting ----------------------------------------------------------------------------------------------------------


def test_the_sink_may_come_first() -> None:
    node = Node()
    assert node.hear(open_message(sink=21)) == []
    out = node.source()
    assert kinds(out) == ["BindSink", "SendAccepted"]
    assert node.state() is State.RUNNING
    assert node.left == ["parts", "by_rank", "by_handle"]


def test_of_two_sinks_that_wait_the_first_is_served_and_the_other_told() -> None:
    node = Node()
    node.hear(open_message(sink=21))
    node.hear(open_message(sink=33), session=6)
    out = node.source()
    assert only(out, do.BindSink)[0].sink == 21
    (refused,) = sent(out, wire.Refused)
    assert (refused.transfer, refused.code) == (33, "ALREADY_EXISTS")


def test_a_waiting_sink_that_does_not_fit_leaves_the_source_to_the_next() -> None:
    node = Node()
    node.hear(open_message(sink=21, ranks=2))
    node.hear(open_message(sink=33), session=6)
    out = node.source()
    assert [refused.code for refused in sent(out, wire.Refused)] == ["UNSUPPORTED_LAYOUT"]
    assert only(out, do.BindSink)[0].sink == 33


def test_a_source_that_knows_its_sink_announces_itself() -> None:
    node = Node()
    assert node.source(peer="d") == [do.Connect(1, "d")]
    out = node(ev.SessionReady(1, SESSION, "d"))
    assert out == [do.SendMessage(SESSION, wire.Announce(source=1, request="r", rank=0))]
    assert node.state() is State.WAITING
    assert kinds(node.hear(open_message())) == ["BindSink", "SendAccepted"]


def test_a_source_that_was_opened_meanwhile_announces_nothing() -> None:
    node = Node()
    node.source(peer="d")
    node.hear(open_message())
    assert node(ev.SessionReady(1, SESSION, "d")) == []
    assert node(ev.ConnectFailed(1, NotFound("no such node"))) == []
    assert node.state() is State.RUNNING


def test_an_announcement_waits_for_its_sink() -> None:
    node = Node("d")
    assert node.hear(wire.Announce(source=9, request="r", rank=0), node="p") == []
    assert kinds(node.sink()) == ["SendOpen"]
    assert node.part().peer == "p"
    assert "announced" not in node.left


def test_an_announcement_of_another_rank_or_request_is_another_ones() -> None:
    node = sink_waiting()
    assert node.hear(wire.Announce(source=9, request="r", rank=1)) == []
    assert node.hear(wire.Announce(source=9, request="s", rank=0)) == []
    assert node.state() is State.WAITING


def test_a_sink_that_names_its_source_uses_the_announcement_up() -> None:
    """Both sides name each other: nothing may stay behind for each such request."""
    node = Node("d")
    node.hear(wire.Announce(source=9, request="r", rank=0), node="p")
    assert node.sink(peer="p") == [do.Connect(1, "p")]
    assert node.left == ["parts", "by_rank"]


def test_an_announcement_of_the_next_try_is_kept_while_the_last_one_is_not_released() -> None:
    node = sink_waiting()
    node(ev.AbortRequested(1, NotFound("gone")))
    assert node.hear(wire.Announce(source=9, request="r", rank=0), node="p") == []
    node(ev.ReleaseRequested(1))
    assert kinds(node.sink(2)) == ["SendOpen"]


def test_a_sink_that_does_not_fit_leaves_the_announcement_to_one_that_does() -> None:
    node = sink_waiting()
    node.hear(wire.Announce(source=9, request="r", rank=0), node="p")
    node.hear(wire.Refused(transfer=1, **why("FINGERPRINT_MISMATCH")))
    node(ev.ReleaseRequested(1))
    assert kinds(node.sink(2)) == ["SendOpen"]


@pytest.mark.parametrize("code", ["ALREADY_EXISTS", "SHUTTING_DOWN", "RENDEZVOUS_TIMEOUT"])
def test_a_refusal_for_good_uses_the_announcement_up(code: str) -> None:
    node = sink_waiting()
    node.hear(wire.Announce(source=9, request="r", rank=0), node="p")
    node.hear(wire.Refused(transfer=1, **why(code)))
    node(ev.ReleaseRequested(1))
    assert node.sink(2) == []
    assert node.state(2) is State.WAITING


def test_sglang_40108_a_lost_announcement_is_made_again() -> None:
    node = Node()
    node.source(peer="d")
    node(ev.SessionReady(1, SESSION, "d"))
    assert node.lose() == [do.Connect(1, "d")]
    out = node(ev.SessionReady(1, 6, "d"))
    assert out == [do.SendMessage(6, wire.Announce(source=1, request="r", rank=0))]
    assert node.lose(SESSION) == []


def test_vllm_42839_request_ids_may_differ_when_the_handle_decides() -> None:
    node = source_waiting()
    out = node.hear(open_message(request="the decoder's own name", handle=handle(1)))
    assert kinds(out) == ["BindSink", "SendAccepted"]
    assert node.state() is State.RUNNING


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (handle(77), "NOT_FOUND"),
        (handle(1)[:-1] + "0", "NOT_FOUND"),
        (handle(1, node="elsewhere"), "NOT_FOUND"),
        (handle(1, node="elsewhere", boot="00000000000000bb"), "NOT_FOUND"),
        (handle(1, boot="00000000000000bb"), "PEER_RESTARTED"),
        ("../../etc/passwd", "INVALID_ARGUMENT"),
    ],
)
def test_vllm_42839_vllm_49238_a_bad_handle_is_refused_at_once(text: str, code: str) -> None:
    node = source_waiting()
    (refused,) = sent(node.hear(open_message(handle=text)), wire.Refused)
    assert (refused.transfer, refused.code) == (21, code)
    assert node.state() is State.WAITING
    assert "opens" not in node.left
    assert kinds(node.hear(open_message(handle=handle(1)))) == ["BindSink", "SendAccepted"]


def test_the_handle_of_a_released_source_is_unknown() -> None:
    node = source_waiting()
    node(ev.ReleaseRequested(1))
    (refused,) = sent(node.hear(open_message(handle=handle(1))), wire.Refused)
    assert refused.code == "NOT_FOUND"


@pytest.mark.parametrize(
    ("differs", "code", "field"),
    [
        (
            {"spec": KVSpec(layers=2, kv_heads=2, entry_bytes=8, dtype="fp8", model="m")},
            "FINGERPRINT_MISMATCH",
            "dtype",
        ),
        (
            {"spec": KVSpec(layers=2, kv_heads=2, entry_bytes=8, dtype="fp16", model="n")},
            "FINGERPRINT_MISMATCH",
            "model",
        ),
        (
            {"spec": KVSpec(layers=2, kv_heads=2, entry_bytes=8, dtype="fp16", model="m", revision="2")},
            "FINGERPRINT_MISMATCH",
            "revision",
        ),
        ({"ranks": 2}, "UNSUPPORTED_LAYOUT", "ranks"),
        ({"head_start": 1}, "UNSUPPORTED_LAYOUT", "head_start"),
        ({"layout": layout(heads=1)}, "UNSUPPORTED_LAYOUT", "heads"),
        ({"layout": layout(rows=2), "lengths": [4, 4]}, "UNSUPPORTED_LAYOUT", "rows"),
        ({"lengths": [5]}, "UNSUPPORTED_LAYOUT", "lengths"),
        ({"layout": layout(capacity=3)}, "UNSUPPORTED_LAYOUT", "capacity"),
    ],
)
def test_vllm_29503_vllm_14952_a_misfit_is_refused_with_what_differs_and_both_live_on(
    differs: dict[str, Any], code: str, field: str
) -> None:
    node = source_waiting()
    (refused,) = sent(node.hear(open_message(**differs)), wire.Refused)
    assert refused.code == code
    assert field in refused.fields["differ"]
    assert field in refused.message
    assert node.state() is State.WAITING
    assert kinds(node.hear(open_message(sink=33), session=6)) == ["BindSink", "SendAccepted"]


@pytest.mark.parametrize(
    "held", [TokenRange(1, 0, 1), TokenRange(-1, 0, 1), TokenRange(0, 3, 2), TokenRange(0, -1, 2), TokenRange(0, 0, 5)]
)
def test_held_tokens_that_do_not_exist_are_refused(held: TokenRange) -> None:
    node = source_waiting()
    (refused,) = sent(node.hear(open_message(held=[held])), wire.Refused)
    assert refused.code == "INVALID_ARGUMENT"
    assert node.state() is State.WAITING
    with pytest.raises(InvalidArgument, match=r"held\[0\]"):
        node.core.check_open(opened(Role.SINK, 2, held=(held,)))


def test_a_capacity_beyond_all_limits_is_refused() -> None:
    huge = type(layout())(layers=2, heads=2, entry_bytes=8, rows=1, capacity=1 << 60)
    (refused,) = sent(source_waiting().hear(open_message(layout=huge)), wire.Refused)
    assert refused.code == "INVALID_ARGUMENT"


def test_a_source_serves_one_sink() -> None:
    node = source_running()
    (refused,) = sent(node.hear(open_message(sink=33), session=6), wire.Refused)
    assert (refused.transfer, refused.code) == (33, "ALREADY_EXISTS")
    assert node.state() is State.RUNNING
    node.hear(wire.Delivered(transfer=1))
    (refused,) = sent(node.hear(open_message(sink=34), session=6), wire.Refused)
    assert refused.code == "ALREADY_EXISTS"
    assert "has ended (OK)" in refused.message


@pytest.mark.parametrize("role", Role)
def test_a_rank_is_opened_once_in_a_role(role: Role) -> None:
    node = Node()
    node(opened(role))
    with pytest.raises(AlreadyExists) as caught:
        node.core.check_open(opened(role, 2))
    assert caught.value.fields == {"request": "r", "rank": 0}
    other = Role.SINK if role is Role.SOURCE else Role.SOURCE
    for allowed in (opened(other, 2), opened(role, 2, rank=1, ranks=2), opened(role, 2, request="s")):
        node.core.check_open(allowed)
    node(ev.ReleaseRequested(1))
    node.core.check_open(opened(role, 2))


def test_a_session_has_a_bounded_number_of_opens_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.transfer.rendezvous.MAX_WAITING", 3)
    node = Node()
    for number in range(3):
        assert node.hear(open_message(sink=number, request=f"r{number}")) == []
    (refused,) = sent(node.hear(open_message(sink=3, request="r3")), wire.Refused)
    assert (refused.transfer, refused.code) == (3, "BUSY")
    assert refused.fields["retry_after_s"] > 0
    assert node.hear(open_message(sink=3, request="r3"), session=6) == []
