"""Bugs of tensors in a layout of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.transfer import core, delivery, pairing, staging
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.part import SourcePart
from kvd.transfer.queue import SendQueue
from kvd.wire import messages as wire
from kvd_client.spec import TokenRange
from tests.simulation.links import URGENT
from tests.simulation.tensors import Batch


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


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    tensors_masks_before_data: "mask says local, but bytes",
    tensors_masks_behind_what_is_urgent: "mask says local, but bytes",
    blocks_are_cut: "no whole blocks",
    a_part_of_the_whole: "sends a part of the whole",
    a_read_that_nobody_hears_of: "nothing disturbed|there are still",
    a_stage_outlives_its_part: "there are still",
    batches_pile_up: "batches at once",
}
