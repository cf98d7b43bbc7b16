"""Cutting a sequence into KV blocks by relative position (SmartGen, section 4.1). Pure arithmetic.

A row of ``length`` tokens has ``blocks`` blocks, whatever its length: token ``t`` belongs to block
``t * blocks // length``, so that one importance matrix serves every prompt length and every row of a batch. With more
blocks than tokens each token has a block of its own and the other blocks are empty.

Block numbers and token positions are arrays or numbers; runs are int64 arrays of shape (n, 2), ``start`` included and
``stop`` excluded.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument

Runs: TypeAlias = npt.NDArray[np.int64]
"""Shape (n, 2): start (included) and stop (excluded) of each run."""


def block_bounds(length: int, blocks: int) -> npt.NDArray[np.int64]:
    """Shape (blocks + 1,): block ``m`` covers the tokens from ``[m]`` to ``[m + 1]``; empty where both are equal.

    Raises :class:`InvalidArgument` for a negative length or less than one block.
    """
    _check(length, blocks)
    return -(-np.arange(blocks + 1, dtype=np.int64) * length // blocks)


def block_range(length: int, blocks: int, block: int) -> tuple[int, int]:
    """The tokens of one block: start and stop. Raises :class:`InvalidArgument` for a block that does not exist."""
    _check(length, blocks)
    if not 0 <= block < blocks:
        raise InvalidArgument(
            f"block {block} does not exist; a layer has blocks 0 to {blocks - 1}", block=block, blocks=blocks
        )
    return -(-block * length // blocks), -(-(block + 1) * length // blocks)


def block_of(length: int, blocks: int, tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The block of each token, in the shape of ``tokens``. Raises :class:`InvalidArgument` for a token outside."""
    _check(length, blocks)
    positions = np.asarray(tokens, dtype=np.int64)
    if positions.size and not (positions.min() >= 0 and positions.max() < length):
        worst = positions.min() if positions.min() < 0 else positions.max()
        raise InvalidArgument(f"token {worst} is outside a row of {length} tokens", token=int(worst), length=length)
    return positions * blocks // max(length, 1)


def filled_blocks(length: int, blocks: int) -> int:
    """How many of the blocks have a token."""
    _check(length, blocks)
    return min(length, blocks)


def blocks_within(length: int, blocks: int, start: int, stop: int) -> tuple[int, int]:
    """The blocks (first included, last excluded) whose tokens all lie in ``[start, stop)``: what a chunk of prefill
    completes. Empty blocks at the edges count as complete."""
    bounds = block_bounds(length, blocks)
    first = int(np.searchsorted(bounds[:-1], start, side="left"))
    last = int(np.searchsorted(bounds[1:], stop, side="right"))
    return first, max(first, last)


def blocks_touched(length: int, blocks: int, start: int, stop: int) -> tuple[int, int]:
    """The blocks (first included, last excluded) that have a token in ``[start, stop)``."""
    start, stop = max(0, start), min(stop, length)
    if start >= stop:
        return 0, 0
    first, last = block_of(length, blocks, [start, stop - 1]).tolist()
    return first, last + 1


def block_runs(numbers: npt.ArrayLike) -> Runs:
    """Block numbers, in any order and repeated or not, as runs of neighbours."""
    unique = np.unique(np.asarray(numbers, dtype=np.int64))
    if not unique.size:
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(unique) != 1) + 1
    firsts = unique[np.concatenate(([0], breaks))]
    lasts = unique[np.concatenate((breaks - 1, [unique.size - 1]))]
    return np.stack((firsts, lasts + 1), axis=1)


def token_runs(length: int, blocks: int, numbers: npt.ArrayLike) -> Runs:
    """The tokens of some blocks as the fewest runs, by position; blocks that touch are one run, empty ones none.

    Raises :class:`InvalidArgument` for a block that does not exist.
    """
    bounds = block_bounds(length, blocks)
    runs = block_runs(numbers)
    if runs.size and not (runs[0, 0] >= 0 and runs[-1, 1] <= blocks):
        wrong = runs[0, 0] if runs[0, 0] < 0 else runs[-1, 1] - 1
        raise InvalidArgument(
            f"block {wrong} does not exist; a layer has blocks 0 to {blocks - 1}", block=int(wrong), blocks=blocks
        )
    return join_runs(bounds[runs])


def join_runs(runs: npt.NDArray[np.int64]) -> Runs:
    """Runs that overlap or touch as one, sorted; empty ones dropped."""
    runs = runs[runs[:, 0] < runs[:, 1]]
    if len(runs) < 2:
        return runs.astype(np.int64)
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    new = np.concatenate(([True], runs[1:, 0] > reach[:-1]))
    starts = runs[new, 0]
    stops = reach[np.concatenate((np.flatnonzero(new)[1:] - 1, [len(runs) - 1]))]
    return np.stack((starts, stops), axis=1)


def window_start(length: int, window: int) -> int:
    """First token that a layer of this window (``KVSpec.windows``; 0: all) can see from the last prompt token on.

    Tokens before it are never needed by decode: the window only moves on.
    """
    return max(0, length - window) if window else 0


def _check(length: int, blocks: int) -> None:
    if length < 0 or blocks < 1:
        raise InvalidArgument(
            f"a row of {length} tokens can't be cut into {blocks} blocks; give at least one block and no negative "
            "length",
            length=length,
            blocks=blocks,
        )
