"""The report's tables, for a terminal and for a Markdown file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvd.profiling.evaluate.results import RANKINGS

REACHED = {True: "reached", False: "NOT reached", None: "not measured"}


class Table(NamedTuple):
    title: str
    heads: list[str]
    rows: list[list[str]]


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """All of them, marks last."""
    if report["recall"]:
        yield _recall(report["recall"])
    if report["divergence"]:
        yield _divergence(report["divergence"])
    for label, lengths in report["on_demand"].items():
        yield _on_demand(label, lengths)
    for label, found in report["correlation"].items():
        yield _correlation(label, found)
    rows = [[REACHED[mark["reached"]], mark["claim"], mark["figures"]] for mark in report["marks"]]
    yield Table("Marks", ["", "claim", "figures"], rows)


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The whole report."""
    settings = report["settings"]
    lines = [
        f"# Selection on {report['model']}",
        "",
        f"Made by `{report['command']}` with kvd {report['kvd']}.",
        "",
        *(f"- {name}: {domain['source']}" for name, domain in report["texts"].items()),
        f"- calibrated on {settings['calibration']}, measured on the other domains; "
        + "; ".join(f"{kind}: {_counts(found)} prompts" for kind, found in report["prompts"].items() if found),
        f"- {settings['steps']} steps behind each prompt, teacher-forced; ± is one standard error over prompts",
        "",
    ]
    for table in tables(report):
        lines += [f"## {table.title}", "", _row(table.heads), _row(["---"] + ["---:"] * (len(table.heads) - 1))]
        lines += [*(_row(row) for row in table.rows), ""]
    for name in pictures:
        lines += [f"![{name.removesuffix('.png')}]({name})", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in found.items())


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


def _divergence(divergence: Mapping[str, Any]) -> Table:
    lengths, labels = list(divergence), list(next(iter(divergence.values())))
    rows = []
    for label in labels:
        row = [label]
        for length in lengths:
            here = divergence[length].get(label)
            if here is None:
                row += ["-"] * 3
            else:
                row += [_mean(here["kl"], 4), f"{here['perplexity']:.3f}", f"{here['same_token']['mean']:.1%}"]
        rows.append(row)
    heads = [f"{length}: {what}" for length in lengths for what in ("KL", "ppl", "same")]
    title = (
        "Next tokens against the full cache: KL divergence (nats), perplexity, how often the same token is likeliest"
    )
    return Table(title, ["selection", *heads], rows)


def _on_demand(label: str, lengths: Mapping[str, Any]) -> Table:
    figures = lengths.get("all") or next(iter(lengths.values()))
    columns = [
        (unit, order, share) for unit, orders in _units(figures) for order, shares in orders.items() for share in shares
    ]
    rows = [
        [name, *(_mean(figures[unit][order][share]["ratio"][name], 3) for unit, order, share in columns)]
        for name in RANKINGS
    ]
    for name in ("prompt-aware", "prompt-aware-others", "learnt", "learnt+prompt"):
        row = [f"gap closed by {name}"]
        for unit, order, share in columns:
            closed = figures[unit][order][share]["closed"][name]["share"]
            row.append("-" if closed is None else f"{closed:.0%}")
        rows.append(row)
    heads = [f"{unit} {order} {share}" for unit, order, share in columns]
    what = f"{label}, {figures['prompts']} prompts of {', '.join(n for n in lengths if n != 'all')} tokens"
    return Table(f"On-demand ratio by unit, order and share sent: {what}", ["ranking", *heads], rows)


def _units(figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(unit, figures[unit]) for unit in ("block", "head")]


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


def _mean(found: Mapping[str, Any], digits: int) -> str:
    error = found["error"]
    return f"{found['mean']:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")
