"""Bugs of any transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvd.mask import IntervalSet
from kvd.transfer import core, delivery, pairing
from kvd.transfer import events as ev
from kvd.transfer.book import Book
from kvd.transfer.part import Part, SinkPart, State
from kvd.transfer.queue import SendQueue
from kvd.transfer.rendezvous import Rendezvous
from kvd.transfer.scheduler import Link
from kvd.transfer.timers import Timers
from kvd.wire import messages as wire
from tests.simulation.links import Operation
from tests.simulation.memory import Lease


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
}
