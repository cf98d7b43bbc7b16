"""Fetches in the core: every branch at the sink and at the source."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.errors import Aborted, InvalidArgument, LeaseExpired, NotFound, OutOfMemory
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings
from kvd.transfer.on_demand import MAX_FETCH_BYTES, MAX_SERVED
from kvd.transfer.part import State
from kvd.wire import messages as wire
from kvd.wire.framing import encode
from kvd_client.protocol import MAX_FRAME
from tests.unit.fetch_helpers import arrived, asked, failed, fetch, numbers, served, settle, sink_part, source_part
from tests.unit.transfer_helpers import (
    SESSION,
    Node,
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

# --- at the sink ------------------------------------------------------------------------------------------------------


def test_a_fetch_goes_to_the_source_and_its_answer_to_the_process() -> None:
    node = sink_running()
    (send,) = node(fetch())
    assert isinstance(send, do.SendMessage)
    assert send.session == SESSION
    assert send.message == wire.Fetch(
        transfer=9, sink=1, fetch=7, layer=1, counts=numbers(1, 2), index=numbers(3, 0, 2), offset=1000, stride=16
    )
    assert node(arrived()) == [do.FetchEnded(1, 7)]
    assert sink_part(node).fetches == {}
    assert node.part().paths["fetches"] == 1
    assert node.part().paths["on_demand"] == 3 * 8


@pytest.mark.parametrize("make", [sink_waiting, sink_connecting, sink_opening])
def test_a_fetch_before_the_source_has_accepted_waits_for_it(make: Callable[[], Node]) -> None:
    node = make()
    assert node(fetch(7)) == []
    assert node(fetch(8)) == []
    if node.state() is State.WAITING:
        node.hear(wire.Announce(source=9, request="r", rank=0))
    elif node.state() is State.CONNECTING:
        node(ev.SessionReady(1, SESSION, "p"))
    out = node.hear(wire.Accepted(transfer=1, source=9))
    assert [(m.fetch, m.transfer) for m in sent(out, wire.Fetch)] == [(7, 9), (8, 9)]
    assert node(arrived(8)) == [do.FetchEnded(1, 8)]


@pytest.mark.parametrize("make", [sink_waiting, sink_connecting, sink_opening, sink_running])
def test_a_transfer_that_fails_answers_its_fetches_with_its_error(make: Callable[[], Node]) -> None:
    node = make()
    node(fetch(7))
    node(fetch(8))
    out = node(ev.AbortRequested(1, Aborted("given up", request="r")))
    ends = only(out, do.FetchEnded)
    assert [(end.fetch, end.error.code if end.error else "") for end in ends] == [(7, "ABORTED"), (8, "ABORTED")]
    assert node(ev.ReleaseRequested(1)) == [do.FreeMemory(1)]


def test_a_fetch_of_a_transfer_that_has_failed_gets_its_error() -> None:
    node = sink_running()
    node.hear(wire.Abort(transfer=1, **why("PROCESS_LOST")))
    (end,) = node(fetch())
    assert isinstance(end, do.FetchEnded)
    assert end.error is not None
    assert (end.error.code, end.error.message) == ("PROCESS_LOST", why("PROCESS_LOST")["message"])
    assert sink_part(node).fetches == {}


def test_a_fetch_after_delivery_is_filled_from_the_sinks_own_memory() -> None:
    node = sink_ended()
    assert node(fetch()) == [do.FillFetch(1, fetch())]
    part = sink_part(node)
    assert part.fetches == {}
    assert part.paths["filled"] == len(fetch().index) // 4 * part.layout.entry_bytes > 0


@pytest.mark.parametrize("make", [source_waiting, source_running, source_ended, Node])
def test_a_fetch_of_what_is_no_sink_here_is_not_found(make: Callable[[], Node]) -> None:
    (end,) = make()(fetch())
    assert isinstance(end, do.FetchEnded)
    assert isinstance(end.error, NotFound)
    assert (end.transfer, end.fetch) == (1, 7)


def test_a_fetch_after_release_is_not_found() -> None:
    node = sink_running()
    node(ev.ReleaseRequested(1))
    (end,) = node(fetch())
    assert isinstance(end, do.FetchEnded)
    assert isinstance(end.error, NotFound)


@pytest.mark.parametrize("make", [sink_waiting, sink_connecting, sink_opening])
def test_release_before_acceptance_ends_the_waiting_fetches(make: Callable[[], Node]) -> None:
    node = make()
    node(fetch())
    out = node(ev.ReleaseRequested(1))
    assert [(end.fetch, end.error.code if end.error else "") for end in only(out, do.FetchEnded)] == [(7, "ABORTED")]
    assert kinds(out)[-1] == "FreeMemory"
    assert node.left == []


@pytest.mark.parametrize("delivered", [False, True])
def test_release_ends_what_the_source_has_not_answered(delivered: bool) -> None:
    node = sink_running()
    node(fetch())
    if delivered:
        node.arrive(0, 0, 4)
        assert only(node.arrive(1, 0, 4), do.FetchEnded) == []
    out = node(ev.ReleaseRequested(1))
    (end,) = only(out, do.FetchEnded)
    assert isinstance(end.error, LeaseExpired)
    assert kinds(out)[-2:] == ["FetchEnded", "FreeMemory"]
    assert node(arrived()) == []
    assert node.hear(failed()) == []


@pytest.mark.parametrize("delivered", [False, True])
def test_a_process_that_is_lost_leaves_no_fetch_behind(delivered: bool) -> None:
    node = sink_ended() if delivered else sink_running()
    if delivered:
        node = sink_running()
        node(fetch())
        node.arrive(0, 0, 4)
        node.arrive(1, 0, 4)
    else:
        node(fetch())
    out = node(ev.ClientLost(1))
    assert len(only(out, do.FetchEnded)) == 1
    assert kinds(out)[-1] == "FreeMemory"
    assert node.left == []


def test_a_delivered_sink_still_gets_answers_from_its_source() -> None:
    node = sink_running()
    node(fetch())
    node.arrive(0, 0, 4)
    assert node.part().code == ""
    node.arrive(1, 0, 4)
    assert node.part().code == "OK"
    assert node(arrived()) == [do.FetchEnded(1, 7)]
    assert node(arrived()) == []


def test_a_source_that_has_gone_after_delivery_does_not_fail_a_fetch() -> None:
    node = sink_running()
    node(fetch())
    node.arrive(0, 0, 4)
    node.arrive(1, 0, 4)
    assert node.hear(failed(code="NOT_FOUND")) == [do.FillFetch(1, fetch())]
    assert node.hear(failed(code="NOT_FOUND")) == []


def test_a_session_that_ends_after_delivery_fills_all_that_is_unanswered() -> None:
    node = sink_running()
    node(fetch(7))
    node(fetch(8))
    node.arrive(0, 0, 4)
    node.arrive(1, 0, 4)
    assert node.lose() == [do.FillFetch(1, fetch(7)), do.FillFetch(1, fetch(8))]
    part = sink_part(node)
    assert part.fetches == {}
    assert part.paths["filled"] == 2 * len(fetch().index) // 4 * part.layout.entry_bytes > 0
    assert part.paths["on_demand"] == 0
    assert node(ev.ReleaseRequested(1)) == [do.FreeMemory(1)]


def test_a_session_that_ends_while_the_transfer_runs_fails_its_fetches_once() -> None:
    node = sink_running()
    node(fetch(7))
    node(fetch(8))
    out = node.lose()
    ends = only(out, do.FetchEnded)
    assert [(end.fetch, end.error.code if end.error else "") for end in ends] == [(7, "PEER_LOST"), (8, "PEER_LOST")]
    assert only(node(ev.ReleaseRequested(1)), do.FetchEnded) == []


def test_a_sources_refusal_is_the_fetchs_error_and_the_transfer_goes_on() -> None:
    node = sink_running()
    node(fetch())
    (end,) = node.hear(failed())
    assert isinstance(end, do.FetchEnded)
    assert isinstance(end.error, OutOfMemory)
    assert (end.error.message, end.error.fields) == ("no room to gather", {"need": 9})
    assert node.state() is State.RUNNING
    assert node(arrived()) == []


def test_two_fetches_are_answered_out_of_order() -> None:
    node = sink_running()
    node(fetch(7, layer=0))
    node(fetch(8, layer=1))
    assert node(arrived(8)) == [do.FetchEnded(1, 8)]
    assert node.hear(failed(8)) == []
    assert node(arrived(7)) == [do.FetchEnded(1, 7)]
    assert node(arrived(7)) == []


@pytest.mark.parametrize(
    "event",
    [
        arrived(session=SESSION + 1),
        arrived(number=8),
        arrived(transfer=2),
        ev.MessageReceived(SESSION + 1, "stranger", failed()),
        ev.MessageReceived(SESSION, "peer", failed(8)),
    ],
)
def test_what_nobody_waits_for_is_not_heard(event: ev.Event) -> None:
    node = sink_running()
    node(fetch())
    assert node(event) == []
    assert node(arrived()) == [do.FetchEnded(1, 7)]


def test_a_fetch_that_does_not_fit_into_a_frame_is_refused_before_it_is_sent() -> None:
    node = sink_running()
    entries = MAX_FETCH_BYTES // 4 - 2
    fits = ev.FetchRequested(1, 7, 1, numbers(entries, 0), bytes(4 * entries), 1000, 4 * entries)
    (message,) = sent(node(fits), wire.Fetch)
    assert len(encode(message)) < MAX_FRAME
    (end,) = node(ev.FetchRequested(1, 8, 1, numbers(entries, 1), bytes(4 * entries + 4), 1000, 4 * entries))
    assert isinstance(end, do.FetchEnded)
    assert isinstance(end.error, InvalidArgument)
    assert list(sink_part(node).fetches) == [7]


# --- at the source ----------------------------------------------------------------------------------------------------


def source_ready(settings: Settings | None = None) -> Node:
    """Two layers of four tokens, all rung; what was written has completed."""
    node = Node(settings=settings) if settings else Node()
    node.source()
    node.hear(open_message())
    settle(node, node.ring(0, 0, 4) + node.ring(1, 0, 4))
    return node


def refused(out: list[do.Instruction]) -> wire.FetchFailed:
    (message,) = sent(out, wire.FetchFailed)
    assert len(out) == 1
    assert message.transfer == 21
    return message


def urgent(node: Node, session: int = SESSION) -> int:
    return node.core._book.link(session).urgent


def test_the_source_serves_a_fetch_and_counts_it() -> None:
    node = source_ready()
    assert node.hear(asked()) == [do.ServeFetch(1, SESSION, 21, asked())]
    assert urgent(node) == 1
    assert node(served()) == []
    assert urgent(node) == 0
    assert node.part().paths["on_demand"] == 24
    assert node.part().paths["fetches"] == 1
    assert node.core.counters["bytes_sent_on_demand"] == 24


def test_what_the_engine_could_not_serve_is_told_to_the_sink() -> None:
    node = source_ready()
    node.hear(asked())
    message = refused(node(served(nbytes=0, error=OutOfMemory("no room", need=5))))
    assert (message.fetch, message.code, message.message) == (7, "OUT_OF_MEMORY", "no room")
    assert message.fields == {"need": 5}
    assert urgent(node) == 0
    assert node.core.counters["fetches_refused"] == 1


@pytest.mark.parametrize("make", [Node, source_waiting, source_ended])
def test_the_source_serves_only_transfers_that_run(make: Callable[[], Node]) -> None:
    node = make()
    assert refused(node.hear(asked())).code == "NOT_FOUND"
    assert urgent(node) == 0


def test_a_sink_cannot_fetch_what_another_session_is_paired_with() -> None:
    node = source_ready()
    assert refused(node.hear(asked(), session=SESSION + 1)).code == "NOT_FOUND"


@pytest.mark.parametrize("layer", [-1, 2, 1 << 40])
def test_a_fetch_of_an_unknown_layer(layer: int) -> None:
    message = refused(source_ready().hear(asked(layer=layer)))
    assert (message.code, message.fields) == ("INVALID_ARGUMENT", {"layer": layer})


def test_a_fetch_that_overtakes_the_last_ring_waits_for_its_layer() -> None:
    node = source_running()
    node.ring(0, 0, 4)
    node.ring(1, 0, 3)
    assert node.hear(asked()) == []
    assert urgent(node) == 0
    assert "ServeFetch" in kinds(node.hear(asked(8, layer=0)))
    out = node.ring(1, 3, 4)
    (serve,) = (i for i in out if isinstance(i, do.ServeFetch))
    assert serve.message.fetch == 7
    assert "ServeFetch" in kinds(node.hear(asked(9)))
    assert urgent(node) == 3


def test_fetches_that_wait_for_a_layer_are_bounded_and_answered_when_the_source_ends() -> None:
    node = source_running()
    for number in range(MAX_SERVED):
        assert node.hear(asked(number)) == []
    assert refused(node.hear(asked(5000))).code == "BUSY"
    out = node(ev.AbortRequested(1, Aborted("enough")))
    assert [message.fetch for message in sent(out, wire.FetchFailed)] == list(range(MAX_SERVED))
    assert source_part(node).early == []


def test_a_session_has_a_bounded_number_of_fetches_in_service() -> None:
    node = source_ready()
    for number in range(MAX_SERVED):
        assert kinds(node.hear(asked(number))) == ["ServeFetch"]
    assert refused(node.hear(asked(5000))).code == "BUSY"
    node(served(0))
    assert kinds(node.hear(asked(5000))) == ["ServeFetch"]
    assert urgent(node) == MAX_SERVED


def test_a_fetch_that_ends_after_its_session_changes_nothing() -> None:
    node = source_ready()
    node.hear(asked())
    node.lose()
    assert node(served()) == []
    assert node(served(error=Aborted("the connection broke"))) == []
    assert node.core._book.links == {}


def test_a_fetch_that_ends_after_its_part_is_forgotten_still_frees_the_link() -> None:
    node = source_ready()
    node.hear(asked())
    node.hear(wire.Delivered(transfer=1))
    assert kinds(node(ev.ReleaseRequested(1))) == ["FreeMemory"]
    assert urgent(node) == 1
    assert node(served()) == []
    assert urgent(node) == 0
    assert node.core.counters["bytes_sent_on_demand"] == 24
