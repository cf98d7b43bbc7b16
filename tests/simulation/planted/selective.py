"""Bugs of selective transfer: metadata, fetches, budgets, idle windows, what is kept of a fetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.errors import PeerLost
from kvd.mask import Places, TokenFlags, mask_view
from kvd.transfer import core, matching, on_demand, processes, serving
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.part import Part, SinkPart, SourcePart
from kvd.transfer.queue import ReadyTokens, SendQueue
from kvd.transfer.scheduler import Link
from kvd.transfer.work import Work
from kvd_client.spec import MASK_LOCAL, PartLayout, TokenRange
from tests.simulation.links import FetchAnswer, MetadataWrite
from tests.simulation.memory import Lease


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


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
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
    fetched_entries_are_sent_again: "twice",
    kept_over_what_is_held: "mask says local, but bytes|which the sink holds|bytes are in place",
    kept_without_its_bytes: "mask says local, but bytes",
    what_is_kept_is_not_counted: "nothing disturbed|there are still",
}
