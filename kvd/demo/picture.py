"""TBT over steps and CTL as a picture, a line for each run."""

from __future__ import annotations

import io
from pathlib import Path

from kvd.demo.figures import Comparison
from kvd.errors import InvalidArgument
from kvd.profiling.files import replace_file

DPI = 120


def plot(comparison: Comparison, path: Path) -> None:
    """Write a PNG; raises :class:`InvalidArgument` without matplotlib, or where the file can't be written."""
    replace_file(path, picture(comparison))


def picture(comparison: Comparison) -> bytes:
    """A PNG: for each share of entries selected, the time of each token after the first on a logarithmic scale, and the
    completion time per token, CTL(n)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument(
            "pictures need matplotlib, which this Python lacks: pip install 'kvd-transport[plot]'",
            missing=["matplotlib"],
        ) from None
    count = max(len(comparison.selections), 1)
    figure = Figure(figsize=(11, 0.6 + 3.4 * count), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(count, 2, squeeze=False)
    for (left, right), selection in zip(panels, comparison.selections, strict=False):
        for run in selection.runs:
            stall = [run.times[1] - run.times[0]] if len(run.times) > 1 else []
            gaps = stall + run.tbt_s
            left.plot(range(2, len(gaps) + 2), gaps, label=run.setting.name, linewidth=1.2)
            right.plot(range(1, len(run.ctl_s) + 1), run.ctl_s, label=run.setting.name, linewidth=1.2)
        left.set_title(f"time since the token before, {100 * selection.share:g} % selected", fontsize="small")
        right.set_title("CTL(n): time to the n-th token / n", fontsize="small")
        for panel in (left, right):
            panel.set_yscale("log")
            panel.set_xlabel("token", fontsize="small")
            panel.set_ylabel("seconds", fontsize="small")
            panel.grid(alpha=0.3, which="both", linewidth=0.4)
        if selection.runs:
            right.legend(fontsize="x-small")
    title = "".join(c if c.isprintable() else "?" for c in f"{comparison.model}, {comparison.selector}")
    figure.suptitle(title[:120], fontsize="medium", parse_math=False)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()
