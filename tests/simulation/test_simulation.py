"""Thousands of worlds in which nothing may go wrong, and planted bugs that the worlds must find."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvd_client.layouts import UNITS
from kvd_client.protocol import MODES

from .links import Violation
from .planted import PLANTED, queue_pairs
from .planted.transfers import sends_what_is_held
from .story import tell
from .world import World

SEEDS = 300
"""Ten thousand are run by ``python -m tests.simulation.run --count 10000``."""


def test_the_worlds_have_what_they_are_for() -> None:
    """Nothing goes wrong; every way to meet, held tokens, misfits and rivals come about undisturbed, and every kind of
    fault happens."""
    undisturbed: set[str] = set()
    answers: set[str] = set()
    paths: set[str] = set()
    modes: set[str] = set()
    tensors: set[str] = set()
    faults: set[str] = set()
    codes: set[str] = set()
    queue_pairs: set[int] = set()
    for seed in range(SEEDS):
        world = World(seed)
        queue_pairs.add(world.queue_pairs)
        world.before_closing = lambda world=world: faults.update(plan.disturbed for plan in world.plans)
        quiet = [plan for plan in world.plans if not plan.disturbed]
        try:
            world.run()
        except Exception:  # whatever it is, the story says it
            pytest.fail(tell(seed) or f"seed {seed} failed once and not again", pytrace=False)
        for plan in world.plans:
            answers |= set(plan.answers)
            paths |= {path for path, nbytes in plan.paths.items() if nbytes}
        codes |= {code for plan in world.plans for codes in plan.codes.values() for code in codes}
        for plan in quiet if world.calm else []:
            undisturbed |= {plan.way, f"{plan.ranks} ranks", plan.misfit, "rival" * bool(plan.rival)}
            undisturbed.add("held" * any(r.start < r.stop for r in plan.held))
            modes |= {plan.sink_mode or plan.source_mode}
            if plan.sink_placement is not None:
                tensors |= {f"{plan.unit} {'pull' if plan.pull else 'push'}", "held" * bool(plan.held)}
            tensors |= {"from a device" * (plan.source_placement is not None)}
    assert undisturbed >= {"request", "handle", "announce", "both", "1 ranks", "2 ranks", "3 ranks", "rival", "held"}
    assert undisturbed >= {"model", "lengths", "ranks", "head_start", "metadata", "mode"}
    assert modes >= {"", *MODES}
    assert tensors >= {f"{unit} {way}" for unit in ("", *UNITS) for way in ("push", "pull")} | {"held", "from a device"}
    assert paths >= {"proactive", "speculative", "on_demand", "metadata", "windows", "fetches"}
    assert answers >= {"OK", "INVALID_ARGUMENT", "LEASE_EXPIRED", "ABORTED", "PROCESS_LOST", "PEER_LOST"}
    assert faults >= {"abort", "release", "kill", "reject", "session broke", "node crashed", "node drains", ""}
    assert faults >= {"nonsense"}
    assert codes >= {"OK", "ABORTED", "PROCESS_LOST", "PEER_LOST", "PEER_UNREACHABLE", "NOT_FOUND", "SHUTTING_DOWN"}
    assert queue_pairs >= {1, 2}
    assert codes >= {"DEADLINE_EXCEEDED", "RENDEZVOUS_TIMEOUT", "ALREADY_EXISTS", "FINGERPRINT_MISMATCH"}


def test_a_seed_gives_the_same_run_again() -> None:
    stories = []
    for _ in range(2):
        story: list[tuple[float, object, str, object]] = []
        World(10, story).run()  # type: ignore[arg-type]
        stories.append([(time, what, re.sub("0x[0-9a-f]+", "", repr(thing))) for time, _, what, thing in story])
    assert len(stories[0]) > 100
    assert stories[0] == stories[1]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_worlds_find(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(1000):
        try:
            World(seed).run()
        except (Violation, KeyError) as violation:  # a core that stumbles over its own leavings is found out, too
            found = f"{type(violation).__name__}: {violation}"
            break
    else:
        pytest.fail("not found within 1000 seeds")
    print(f"seed {seed}: {found}")
    assert re.search(PLANTED[plant], found)


@pytest.mark.parametrize("plant", queue_pairs.PLANTED, ids=lambda plant: plant.__name__)
def test_one_queue_pair_hides(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What only queue pairs that overtake each other show."""
    plant(monkeypatch)
    for seed in range(40):
        world = World(seed)
        world.queue_pairs = 1
        world.run()


def test_a_failure_is_told_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    sends_what_is_held(monkeypatch)
    # One of tokens as they lie, not of tensors in a device's layout.
    story = next(filter(lambda told: "WriteTokens(" in told, filter(None, map(tell, range(100)))))
    assert re.search(r"^seed \d+: .*which the sink holds", story)
    assert re.search(r"python -m tests\.simulation\.run --seed \d+", story)
    for step in ("PartOpened(", "SendOpen(", "BindSink(", "WriteTokens("):
        assert step in story
