"""Thousands of worlds in which nothing may go wrong, and planted bugs that the worlds must find."""

from __future__ import annotations

import re
import time
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
from kvd.wire import messages as wire

from .links import Operation, Violation
from .memory import Lease
from .world import World, tell

CHUNKS, SEEDS = 10, 200
"""How many tests, and seeds in each."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_goes_wrong(chunk: int) -> None:
    began, steps = time.perf_counter(), 0
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        world = World(seed)
        try:
            world.run()
        except Exception:  # whatever it is, the story says it
            pytest.fail(tell(seed) or f"seed {seed} failed once and not again", pytrace=False)
        steps += world.steps
    print(f"{SEEDS} seeds, {steps} steps, {time.perf_counter() - began:.1f} s")


def test_the_worlds_have_what_they_are_for() -> None:
    """Every way to meet, held tokens, misfits and rivals come about undisturbed, and every kind of fault happens."""
    undisturbed: set[str] = set()
    faults: set[str] = set()
    codes: set[str] = set()
    for seed in range(150):
        world = World(seed)
        world.before_closing = lambda world=world: faults.update(plan.disturbed for plan in world.plans)
        quiet = [plan for plan in world.plans if not plan.disturbed]
        world.run()
        codes |= {code for plan in world.plans for codes in plan.codes.values() for code in codes}
        for plan in quiet if world.calm else []:
            undisturbed |= {plan.way, f"{plan.ranks} ranks", plan.misfit, "rival" * bool(plan.rival)}
            undisturbed.add("held" * any(r.start < r.stop for r in plan.held))
    assert undisturbed >= {"request", "handle", "announce", "both", "1 ranks", "2 ranks", "3 ranks", "rival", "held"}
    assert undisturbed >= {"model", "lengths", "ranks", "head_start"}
    assert faults >= {"abort", "release", "kill", "reject", "session broke", "node crashed", "node drains", ""}
    assert codes >= {"OK", "ABORTED", "PROCESS_LOST", "PEER_LOST", "PEER_UNREACHABLE", "NOT_FOUND", "SHUTTING_DOWN"}
    assert codes >= {"DEADLINE_EXCEEDED", "RENDEZVOUS_TIMEOUT", "ALREADY_EXISTS", "FINGERPRINT_MISMATCH"}


def test_a_seed_gives_the_same_run_again() -> None:
    stories = []
    for _ in range(2):
        story: list[tuple[float, object, str, object]] = []
        World(7, story).run()  # type: ignore[arg-type]
        stories.append([(time, what, re.sub("0x[0-9a-f]+", "", repr(thing))) for time, _, what, thing in story])
    assert len(stories[0]) > 100
    assert stories[0] == stories[1]


# --- planted bugs -----------------------------------------------------------------------------------------------------


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
    patch.setattr(Link, "completed", lambda self, write, now: self.writes.pop(write, (0, "")))


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
    def expiry(self: Book, part: Part) -> float:
        return properly(self, part) + 1.0

    properly = Book.expiry
    patch.setattr(Book, "expiry", expiry)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    mask_before_data: "mask says local, but bytes",
    late_write_after_reuse: "bytes of token|nobody sent",
    memory_not_freed: "leases were not given back|there are still grants",
    handle_not_forgotten: "there are still by_handle",
    sends_twice: "twice",
    sends_what_is_held: "which the sink holds",
    reports_the_end_twice: "ends twice",
    ranks_run_on: "its sibling .* runs on",
    window_ignored: "bytes in flight, and another write",
    window_leaks: "nothing disturbed request|there are still in flight",
    delivered_too_early: "is delivered, and row|bytes are in place",
    data_overtakes_the_answer: "nothing disturbed request",
    strangers_are_heard: "nothing disturbed request|ends twice",
    misfit_spends_the_announcement: "nothing disturbed request",
    lost_sessions_are_remembered: "which is lost|that is lost|there are still",
    deadlines_pass: "past its deadline",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_worlds_find(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(1000):
        try:
            World(seed).run()
        except Violation as violation:
            found = str(violation)
            break
    else:
        pytest.fail("not found within 1000 seeds")
    print(f"seed {seed}: {found}")
    assert re.search(PLANTED[plant], found)


def test_a_failure_is_told_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    sends_what_is_held(monkeypatch)
    story = next(filter(None, (tell(seed) for seed in range(100))))
    assert re.search(r"^seed \d+: .*which the sink holds", story)
    assert re.search(r"python -m tests\.simulation\.run --seed \d+", story)
    for step in ("PartOpened(", "SendOpen(", "BindSink(", "WriteTokens("):
        assert step in story
