"""Choosing the entries of a KV index by their scores. What :mod:`kvd_kernels.ops` says holds here too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import checks, native

FLOAT32 = (np.dtype(np.float32),)


def top_k(
    scores: NDArray[np.float32],
    lengths: NDArray[np.int64],
    k: NDArray[np.int64],
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Of each row the best scores' places, ascending; the newest token is always among them.

    Of equal scores the earlier one is better; not a number counts as minus infinity. The time grows with the scores,
    and hardly with `k`.

    Args:
        scores: float32 (rows, tokens).
        lengths: int64 (rows,): how many scores of each row count; the last of them is the newest token's, and is taken
            whatever it is.
        k: int64 (rows,): how many are taken, 1 to the row's length.
        out: int32 (rows, width), `k` at most the width, the width at most the tokens. As wide as the largest `k` by
            default.

    Returns:
        `out`: -1 behind the places of a row with fewer than the width.

    Raises:
        TypeError, ValueError: see the module; also for a length or a `k` that a row does not have.
    """
    op = "top_k"
    checks.array(op, "scores", scores, FLOAT32, (2,))
    rows, tokens = scores.shape
    if tokens > checks.INT32_MAX:
        raise ValueError(f"{op}: scores has {tokens} tokens; an int32 index counts {checks.INT32_MAX}")
    for name, value in (("lengths", lengths), ("k", k)):
        if checks.array(op, name, value, checks.INT64, (1,)).shape != (rows,):
            raise ValueError(f"{op}: {name} has shape {value.shape}; give one for each of {rows} rows")
    width = int(k.max(initial=0)) if out is None else np.shape(out)[-1]
    if not 0 <= width <= tokens:
        raise ValueError(f"{op}: {width} of {tokens} scores can't be taken; give k of 1 to each row's length")
    out = checks.output(op, "out", out, checks.INT32, (rows, width))
    checks.apart(op, "out", out, ("scores", scores), ("lengths", lengths), ("k", k))
    bad = native.active.top_k(scores, lengths, k, out)
    if bad >= 0:
        raise ValueError(
            f"{op}: row {bad} of {lengths[bad]} tokens can't give {k[bad]} entries to an index of {width} columns; "
            f"give k of 1 to its length, which is at most {tokens} here"
        )
    return out
