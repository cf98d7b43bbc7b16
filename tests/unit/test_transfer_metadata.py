"""Selection metadata in the core: announced by layer, sent once and ahead of the tokens, complete before the end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvd.errors import FabricError, InvalidArgument
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings
from kvd.transfer.part import SinkPart, State
from kvd.wire import messages as wire
from kvd_client.spec import MetadataSpec, PartLayout, TokenRange
from tests.unit.transfer_helpers import SESSION, TOKEN, Node, kinds, layout, only, open_message, sent

KEYS = MetadataSpec(name="keys", layer_bytes=100)
CODES = MetadataSpec(name="codes", layer_bytes=10)
LAYOUT: PartLayout = msgspec.structs.replace(layout(), metadata=(KEYS, CODES))
OTHER = MetadataSpec(name="other", layer_bytes=1)
STRIDE = 128 + 64
ROOMY = Settings(rendezvous_s=10.0, chunk=2 * TOKEN, window=10_000)


def source(settings: Settings = ROOMY) -> Node:
    node = Node(settings=settings)
    node.source(layout=LAYOUT)
    node.hear(open_message(layout=LAYOUT))
    return node


def sink(accepted: bool = True, **other: Any) -> Node:
    node = Node("d")
    node.sink(peer="p", layout=LAYOUT, **other)
    node(ev.SessionReady(1, SESSION, "p"))
    if accepted:
        node.hear(wire.Accepted(transfer=1, source=9))
    return node


def announce(node: Node, layer: int) -> list[do.Instruction]:
    return node(ev.MetadataReady(1, layer))


def arrive(node: Node, layer: int, session: int = SESSION, transfer: int = 1) -> list[do.Instruction]:
    return node(ev.MetadataArrived(session, wire.MetadataArrived(transfer, layer)))


def test_metadata_that_is_said_to_have_arrived_and_is_not_marked_ends_the_transfer() -> None:
    node = sink()
    out = node(ev.MetadataArrived(SESSION, wire.MetadataArrived(1, 0), marked=False))
    assert only(out, do.ReportEnd)[0].code == "PROTOCOL"
    assert not only(out, do.CloseSession)


# --- at the source ----------------------------------------------------------------------------------------------------


def test_metadata_is_written_a_layer_at_a_time_once() -> None:
    node = source()
    (write,) = announce(node, 1)
    assert write == do.WriteMetadata(1, SESSION, 1, 1, STRIDE)
    assert announce(node, 1) == []
    node.done(1)
    assert announce(node, 1) == []
    assert (node.part().paths["metadata"], node.part().bytes_done) == (STRIDE, 0)
    assert node.core.counters["bytes_sent_metadata"] == STRIDE
    assert kinds(announce(node, 0)) == ["WriteMetadata"]


def test_what_was_announced_before_the_sink_came_goes_first_and_by_layer() -> None:
    node = Node(settings=ROOMY)
    node.source(layout=LAYOUT)
    node.ring(0, 0, 4)
    assert announce(node, 1) == announce(node, 0) == []
    out = node.hear(open_message(layout=LAYOUT))
    expected = ["BindSink", "SendAccepted", "WriteMetadata", "WriteMetadata", "WriteTokens", "WriteTokens"]
    assert kinds(out) == expected
    assert [write.layer for write in only(out, do.WriteMetadata)] == [0, 1]


def test_metadata_overtakes_tokens_that_wait() -> None:
    node = source(Settings(rendezvous_s=10.0, chunk=TOKEN, window=TOKEN))
    node.ring(0, 0, 4)
    assert announce(node, 0) == []
    (write,) = node.done(1)
    assert isinstance(write, do.WriteMetadata)
    assert node.done(99) == []
    assert kinds(node.done(write.write)) == ["WriteTokens"]


@pytest.mark.parametrize("layer", [-1, 2])
def test_metadata_of_an_unknown_layer_ends_the_transfer(layer: int) -> None:
    (end,) = only(announce(source(), layer), do.ReportEnd)
    assert (end.code, end.fields) == ("INVALID_ARGUMENT", {"layer": layer})
    assert f"layer {layer}" in end.message


def test_metadata_of_a_transfer_that_has_none_ends_it() -> None:
    node = Node()
    node.source()
    (end,) = only(announce(node, 0), do.ReportEnd)
    assert end.code == "INVALID_ARGUMENT"
    assert announce(node, 0) == []


def test_metadata_of_what_is_no_source_here_means_nothing() -> None:
    assert announce(Node(), 0) == []
    assert announce(sink(), 0) == []


def test_finish_is_refused_while_metadata_is_missing() -> None:
    node = source()
    for layer in (0, 1):
        node.ring(layer, 0, 4)
    announce(node, 0)
    with pytest.raises(InvalidArgument, match="metadata of layer 1 has never been announced") as caught:
        node.core.check_finish(1)
    assert caught.value.fields == {"request": "r", "layer": 1}
    announce(node, 1)
    node.core.check_finish(1)


def test_a_refused_metadata_write_counts_as_any_other() -> None:
    node = source()
    announce(node, 0)
    assert node.done(1, FabricError("refused")) == []
    assert announce(node, 1) == []
    assert node.part().paths["metadata"] == 0
    (end,) = only(node.tick(5.0), do.ReportEnd)
    assert end.code == "FABRIC"


def test_a_write_that_ends_after_its_session_leaves_no_trace_in_the_accounts() -> None:
    node = source()
    announce(node, 0)
    node.lose()
    assert node.done(1) == []
    assert set(node.part().paths) == {"budget_tokens"}
    assert not any(name.startswith("bytes_sent") for name in node.core.counters)


@pytest.mark.parametrize(
    "theirs",
    [(), (KEYS,), (CODES, KEYS), (KEYS, MetadataSpec(name="codes", layer_bytes=11)), (KEYS, CODES, OTHER)],
)
def test_a_sink_with_other_metadata_is_refused(theirs: tuple[MetadataSpec, ...]) -> None:
    node = Node()
    node.source(layout=LAYOUT)
    (message,) = sent(node.hear(open_message(layout=msgspec.structs.replace(LAYOUT, metadata=theirs))), wire.Refused)
    assert message.code == "UNSUPPORTED_LAYOUT"
    assert message.fields["differ"] == {
        "metadata": [[["keys", 100], ["codes", 10]], [[array.name, array.layer_bytes] for array in theirs]]
    }
    assert node.state() is State.WAITING


# --- at the sink ------------------------------------------------------------------------------------------------------


def test_a_sink_is_delivered_once_its_metadata_is_here_too() -> None:
    node = sink()
    assert arrive(node, 0) == [do.Publish(1, 0, 0)]
    node.arrive(0, 0, 4)
    assert kinds(node.arrive(1, 0, 4)) == ["Publish"]
    assert kinds(arrive(node, 1)) == ["Publish", "SendDelivered", "ReportEnd"]
    assert node.part().paths["metadata"] == 2 * STRIDE
    assert (node.part().bytes_done, node.part().bytes_total) == (8 * TOKEN, 8 * TOKEN)


def test_a_sink_that_holds_every_token_still_waits_for_metadata() -> None:
    node = sink(held=(TokenRange(0, 0, 4),))
    assert node.state() is State.RUNNING
    arrive(node, 1)
    assert kinds(arrive(node, 0)) == ["Publish", "SendDelivered", "ReportEnd"]


def test_metadata_may_overtake_the_answer() -> None:
    node = sink(accepted=False, held=(TokenRange(0, 0, 4),))
    assert kinds(arrive(node, 0) + arrive(node, 1)) == ["Publish", "Publish"]
    assert kinds(node.hear(wire.Accepted(transfer=1, source=9))) == ["SendDelivered", "ReportEnd"]


@pytest.mark.parametrize("layer", [-1, 0, 2])
def test_metadata_that_is_not_missing_closes_the_session(layer: int) -> None:
    node = sink()
    arrive(node, 0)
    (close,) = arrive(node, layer)
    assert isinstance(close, do.CloseSession)
    assert (close.session, "metadata" in close.reason) == (SESSION, True)
    part = node.part()
    assert isinstance(part, SinkPart)
    assert part.missing_metadata == {1}
    assert part.paths["metadata"] == STRIDE


def test_metadata_of_a_transfer_without_any_closes_the_session() -> None:
    node = Node("d")
    node.sink(peer="p")
    node(ev.SessionReady(1, SESSION, "p"))
    assert kinds(arrive(node, 0)) == ["CloseSession"]


def test_a_strangers_metadata_and_late_news_are_not_heard() -> None:
    node = sink()
    assert arrive(node, 0, session=SESSION + 1) == []
    assert arrive(node, 0, transfer=2) == []
    node.hear(wire.Abort(transfer=1, code="ABORTED", message="given up", fields={}))
    assert arrive(node, 0) == []


def test_a_source_hears_no_metadata() -> None:
    assert arrive(source(), 0) == []
