"""Cutting a sequence into KV blocks by relative position (SmartGen, section 4.1). Pure arithmetic.

A row of ``length`` tokens has ``blocks`` blocks, whatever its length: token ``t`` belongs to block
``t * blocks // length``, so that one importance matrix serves every prompt length and every row of a batch. With more
blocks than tokens each token has a block of its own and the other blocks are empty.

Runs are int64 arrays of shape (n, 2), ``start`` included and
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


def block_of(length: int, blocks: int, tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The block of each token, in the shape of ``tokens``. Raises :class:`InvalidArgument` for a token outside."""
    _check(length, blocks)
    positions = np.asarray(tokens, dtype=np.int64)
    if positions.size and not (positions.min() >= 0 and positions.max() < length):
        worst = positions.min() if positions.min() < 0 else positions.max()
        raise InvalidArgument(f"token {worst} is outside a row of {length} tokens", token=int(worst), length=length)
    return positions * blocks // max(length, 1)


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
