"""Transfers of tensors in a layout of their own, as the core sees them: pushed or pulled, and every way they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import FabricError, InvalidArgument, KvdError, OutOfMemory, RemoteAccessError
from kvd.layout.named import NAMED
from kvd.transfer import delivery
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings
from kvd.transfer.part import State
from kvd.transfer.scheduler import Link
from kvd.types import Path, Role
from kvd.wire import messages as wire
from kvd_client.layouts import Placement, Target
from kvd_client.spec import TokenRange, part_layout
from tests.unit.transfer_helpers import SESSION, SPEC, TOKEN, Node, layout, only, open_message, opened, sent, why

PAGED = 'order = "l kv || B | s h d"\naxes = { t = "B:* s:2" }\nname = "pairs"\ncodec = "f16"\ntable = "B"\n'
PLACEMENT = Placement(layout=PAGED, block_tokens=2, dtype="f16")
PLACED = part_layout(SPEC, heads=2, rows=1, capacity=8, placed=True)
WHOLE = (TokenRange(0, 0, 4),)


def target(**other: Any) -> Target:
    """Four tensors of four blocks, 2 x 2 x 2 elements of two bytes each."""
    fields: dict[str, Any] = {
        "placement": PLACEMENT, "channels": 1, "alignment": 1, "blocks": 4, "unit": "layer",
        "bases": (np.arange(4) * 64).astype("<i8").tobytes(),
    }  # fmt: skip
    return Target(**(fields | other))


def opening(**other: Any) -> wire.Open:
    return open_message(layout=PLACED, target=target(**other))


def source(settings: Settings | None = None, **other: Any) -> Node:
    node = Node() if settings is None else Node(settings=settings)
    node.source()
    node.hear(opening(**other))
    return node


def sink(pull: bool = True) -> Node:
    node = Node("d")
    node.sink(peer="p", layout=PLACED, target=target(pull=pull))
    node(ev.SessionReady(1, SESSION, "p"))
    node.hear(wire.Accepted(transfer=1, source=9))
    return node


def staged(stage: int = 7, layer: int = 0, ranges: Any = WHOLE, transfer: int = 1) -> wire.Staged:
    layers = [wire.LayerRanges(layer, list(ranges))]
    return wire.Staged(transfer=transfer, source=9, stage=stage, layers=layers, grant=b"g", nbytes=64, path="proactive")


# --- the source -------------------------------------------------------------------------------------------------------


def test_the_sinks_layout_travels_with_its_open() -> None:
    node = Node("d")
    node.sink(peer="p", layout=PLACED, target=target())
    (opened_,) = only(node(ev.SessionReady(1, SESSION, "p")), do.SendOpen)
    assert opened_.message.target == target()
    bound = only(Node().source() + source_bound(), do.BindSink)
    assert [b.target for b in bound] == [target()]


def source_bound() -> list[do.Instruction]:
    node = Node()
    node.source()
    return node.hear(opening())


def test_a_layer_is_one_batch() -> None:
    node = source()
    assert only(node.ring(0, 0, 3), do.WriteTensors) == []
    (write,) = only(node.ring(0, 3, 4), do.WriteTensors)
    assert (write.layers, write.nbytes, write.path) == (((0, WHOLE),), 4 * TOKEN, Path.PROACTIVE)


def test_a_layer_is_regrouped_while_another_is_on_the_wire_and_no_third() -> None:
    node = source(Settings(window=TOKEN, chunk=TOKEN))
    one, other = (only(node.ring(layer, 0, 4), do.WriteTensors) for layer in (0, 1))
    assert [len(one), len(other)] == [1, 1]
    node = source(Settings(window=TOKEN, chunk=TOKEN), unit="chunk")
    assert len(only(node.ring(0, 0, 4), do.WriteTensors)) == 1


def test_small_layers_that_are_ready_go_together() -> None:
    node = Node()
    node.source()
    for layer in range(2):
        node.ring(layer, 0, 4)
    (write,) = only(node.hear(opening()), do.WriteTensors)
    assert write.layers == ((0, WHOLE), (1, WHOLE))


def test_layers_arrive_together() -> None:
    node = sink(pull=False)
    layers = [wire.LayerRanges(layer, list(WHOLE)) for layer in range(2)]
    out = node(ev.TokensArrived(SESSION, wire.TensorsArrived(1, layers, "proactive")))
    assert [p.new_bytes for p in only(out, do.Publish)] == [8 * TOKEN]
    assert sent(out, wire.Delivered)
    node = sink(pull=False)
    layers[1] = wire.LayerRanges(2, list(WHOLE))
    out = node(ev.TokensArrived(SESSION, wire.TensorsArrived(1, layers, "proactive")))
    assert only(out, do.CloseSession)
    assert node.part().bytes_done == 0


@pytest.mark.parametrize(
    ("rate", "turns"),
    [
        (0.0, [1 << 20] * 4),  # nothing is known of the link yet
        (12.5e6, [1 << 20] * 4),
        (125e6, [1 << 20, 2 << 20, 2_500_000, 2_500_000]),
        (600e6, [2_400_000, 4_800_000, 9_600_000, 12_000_000]),
        (1.25e9, [5_000_000, 10_000_000, 16 << 20, 16 << 20]),
    ],
)
def test_batches_grow_with_what_is_ahead(rate: float, turns: list[int]) -> None:
    """The first one is 4 ms of the link's time, and the others, with that before still on its way, grow up to 20 ms."""
    part: Any = SimpleNamespace(queue=SimpleNamespace(unit="layer"), writes=set())
    link = Link(window=64 << 20)
    link.estimate.rate = rate
    found = []
    for write in range(4):
        found.append(delivery._turn(part, link, Path.PROACTIVE))
        link.submitted(write, found[-1], "proactive", 0.0)
        part.writes.add(write)
    assert found == turns


def test_whole_is_one_batch_at_the_end() -> None:
    node = source(unit="whole")
    assert only(node.ring(0, 0, 4), do.WriteTensors) == []
    (write,) = only(node.ring(1, 0, 4), do.WriteTensors)
    assert write.layers == ((0, WHOLE), (1, WHOLE))


def test_chunks_are_whole_blocks() -> None:
    node = source(Settings(window=100 * TOKEN, chunk=TOKEN), unit="chunk")
    writes = only(node.ring(0, 0, 4), do.WriteTensors)
    assert [write.layers for write in writes] == [((0, (TokenRange(0, 0, 2),)),), ((0, (TokenRange(0, 2, 4),)),)]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (opening(unit="tensor"), "INVALID_ARGUMENT"),
        (opening(blocks=1), "INVALID_ARGUMENT"),
        (opening(channels=0), "INVALID_ARGUMENT"),
        (opening(bases=b"123"), "INVALID_ARGUMENT"),
        (opening(table=b"\0\0\0\0" * 4), "INVALID_ARGUMENT"),
        (opening(placement=msgspec.structs.replace(PLACEMENT, dtype="raw:3")), "UNSUPPORTED_LAYOUT"),
        (opening(placement=msgspec.structs.replace(PLACEMENT, layout="no such")), None),
        (open_message(layout=PLACED, target=target(), mode="speculative"), "INVALID_ARGUMENT"),
        (open_message(layout=PLACED, target=target(), held=[TokenRange(0, 0, 1)]), "UNSUPPORTED_LAYOUT"),
    ],
    ids=["unit", "blocks", "channels", "bases", "table", "dtype", "layout", "mode", "held"],
)
def test_what_can_not_be_expressed_is_refused(message: wire.Open, code: str | None) -> None:
    node = Node()
    node.source()
    (refused,) = sent(node.hear(message), wire.Refused)
    assert code is None or refused.code == code
    assert node.state() is State.WAITING  # a sink that fits may still come
    assert sent(node.hear(opening()), wire.Accepted)


def test_selective_modes_go_in_chunks() -> None:
    node = Node()
    node.source()
    assert sent(node.hear(open_message(layout=PLACED, target=target(unit=""), mode="speculative")), wire.Accepted)
    assert only(node.ring(0, 0, 2), do.WriteTensors)


def test_a_source_on_a_device_serves_a_plain_sink_in_its_own_blocks() -> None:
    node = Node()
    node.source(layout=PLACED, placement=PLACEMENT)
    node.hear(open_message())
    assert only(node.ring(0, 0, 3), do.WriteTensors) == []
    (write,) = only(node.ring(0, 3, 4), do.WriteTensors)
    assert write.layers == ((0, WHOLE),)


def test_single_entries_of_a_source_on_a_device_can_not_be_fetched() -> None:
    node = Node()
    node.source(layout=PLACED, placement=PLACEMENT)
    node.hear(open_message())
    node.ring(0, 0, 4)
    fetch = wire.Fetch(transfer=1, sink=21, fetch=1, layer=0, counts=b"", index=b"", offset=0, stride=0)
    (failed,) = sent(node.hear(fetch), wire.FetchFailed)
    assert failed.code == "UNSUPPORTED_LAYOUT"


def test_what_moving_took_is_counted() -> None:
    node = source()
    node.ring(0, 0, 4)
    node(ev.Moved(1, requests=8, nbytes=4096, regroup_us=30))
    node(ev.Moved(1, requests=2, nbytes=4, regroup_us=1))
    assert {name: node.core.counters[name] for name in ("tensor_requests", "tensor_bytes", "regroup_us")} == {
        "tensor_requests": 10,
        "tensor_bytes": 4100,
        "regroup_us": 31,
    }
    assert node.part().paths["requests"] == 10


# --- pulled: the source -----------------------------------------------------------------------------------------------


def pulled() -> tuple[Node, int]:
    """A source whose first layer is staged."""
    node = source(pull=True)
    (write,) = only(node.ring(0, 0, 4), do.WriteTensors)
    (message,) = sent(node(ev.Staged(1, write.write, b"token", 64)), wire.Staged)
    assert (message.transfer, message.stage, message.grant, message.nbytes) == (21, write.write, b"token", 64)
    assert message.layers == [wire.LayerRanges(0, list(WHOLE))]
    return node, write.write


def test_a_stage_ends_with_the_sinks_word() -> None:
    node, write = pulled()
    assert only(node.hear(wire.Pulled(transfer=1, stage=write)), do.EndStage) == [
        do.EndStage(1, write, 4 * TOKEN, None)
    ]
    assert only(node.hear(wire.Pulled(transfer=1, stage=write)), do.EndStage) == []
    node.done(write)
    assert node.part().bytes_done == 4 * TOKEN
    assert node.left == ["parts", "by_rank", "by_handle"]


def test_a_stage_that_the_sink_could_not_read_fails() -> None:
    node, write = pulled()
    (end,) = only(node.hear(wire.Pulled(transfer=1, stage=write, **why("FABRIC"))), do.EndStage)
    assert end.error is not None
    node.done(write, end.error)
    assert node.part().refused_until is not None  # the sink says the rest


@pytest.mark.parametrize("end", ["session", "delivered", "abort", "process"])
def test_a_stage_ends_with_its_part(end: str) -> None:
    node, write = pulled()
    events = {
        "session": lambda: node.lose(),
        "delivered": lambda: node.hear(wire.Delivered(transfer=1)),
        "abort": lambda: node.hear(wire.Abort(transfer=1, **why())),
        "process": lambda: node(ev.ClientLost(1)),
    }
    out = events[end]()
    assert only(out, do.CancelWrites) == [do.CancelWrites(1)]
    node.done(write, FabricError("cancelled"))
    assert node(ev.Staged(1, write, b"late", 64)) == []
    assert node.hear(wire.Pulled(transfer=1, stage=write)) == []
    node(ev.ReleaseRequested(1))
    assert node.left == []


def test_no_room_to_stage_ends_the_transfer_on_both_sides() -> None:
    node = source(pull=True)
    (write,) = only(node.ring(0, 0, 4), do.WriteTensors)
    error = OutOfMemory("no room for 64 bytes", need=64)
    out = node(ev.AbortRequested(1, error)) + node.done(write.write, error)
    assert [message.code for message in sent(out, wire.Abort)] == ["OUT_OF_MEMORY"]
    assert node.left == ["parts", "by_rank", "by_handle"]


# --- pulled: the sink -------------------------------------------------------------------------------------------------


def test_a_stage_is_read_then_told_and_accounted_for() -> None:
    node = sink()
    (pull,) = only(node.hear(staged()), do.PullTensors)
    out = node(ev.PullCompleted(1, SESSION, pull.message))
    assert [(m.transfer, m.stage, m.code) for m in sent(out, wire.Pulled)] == [(9, 7, "")]
    assert [p.new_bytes for p in only(out, do.Publish)] == [4 * TOKEN]
    out = node.hear(staged(stage=8, layer=1)) and node(ev.PullCompleted(1, SESSION, staged(stage=8, layer=1)))
    assert sent(out, wire.Delivered)
    assert node.part().code == "OK"


def test_a_read_that_can_not_be_planned_ends_both_sides() -> None:
    node = sink()
    node.hear(staged())
    out = node(ev.PullCompleted(1, SESSION, staged(), InvalidArgument("another size")))
    assert [m.code for m in sent(out, wire.Pulled)] == ["INVALID_ARGUMENT"]
    assert [m.code for m in sent(out, wire.Abort)] == ["INVALID_ARGUMENT"]


@pytest.mark.parametrize("error", [FabricError("the link broke"), RemoteAccessError("revoked")])
def test_a_read_that_is_refused_waits_for_the_reason(error: KvdError) -> None:
    """The source has gone, or has ended its side: what it says comes on another connection."""
    node = sink()
    node.hear(staged())
    out = node(ev.PullCompleted(1, SESSION, staged(), error))
    assert [m.code for m in sent(out, wire.Pulled)] == [error.code]
    assert only(out, do.ReportEnd) == []
    assert [e.code for e in only(node.hear(wire.Abort(transfer=1, **why("PROCESS_LOST"))), do.ReportEnd)] == [
        "PROCESS_LOST"
    ]
    node = sink()
    node.hear(staged())
    node(ev.PullCompleted(1, SESSION, staged(), error))
    assert [e.code for e in only(node.lose(), do.ReportEnd)] == ["PEER_LOST"]
    node = sink()
    node.hear(staged())
    node(ev.PullCompleted(1, SESSION, staged(), error))
    assert [e.code for e in only(node.tick(5.0), do.ReportEnd)] == [error.code]


def test_a_read_that_ends_after_its_part_is_nobodys() -> None:
    node = sink()
    node.hear(staged())
    node(ev.AbortRequested(1, FabricError("x")))
    assert node(ev.PullCompleted(1, SESSION, staged())) == []
    node(ev.ReleaseRequested(1))
    assert node(ev.PullCompleted(1, SESSION, staged())) == []
    assert node.left == []


@pytest.mark.parametrize(
    "message",
    [
        staged(layer=2),
        staged(layer=-1),
        staged(ranges=[TokenRange(0, 0, 5)]),
        staged(ranges=[TokenRange(1, 0, 2)]),
        staged(ranges=[TokenRange(0, 1, 2)]),
        staged(ranges=[TokenRange(0, 0, 3)]),
        staged(ranges=[TokenRange(0, 2, 2)]),
    ],
)
def test_a_stage_that_makes_no_sense_ends_the_session(message: wire.Staged) -> None:
    node = sink()
    assert only(node.hear(message), do.CloseSession)
    assert node.part().code == ""  # the engine reports the session's end


def test_stages_are_bounded_and_not_for_everybody() -> None:
    node = sink()
    for stage in range(64):
        assert only(node.hear(staged(stage=stage)), do.PullTensors)
    assert only(node.hear(staged(stage=64)), do.CloseSession)
    assert only(sink(pull=False).hear(staged()), do.CloseSession)
    assert sink().hear(staged(), session=SESSION + 1) == []
    plain = Node("d")
    plain(opened(Role.SINK, layout=layout(), peer="p"))
    assert plain.hear(staged()) == []


@given(
    layout_name=st.one_of(
        st.sampled_from([*NAMED, PAGED, PAGED.replace("s:2", "s:*"), PAGED.replace("B |", "|"), "=", "a = 1"]),
        st.text(),
    ),
    block=st.sampled_from([1, 2, 8, 32, 1 << 20]),
    tensors=st.sampled_from([1, 2]),
    codecs=st.tuples(*[st.sampled_from(["f16", "bf16", "bfp8_b", "raw:4", "raw:0", "x", "u8"])] * 2),
    numbers=st.tuples(*[st.sampled_from([-1, 0, 1, 2, 4, 8, 33, 1 << 24, 1 << 40])] * 3),
    table=st.one_of(st.just(b""), st.binary(max_size=20)),
    bases=st.one_of(st.just((np.arange(4) * 64).tobytes()), st.binary(max_size=40)),
    heads=st.one_of(st.just((0, 0)), st.tuples(*[st.sampled_from([-1, 0, 1, 2, 3, 1 << 40])] * 2)),
)
@settings(max_examples=300, deadline=None)
def test_whatever_a_sink_says_of_its_tensors_it_gets_an_answer(
    layout_name: str, block: int, tensors: int, codecs: Any, numbers: Any, table: bytes, bases: bytes, heads: Any
) -> None:
    placement = Placement(layout=layout_name, block_tokens=block, tensors=tensors, dtype=codecs[0], codec=codecs[1])
    channels, alignment, blocks = numbers
    node = Node()
    node.source()
    out = node.hear(
        opening(
            placement=placement,
            channels=channels,
            alignment=alignment,
            blocks=blocks,
            table=table,
            bases=bases,
            heads=heads[0],
            first_head=heads[1],
        )
    )
    assert len(sent(out, wire.Accepted)) + len(sent(out, wire.Refused)) == 1
