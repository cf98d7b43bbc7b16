"""Fetches and idle windows in the core: every branch at the sink and at the source, and what fetches do to a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.errors import Aborted, InvalidArgument, LeaseExpired, NotFound, OutOfMemory
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings
from kvd.transfer.on_demand import MAX_FETCH_BYTES, MAX_SERVED
from kvd.transfer.part import SinkPart, SourcePart, State
from kvd.transfer.policy import Profiled, Selective
from kvd.transfer.rate import UNBOUNDED, IdleTime
from kvd.types import Path, Role
from kvd.wire import messages as wire
from kvd.wire.framing import encode
from kvd_client.protocol import MAX_FRAME
from kvd_client.spec import KVSpec, MetadataSpec
from tests.unit.transfer_helpers import (
    SESSION,
    TOKEN,
    Node,
    kinds,
    layout,
    only,
    open_message,
    opened,
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

SPEC = KVSpec(layers=4, kv_heads=2, entry_bytes=8, dtype="fp16", model="m")
DEEP: dict[str, Any] = {"spec": SPEC, "layout": layout(spec=SPEC)}
"""Four layers, so that two of them need not be pushed."""


def numbers(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def fetch(number: int = 7, layer: int = 1, transfer: int = 1) -> ev.FetchRequested:
    """Token 3 for the first head, tokens 0 and 2 for the second."""
    return ev.FetchRequested(transfer, number, layer, numbers(1, 2), numbers(3, 0, 2), 1000, 16)


def asked(number: int = 7, layer: int = 1, transfer: int = 1) -> wire.Fetch:
    """The same as it comes to the source."""
    return wire.Fetch(
        transfer=transfer, sink=21, fetch=number, layer=layer,
        counts=numbers(1, 2), index=numbers(3, 0, 2), offset=1000, stride=16,
    )  # fmt: skip


def arrived(number: int = 7, transfer: int = 1, session: int = SESSION) -> ev.FetchArrived:
    return ev.FetchArrived(session, wire.FetchArrived(transfer, number))


def failed(number: int = 7, code: str = "OUT_OF_MEMORY") -> wire.FetchFailed:
    return wire.FetchFailed(transfer=1, fetch=number, code=code, message="no room to gather", fields={"need": 9})


def served(number: int = 7, nbytes: int = 24, error: Any = None, transfer: int = 1, sink: int = 21) -> ev.FetchServed:
    return ev.FetchServed(transfer, SESSION, number, sink, nbytes, error)


def sink_part(node: Node) -> SinkPart:
    part = node.part()
    assert isinstance(part, SinkPart)
    return part


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


def test_a_fetch_of_a_transfer_that_has_failed_gets_its_code() -> None:
    node = sink_running()
    node.hear(wire.Abort(transfer=1, **why("PROCESS_LOST")))
    (end,) = node(fetch())
    assert isinstance(end, do.FetchEnded)
    assert end.error is not None
    assert (end.error.code, end.error.fields) == ("PROCESS_LOST", {"request": "r"})
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


def settle(node: Node, out: list[do.Instruction]) -> list[do.WriteTokens | do.WriteMetadata]:
    """Complete writes until no more follow; all of them, in order."""
    writes: list[do.WriteTokens | do.WriteMetadata] = []
    while found := [i for i in out if isinstance(i, do.WriteTokens | do.WriteMetadata)]:
        writes += found
        out = [i for write in found for i in node.done(write.write, transfer=write.transfer)]
    return writes


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


# --- idle windows -----------------------------------------------------------------------------------------------------


def windows(out: list[do.Instruction]) -> list[bool]:
    return [i.wanted for i in only(out, do.WantWindows)]


@pytest.mark.parametrize("mode", ["full", "partial", "profile", "parallel", "speculative"])
def test_windows_are_wanted_and_passed_on_in_speculative_mode_only(mode: str) -> None:
    node = sink_opening()
    assert node(ev.IdleWindow(1, 0)) == []
    out = node.hear(wire.Accepted(transfer=1, source=9, mode=mode))
    assert windows(out) == [True] * (mode == "speculative")
    assert node.part().mode == mode
    out = node(ev.IdleWindow(1, 1))
    assert sent(out, wire.Idle) == [wire.Idle(transfer=9, windows=1)] * (mode == "speculative")
    assert len(out) == (mode == "speculative")
    node.arrive(0, 0, 4)
    assert windows(node.arrive(1, 0, 4)) == [False] * (mode == "speculative")
    assert node(ev.IdleWindow(1, 0)) == []


@pytest.mark.parametrize("make", [sink_waiting, sink_connecting, sink_opening, sink_running])
@pytest.mark.parametrize("layer", [-1, 2])
def test_a_window_of_an_unknown_layer_ends_the_transfer_and_says_why(make: Callable[[], Node], layer: int) -> None:
    node = make()
    (end,) = only(node(ev.IdleWindow(1, layer)), do.ReportEnd)
    assert (end.code, end.fields) == ("INVALID_ARGUMENT", {"layer": layer})
    assert end.message == f"idle names layer {layer}, but the transfer has layers 0 to 1"
    assert node(ev.IdleWindow(1, layer)) == []


@pytest.mark.parametrize("make", [source_running, Node])
def test_windows_of_what_is_no_sink_here_mean_nothing(make: Callable[[], Node]) -> None:
    assert make()(ev.IdleWindow(1, 0)) == []


def test_windows_end_with_a_failure_and_are_not_unwanted_twice() -> None:
    node = Node("d")
    node.sink(peer="p", mode="speculative")
    node(ev.SessionReady(1, SESSION, "p"))
    assert windows(node.hear(wire.Accepted(transfer=1, source=9, mode="speculative"))) == [True]
    assert windows(node.lose()) == [False]
    assert windows(node(ev.ReleaseRequested(1))) == []


def test_windows_that_were_never_wanted_are_not_unwanted() -> None:
    node = Node("d")
    node.sink(peer="p", mode="speculative")
    node(ev.SessionReady(1, SESSION, "p"))
    assert windows(node(ev.AbortRequested(1, Aborted("given up")))) == []


# --- the budget and the link ------------------------------------------------------------------------------------------


def deep_source(mode: str = "speculative", *, share: float = 1.0, finished: bool = True, **more: Any) -> Node:
    """A paired source of four layers of four tokens, all rung; what may be pushed has been."""
    selective = Selective(**{"mode": mode, "share": share, "speculative": "windows", **more})
    settings = Settings(rendezvous_s=10.0, chunk=2 * TOKEN, window=4 * TOKEN, selective=selective)
    node = Node(settings=settings)
    node.source(**DEEP)
    node.hear(open_message(**DEEP))
    if finished:
        ring_all(node)
        settle(node, node(ev.SourceFinished(1)))
    return node


def ring_all(node: Node, transfer: int = 1) -> list[do.WriteTokens | do.WriteMetadata]:
    return [w for layer in range(4) for w in settle(node, node.ring(layer, 0, 4, transfer=transfer))]


def source_part(node: Node, transfer: int = 1) -> SourcePart:
    part = node.part(transfer)
    assert isinstance(part, SourcePart)
    return part


@pytest.mark.parametrize("mode", ["partial", "profile", "parallel", "speculative"])
def test_a_deadline_budget_pushes_until_the_first_token_and_what_decode_needs_whole_after_it(mode: str) -> None:
    node = deep_source(mode, finished=False)
    for layer in (3, 2, 0):
        assert [w.layer for w in settle(node, node.ring(layer, 0, 4)) if w.nbytes] == [layer, layer]
    node(ev.SourceFinished(1))
    assert [w.layer for w in settle(node, node.ring(1, 0, 4))] == [1, 1]
    assert source_part(node).bytes_done == 16 * TOKEN


def test_what_is_left_at_the_deadline_waits_for_windows() -> None:
    node = deep_source(finished=False)
    first = node.ring(3, 0, 4)  # two writes fill the window
    assert len(only(first, do.WriteTokens)) == 2
    assert node.ring(2, 0, 4) == []
    assert node(ev.SourceFinished(1)) == []
    assert settle(node, first) == only(first, do.WriteTokens)
    out = node.hear(wire.Idle(transfer=1, windows=4))
    assert [(w.layer, w.path) for w in only(out, do.WriteTokens)] == [(2, Path.SPECULATIVE)] * 2


def test_a_fixed_budget_pushes_so_many_blocks_whenever_they_are_ready() -> None:
    node = Node(
        settings=Settings(
            rendezvous_s=10.0,
            chunk=TOKEN,
            window=4 * TOKEN,
            selective=Selective(mode="speculative", budget="fixed", share=0.25, speculative="windows"),
            profiled=lambda spec, selector, lengths: Profiled(None, prefill_s=9.0, transfer_s=1.2),
        )
    )
    node.source(**DEEP, prefill_s=1.0)
    node.hear(open_message(**DEEP))
    node(ev.SourceFinished(1))
    pushed = ring_all(node)
    # K_r = 16 blocks x 3/4 x 1.0 s / 1.2 s, whatever finish says.
    assert len(pushed) == 10
    assert node.part().paths["budget_tokens"] == 10
    assert {w.path for w in pushed if isinstance(w, do.WriteTokens)} == {Path.PROACTIVE}
    late = settle(node, node.hear(wire.Idle(transfer=1, windows=4)))
    assert [w.path for w in late if isinstance(w, do.WriteTokens)] == [Path.SPECULATIVE] * 4


def test_metadata_takes_its_time_from_the_budget() -> None:
    node = Node(
        settings=Settings(
            rendezvous_s=10.0,
            chunk=TOKEN,
            window=1 << 20,
            selective=Selective(mode="partial", budget="fixed"),
            profiled=lambda spec, selector, lengths: Profiled(None, prefill_s=9.0, transfer_s=1.2),
        )
    )
    metadata = (MetadataSpec(name="keys", layer_bytes=4),)  # 64 bytes a layer with its padding; tokens have 64, too
    parts: dict[str, Any] = {"spec": SPEC, "layout": msgspec.structs.replace(layout(spec=SPEC), metadata=metadata)}
    node.source(**parts, prefill_s=2.0)
    node.hear(open_message(**parts))
    # 16 x (3/4 x 2.0 - 1.2) / 1.2 = 4, below the 2M that decode always needs.
    assert node.part().paths["budget_tokens"] == 8


def test_speculation_pauses_while_a_fetch_is_served_and_resumes_after_it() -> None:
    node = deep_source(finished=False)
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    settle(node, node.done(1) + node.done(2))
    node.hear(asked(layer=3))
    assert node.hear(wire.Idle(transfer=1, windows=4)) == []
    (first, second) = only(node(served()), do.WriteTokens)
    assert (first.path, second.path) == (Path.SPECULATIVE, Path.SPECULATIVE)


def test_a_fetch_ends_the_window() -> None:
    node = deep_source(finished=False)
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    settle(node, node.done(1) + node.done(2))
    node.hear(asked(layer=3))
    assert node.hear(wire.Idle(transfer=1, windows=4)) == []
    node.hear(asked(8, layer=2))
    assert node(served()) == []
    assert node(served(8)) == []
    assert len(only(node.hear(wire.Idle(transfer=1, windows=4)), do.WriteTokens)) == 2


def test_a_window_brings_no_more_than_the_link_carries_until_the_next_fetch() -> None:
    idle = IdleTime()
    idle.window(10.0, 1e6, 100)
    assert idle.room == UNBOUNDED
    idle.fetch(10.003)
    assert idle.room == 0
    idle.window(10.01, 1e6, 100)
    assert idle.room == pytest.approx(3000, abs=1)
    idle.window(10.03, 1e6, 100)  # nothing was missing this time: the window lasted until this one
    assert idle.expected_s == pytest.approx(0.003 + 0.25 * 0.017)
    idle.window(10.03, 0.0, 100)
    assert idle.room == UNBOUNDED
    idle.fetch(10.03)
    idle.window(10.04, 10.0, 100)
    assert idle.room == 100


def test_what_prefill_pushes_does_not_pause_for_fetches() -> None:
    node = deep_source(finished=False)
    settle(node, node.ring(2, 0, 4))
    node.hear(asked(layer=2))
    assert [w.path for w in only(node.ring(0, 0, 4), do.WriteTokens)] == [Path.PROACTIVE] * 2


def test_what_one_part_pushes_goes_before_what_windows_allow_another() -> None:
    node = deep_source(finished=False)
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    node.source(2, request="other", **DEEP)
    node.hear(open_message(sink=22, request="other", **DEEP))
    node.ring(0, 0, 4, transfer=2)
    node.hear(wire.Idle(transfer=1, windows=4))
    order = [(w.transfer, w.path) for w in settle(node, node.done(1) + node.done(2)) if isinstance(w, do.WriteTokens)]
    assert order == [(2, Path.PROACTIVE)] * 2 + [(1, Path.SPECULATIVE)] * 2


def test_windows_of_a_stranger_or_for_a_part_that_has_ended_bring_nothing() -> None:
    node = deep_source(finished=False)
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    settle(node, node.done(1) + node.done(2))
    assert node.hear(wire.Idle(transfer=1, windows=4), session=SESSION + 1) == []
    node.hear(wire.Delivered(transfer=1))
    assert node.hear(wire.Idle(transfer=1, windows=4)) == []
    assert node.part().paths["windows"] == 0


@pytest.mark.parametrize("claimed", [-5, 0, 1 << 60])
def test_a_peer_cannot_claim_more_windows_than_an_iteration_has(claimed: int) -> None:
    node = deep_source(share=0.25, finished=False)
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    settle(node, node.done(1) + node.done(2))
    out = settle(node, node.hear(wire.Idle(transfer=1, windows=claimed)))
    assert sum(w.nbytes for w in out) == (4 * TOKEN if claimed > 0 else 0)


def test_adaptive_speculation_needs_one_window_and_stops_for_fetches() -> None:
    node = deep_source(finished=False, speculative="adaptive")
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    node.hear(asked(layer=3))
    assert settle(node, node.done(1) + node.done(2)) == []
    assert node(served()) == []
    node.hear(asked(8, layer=3))
    assert node.hear(wire.Idle(transfer=1, windows=1)) == []
    assert [w.path for w in only(node(served(8)), do.WriteTokens)] == [Path.SPECULATIVE] * 2


def test_the_sinks_mode_goes_before_the_sources_and_that_before_the_daemons() -> None:
    for sink, source, mode in (("full", "partial", "full"), ("", "partial", "partial"), ("", "", "parallel")):
        node = Node(settings=Settings(selective=Selective(mode="parallel")))
        node.source(mode=source)
        (accepted,) = sent(node.hear(open_message(mode=sink)), wire.Accepted)
        assert accepted.mode == mode
        assert node.part().mode == mode


def test_a_sink_with_an_unknown_mode_is_refused_and_the_source_goes_on_waiting() -> None:
    node = source_waiting()
    (message,) = sent(node.hear(open_message(mode="fastest")), wire.Refused)
    assert message.code == "INVALID_ARGUMENT"
    assert node.state() is State.WAITING
    assert sent(node.hear(open_message()), wire.Accepted) != []


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_prefill_time_that_is_none_is_refused_at_the_source(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="prefill_s"):
        Node().core.check_open(opened(Role.SOURCE, prefill_s=seconds))
