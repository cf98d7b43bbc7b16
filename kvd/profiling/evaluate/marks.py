"""What the evaluation has to show, reached or not, with the figures that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kvd.profiling.evaluate.plan import FULL
from kvd.profiling.evaluate.rankings import EARLY
from kvd.profiling.evaluate.results import CLOSERS
from kvd.profiling.evaluate.statistics import no_worse

KEEPS = ("infinigen@0.2", "infinigen@0.1", "hata@0.2")
"""Selections whose recall equals the full cache's."""
LOSES = ("streaming@0.2",)
"""Selections whose recall does not, which the evaluation must be able to tell."""
SURE = 0.05
"""A loss that is less likely than this by chance is told from none."""
CLOSES = (
    # unit, order, least share of the gap closed
    ("block", "global", 0.60),
    ("block", "causal", 0.50),
    ("head", "global", 0.95),
)
AWARE = "prompt-aware"
"""Held to that, with half and with a quarter sent."""
SENT = ("0.5", "0.25")


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """One claim."""

    claim: str
    reached: bool | None
    """None: not measured."""
    figures: str

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def marks(recall: Mapping[str, Any], on_demand: Mapping[str, Any]) -> list[Mark]:
    """All of them, from the report's parts."""
    return [*_recall_marks(recall), *_gap_marks(on_demand)]


def _recall_marks(recall: Mapping[str, Any]) -> Iterator[Mark]:
    for labels, claim in ((KEEPS, "recall with {} equals the full cache's"), (LOSES, "recall with {} does not")):
        for label in labels:
            sums = _recall(recall, label)
            if sums is None:
                yield Mark(claim.format(label), None, "not measured")
                continue
            chance = no_worse(sums["lost"], sums["gained"])
            reached = sums["lost"] <= sums["gained"] if labels is KEEPS else chance < SURE
            too = f", {sums['exact_too']} of them by exact selection of that share too" if sums["exact_too"] else ""
            found = f"{sums['found']} of {sums['of']} facts found, {sums['full']} with the full cache"
            changed = f"{sums['lost']} lost{too}, {sums['gained']} gained (one-sided exact McNemar p = {chance:.2g})"
            figures = f"{found}: {changed}; {_selected(recall, label)} of the prompt selected"
            yield Mark(claim.format(label), reached, figures)
            if labels is KEEPS and sums["lost"] and sums["judged"]:
                yield _beside_exact(label, sums)


def _beside_exact(label: str, sums: Mapping[str, int]) -> Mark:
    """What is lost by selecting so little, however well, is no fault of the algorithm that selects."""
    figures = f"{sums['worse']} lost that exact selection of that share finds, {sums['better']} found that it loses"
    return Mark(f"recall with {label} equals exact selection's", sums["worse"] <= sums["better"], figures)


def _recall(recall: Mapping[str, Any], label: str) -> dict[str, int] | None:
    """All lengths and kinds of question together."""
    names = ("found", "of", "lost", "gained", "exact_too", "worse", "better")
    found = dict.fromkeys((*names, "full"), 0) | {"judged": 1}
    for by_label in recall.values():
        if label not in by_label:
            continue
        for kind in ("one", "all"):
            here = by_label[label][kind]
            for name in names:
                found[name] += here[name] or 0
            found["judged"] &= here["exact_too"] is not None
            found["full"] += by_label[FULL][kind]["found"]
    return found if found["of"] else None


def _selected(recall: Mapping[str, Any], label: str) -> str:
    shares = [by_label[label]["selected"] for by_label in recall.values() if label in by_label]
    return f"{sum(shares) / len(shares):.0%}"


def _gap_marks(on_demand: Mapping[str, Any]) -> Iterator[Mark]:
    for label, lengths in on_demand.items():
        figures = lengths.get("all") or next(iter(lengths.values()))
        for unit, order, least in CLOSES:
            values, texts = [], []
            for share in SENT:
                here = figures[unit][order][share]
                base = CLOSERS[AWARE]
                closed, ratio = here["closed"][AWARE], here["ratio"]
                optimal = figures["block"][order][share]["ratio"]["optimal"]["mean"]
                start = figures["block"][order][share]["ratio"][base]["mean"]
                values.append(closed["share"])
                between = ", {:.0%} to {:.0%}".format(*closed["interval"]) if closed["interval"] else ""
                early = "" if closed["early"] is None else f", {closed['early']:.0%} in the first {EARLY} steps"
                part = "-" if closed["share"] is None else f"{closed['share']:.0%}"
                texts.append(
                    f"{share} sent: {part}{between}{early} ({start:.3f} to {ratio[AWARE]['mean']:.3f} of {optimal:.3f})"
                )
            yield Mark(
                f"{label}: {AWARE} closes {least:.0%} of the gap from profile to optimal, "
                f"{order} order, a unit per {'layer, KV head and block' if unit == 'head' else 'layer and block'}",
                None if None in values else all(value >= least for value in values),
                "; ".join(texts),
            )
