"""Fetched entries travel once where a mask byte stands for one entry: the source's queue, the core, the copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import Aborted, OutOfMemory
from kvd.importance.matrix import ImportanceMatrix
from kvd.mask import TokenFlags, init_masks, mask_view
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import ReadyTokens, SendQueue
from kvd.transfer.serving import keep_fetched
from kvd.types import Path
from kvd.wire import messages as wire
from kvd_client.spec import MASK_LOCAL, MASK_REMOTE, KVSpec, PartLayout, TokenRange, part_layout
from tests.unit.fetch_helpers import arrived, failed, numbers, served, settle, sink_part, source_part
from tests.unit.transfer_helpers import SESSION, Node, kinds, only, open_message, sent

# --- flags ------------------------------------------------------------------------------------------------------------

ROWS, CAPACITY = 3, 7
PLACES = st.lists(st.integers(0, ROWS * CAPACITY - 1), max_size=12).map(lambda found: np.array(found, np.int64))


@given(st.lists(st.tuples(st.sampled_from(["range", "add", "subtract"]), st.integers(0, 1), PLACES), max_size=12))
def test_flags_agree_with_a_bitmap(steps: list[tuple[str, int, Any]]) -> None:
    flags, bits = TokenFlags(ROWS, CAPACITY), np.zeros((2, ROWS * CAPACITY), bool)
    for what, layer, places in steps:
        if what == "range":
            row = len(places) % ROWS
            start, stop = sorted(int(place) % (CAPACITY + 1) for place in (*places[:2], 0, 0)[:2])
            part = bits[layer, row * CAPACITY + start : row * CAPACITY + stop]
            gaps = flags.gaps(layer, row, start, stop)
            assert [t for low, high in gaps for t in range(low, high)] == [
                start + int(t) for t in np.flatnonzero(~part)
            ]
            if len(places) % 2:
                assert flags.add(layer, row, start, stop) == int((~part).sum())
            else:
                flags.mark_all(layer, [TokenRange(row, start, stop)])
            part[:] = True
        elif what == "add":
            flags.add_places(layer, places)
            bits[layer, places] = True
        else:
            flags.subtract_places(layer, places)
            bits[layer, places] = False
        everything = np.arange(ROWS * CAPACITY)
        assert (flags.absent(layer, everything) == ~bits[layer]).all()
        there = np.flatnonzero(bits[layer])
        tokens = [row * CAPACITY + t for row, start, stop in flags.ranges(there) for t in range(start, stop)]
        assert tokens == there.tolist()


# --- the queue --------------------------------------------------------------------------------------------------------

LAYOUT = PartLayout(layers=4, heads=1, entry_bytes=4, rows=2, capacity=10, landing_entries=10, landing_slots=2)
LENGTHS = (10, 6)


def queue_of(mode: str = "speculative", held: tuple[TokenRange, ...] = ()) -> SendQueue:
    matrix = ImportanceMatrix(np.random.default_rng(3).random((4, 5)))
    policy = choose_policy(mode, Selective(classes=8), Profiled(matrix), layers=4, lengths=LENGTHS, token_bytes=4)
    made = SendQueue(LAYOUT, LENGTHS, policy, held=held, drops=True)
    tokens = ReadyTokens(LAYOUT, LENGTHS)
    for layer in range(4):
        made.add(tokens.add(layer, None, 0, 10))
    return made


def test_without_drops_nothing_is_left_out() -> None:
    plain = SendQueue(LAYOUT, LENGTHS, queue_of().policy)
    plain.add([(2, TokenRange(0, 0, 4))])
    assert plain.drop(2, np.arange(4)).size == 0
    assert plain.pending_tokens == 4


def test_what_is_dropped_is_not_handed_out_and_what_is_restored_is() -> None:
    queue = queue_of(held=(TokenRange(0, 2, 4),))
    queue.finish()
    before = queue.pending_tokens
    dropped = queue.drop(2, np.array([9, 1, 2, 3, 1, 10, 15]))  # tokens 2 and 3 are held: never sent
    assert dropped.tolist() == [1, 9, 10, 15]
    assert queue.pending_tokens == before - 4
    queue.restore(2, dropped[:1])
    assert queue.drop(2, np.array([9, 10])).size == 0
    queue.window()
    queue.window()
    found: list[tuple[int, int, int]] = []
    while queue.path is not None:
        for layer, ranges in queue.take(8):
            found += [(layer, r.row, token) for r in ranges for token in range(r.start, r.stop)]
    expected = {
        (layer, row, token) for layer in range(4) for row, length in enumerate(LENGTHS) for token in range(length)
    }
    expected -= {(layer, 0, token) for layer in range(4) for token in (2, 3)}
    assert len(found) == len(set(found))
    assert set(found) == expected - {(2, 0, 9), (2, 1, 0), (2, 1, 5)}
    assert queue.pending_tokens == 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_token_goes_once_whatever_is_dropped_restored_and_ranked(data: st.DataObject) -> None:
    queue = queue_of(data.draw(st.sampled_from(["full", "parallel", "speculative"])))
    out: set[tuple[int, int]] = set()
    served: list[tuple[int, Any]] = []

    def pending() -> int:
        return 4 * sum(LENGTHS) - len(out) - sum(len(places) for _, places in served)

    def take() -> None:
        for layer, ranges in queue.take(4 * data.draw(st.integers(1, 9))):
            tokens = {(layer, r.row * 10 + token) for r in ranges for token in range(r.start, r.stop)}
            assert len(tokens) == sum(r.stop - r.start for r in ranges)
            assert not out & tokens, "sent twice"
            assert not any(layer == at and place in places for at, places in served for _, place in tokens)
            out.update(tokens)

    for _ in range(data.draw(st.integers(0, 20))):
        what = data.draw(st.sampled_from(["take", "drop", "fail", "arrive", "rank", "finish", "window"]))
        if what == "take":
            take()
        elif what == "drop":
            layer = data.draw(st.integers(0, 3))
            exist = [row * 10 + token for row, length in enumerate(LENGTHS) for token in range(length)]
            places = queue.drop(layer, np.array(data.draw(st.lists(st.sampled_from(exist), max_size=8)), np.int64))
            assert not out & {(layer, int(place)) for place in places}
            served.append((layer, places))
        elif what == "fail" and served:
            queue.restore(*served.pop(data.draw(st.integers(0, len(served) - 1))))
        elif what == "arrive" and served:
            layer, places = served.pop(data.draw(st.integers(0, len(served) - 1)))
            out.update((layer, int(place)) for place in places)
        elif what == "rank":
            queue.rank(data.draw(st.integers(2, 3)), np.random.default_rng(1).random((2, 5), np.float32), 0.5)
        elif what == "finish":
            queue.finish()
        elif what == "window":
            queue.window()
        assert queue.pending_tokens == pending()
    for layer, places in served:
        queue.restore(layer, places)
    served.clear()
    queue.window()
    while queue.path is not None:
        take()
        queue.window()
    if queue.policy.mode != "parallel":
        assert len(out) == 4 * sum(LENGTHS)


# --- the core ---------------------------------------------------------------------------------------------------------

SPEC = KVSpec(layers=2, kv_heads=2, entry_bytes=8, dtype="fp16", model="m")
BY_HEAD = part_layout(SPEC, heads=2, rows=1, capacity=8, mask="head")
SINK = part_layout(SPEC, heads=2, rows=1, capacity=8, mask="head", landing_entries=2, landing_slots=1)
OFFSET = SINK.landing_offset(0)


def fetch(number: int = 7, index: tuple[int, ...] = (3, 0, 2)) -> ev.FetchRequested:
    """Token 3 of the first head, tokens 0 and 2 of the second, of layer 1."""
    return ev.FetchRequested(1, number, 1, numbers(1, 2), numbers(*index), OFFSET, SINK.landing_row_bytes)


def asked(number: int = 7, index: tuple[int, ...] = (3, 0, 2), keep: bool = True) -> wire.Fetch:
    return wire.Fetch(
        transfer=1, sink=21, fetch=number, layer=1, counts=numbers(1, 2), index=numbers(*index), offset=OFFSET,
        stride=SINK.landing_row_bytes, keep=keep,
    )  # fmt: skip


def sink(held: tuple[TokenRange, ...] = ()) -> Node:
    node = Node("d")
    node.sink(peer="p", layout=SINK, lengths=(4, 4), held=held)
    node(ev.SessionReady(1, SESSION, "p"))
    node.hear(wire.Accepted(transfer=1, source=9, mode="speculative"))
    return node


def source() -> Node:
    node = Node()
    node.source(layout=BY_HEAD, lengths=(4, 4))
    node.hear(open_message(layout=SINK, lengths=[4, 4]))
    return node


def test_a_fetch_is_answered_when_its_entries_are_in_place() -> None:
    node = sink(held=(TokenRange(1, 0, 1),))  # token 0 of the second head is the process's own
    (send,) = sent(node(fetch()), wire.Fetch)
    assert send.keep
    (keep,) = node(arrived())
    assert isinstance(keep, do.KeepFetched)
    assert (keep.transfer, keep.fetch, keep.layer, keep.offset) == (1, 7, 1, OFFSET)
    assert keep.places.tolist() == [3, 8 + 2]
    assert keep.entries.tolist() == [0, 2 + 1]  # two entries a row of the slot; the held one was its row's first
    missing = sink_part(node).missing
    assert node(arrived()) == []
    assert node.hear(failed()) == []
    publish, end = node(ev.FetchKept(1, 7))
    assert publish == do.Publish(1, 2 * 8, 2 * 8)
    assert end == do.FetchEnded(1, 7)
    part = sink_part(node)
    assert (part.missing, part.bytes_done, part.paths["on_demand"]) == (missing - 2, 16, 24)
    # Once more: everything is there, and nothing to be copied.
    node(fetch(8))
    assert node(arrived(8)) == [do.FetchEnded(1, 8)]
    assert node(ev.FetchKept(1, 8)) == []


def test_what_was_fetched_and_what_was_sent_complete_a_transfer_together() -> None:
    node = sink()
    for row in (0, 1):
        node.arrive(0, 0, 4, row=row)
    node.arrive(1, 0, 3, row=0)
    node.arrive(1, 1, 2, row=1)
    node.arrive(1, 3, 4, row=1)
    node(fetch())
    node(arrived())
    node.arrive(1, 2, 3, row=1)  # a block that was on its way when the fetch was asked for
    assert node.part().code == ""
    out = node(ev.FetchKept(1, 7))
    assert only(out, do.Publish) == [do.Publish(1, 8 * 16, 2 * 8)]
    assert kinds(out) == ["Publish", "FetchEnded", "SendDelivered", "WantWindows", "ReportEnd"]
    assert node.part().code == "OK"


def test_the_copy_may_end_after_the_transfer() -> None:
    node = sink()
    node(fetch())
    node(arrived())
    for layer in (0, 1):
        for row in (0, 1):
            node.arrive(layer, 0, 4, row=row)
    assert node.part().code == "OK"
    assert node(ev.FetchKept(1, 7)) == [do.FetchEnded(1, 7)]
    node = sink()
    node(fetch())
    node(arrived())
    assert len(only(node(ev.ReleaseRequested(1)), do.FetchEnded)) == 1
    assert node(ev.FetchKept(1, 7)) == []


def test_a_copy_that_fails_ends_the_transfer_since_nothing_comes_again() -> None:
    node = sink()
    node(fetch())
    node(arrived())
    out = node(ev.FetchKept(1, 7, Aborted("no memory")))
    assert len(only(out, do.FetchEnded)) == 1
    assert node.part().code == "ABORTED"


def test_a_source_that_answers_what_it_should_have_refused() -> None:
    node = sink()
    node(fetch(index=(3, 0, 4)))
    out = node(arrived())
    assert [end.error.code if end.error else "" for end in only(out, do.FetchEnded)] == ["INVALID_ARGUMENT"]
    assert node.part().code == "INVALID_ARGUMENT"


def test_a_part_of_several_heads_keeps_nothing_by_itself() -> None:
    layout = part_layout(SPEC, heads=2, rows=1, capacity=8, landing_entries=2, landing_slots=1)
    node = Node("d")
    node.sink(peer="p", layout=layout)
    node(ev.SessionReady(1, SESSION, "p"))
    node.hear(wire.Accepted(transfer=1, source=9))
    (send,) = sent(node(fetch()), wire.Fetch)
    assert not send.keep
    assert node(arrived()) == [do.FetchEnded(1, 7)]


@pytest.mark.parametrize("keep", [True, False])
def test_the_source_sends_what_a_fetch_brought_only_if_it_is_not_kept(keep: bool) -> None:
    node = source()
    # The link has room for four tokens of two heads; layer 1 waits in the queue while layer 0 is on its way.
    out = node.ring(0, 0, 4)
    node.ring(1, 0, 4)
    assert kinds(node.hear(asked(keep=keep))) == ["ServeFetch"]
    node(served())
    writes = settle(node, out)
    tokens = [
        (write.layer, r.row, token)
        for write in writes
        if isinstance(write, do.WriteTokens)
        for r in write.ranges
        for token in range(r.start, r.stop)
    ]
    fetched = {(1, 0, 3), (1, 1, 0), (1, 1, 2)}
    assert len(tokens) == len(set(tokens)) == (13 if keep else 16)
    assert (fetched & set(tokens) == set()) is keep
    part = source_part(node)
    assert part.bytes_done == part.bytes_total == 16 * 8
    assert part.paths["proactive"] == len(tokens) * 8
    assert part.dropped == {}


def test_a_fetch_that_fails_puts_its_entries_back() -> None:
    node = source()
    out = node.ring(0, 0, 4)
    node.ring(1, 0, 4)
    node.hear(asked())
    writes = settle(node, out)
    assert sum(r.stop - r.start for write in writes for r in write.ranges) == 13  # type: ignore[union-attr]
    again = node(served(nbytes=0, error=OutOfMemory("no room")))
    assert kinds(again) == ["SendFetchFailed", "WriteTokens"]
    writes = settle(node, again)
    assert [(r.row, r.start, r.stop) for write in writes for r in write.ranges] == [(0, 3, 4), (1, 0, 1), (1, 2, 3)]  # type: ignore[union-attr]
    assert {write.path for write in writes} == {Path.PROACTIVE}  # type: ignore[union-attr]
    assert source_part(node).bytes_done == 16 * 8


def test_a_fetch_of_what_does_not_exist_drops_nothing() -> None:
    node = source()
    node.ring(0, 0, 4)
    node.ring(1, 0, 4)
    pending = source_part(node).queue.pending_tokens  # type: ignore[union-attr]
    (refusal,) = sent(node.hear(asked(index=(3, 0, 4))), wire.FetchFailed)
    assert (refusal.code, refusal.fields["token"]) == ("INVALID_ARGUMENT", 4)
    assert source_part(node).queue.pending_tokens == pending  # type: ignore[union-attr]
    assert source_part(node).dropped == {}
    assert node.core._book.link(SESSION).urgent == 0


# --- the copy ---------------------------------------------------------------------------------------------------------


class Lease:
    def __init__(self, layout: PartLayout) -> None:
        self.memory = memoryview(bytearray(layout.nbytes))


def test_entries_are_copied_to_their_places_and_marked() -> None:
    lease = Lease(SINK)
    init_masks(lease.memory, SINK, (4, 4))
    slot = np.frombuffer(lease.memory, np.uint8)[OFFSET : OFFSET + 2 * SINK.landing_row_bytes].reshape(4, 8)
    slot[:] = np.arange(1, 5)[:, None]
    entries, places = np.array([0, 3, 2]), np.array([3, 8 + 2, 8])
    keep_fetched(do.KeepFetched(1, 7, 1, OFFSET, entries, places), layout=SINK, lease=lease)  # type: ignore[arg-type]
    start = SINK.layer_offset(1)
    layer = np.frombuffer(lease.memory, np.uint8)[start : start + SINK.layer_bytes].reshape(16, 8)
    assert layer[:, 0].nonzero()[0].tolist() == [3, 8, 10]
    assert layer[[3, 8, 10]].tolist() == [[1] * 8, [3] * 8, [4] * 8]
    mask = mask_view(lease.memory, SINK, 1)
    assert mask.tolist() == [[2, 2, 2, 1, 0, 0, 0, 0], [1, 2, 1, 2, 0, 0, 0, 0]]
    assert (mask_view(lease.memory, SINK, 0)[:, :4] == MASK_REMOTE).all()
    assert (mask == MASK_LOCAL).sum() == 3
