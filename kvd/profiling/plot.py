"""A profile as a picture, like the paper's figure 5: layers against relative position, a panel a group."""

from __future__ import annotations

import io
import os

import numpy as np

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.profiling.files import replace_file
from kvd.profiling.profile import Profile

COLUMNS = 4
DPI = 120
BRIGHTEST = 0.995
"""Of all blocks, the share that the colours tell apart; those above have the colour of the highest."""


def plot(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a PNG; see :func:`picture` and :func:`kvd.profiling.files.replace_file` for what they raise."""
    replace_file(path, picture(profile))


def picture(profile: Profile) -> bytes:
    """A PNG: layers from 2 on to the right, positions from the prompt's beginning downwards, colour for importance, on
    one scale for all groups.

    Raises :class:`InvalidArgument` without matplotlib, and for a model of layers 0 and 1 only.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError:
        raise InvalidArgument(
            "pictures need matplotlib, which this Python lacks: pip install 'kvd-transport[plot]'",
            missing=["matplotlib"],
        ) from None
    if profile.layers <= ALWAYS_LAYERS:
        raise InvalidArgument(
            f"a model of {profile.layers} layers has none with a choice to show; layers 0 and 1 are always sent",
            layers=profile.layers,
        )
    columns = min(COLUMNS, len(profile.groups))
    rows = -(-len(profile.groups) // columns)
    figure = Figure(figsize=(1.8 + 2.6 * columns, 0.9 + 2.8 * rows), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    values = np.stack([group.matrix.values[ALWAYS_LAYERS:] for group in profile.groups])
    # Attention sinks, a few blocks that each step selects, would leave all the rest in the dark.
    highest = float(np.quantile(values, BRIGHTEST)) or float(values.max())
    for panel, group in zip(panels, profile.groups, strict=False):
        image = panel.imshow(
            np.asarray(group.matrix.values[ALWAYS_LAYERS:].T),
            aspect="auto",
            interpolation="nearest",
            vmin=0.0,
            vmax=highest or 1.0,
            extent=(ALWAYS_LAYERS - 0.5, profile.layers - 0.5, 1.0, 0.0),
        )
        panel.set_title(f"{group.low}-{group.high - 1} tokens, {group.samples} prompts", fontsize="small")
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.xaxis.get_major_locator().set_params(integer=True)
    for panel in panels[len(profile.groups) :]:
        panel.set_visible(False)
    figure.colorbar(image, ax=panels[: len(profile.groups)].tolist(), label="selection frequency", extend="max")
    figure.supxlabel("layer", fontsize="small")
    figure.supylabel("position in the prompt", fontsize="small")
    title = "".join(c if c.isprintable() else "?" for c in f"{profile.model}, {profile.selector}")
    figure.suptitle(title[:120], fontsize="medium", parse_math=False)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()
