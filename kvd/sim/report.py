"""What a simulation found: percentiles, as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvd.errors import InvalidArgument
from kvd.profiling.files import replace_file
from kvd.sim.cluster import Cluster
from kvd.sim.request import Measured
from kvd.sim.workload import Scenario

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Of one mode. Times in seconds; each list has the percentiles of :data:`PERCENTILES`."""

    mode: str
    requests: int
    codes: dict[str, int]
    ttft_s: list[float]
    ttst_s: list[float]
    stall_s: list[float]
    """TTST - TTFT."""
    tbt_s: list[float]
    queued_s: list[float]
    """Waiting for a prefill node or a place in a batch."""
    on_demand_ratio: float
    """Of the first decode step: entries fetched / entries selected, all requests together."""
    source_link: float
    """Share of the time for which the busiest source was sending."""
    most_running: int
    pool_bytes: int
    """What a decode node's pool has to hold."""
    left: int
    """Ends of transfers that the nodes still hold when every request has ended: none, unless kvd is wrong."""
    simulated_s: float
    all_ttst_s: list[float] = dataclasses.field(repr=False)
    """Of every request, sorted; for the picture."""


def summarise(cluster: Cluster) -> Result:
    """What a cluster that has run found."""
    ended = [one for one in cluster.measured if one.code == "OK"]
    selected = sum(one.selected_first for one in ended)
    span = max(cluster.clock.now, 1e-9)

    def of(values: Sequence[float]) -> list[float]:
        return [round(float(value), 6) for value in np.percentile(values, PERCENTILES)] if values else []

    return Result(
        mode=cluster.scenario.mode,
        requests=len(cluster.measured),
        codes=dict(sorted(Counter(one.code for one in cluster.measured).items())),
        ttft_s=of([one.ttft_s for one in ended]),
        ttst_s=of([one.ttst_s for one in ended]),
        stall_s=of([one.ttst_s - one.ttft_s for one in ended]),
        tbt_s=of([one.tbt_s for one in ended if one.request.output > 2]),
        queued_s=of([one.queued_s for one in ended]),
        on_demand_ratio=sum(one.fetched_first for one in ended) / selected if selected else 0.0,
        source_link=max(node.nic.busy_s for node in cluster.prefill) / span,
        most_running=cluster.most_running,
        pool_bytes=cluster.most_bytes,
        left=sum(len(node.core.parts) for node in (*cluster.prefill, *cluster.decode)),
        simulated_s=cluster.clock.now,
        all_ttst_s=sorted(_ttst(ended)),
    )


def _ttst(ended: Sequence[Measured]) -> list[float]:
    return [round(one.ttst_s, 6) for one in ended]


def to_json(scenario: Scenario, results: Sequence[Result]) -> dict[str, Any]:
    """The scenario (without the mode), and each mode's result."""
    described = dataclasses.asdict(scenario)
    del described["mode"]
    return {
        "scenario": described,
        "percentiles": list(PERCENTILES),
        "modes": [dataclasses.asdict(result) for result in results],
    }


def plot(results: Sequence[Result], path: Path) -> None:
    """Write a PNG: for each mode, the share of requests whose second token came within a time.

    Raises :class:`InvalidArgument` without matplotlib, or where the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument(
            "pictures need matplotlib, which this Python lacks: pip install 'kvd-transport[plot]'",
            missing=["matplotlib"],
        ) from None
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panel = figure.subplots()
    for result in results:
        times = result.all_ttst_s
        panel.step(times, np.arange(1, len(times) + 1) / max(1, len(times)), where="post", label=result.mode)
    panel.set_xscale("log")
    panel.set_xlabel("seconds to the second token")
    panel.set_ylabel("share of requests")
    panel.grid(alpha=0.3, which="both", linewidth=0.4)
    panel.legend(fontsize="small")
    file = io.BytesIO()
    canvas.print_png(file)
    replace_file(path, file.getvalue())
