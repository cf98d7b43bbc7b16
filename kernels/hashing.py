"""Hash codes, as HATA has them: made of keys and queries by :func:`sign_codes`, compared by :func:`hamming`.

What :mod:`kvd_kernels.ops` says holds here too. Every implementation gives the same bits, on every machine and however
many vectors are hashed at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import checks, native

FLOAT32 = (np.dtype(np.float32),)
UINT8 = (np.dtype(np.uint8),)
WORD_BITS = 64


def sign_codes(
    x: NDArray[np.float32], w: NDArray[np.float32], out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Hash vectors: bit b of a code is set where the vector's product with column b of `w` is above 0.

    The product is the sum in the order of the dimensions, each term and partial sum rounded to float32. Not a number is
    not above 0.

    Args:
        x: float32 (n, dim).
        w: float32 (dim, bits), bits a multiple of 64.
        out: uint8 (n, bits / 8), or None for a new array.

    Returns:
        `out`: bit b is bit ``b % 8`` (of value ``2 ** (b % 8)``) of byte ``b // 8``.

    Raises:
        TypeError, ValueError: see :mod:`kvd_kernels.ops`.
    """
    op = "sign_codes"
    checks.array(op, "x", x, FLOAT32, (2,))
    checks.array(op, "w", w, FLOAT32, (2,))
    dim, bits = w.shape
    if not dim or not bits or bits % WORD_BITS:
        raise ValueError(f"{op}: w has shape {w.shape}; it needs a dimension, and a multiple of {WORD_BITS} bits")
    if x.shape[1] != dim:
        raise ValueError(f"{op}: x has {x.shape[1]} dimensions and w {dim}; pass the projection of these vectors")
    out = checks.output(op, "out", out, UINT8, (len(x), bits // 8))
    checks.apart(op, "out", out, ("x", x), ("w", w))
    native.active.sign_codes(x, w, out)
    return out


def hamming(q: NDArray[np.uint8], k: NDArray[np.uint8], out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """In how many bits codes differ, added up over a group of queries.

    Args:
        q: uint8 (rows, group, bytes), bytes a multiple of 8.
        k: uint8 (rows, tokens, bytes).
        out: int32 (rows, tokens), or None for a new array.

    Returns:
        `out`: of each token, the sum over the group's queries.

    Raises:
        TypeError, ValueError: see :mod:`kvd_kernels.ops`.
    """
    op = "hamming"
    checks.array(op, "q", q, UINT8, (3,))
    checks.array(op, "k", k, UINT8, (3,))
    rows, group, size = q.shape
    if not group or not size or size % 8 or size * 8 * group > checks.INT32_MAX:
        raise ValueError(f"{op}: q has shape {q.shape}; it needs a query, and codes of a multiple of 8 bytes")
    if k.shape[0] != rows or k.shape[2] != size:
        raise ValueError(f"{op}: k has shape {k.shape} for q's {q.shape}; both need as many rows and bytes")
    out = checks.output(op, "out", out, checks.INT32, (rows, k.shape[1]))
    checks.apart(op, "out", out, ("q", q), ("k", k))
    native.active.hamming(q, k, out)
    return out
