"""What the evaluation claims of its own figures."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.profiling.evaluate import rankings
from kvd.profiling.evaluate.marks import marks
from kvd.profiling.evaluate.plan import DEPTHS, Place, Settings
from kvd.profiling.evaluate.results import CLOSERS, RANKINGS, Prompt, Results, correlations, on_demand, recalls
from tests.unit.test_evaluate_rankings import recorded


def cell(one: str, every: str, selected: float = 0.2) -> dict[str, Any]:
    """Facts found by depth, as ``xx.xx``."""
    found = {kind: [c == "x" for c in text] for kind, text in (("one", one), ("all", every))}
    return {"selected": selected, **found}


HIDDEN = {
    (1024, "full"): [cell("xxxxx", "xxxx.", 1.0), cell("xxxxx", "xxxxx", 1.0)],
    (1024, "exact@0.2"): [cell("xxxx.", "xxxx."), cell("xxxxx", "xxxxx")],
    (1024, "hata@0.2"): [cell("xxxx.", "xxxxx"), cell("xxxxx", "xxxxx")],
    (1024, "infinigen@0.2"): [cell("xxxx.", ".xxx."), cell("xxxxx", "xxxxx", 0.1)],
    (1024, "streaming@0.2"): [cell("....x", "....."), cell("....x", "....x")],
    (2048, "full"): [cell("xxxxx", "xxxxx", 1.0)],
    (2048, "hata@0.2"): [cell("xxxxx", "xxxxx")],
}


def test_recall_is_counted_by_depth_and_against_the_full_cache() -> None:
    found = recalls(Results({}, HIDDEN, {}))
    assert list(found) == ["1024", "2048"]
    one, every = (found["1024"]["infinigen@0.2"][kind] for kind in ("one", "all"))
    assert (one["found"], one["of"], one["lost"], one["gained"], one["exact_too"]) == (9, 10, 1, 0, 1)
    assert (every["found"], every["of"], every["lost"], every["gained"], every["exact_too"]) == (8, 10, 1, 0, 0)
    assert one["by_depth"] == dict(zip(map(str, DEPTHS), (2, 2, 2, 2, 1), strict=True))
    assert found["1024"]["infinigen@0.2"]["selected"] == pytest.approx(0.15)
    assert found["1024"]["hata@0.2"]["all"]["gained"] == 1


def test_recall_marks_tell_what_is_kept_from_what_is_lost() -> None:
    found = {mark.claim: mark for mark in marks(recalls(Results({}, HIDDEN, {})), {})}
    kept = found["recall with hata@0.2 equals the full cache's"]
    assert kept.reached  # one lost, one gained
    assert "29 of 30 facts found, 29 with the full cache: 1 lost, 1 of them by exact" in kept.figures
    lost = found["recall with infinigen@0.2 equals the full cache's"]
    assert lost.reached is False
    assert "2 lost, 1 of them by exact selection of that share too, 0 gained" in lost.figures
    assert "15% of the prompt selected" in lost.figures
    beside = found["recall with infinigen@0.2 equals exact selection's"]
    assert beside.reached is False
    assert beside.figures == "1 lost that exact selection of that share finds, 0 found that it loses"
    assert "recall with hata@0.2 equals exact selection's" not in found, "exact selection was not measured at 2,048"
    assert found["recall with streaming@0.2 does not"].reached
    assert found["recall with infinigen@0.1 equals the full cache's"].reached is None


def test_what_exact_selection_loses_too_is_told_apart() -> None:
    hidden = HIDDEN | {(1024, "infinigen@0.2"): [cell("xxxx.", "xxxx."), cell("xxxxx", "xxxxx")]}
    found = {mark.claim: mark for mark in marks(recalls(Results({}, hidden, {})), {})}
    assert found["recall with infinigen@0.2 equals the full cache's"].reached is False
    beside = found["recall with infinigen@0.2 equals exact selection's"]
    assert beside.reached
    assert beside.figures == "0 lost that exact selection of that share finds, 0 found that it loses"


def test_beside_exact_selection_both_sides_are_counted() -> None:
    hidden = HIDDEN | {(1024, "infinigen@0.2"): [cell("xxxxx", "xxxx."), cell("xxxx.", "xxxxx")]}
    found = {mark.claim: mark for mark in marks(recalls(Results({}, hidden, {})), {})}
    assert found["recall with infinigen@0.2 equals the full cache's"].reached is False
    beside = found["recall with infinigen@0.2 equals exact selection's"]
    assert beside.reached
    assert beside.figures == "1 lost that exact selection of that share finds, 1 found that it loses"


def test_a_loss_by_chance_is_not_told_from_none() -> None:
    hidden = HIDDEN | {(1024, "streaming@0.2"): [cell("xxxx.", "xxxx."), cell("xxxxx", "xxxxx")]}
    found = {mark.claim: mark for mark in marks(recalls(Results({}, hidden, {})), {})}
    assert found["recall with streaming@0.2 does not"].reached is False


def prompts() -> list[Prompt]:
    places = [Place(number, 23, name) for name in ("code", "prose", "talk") for number in range(2)]
    return [Prompt(place, rankings.Counts.of(recorded(seed), 23)) for seed, place in enumerate(places)]


def test_gaps_are_those_of_the_means() -> None:
    results = Results({}, {}, {"exact@0.3": prompts()})
    found = on_demand(results, Settings(), lambda *_: None)["exact@0.3"]
    assert list(found) == ["23"]
    figures = found["23"]
    assert figures["prompts"] == 4  # not those of the calibration domain
    for order in rankings.ORDERS:
        here, blocks = figures["head"][order]["0.5"], figures["block"][order]["0.5"]["ratio"]
        assert list(here["ratio"]) == list(RANKINGS)
        for name, base in CLOSERS.items():
            gap = blocks[base]["mean"] - blocks["optimal"]["mean"]
            expected = (blocks[base]["mean"] - here["ratio"][name]["mean"]) / gap
            assert here["closed"][name]["share"] == pytest.approx(expected, abs=1e-3)
            low, high = here["closed"][name]["interval"]
            assert low <= here["closed"][name]["share"] <= high
    found_marks = [mark for mark in marks({}, {"exact@0.3": found}) if mark.claim.startswith("exact@0.3")]
    assert len(found_marks) == 3
    # What is random has no pattern that a profile or query could know, and a quarter of 5 layers is layers 0 and 1.
    assert not any(mark.reached for mark in found_marks)


def test_correlation_is_one_with_itself_and_none_with_chance() -> None:
    same = [Prompt(Place(0, 23, name), rankings.Counts.of(recorded(1), 23)) for name in ("a", "b")]
    found = correlations(Results({}, {}, {"exact@0.3": [*same, Prompt(Place(0, 23, "c"), prompts()[3].counts)]}))
    pairs = found["exact@0.3"]["domains"]["23"]
    assert pairs["a b"]["blocks"] == pytest.approx(1.0)
    assert abs(pairs["a c"]["blocks"]) < 0.5
    assert found["exact@0.3"]["lengths"] == {"a": {}, "b": {}, "c": {}}
