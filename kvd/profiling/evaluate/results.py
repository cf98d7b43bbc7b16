"""From finished cells to figures: means over prompts, and how sure they are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.profiling import recorded as recordings
from kvd.profiling.compare import mean, pearson
from kvd.profiling.evaluate import rankings
from kvd.profiling.evaluate.plan import DEPTHS, FULL, Place, Settings, Variant, Work
from kvd.profiling.evaluate.statistics import Mean, interval
from kvd.profiling.evaluate.store import Store

RANKINGS = (
    *("sequential", "random", "streaming", "profile", "prompt-aware", "learnt", "learnt+prompt"),
    *("profile-others", "prompt-aware-others", "optimal"),
)
"""``profile`` is the calibration domain's, ``profile-others`` that of all domains but the tested one; ``prompt-aware``
is F on top of them. ``learnt`` began as ``profile`` and has seen the tested domain's other prompts."""
CLOSERS = {
    "prompt-aware": "profile",
    "prompt-aware-others": "profile-others",
    "learnt": "profile",
    "learnt+prompt": "profile",
}
"""Rankings that close a gap, and the one where it begins."""
HALF_LIFE = 4.0
"""Of ``learnt``, in prompts."""
COARSE = 100
"""Blocks of the smoothed correlation."""

Told = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that was measured, by what it was measured on."""

    text: dict[tuple[int, str], list[dict[str, Any]]]
    """Cells by (length, label), a row a prompt, the domains in turn."""
    hidden: dict[tuple[int, str], list[dict[str, Any]]]
    recorded: dict[str, list[Prompt]]
    """By label."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The selections of one prompt."""

    place: Place
    counts: rankings.Counts


def collect(
    store: Store, work: Work, settings: Settings, parameters: Callable[[Variant], Mapping[str, Any]], blocks: int
) -> Results:
    """What is finished. So that means compare, a prompt counts only if it ran with every selection that any prompt of
    its kind and length ran with."""
    cells: dict[tuple[str, int], list[tuple[Place, dict[str, Any]]]] = {}
    recorded: dict[str, list[Prompt]] = {}
    for place, kind, variants in work.cells(settings):
        found = {one.label: store.cell(place, kind, one.label, parameters(one)) for one in variants}
        if kind == "text":
            for one in work.recorded:
                path = store.recorded(place, one.label)
                if found[one.label] is not None and path.is_file():
                    counts = rankings.Counts.of(recordings.read(path), blocks)
                    recorded.setdefault(one.label, []).append(Prompt(place, counts))
        if FULL in found:
            done = {label: cell for label, cell in found.items() if cell is not None}
            cells.setdefault((kind, place.length), []).append((place, done))
    return Results(_whole(cells, "text"), _whole(cells, "hidden"), recorded)


def _whole(
    cells: Mapping[tuple[str, int], Sequence[tuple[Place, dict[str, Any]]]], kind: str
) -> dict[tuple[int, str], list[dict[str, Any]]]:
    whole: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for (own, length), prompts in cells.items():
        if own != kind:
            continue
        labels = max((list(done) for _, done in prompts), key=len)
        for place, done in prompts:
            if done.keys() >= set(labels):
                for label in labels:
                    whole.setdefault((length, label), []).append({"place": place.key, **done[label]})
    return whole


def divergences(results: Results) -> dict[str, dict[str, Any]]:
    """By length and label: how far the next tokens' distribution moved."""
    found: dict[str, dict[str, Any]] = {}
    for (length, label), cells in results.text.items():
        full = results.text[length, FULL]
        nll = [float(np.mean(cell["nll"])) for cell in cells]
        base = [float(np.mean(cell["nll"])) for cell in full]
        found.setdefault(str(length), {})[label] = {
            "kl": Mean.of([float(np.mean(cell["kl"])) for cell in cells]).fields(),
            "perplexity": round(math.exp(sum(nll) / len(nll)), 4),
            "nll_added": Mean.of([mine - its for mine, its in zip(nll, base, strict=True)]).fields(),
            "same_token": Mean.of([float(np.mean(cell["same"])) for cell in cells]).fields(),
            "selected": round(float(np.mean([cell["selected"] for cell in cells])), 4),
        }
    return found


def recalls(results: Results) -> dict[str, dict[str, Any]]:
    """By length and label: facts found, by themselves and all in one answer, by depth; against the full cache's answers
    ``lost`` and ``gained``, and ``exact_too``, how many of the lost ones exact selection of the same share loses;
    ``worse`` and ``better``, those that it finds and this one does not, and the other way round."""
    found: dict[str, dict[str, Any]] = {}
    for (length, label), cells in results.hidden.items():
        here: dict[str, Any] = {"selected": round(float(np.mean([cell["selected"] for cell in cells])), 4)}
        for kind in ("one", "all"):
            mine = np.array([cell[kind] for cell in cells], bool)
            full = np.array([cell[kind] for cell in results.hidden[length, FULL]], bool)
            exact = results.hidden.get((length, f"exact@{label.rpartition('@')[2]}"))
            oracle = None if exact is None else np.array([cell[kind] for cell in exact], bool)
            here[kind] = {
                "found": int(mine.sum()),
                "of": int(mine.size),
                "by_depth": dict(zip(map(str, DEPTHS), mine.sum(axis=0).tolist(), strict=True)),
                "lost": int((full & ~mine).sum()),
                "gained": int((mine & ~full).sum()),
                "exact_too": None if oracle is None else int((full & ~mine & ~oracle).sum()),
                "worse": None if oracle is None else int((oracle & ~mine).sum()),
                "better": None if oracle is None else int((mine & ~oracle).sum()),
            }
        found.setdefault(str(length), {})[label] = here
    return found


def on_demand(results: Results, settings: Settings, told: Told) -> dict[str, Any]:
    """By label, length (and ``all``), unit, order and share sent: the mean on-demand ratio of each ranking over the
    prompts of the domains that were not calibrated on, and the share of the gap that prompt-awareness closes."""
    found: dict[str, Any] = {}
    for label, prompts in results.recorded.items():
        tested = [one for one in prompts if one.place.domain != settings.calibration]
        rows: list[tuple[int, rankings.Ratios]] = []
        for done, one in enumerate(tested):
            told(f"orders of sending, {label}", done, len(tested))
            known = _known(one, prompts, settings)
            if known is not None:
                rows.append((one.place.length, rankings.ratios(one.counts, known)))
        lengths = sorted({length for length, _ in rows})
        groups = {str(length): [row for own, row in rows if own == length] for length in lengths}
        if len(lengths) > 1:
            groups["all"] = [row for _, row in rows]
        if rows:
            found[label] = {name: _ratios_of(group) for name, group in groups.items()}
    return found


def _known(one: Prompt, prompts: Sequence[Prompt], settings: Settings) -> dict[str, rankings.Values] | None:
    """What each ranking says of a prompt; None where the calibration domain has no prompt of its length."""
    same = [other for other in prompts if other.place.length == one.place.length]
    calibration = [other.counts for other in same if other.place.domain == settings.calibration]
    others = [other.counts for other in same if other.place.domain != one.place.domain]
    own = [other.counts for other in same if other.place.domain == one.place.domain and other is not one]
    if not calibration:
        return None
    profile, pooled = rankings.profile(calibration), rankings.profile(others)
    learnt = rankings.learnt(profile, own, HALF_LIFE)
    aware = functools.partial(rankings.prompt_aware, counts=one.counts)
    return {
        "sequential": rankings.sequential(one.counts),
        "random": rankings.at_random(one.counts, settings.seed + one.place.number),
        "streaming": rankings.streaming(one.counts),
        "profile": profile,
        "prompt-aware": aware(profile),
        "learnt": learnt,
        "learnt+prompt": aware(learnt),
        "profile-others": pooled,
        "prompt-aware-others": aware(pooled),
    }


def _ratios_of(rows: Sequence[rankings.Ratios]) -> dict[str, Any]:
    found: dict[str, Any] = {"prompts": len(rows)}
    for unit in rankings.UNITS:
        for order in rankings.ORDERS:
            for share in rankings.SENT:
                here: dict[str, Any] = {}
                for name in RANKINGS:
                    every, early, first = zip(*(row[unit, order, share, name] for row in rows), strict=True)
                    here[name] = Mean.of(every).fields()
                    here[name] |= {"early": round(float(np.mean(early)), 6), "first": round(float(np.mean(first)), 6)}
                place = found.setdefault(unit, {}).setdefault(order, {})
                place[f"{share:g}"] = {"ratio": here, "closed": _closed(rows, unit, order, share)}
    return found


def _closed(rows: Sequence[rankings.Ratios], unit: str, order: str, share: float) -> dict[str, Any]:
    """Of the gap from a profile to the optimal order *of blocks*, what each way closes in all steps and in early ones:
    units of blocks and heads are measured by the gap that blocks have. Optimal is what knows all steps."""
    found: dict[str, Any] = {}
    for name, base in CLOSERS.items():
        every, early = (
            [
                (
                    row["block", order, share, base][at],
                    row[unit, order, share, name][at],
                    row["block", order, share, "optimal"][at],
                )
                for row in rows
            ]
            for at in (0, 1)
        )
        shares = [rankings.closed(*np.mean(triples, axis=0).tolist()) for triples in (every, early)]
        found[name] = {
            "share": None if shares[0] is None else round(shares[0], 4),
            "early": None if shares[1] is None else round(shares[1], 4),
            "interval": interval(every, _gap) if len(rows) > 1 else [],
        }
    return found


def _gap(means: Any) -> float:
    value = rankings.closed(*(float(one) for one in means))
    return math.nan if value is None else value


def correlations(results: Results) -> dict[str, Any]:
    """By label: Pearson's correlation of block importance between domains (by length) and between lengths (by domain),
    mean over the layers from 2 on; of blocks as they are, and of :data:`COARSE` ones."""
    found: dict[str, Any] = {}
    for label, prompts in results.recorded.items():
        groups: dict[tuple[str, int], list[rankings.Counts]] = {}
        for one in prompts:
            groups.setdefault((one.place.domain, one.place.length), []).append(one.counts)
        matrices = {key: rankings.by_block(rankings.profile(members)) for key, members in groups.items()}
        domains = list(dict.fromkeys(domain for domain, _ in matrices))
        lengths = list(dict.fromkeys(length for _, length in matrices))
        found[label] = {
            "prompts": {f"{domain} {length}": len(members) for (domain, length), members in groups.items()},
            "domains": {
                str(length): _pairs({name: matrices[name, length] for name in domains if (name, length) in matrices})
                for length in lengths
            },
            "lengths": {
                name: _pairs({str(n): matrices[name, n] for n in sorted(lengths) if (name, n) in matrices})
                for name in domains
            },
        }
    return found


def _pairs(matrices: Mapping[str, rankings.Values]) -> dict[str, dict[str, float | None]]:
    names = list(matrices)
    return {
        f"{one} {other}": correlation(matrices[one], matrices[other])
        for at, one in enumerate(names)
        for other in names[at + 1 :]
    }


def correlation(one: rankings.Values, other: rankings.Values) -> dict[str, float | None]:
    """Of two importance matrices (layers, blocks), mean over layers: ``blocks``, over as many blocks as the smaller
    has, and ``coarse``, over :data:`COARSE`."""
    most = min(one.shape[1], other.shape[1])
    return {
        name: _correlation(one, other, min(blocks, most)) for name, blocks in (("blocks", most), ("coarse", COARSE))
    }


def _correlation(one: rankings.Values, other: rankings.Values, blocks: int) -> float | None:
    from kvd.importance.matrix import ImportanceMatrix

    pair = [ImportanceMatrix(each).resampled(blocks).values[ALWAYS_LAYERS:] for each in (one, other)]
    value = mean(pearson(x, y) for x, y in zip(*pair, strict=True))
    return None if value is None else round(value, 4)


def counted(results: Results) -> dict[str, Any]:
    """How many prompts everything was measured on."""

    def by_length(cells: Iterable[tuple[int, str]], of: Mapping[tuple[int, str], Sequence[Any]]) -> dict[str, int]:
        return {str(length): len(of[length, label]) for length, label in cells if label == FULL}

    return {
        "text": by_length(results.text, results.text),
        "hidden": by_length(results.hidden, results.hidden),
        "recorded": {label: len(prompts) for label, prompts in results.recorded.items()},
    }
