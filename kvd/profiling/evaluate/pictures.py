"""The report as pictures. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from kvd.errors import InvalidArgument
from kvd.profiling.evaluate.plan import DEPTHS, FULL, Variant
from kvd.profiling.evaluate.results import RANKINGS

DPI = 90


def pictures(report: Mapping[str, Any]) -> dict[str, bytes]:
    """PNG files by name. Raises :class:`InvalidArgument` without matplotlib."""
    found = {}
    if report["recall"]:
        found["recall.png"] = _recall(report["recall"])
    if report["divergence"]:
        found["divergence.png"] = _divergence(report["divergence"])
    if report["on_demand"]:
        found["on_demand.png"] = _on_demand(report["on_demand"])
    if any(each["domains"] for each in report["correlation"].values()):
        found["correlation.png"] = _correlation(report["correlation"])
    return found


def _figure(columns: int, rows: int, width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument(
            "pictures need matplotlib, which this Python lacks: pip install 'kvd-transport[plot]'",
            missing=["matplotlib"],
        ) from None
    figure = Figure(figsize=(1.5 + width * columns, 0.8 + height * rows), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _recall(recall: Mapping[str, Any]) -> bytes:
    """Selections against depths, a panel for each length and kind of question."""
    labels = list(next(iter(recall.values())))
    figure, panels = _figure(2 * len(recall), 1, 1.9, 0.24 * len(labels))
    image, empty = None, [float("nan")] * len(DEPTHS)
    for at, (length, by_label) in enumerate(recall.items()):
        for kind, name in enumerate(("one", "all")):
            panel = panels[0, 2 * at + kind]
            shares = [_by_depth(by_label[label][name]) if label in by_label else empty for label in labels]
            image = panel.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            panel.set_xticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS], fontsize="x-small")
            first = not at and not kind
            panel.set_yticks(range(len(labels)), labels if first else [""] * len(labels), fontsize="x-small")
            panel.set_title(f"{length} tokens, {'one by one' if name == 'one' else 'all at once'}", fontsize="small")
    figure.colorbar(image, ax=panels.ravel().tolist(), label="facts found")
    figure.supxlabel("depth", fontsize="small")
    return _png(figure)


def _by_depth(cell: Mapping[str, Any]) -> list[float]:
    each = cell["of"] / len(DEPTHS)
    return [cell["by_depth"][str(depth)] / each for depth in DEPTHS]


def _divergence(divergence: Mapping[str, Any]) -> bytes:
    """KL divergence against the share that was selected, a line for each selector, a panel for each length."""
    figure, panels = _figure(len(divergence), 1, 3.2, 3.0)
    labels = {label for by_label in divergence.values() for label in by_label if label != FULL}
    names = sorted({Variant.parse(label).name for label in labels})
    # Ten colours, and the next ten names have them with other marks and lines.
    looks = {name: {"color": f"C{at}", "fmt": ("o-", "s--", "^:")[at // 10 % 3]} for at, name in enumerate(names)}
    most = max(by_label[label]["selected"] for by_label in divergence.values() for label in by_label if label != FULL)
    for at, (panel, (length, by_label)) in enumerate(zip(panels[0], divergence.items(), strict=True)):
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for label, cell in by_label.items():
            if label != FULL:
                point = cell["selected"], cell["kl"]["mean"], cell["kl"]["error"] or 0.0
                lines.setdefault(Variant.parse(label).name, []).append(point)
        for name, points in sorted(lines.items()):
            x, y, error = zip(*sorted(points), strict=True)
            panel.errorbar(x, y, yerr=error, markersize=3, linewidth=1, label=name, **looks[name])
        panel.set(yscale="log", title=f"{length} tokens", xlabel="share selected", xlim=(0, 1.1 * most))
        panel.title.set_fontsize("small")
        if not at:
            panel.set_ylabel("KL divergence from the full cache, nats")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize="x-small", loc="outside right center")
    return _png(figure)


def _on_demand(on_demand: Mapping[str, Any]) -> bytes:
    """Bars of the rankings, a panel for each unit and order, a row for each selection."""
    kinds = [(unit, order) for unit in ("block", "head") for order in ("global", "causal")]
    figure, panels = _figure(len(kinds), len(on_demand), 2.9, 2.6)
    for row, (label, lengths) in zip(panels, on_demand.items(), strict=True):
        figures = lengths.get("all") or next(iter(lengths.values()))
        for panel, (unit, order) in zip(row, kinds, strict=True):
            shares = figures[unit][order]
            height = 0.8 / len(shares)
            for number, (share, here) in enumerate(shares.items()):
                values = [here["ratio"][name]["mean"] for name in RANKINGS]
                errors = [here["ratio"][name]["error"] or 0.0 for name in RANKINGS]
                places = [place + (number - (len(shares) - 1) / 2) * height for place in range(len(RANKINGS))]
                panel.barh(places, values, height, xerr=errors, label=f"{share} sent", error_kw={"linewidth": 0.6})
            first = panel is row[0]
            panel.set_yticks(range(len(RANKINGS)), RANKINGS if first else [""] * len(RANKINGS), fontsize="x-small")
            panel.invert_yaxis()
            panel.set_xlim(0, 1)
            panel.set_title(f"{label}, per {unit}, {order}", fontsize="small")
            if first:
                panel.legend(fontsize="x-small")
    figure.supxlabel("on-demand ratio", fontsize="small")
    return _png(figure)


def _correlation(correlation: Mapping[str, Any]) -> bytes:
    """Domains against domains, a panel for each length, a row for each selection."""
    most = max(len(found["domains"]) for found in correlation.values())
    figure, panels = _figure(most, len(correlation), 2.4, 2.2)
    image = None
    for row, (label, found) in zip(panels, correlation.items(), strict=True):
        for panel in row[len(found["domains"]) :]:
            panel.set_visible(False)
        for panel, (length, pairs) in zip(row, found["domains"].items(), strict=False):
            names = list(dict.fromkeys(name for pair in pairs for name in pair.split(" ")))
            grid = [[_value(pairs, one, other) for other in names] for one in names]
            image = panel.imshow(grid, vmin=0, vmax=1)
            panel.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize="x-small")
            panel.set_yticks(range(len(names)), names if panel is row[0] else [""] * len(names), fontsize="x-small")
            panel.set_title(f"{label}, {length} tokens", fontsize="small")
            for y, values in enumerate(grid):
                for x, value in enumerate(values):
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="x-small", color="white")
    if image is not None:
        figure.colorbar(image, ax=panels.ravel().tolist(), label="correlation of importance")
    return _png(figure)


def _value(pairs: Mapping[str, Any], one: str, other: str) -> float:
    if one == other:
        return 1.0
    found = pairs.get(f"{one} {other}") or pairs.get(f"{other} {one}")
    return float((found or {}).get("blocks") or 0.0)
