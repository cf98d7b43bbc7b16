"""Bugs of several queue pairs for bulk; with one, nothing comes of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvd.transfer import core, delivery
from kvd.transfer import events as ev
from kvd.transfer.book import Book
from kvd.transfer.part import SourcePart
from tests.simulation.links import BULK, Operation


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


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    mask_on_another_queue_pair: "mask says local, but bytes",
    news_on_another_queue_pair: "bytes are in place",
    completions_in_the_order_of_posting: "bytes in flight, and another write|there are still",
}
