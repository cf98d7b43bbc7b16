"""Bugs to plant, each of which the worlds must find: ``python -m tests.simulation.run --count 1000 --plant NAME``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvd.errors import PeerLost
from kvd.mask import IntervalSet, Places, TokenFlags, mask_view
from kvd.transfer import core, delivery, matching, on_demand, pairing, processes, serving, staging
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.part import Part, SinkPart, SourcePart, State
from kvd.transfer.queue import ReadyTokens, SendQueue
from kvd.transfer.rendezvous import Rendezvous
from kvd.transfer.scheduler import Link
from kvd.transfer.timers import Timers
from kvd.transfer.work import Work
from kvd.wire import messages as wire
from kvd_client.spec import MASK_LOCAL, PartLayout, TokenRange

from .links import BULK, URGENT, FetchAnswer, MetadataWrite, Operation
from .memory import Lease
from .tensors import Batch


def mask_before_data(patch: pytest.MonkeyPatch) -> None:
    def stages(self: Operation) -> list[Callable[[], None]]:
        return [self.place_mask, self.place_first_half, self.place_second_half, self.notify]

    patch.setattr(Operation, "stages", stages)


def late_write_after_reuse(patch: pytest.MonkeyPatch) -> None:
    def lease(self: Operation) -> Lease | None:
        peer, found = self.end.peer, self.record.sink
        if found is not None and peer.node.life == peer.life:
            self.end.node.world.dirty.append(found.slab)
            return found  # revoked or not
        return refusing(self)

    refusing = Operation._lease
    patch.setattr(Operation, "_lease", lease)


def memory_not_freed(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Book, part: Part) -> None:
        properly(self, part)
        if part.code == "PROCESS_LOST":
            self.out.pop()

    properly = Book.forget
    patch.setattr(Book, "forget", forget)


def handle_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Book, part: Part) -> None:
        properly(self, part)
        if part.handle and part.code == "ABORTED":
            self.by_handle[part.handle] = part.transfer

    properly = Book.forget
    patch.setattr(Book, "forget", forget)


def sends_twice(patch: pytest.MonkeyPatch) -> None:
    def add(self: IntervalSet, start: int, stop: int) -> list[tuple[int, int]]:
        new = properly(self, start, stop)
        return [(start, stop)] if new else []  # a ring that overlaps counts as wholly new

    properly = IntervalSet.add
    patch.setattr(IntervalSet, "add", add)


def sends_what_is_held(patch: pytest.MonkeyPatch) -> None:
    def init(self: SendQueue, *arguments: object, **options: object) -> None:
        properly(self, *arguments, **{**options, "held": ()})  # type: ignore[arg-type]

    properly = SendQueue.__init__
    patch.setattr(SendQueue, "__init__", init)


def reports_the_end_twice(patch: pytest.MonkeyPatch) -> None:
    def end(self: Book, part: Part, error: object, *, tell_peer: bool = True) -> None:
        if part.ended and error is not None:
            part.state = State.WAITING
        properly(self, part, error, tell_peer=tell_peer)  # type: ignore[arg-type]

    properly = Book.end
    patch.setattr(Book, "end", end)


def ranks_run_on(patch: pytest.MonkeyPatch) -> None:
    def ranks(self: Book, part: Part) -> Iterator[Part]:
        return iter(())

    patch.setattr(Book, "_ranks", ranks)


def window_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Link, "open", property(lambda self: bool(self.turns)))


def window_leaks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Link, "completed", lambda self, write, now, placed=True: self.writes.pop(write, (0, "")))


def delivered_too_early(patch: pytest.MonkeyPatch) -> None:
    properly = delivery.cover
    patch.setattr(delivery, "cover", lambda part, layer, tokens: min(part.missing, 2 * properly(part, layer, tokens)))


def data_overtakes_the_answer(patch: pytest.MonkeyPatch) -> None:
    def on_accepted(book: Book, event: ev.MessageReceived, now: float) -> None:
        part = book.named_by(event, SinkPart)
        if part is not None and part.state is State.OPENING:
            part.state = State.RUNNING
            part.peer_transfer = event.message.source  # type: ignore[union-attr]

    patch.setitem(core._MESSAGES, wire.Accepted, on_accepted)


def strangers_are_heard(patch: pytest.MonkeyPatch) -> None:
    def named_by(self: Book, event: ev.MessageReceived, kind: type[Part]) -> Part | None:
        part = self.parts.get(getattr(event.message, "transfer", -1))
        return part if isinstance(part, kind) else None

    patch.setattr(Book, "named_by", named_by)


def misfit_spends_the_announcement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pairing, "MISFITS", ())


def lost_sessions_are_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rendezvous, "session_lost", lambda self, session: None)


def deadlines_pass(patch: pytest.MonkeyPatch) -> None:
    properly = Part.expiry
    patch.setattr(Part, "expiry", property(lambda part: properly.__get__(part) + 1.0))


def a_limit_comes_forward_unseen(patch: pytest.MonkeyPatch) -> None:
    def set(self: Timers, part: Part) -> None:
        if all(transfer != part.transfer for _, transfer in self._heap):
            properly(self, part)

    properly = Timers.set
    patch.setattr(Timers, "set", set)


# Of selective transfer.


def metadata_mask_before_data(patch: pytest.MonkeyPatch) -> None:
    def stages(self: MetadataWrite) -> list[Callable[[], None]]:
        return [self.place_mask, self.place_data, self.notify]

    patch.setattr(MetadataWrite, "stages", stages)


def metadata_sent_twice(patch: pytest.MonkeyPatch) -> None:
    def on_metadata_ready(book: Book, event: ev.MetadataReady, now: float) -> None:
        part = book.parts.get(event.transfer)
        if isinstance(part, SourcePart):
            part.metadata_ready.discard(event.layer)
        processes.on_metadata_ready(book, event, now)

    patch.setitem(core._EVENTS, ev.MetadataReady, on_metadata_ready)


def metadata_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching, "_arrays", lambda layout: [])


def delivered_without_metadata(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SinkPart, "complete", property(lambda self: self.missing == 0))


def fetch_answered_twice(patch: pytest.MonkeyPatch) -> None:
    def on_fetch_arrived(book: Book, event: ev.FetchArrived, now: float) -> None:
        part = book.parts.get(event.arrived.transfer)
        request = part.fetches.get(event.arrived.fetch) if isinstance(part, SinkPart) else None
        on_demand.on_fetch_arrived(book, event, now)
        if isinstance(part, SinkPart) and request is not None:
            part.fetches[request.fetch] = request

    patch.setitem(core._EVENTS, ev.FetchArrived, on_fetch_arrived)


def fetch_forgotten_with_the_session(patch: pytest.MonkeyPatch) -> None:
    def end_one(self: Book, part: Part, error: object, tell_peer: bool) -> None:
        if isinstance(part, SinkPart) and isinstance(error, PeerLost):
            part.fetches.clear()
        properly(self, part, error, tell_peer)  # type: ignore[arg-type]

    properly = Book._end_one
    patch.setattr(Book, "_end_one", end_one)


def fetch_forgotten_at_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(processes, "end_fetches", lambda book, part, error: None)


def fetch_of_a_layer_that_is_not_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadyTokens, "covers", lambda self, layer, row, start, stop: True)


def landing_in_freed_memory(patch: pytest.MonkeyPatch) -> None:
    def lease(self: FetchAnswer) -> Lease | None:
        peer, found = self.end.peer, self.record.sink
        if found is not None and peer.node.life == peer.life:
            self.end.node.world.dirty.append(found.slab)
            return found  # revoked or not
        return refusing(self)

    refusing = FetchAnswer._lease
    patch.setattr(FetchAnswer, "_lease", lease)


def strangers_answer_fetches(patch: pytest.MonkeyPatch) -> None:
    def on_fetch_arrived(book: Book, event: ev.FetchArrived, now: float) -> None:
        part = book.parts.get(event.arrived.transfer)
        session = part.session if part is not None and part.session is not None else event.session
        on_demand.on_fetch_arrived(book, ev.FetchArrived(session, event.arrived), now)

    patch.setitem(core._EVENTS, ev.FetchArrived, on_fetch_arrived)


def speculation_goes_on(patch: pytest.MonkeyPatch) -> None:
    waiting = property(lambda self: bool(self.turns or self.late) and self.in_flight < self.limit)
    patch.setattr(Link, "open", waiting)


def speculation_stays_paused(patch: pytest.MonkeyPatch) -> None:
    def on_fetch_served(book: Book, event: ev.FetchServed, now: float) -> None:
        link = book.links.get(event.session)
        if link is not None and event.error is not None:
            link.urgent += 1
        on_demand.on_fetch_served(book, event, now)

    patch.setitem(core._EVENTS, ev.FetchServed, on_fetch_served)


def speculation_without_windows(patch: pytest.MonkeyPatch) -> None:
    def window(self: SendQueue) -> None:
        self.windows_used += 1
        self._quota += sum(self.lengths)

    patch.setattr(SendQueue, "window", window)


def the_deadline_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SendQueue, "finish", lambda self: None)


def small_shares_are_lost(patch: pytest.MonkeyPatch) -> None:
    def window(self: SendQueue) -> None:
        share = self.policy.share * sum(self.lengths) * self.layout.layers
        self._quota = min(share, self._quota + share / self.layout.layers)
        self.windows_used += 1

    patch.setattr(SendQueue, "window", window)


def a_ranking_loses_what_is_pending(patch: pytest.MonkeyPatch) -> None:
    def rank(self: SendQueue, layer: int, shares: Any, weight: float) -> bool:
        pending = self.pending_tokens
        for work in (self._proactive, self._rest):
            work.move_layers(layer, Work(self._order))
        self.pending_tokens = pending
        return properly(self, layer, shares, weight)

    properly = SendQueue.rank
    patch.setattr(SendQueue, "rank", rank)


def a_ranking_sends_again(patch: pytest.MonkeyPatch) -> None:
    def rank(self: SendQueue, layer: int, shares: Any, weight: float) -> bool:
        if not properly(self, layer, shares, weight):
            return False
        self.add([(layer, TokenRange(row, 0, 1)) for row, length in enumerate(self.lengths) if length])
        return True

    properly = SendQueue.rank
    patch.setattr(SendQueue, "rank", rank)


def a_ranking_makes_work_wait(patch: pytest.MonkeyPatch) -> None:
    def rank(self: SendQueue, layer: int, shares: Any, weight: float) -> bool:
        if not properly(self, layer, shares, weight):
            return False
        self._proactive.move_layers(layer, self._rest)
        return True

    properly = SendQueue.rank
    patch.setattr(SendQueue, "rank", rank)


# Of tensors in a layout of their own.


def tensors_masks_before_data(patch: pytest.MonkeyPatch) -> None:
    def stages(self: Batch) -> list[Callable[[], None]]:
        return [self.place_masks, lambda: self._place(0), lambda: self._place(1), self.notify]

    patch.setattr(Batch, "stages", stages)


def tensors_masks_behind_what_is_urgent(patch: pytest.MonkeyPatch) -> None:
    """Submitted with their bytes, and not behind them."""

    def connection_of(self: Batch, stage: Callable[[], None]) -> int:
        return URGENT if stage == self.place_masks else self.connection

    patch.setattr(Batch, "connection_of", connection_of)


def blocks_are_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pairing, "grain_of", lambda part, target: 1)


def a_part_of_the_whole(patch: pytest.MonkeyPatch) -> None:
    def gather(self: SendQueue, layer: int, piece: TokenRange) -> None:
        self._enqueue(layer, piece.row, piece.start, piece.stop)

    patch.setattr(SendQueue, "_gather", gather)


def a_read_that_nobody_hears_of(patch: pytest.MonkeyPatch) -> None:
    def on_pull_completed(book: Book, event: ev.PullCompleted, now: float) -> None:
        staging.on_pull_completed(book, event, now)
        book.out = [i for i in book.out if not isinstance(getattr(i, "message", None), wire.Pulled)]

    patch.setitem(core._EVENTS, ev.PullCompleted, on_pull_completed)


def a_stage_outlives_its_part(patch: pytest.MonkeyPatch) -> None:
    def emit(self: Book, instruction: do.Instruction) -> None:
        part = self.parts.get(getattr(instruction, "transfer", -1))
        pulled = isinstance(part, SourcePart) and part.pulled
        if not (isinstance(instruction, do.CancelWrites) and pulled):
            properly(self, instruction)

    properly = Book.emit
    patch.setattr(Book, "emit", emit)


def batches_pile_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery, "BATCHES", 100)
    patch.setattr(delivery, "BATCH_LEAST", 1)


def fetched_entries_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    def drop(self: SendQueue, layer: int, places: Places) -> Places:
        found = properly(self, layer, places)
        self.restore(layer, found)
        return found

    properly = SendQueue.drop
    patch.setattr(SendQueue, "drop", drop)


def kept_over_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenFlags, "absent", lambda self, layer, places: np.ones(len(places), np.bool_))


def kept_without_its_bytes(patch: pytest.MonkeyPatch) -> None:
    def keep_fetched(instruction: do.KeepFetched, *, layout: PartLayout, lease: Lease) -> None:
        mask = mask_view(memoryview(lease.memory), layout, instruction.layer)
        mask.reshape(-1)[instruction.places] = MASK_LOCAL

    patch.setattr(serving, "keep_fetched", keep_fetched)


def what_is_kept_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    def on_fetch_kept(book: Book, event: ev.FetchKept, now: float) -> None:
        part = book.parts.get(event.transfer)
        if isinstance(part, SinkPart):
            part.keeping.pop(event.fetch, None)
        on_demand.on_fetch_kept(book, event, now)

    patch.setitem(core._EVENTS, ev.FetchKept, on_fetch_kept)


# Of queue pairs: with one for all bulk, nothing comes of these.


def mask_on_another_queue_pair(patch: pytest.MonkeyPatch) -> None:
    def connection_of(self: Operation, stage: Callable[[], None]) -> int:
        others = self.end.node.world.queue_pairs
        return BULK + (self.connection - BULK + (stage == self.place_mask)) % others

    patch.setattr(Operation, "connection_of", connection_of)


def news_on_another_queue_pair(patch: pytest.MonkeyPatch) -> None:
    def connection_of(self: Operation, stage: Callable[[], None]) -> int:
        others = self.end.node.world.queue_pairs
        return BULK + (self.connection - BULK + (stage == self.notify)) % others

    patch.setattr(Operation, "connection_of", connection_of)


def completions_in_the_order_of_posting(patch: pytest.MonkeyPatch) -> None:
    """As if what completes were the oldest that its part has under way."""

    def on_write_completed(book: Book, event: ev.WriteCompleted, now: float) -> None:
        part = book.parts.get(event.transfer)
        if isinstance(part, SourcePart) and not part.ended and not part.regroups and event.error is None:
            event = dataclasses.replace(event, write=min(part.writes, default=event.write))
        delivery.on_write_completed(book, event, now)

    patch.setitem(core._EVENTS, ev.WriteCompleted, on_write_completed)


QUEUE_PAIRS = (mask_on_another_queue_pair, news_on_another_queue_pair, completions_in_the_order_of_posting)
"""Those that need several."""

PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    mask_before_data: "mask says local, but bytes",
    late_write_after_reuse: "bytes of token|nobody sent|bytes of another's memory",
    memory_not_freed: "leases were not given back|there are still grants",
    handle_not_forgotten: "there are still by_handle|KeyError",
    sends_twice: "twice|nothing disturbed",
    sends_what_is_held: "which the sink holds",
    reports_the_end_twice: "ends twice",
    ranks_run_on: "its sibling .* runs on",
    window_ignored: "bytes in flight, and another write",
    window_leaks: "nothing disturbed|there are still in flight",
    delivered_too_early: "is delivered, and row|bytes are in place",
    data_overtakes_the_answer: "nothing disturbed|WantWindows",
    strangers_are_heard: "nothing disturbed|ends twice|or another's",
    misfit_spends_the_announcement: "nothing disturbed",
    lost_sessions_are_remembered: "which is lost|that is lost|there are still",
    deadlines_pass: "past its deadline",
    a_limit_comes_forward_unseen: "something waits until",
    metadata_mask_before_data: "metadata: mask says local",
    metadata_sent_twice: "sends metadata of layer . twice",
    metadata_not_compared: "is paired with other metadata",
    delivered_without_metadata: "is delivered without metadata",
    fetch_answered_twice: "never began or which was answered",
    fetch_forgotten_with_the_session: "were never answered",
    fetch_forgotten_at_release: "were never answered",
    fetch_of_a_layer_that_is_not_computed: "landed as",
    landing_in_freed_memory: "bytes of another's memory|bytes of token|bytes are not",
    strangers_answer_fetches: "landed as",
    speculation_goes_on: "sends speculatively while",
    speculation_stays_paused: "there are still fetches in service|nothing disturbed",
    speculation_without_windows: "speculatively, and windows allowed",
    the_deadline_passes: "after the first token",
    small_shares_are_lost: "nothing disturbed",
    a_ranking_loses_what_is_pending: "tokens are said to be pending",
    a_ranking_sends_again: "twice|changed what is to be sent",
    a_ranking_makes_work_wait: "changed what is to be sent",
    tensors_masks_before_data: "mask says local, but bytes",
    tensors_masks_behind_what_is_urgent: "mask says local, but bytes",
    blocks_are_cut: "no whole blocks",
    a_part_of_the_whole: "sends a part of the whole",
    a_read_that_nobody_hears_of: "nothing disturbed|there are still",
    a_stage_outlives_its_part: "there are still",
    batches_pile_up: "batches at once",
    fetched_entries_are_sent_again: "twice",
    kept_over_what_is_held: "mask says local, but bytes|which the sink holds|bytes are in place",
    kept_without_its_bytes: "mask says local, but bytes",
    what_is_kept_is_not_counted: "nothing disturbed|there are still",
    mask_on_another_queue_pair: "mask says local, but bytes",
    news_on_another_queue_pair: "bytes are in place",
    completions_in_the_order_of_posting: "bytes in flight, and another write|there are still",
}
