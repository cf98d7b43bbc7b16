"""The report's tables, for a terminal and for a Markdown file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvd.profiling.evaluate import rankings
from kvd.profiling.evaluate.plan import DEPTHS
from kvd.profiling.evaluate.results import CLOSERS, RANKINGS

REACHED = {True: "reached", False: "NOT reached", None: "not measured"}


class Table(NamedTuple):
    title: str
    heads: list[str]
    rows: list[list[str]]


def tables(report: Mapping[str, Any], *, errors: bool = False) -> Iterator[Table]:
    """All of them, with standard errors or without."""
    if report["recall"]:
        yield _recall(report["recall"])
    if report["divergence"]:
        yield _divergence(report["divergence"], errors)
    for label, lengths in report["on_demand"].items():
        for unit in ("block", "head"):
            yield _on_demand(label, unit, lengths, errors)
    for label, found in report["correlation"].items():
        yield _correlation(label, found)


def marks(report: Mapping[str, Any]) -> list[str]:
    """A line for each mark."""
    return [f"{REACHED[mark['reached']]}: {mark['claim']}: {mark['figures']}" for mark in report["marks"]]


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The whole report."""
    settings, prompts = report["settings"], report["prompts"]
    unfinished = "" if report["complete"] else ", which has been stopped before its end"
    lines = [
        f"# Selection on {report['model']}",
        "",
        f"Made by `{report['command']}` with kvd {report['kvd']}{unfinished}.",
        "",
        *(f"- {name}: {domain['source']}" for name, domain in report["texts"].items()),
        f"- calibrated on {settings['calibration']}, measured on the other domains",
        f"- divergence: {_counts(prompts['text'])}; recall: {_counts(prompts['hidden'])}, each with "
        f"{len(DEPTHS)} facts, asked for one by one and all in one answer",
        f"- {settings['steps']} steps behind each prompt, teacher-forced; ± is one standard error over prompts",
        "- on-demand ratios of all steps, by order (global, causal) and share of all units sent, "
        f"{settings['blocks']} blocks a layer; early: of the first {rankings.EARLY} steps, global order; closed: the "
        "share of the gap from the profile to optimal, which knows all steps beforehand; percentages in marks: the "
        "share closed, its 95 % interval over prompts, and that of the early steps",
        "",
    ]
    lines += ["## Marks", "", *(f"- {line}" for line in marks(report)), ""]
    for table in tables(report, errors=True):
        lines += [f"## {table.title}", "", _row(table.heads), _row(["---"] + ["---:"] * (len(table.heads) - 1))]
        lines += [*(_row(row) for row in table.rows), ""]
    for name in pictures:
        lines += [f"![{name.removesuffix('.png')}]({name})", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} prompts of {length} tokens" for length, count in found.items()) or "none"


def _recall(recall: Mapping[str, Any]) -> Table:
    lengths, labels = list(recall), list(next(iter(recall.values())))
    rows = []
    for label in labels:
        row = [label]
        for length in lengths:
            here = recall[length].get(label)
            row += [_found(here, "one"), _found(here, "all"), "-" if here is None else f"{here['selected']:.3f}"]
        rows.append(row)
    heads = [f"{length}: {what}" for length in lengths for what in ("one", "all", "selected")]
    return Table("Recall: facts found, asked for one by one and all in one answer", ["selection", *heads], rows)


def _found(here: Mapping[str, Any] | None, kind: str) -> str:
    return "-" if here is None else f"{here[kind]['found']}/{here[kind]['of']}"


def _divergence(divergence: Mapping[str, Any], errors: bool) -> Table:
    lengths, labels = list(divergence), list(next(iter(divergence.values())))
    rows = []
    for label in labels:
        row = [label]
        for length in lengths:
            here = divergence[length].get(label)
            if here is None:
                row += ["-"] * 3
            else:
                row += [_mean(here["kl"], 4, errors), f"{here['perplexity']:.3f}", f"{here['same_token']['mean']:.1%}"]
        rows.append(row)
    heads = [f"{length}: {what}" for length in lengths for what in ("KL", "ppl", "same")]
    title = (
        "Next tokens against the full cache: KL divergence (nats), perplexity, how often the same token is likeliest"
    )
    return Table(title, ["selection", *heads], rows)


def _on_demand(label: str, unit: str, lengths: Mapping[str, Any], errors: bool) -> Table:
    figures = lengths.get("all") or next(iter(lengths.values()))
    orders = figures[unit]
    columns = [(order, share) for order in orders for share in orders[order]]
    early = list(orders["global"])[:2]
    rows = []
    for name in RANKINGS:
        row = [name, *(_mean(orders[order][share]["ratio"][name], 3, errors) for order, share in columns)]
        rows.append(row + [f"{orders['global'][share]['ratio'][name]['early']:.3f}" for share in early])
    for name in CLOSERS:
        shares = [orders[order][share]["closed"][name]["share"] for order, share in columns]
        shares += [orders["global"][share]["closed"][name]["early"] for share in early]
        rows.append([f"closed: {name}", *("-" if one is None else f"{one:.0%}" for one in shares)])
    heads = [f"{order} {share}" for order, share in columns] + [f"early {share}" for share in early]
    what = "layer and block" if unit == "block" else "layer, KV head and block"
    prompts = f"{figures['prompts']} prompts of {', '.join(name for name in lengths if name != 'all')} tokens"
    return Table(f"On-demand ratio with {label}, a unit per {what}, {prompts}", ["ranking", *heads], rows)


def _correlation(label: str, found: Mapping[str, Any]) -> Table:
    rows = []
    for length, pairs in found["domains"].items():
        for pair, value in pairs.items():
            rows.append([f"{pair}, {length}", _number(value["blocks"]), _number(value["coarse"])])
    for domain, pairs in found["lengths"].items():
        for pair, value in pairs.items():
            rows.append([f"{domain}, {pair.replace(' ', ' and ')}", _number(value["blocks"]), _number(value["coarse"])])
    return Table(f"Correlation of importance: {label}", ["between", "blocks", "100 blocks"], rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(found: Mapping[str, Any], digits: int, errors: bool) -> str:
    error = found["error"] if errors else None
    return f"{found['mean']:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")
