"""From a mode, an importance matrix and two times to a :class:`~kvd.transfer.order.Policy` (SmartGen, section 4.1)."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget
from kvd.importance.heads import Values
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.transfer.order import Policy
from kvd_client.protocol import MODES

MIN_CLASSES, MAX_CLASSES = 8, 64
"""Degrees of importance that the order tells apart. Blocks of one class are sent by address, in long runs; more
classes would cut the runs without changing which entries are missing by more than a fraction of a percent."""

RUN_BYTES = 128 << 10
"""What one class should have for each layer: a write ends at a layer's end, and costs the same CPU time whatever its
size."""

_FINER = (4, 4, 4, 4, 2, 2)
"""What part of the others' size the first classes have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Selective:
    """The daemon's settings for modes other than ``full``."""

    mode: str = "full"
    """Where neither process names one."""
    budget: str = "deadline"
    """``fixed``: K_r of equation 2. ``deadline``: push by importance until the first token exists."""
    speculative: str = "adaptive"
    """``windows``: a share in each idle window. ``adaptive``: as fast as the bound on fetches' delay allows."""
    share: float = 0.1
    """Of all blocks, in the windows of one decode iteration (section 4.3)."""
    blocks: int = 1000
    """M, where no profile says otherwise."""
    classes: int = MAX_CLASSES
    """Most degrees of importance that the order tells apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """What is known about transfers like this one. Times in seconds, 0 where unknown."""

    matrix: ImportanceMatrix | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    metadata_s: float = 0.0


def choose_policy(
    mode: str,
    settings: Selective,
    known: Profiled,
    *,
    layers: int,
    lengths: tuple[int, ...],
    token_bytes: int,
    heads: tuple[int, int] | None = None,
) -> Policy:
    """The policy of a transfer that is about to begin; raises :class:`InvalidArgument` for an unknown mode. ``heads``:
    the first and the number of the model's KV heads that its rows are, in their order, sequence after sequence; None:
    rows are sequences.

    Without a profile the order is that of addresses. ``fixed`` without both times falls back to ``deadline``, which
    needs none.
    """
    if mode not in MODES:
        raise InvalidArgument(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}", mode=mode)
    if mode == "full":
        return Policy()
    blocks = known.matrix.blocks if known.matrix is not None else settings.blocks
    blocks = max(1, min(blocks, max(lengths)))
    if mode == "partial" or known.matrix is None:
        matrix = ImportanceMatrix.sequential(layers, blocks)
    else:
        matrix = known.matrix.resampled(blocks)
    share = settings.share if mode == "speculative" else 0.0
    adaptive = mode == "speculative" and settings.speculative == "adaptive"
    count = max(MIN_CLASSES, min(settings.classes, sum(lengths) * token_bytes // RUN_BYTES))
    # The paper's baselines are defined by K_r; the budget policy is ours to choose for the rest.
    fixed = settings.budget == "fixed" or mode == "partial"
    if fixed and known.prefill_s > 0 and known.transfer_s > 0:
        budget = block_budget(layers, blocks, known.prefill_s, known.transfer_s, metadata_s=known.metadata_s)
        classes, proactive = _classes(matrix.ranks(), budget, count)
        return Policy(
            mode=mode,
            classes=classes,
            proactive_classes=proactive,
            share=share,
            adaptive=adaptive,
            budget_tokens=budget * sum(lengths) // blocks,
        )
    classes = _finer_classes(matrix.ranks(), min(layers, ALWAYS_LAYERS) * blocks, count)
    return Policy(
        mode=mode,
        classes=classes,
        until_finish=True,
        share=share,
        adaptive=adaptive,
        importance=matrix.values if known.matrix is not None else None,
        head_factors=_factors(matrix, heads) if mode != "partial" else None,
        rankable=mode != "partial",
    )


def _factors(matrix: ImportanceMatrix, heads: tuple[int, int] | None) -> Values | None:
    """(layers, KV heads, cells), where rows are heads that the profile tells apart."""
    if heads is None or matrix.heads is None or sum(heads) > matrix.heads.heads:
        return None
    return matrix.heads.factors(*heads)


def _classes(ranks: npt.NDArray[np.int64], budget: int, count: int) -> tuple[npt.NDArray[np.int16], int]:
    """``count`` classes of (about) equal size, with a boundary exactly at ``budget``; and how many lie before it.

    Layers 0 and 1 come first in the ranks, since their importance is infinite.
    """
    total = ranks.size
    step = -(-total // count)
    before = -(-budget // step)
    classes = np.where(ranks < budget, ranks // step, before + (ranks - budget) // step)
    return classes.astype(np.int16), before


def _finer_classes(ranks: npt.NDArray[np.int64], always: int, count: int) -> npt.NDArray[np.int16]:
    """About ``count`` classes of equal size, but for the first ones behind the ``always`` first ranks, which are halves
    and quarters: on a slow link they are all that goes before the second token, so their order matters most.

    What ranks first always has classes of its own: whatever a ranking prefers of other layers comes behind it.
    """
    step = -(-ranks.size // count)
    sizes = [step // part for part in _FINER if step >= part]
    ends = np.concatenate((np.arange(step, always, step), always + np.cumsum([0, *sizes])))
    ends = np.concatenate((ends, np.arange(ends[-1] + step, ranks.size, step)))
    found: npt.NDArray[np.int16] = np.searchsorted(ends, ranks, side="right").astype(np.int16)
    return found
