"""Idle windows in the core, budgets, and what fetches and windows do to a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvd.errors import Aborted, InvalidArgument
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings
from kvd.transfer.part import State
from kvd.transfer.policy import Profiled, Selective
from kvd.transfer.rate import UNBOUNDED, IdleTime
from kvd.types import Path, Role
from kvd.wire import messages as wire
from kvd_client.spec import MetadataSpec
from tests.unit.fetch_helpers import DEEP, SPEC, asked, served, settle, source_part
from tests.unit.transfer_helpers import (
    SESSION,
    TOKEN,
    Node,
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
)

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


def paused_source() -> Node:
    """All is rung, a fetch of layer 3 is being served, and four windows came meanwhile."""
    node = deep_source(finished=False)
    node.ring(3, 0, 4)
    node.ring(2, 0, 4)
    node(ev.SourceFinished(1))
    settle(node, node.done(1) + node.done(2))
    node.hear(asked(layer=3))
    assert node.hear(wire.Idle(transfer=1, windows=4)) == []
    return node


def test_speculation_pauses_while_a_fetch_is_served_and_resumes_after_it() -> None:
    node = paused_source()
    (first, second) = only(node(served()), do.WriteTokens)
    assert (first.path, second.path) == (Path.SPECULATIVE, Path.SPECULATIVE)


def test_a_fetch_ends_the_window() -> None:
    node = paused_source()
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
