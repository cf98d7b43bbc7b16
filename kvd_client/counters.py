"""What selections cost, by layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

ALWAYS_LAYERS = 2
"""Layers 0 and 1 are always complete, and no part of on-demand ratios."""


@dataclasses.dataclass(frozen=True, slots=True)
class SelectionCounters:
    """What selections have cost, by layer; each array has the shape (layers,)."""

    selects: npt.NDArray[np.int64]
    """Calls of select: decode steps."""
    selected: npt.NDArray[np.int64]
    """KV entries that were selected."""
    fetched: npt.NDArray[np.int64]
    """Those of them that came from the source on demand."""
    wait_s: npt.NDArray[np.float64]
    """Seconds for which nothing was left to do but to wait for fetches."""
    fetch_s: npt.NDArray[np.float64]
    """Seconds from the request of each fetch until its answer was seen, added up: what of it was not waited for was
    hidden behind other work."""

    def since(self, earlier: SelectionCounters) -> SelectionCounters:
        """What came on top of ``earlier``, of the same transfer: a decode step's share."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(earlier)
        return SelectionCounters(*(a - b for a, b in zip(mine, theirs, strict=True)))

    def plus(self, other: SelectionCounters) -> SelectionCounters:
        """The sum, of transfers that decode in one batch."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return SelectionCounters(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def overlap(self) -> float | None:
        """The share of the fetches' time that was hidden behind other work; None without fetches."""
        took = float(self.fetch_s.sum())
        return 1 - min(float(self.wait_s.sum()) / took, 1.0) if took else None

    @property
    def on_demand_ratio(self) -> float:
        """Entries fetched / entries selected, layers 0 and 1 left out; 0 where nothing was selected."""
        selected = int(self.selected[ALWAYS_LAYERS:].sum())
        return int(self.fetched[ALWAYS_LAYERS:].sum()) / selected if selected else 0.0


def no_selections(layers: int) -> SelectionCounters:
    """Counters of a transfer at its beginning."""
    selects, selected, fetched = np.zeros((3, layers), np.int64)
    return SelectionCounters(selects, selected, fetched, *np.zeros((2, layers), np.float64))
