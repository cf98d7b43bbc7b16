"""How much would have to be fetched, had blocks been sent in another order: the choice behind importance, by itself.

No network takes part: from what a run selected, and which half of the blocks had been sent before. Layers 0 and 1 are
in every half and in no ratio.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_of
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix

SENT = 0.5
"""Share of all blocks that has been sent, as in the paper's figures."""
SINKS = 4
"""First tokens that StreamingLLM keeps."""

Counts = npt.NDArray[np.int64]
"""Shape (layers, blocks): how often entries of each block were selected."""


def on_demand_ratio(counts: Counts, order: npt.NDArray[np.int64], sent: float = SENT) -> float | None:
    """Of what was selected, the share that lies outside the first ``sent`` of the blocks of ``order``, blocks as
    ``layer * blocks + block``; None where nothing was selected."""
    there = np.zeros(counts.size, bool)
    there[order[: round(sent * counts.size)]] = True
    later = counts[ALWAYS_LAYERS:]
    total = int(later.sum())
    return int(later[~there.reshape(counts.shape)[ALWAYS_LAYERS:]].sum()) / total if total else None


def orders(
    counts: Counts, tokens: int, profile: ImportanceMatrix | None = None, *, seed: int = 0
) -> dict[str, npt.NDArray[np.int64]]:
    """Orders of all blocks of a prompt of ``tokens`` tokens, by name: ``sequential`` (by address), ``random``,
    ``streaming`` (StreamingLLM: the first tokens and the newest), ``profile`` if there is one, and ``optimal``, which
    knows ``counts``."""
    layers, blocks = counts.shape
    position = np.zeros((layers, blocks))
    position[:] = np.arange(blocks)
    position[:, : int(block_of(tokens, blocks, [min(SINKS, tokens) - 1])[0]) + 1] += blocks
    found = {
        "sequential": np.arange(counts.size),
        "random": ImportanceMatrix(np.random.default_rng(seed).random(counts.shape)).order(),
        "streaming": ImportanceMatrix(position).order(),
    }
    if profile is not None:
        found["profile"] = profile.resampled(blocks).order()
    return found | {"optimal": ImportanceMatrix(counts).order()}


def compare(
    counts: Counts, tokens: int, profile: ImportanceMatrix | None = None, *, sent: float = SENT
) -> dict[str, float | None]:
    """The on-demand ratio of each of :func:`orders`."""
    return {name: on_demand_ratio(counts, order, sent) for name, order in orders(counts, tokens, profile).items()}
