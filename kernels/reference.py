"""The kernels in NumPy: the definition of every operation, and the fallback where the C extension is missing.

The contract, the same as in native.c: `kvd_kernels.ops` has checked types, shapes, contiguity and overlap; a
function returns -1 when the work is done, or the flat position of the first entry that is refused, and then
nothing has been written.

Indices and masks may lie in memory that somebody else writes at the same time. NumPy checks all indices and then reads
them again, so every function first takes a copy, and checks and uses that.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Index = NDArray[np.int32] | NDArray[np.int64]


def _first(bad: NDArray[np.bool_]) -> int:
    """The flat position of the first True, or -1."""
    return int(bad.argmax()) if bad.any() else -1


def _rows(memory: Bytes, entry_bytes: int) -> NDArray[np.void]:
    """Entries as opaque items: NumPy copies each in one piece, twice as fast as rows of bytes."""
    return memory.view(f"V{entry_bytes}")


def overlap(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two contiguous arrays share memory."""
    return np.may_share_memory(a, b)


def partition(
    index: NDArray[np.int32],
    mask: NDArray[np.int8],
    heads: int,
    out: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> int:
    """Stable partition of each row of `index` (B·heads, k): mask 2 first, then mask 1 (SmartGen, algorithm 1).

    Two boolean selections instead of the paper's sort: each keeps the row-major order, so the partition is stable.
    """
    index = index.copy()  # also since out may be index itself
    batch, tokens = mask.shape
    outside = (index < 0) | (index >= tokens)
    safe = np.where(outside, 0, index).reshape(batch, -1)
    values = np.take_along_axis(mask, safe, axis=1).reshape(index.shape)
    bad = _first(outside | ((values != 1) & (values != 2)))
    if bad >= 0:
        return bad
    remote = values == 2
    count = remote.sum(axis=1, dtype=np.int32)
    head = np.arange(index.shape[1]) < count[:, None]
    out[head] = index[remote]
    out[~head] = index[~remote]
    counts[:] = count
    return -1


def token_entries(index: NDArray[np.int32], tokens: int, heads: int, out: NDArray[np.int64]) -> int:
    """Flat entry (b·tokens + t)·heads + h for each token position t in row b·heads + h of `index`."""
    index = index.copy()
    bad = _first((index < 0) | (index >= tokens))
    if bad >= 0:
        return bad
    row = np.arange(index.shape[0], dtype=np.int64)[:, None]
    np.multiply(index, np.int64(heads), out=out)
    out += row // heads * (tokens * heads) + row % heads
    return -1


def gather(source: Bytes, entry_bytes: int, index: Index, out: Bytes, to: Index | None) -> int:
    """``out[i] = source[index[i]]``, or ``out[to[i]] = source[index[i]]``.

    A refused entry of `to` is reported as len(index) + its position.
    """
    entries, result = _rows(source, entry_bytes), _rows(out, entry_bytes)
    index = index.astype(np.intp)  # a copy, in the type that NumPy would convert to
    bad = _first((index < 0) | (index >= len(entries)))
    if bad >= 0:
        return bad
    if to is None:
        np.take(entries, index, out=result, mode="clip")  # "raise", the default, would copy through a buffer
        return -1
    to = to.astype(np.intp)
    bad = _first((to < 0) | (to >= len(result)))
    if bad >= 0:
        return len(index) + bad
    result[to] = np.take(entries, index, mode="clip")
    return -1


def scatter(values: Bytes, entry_bytes: int, index: Index, target: Bytes) -> int:
    """``target[index[i]] = values[i]``; of an entry named twice the last value stays."""
    entries = _rows(target, entry_bytes)
    index = index.astype(np.intp)
    bad = _first((index < 0) | (index >= len(entries)))
    if bad >= 0:
        return bad
    entries[index] = _rows(values, entry_bytes)
    return -1


def copy_runs(source: Bytes, target: Bytes, descriptors: NDArray[np.int64]) -> int:
    """``target[t : t + n] = source[s : s + n]`` for each descriptor (s, t, n), one after another."""
    runs = descriptors.tolist()  # Python integers: read once, and offset + length cannot wrap
    for i, (s, t, n) in enumerate(runs):
        if min(s, t, n) < 0 or s + n > source.size or t + n > target.size:
            return i
    for s, t, n in runs:
        target[t : t + n] = source[s : s + n]  # NumPy copies overlapping slices as memmove does
    return -1


def accumulate(
    index: NDArray[np.int32],
    counts: NDArray[np.int64] | NDArray[np.float64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    skip_beyond: bool,
) -> int:
    """Add one to cell ``(t - start) * cells // length`` for each position t, row-major (SmartGen, equation
    1).

    `index` (rows, k); `starts` and `lengths` (sequences,), rows divided evenly among the sequences; `counts`
    (cells,), shared by all sequences, or (sequences, cells). Positions from `length` on are skipped with
    `skip_beyond`.
    """
    cells = counts.shape[-1]
    sequence = np.arange(index.shape[0]) // (index.shape[0] // len(starts))
    length = lengths[sequence][:, None]
    position = index - starts[sequence][:, None]  # the only look at index
    beyond = position >= length
    bad = position < 0  # starts are not negative
    if not skip_beyond:
        bad |= beyond
    if bad.any():
        return int(bad.argmax())
    cell = position * cells // length
    if counts.ndim == 2:
        cell += sequence[:, None] * cells
    # One by one and in order, since that is what decides the last bit of a count that is not whole (decayed,
    # say).
    np.add.at(counts.reshape(-1), cell[~beyond], 1)
    return -1


def sign_codes(x: NDArray[np.float32], w: NDArray[np.float32], out: Bytes) -> None:
    """Bit b of ``out[i]`` is set where the sum over d of ``x[i, d] * w[d, b]`` is above 0.

    Dimension by dimension, since that is what decides the last bit of a sum, and so a code of a sum near 0.
    """
    sums = np.zeros((x.shape[0], w.shape[1]), np.float32)
    with np.errstate(all="ignore"):  # overflow and NaN are not above 0, or are, as in C
        for d in range(len(w)):
            sums += x[:, d, None] * w[d]
    out[...] = np.packbits(sums > 0, axis=1, bitorder="little")


def hamming(q: Bytes, k: Bytes, out: NDArray[np.int32]) -> None:
    """``out[r, t]`` is the sum over g of the bits in which ``q[r, g]`` and ``k[r, t]`` differ."""
    out[...] = 0
    for g in range(q.shape[1]):
        out += _BITS[q[:, g, None] ^ k].sum(axis=2, dtype=np.int32)


def top_k(scores: NDArray[np.float32], lengths: NDArray[np.int64], k: NDArray[np.int64], out: NDArray[np.int32]) -> int:
    """``out[r]`` is, of the first ``lengths[r]`` scores of row r, the last and the ``k[r] - 1`` best others, ascending,
    -1 behind them. Equal scores: the earlier one; not a number counts as minus infinity."""
    bad = _first((k < 1) | (k > out.shape[1]) | (k > lengths) | (lengths > scores.shape[1]))
    if bad >= 0:
        return bad
    out[...] = -1
    for row, length, n, to in zip(scores, lengths.tolist(), k.tolist(), out, strict=True):
        mine = row[: length - 1]
        mine = np.where(mine == mine, mine, -np.inf)
        if n > 1:
            least = np.partition(mine, length - n)[length - n]
            above, level = mine > least, mine == least
            chosen = above | (level & (level.cumsum() <= n - 1 - above.sum()))
            to[: n - 1] = np.flatnonzero(chosen)
        to[n - 1] = length - 1
    return -1


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
"""Bits set in each byte."""


def regroup(
    source: Bytes,
    target: Bytes,
    places: NDArray[np.int64],
    dims: NDArray[np.int64],
    item_bytes: int,
    stream_from: int = 0,
) -> int:
    """For each box (s, t) of `places` (n, 2) and every index (a, b, …) below ``dims[:, 0]``: `item_bytes` bytes from
    ``s + a * dims[0, 1] + b * dims[1, 1] + …`` of `source` to ``t + a * dims[0, 2] + …`` of `target`.
    """
    places = places.copy()
    offsets = np.zeros((1, 2), np.int64)
    for size, *strides in dims.tolist():
        steps = np.arange(size)[:, None] * np.array(strides, np.int64)
        offsets = (offsets[:, None] + steps).reshape(-1, 2)
    if len(offsets) == 0:
        return -1
    last = np.array([source.size, target.size]) - item_bytes - offsets.max(axis=0)
    bad = _first(((places < 0) | (places > last)).any(axis=1))
    if bad >= 0:
        return bad
    reading, writing = _windows(source, item_bytes), _windows(target, item_bytes)
    grid = whole_grid(places)
    if grid is not None:
        (s, t), shape = places[0].tolist(), np.concatenate((grid, dims))
        _strided(writing, t, shape[:, (0, 2)])[...] = _strided(reading, s, shape[:, (0, 1)])
        return -1
    step = max(1, REGROUPED_AT_ONCE // len(offsets))
    for first in range(0, len(places), step):
        some = (places[first : first + step, None] + offsets).reshape(-1, 2)
        writing[some[:, 1]] = reading[some[:, 0]]
    return -1


REGROUPED_AT_ONCE = 1 << 14
"""Items: their positions stay in the caches."""


def _windows(memory: Bytes, nbytes: int) -> NDArray[np.void]:
    """Item i is the `nbytes` bytes from i on."""
    return np.ndarray((memory.size - nbytes + 1,), f"V{nbytes}", memory, strides=(1,))


def _strided(windows: NDArray[np.void], first: int, dims: NDArray[np.int64]) -> NDArray[np.void]:
    """The items of a grid, from (size, stride) of each dim."""
    return np.lib.stride_tricks.as_strided(windows[first:], dims[:, 0].tolist(), dims[:, 1].tolist())


def whole_grid(places: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """`places` (n, 2) as dims (size, source stride, target stride), outermost first, if they are a whole grid."""
    dims: list[list[int]] = []
    while len(places) > 1:
        steps = np.diff(places, axis=0)
        other = np.flatnonzero((steps != steps[0]).any(axis=1))
        run = int(other[0]) + 1 if len(other) else len(places)
        if len(places) % run or len(dims) == GRID_DIMS:
            return None
        rows = places.reshape(-1, run, 2)
        if (np.diff(rows, axis=1) != steps[0]).any():
            return None
        dims.insert(0, [run, *steps[0].tolist()])
        places = rows[:, 0]
    return np.array(dims, np.int64).reshape(-1, 3)


GRID_DIMS = 16
"""NumPy's arrays have 32 dims at most."""


def zero(target: Bytes, offsets: NDArray[np.int64], nbytes: int) -> int:
    """``target[o : o + nbytes] = 0`` for each o of `offsets` (n,)."""
    starts = offsets.tolist()
    bad = next((i for i, o in enumerate(starts) if not 0 <= o <= target.size - nbytes), -1)
    if bad < 0:
        for o in starts:
            target[o : o + nbytes] = 0
    return bad


def encode_bfp(values: Bytes, plain_bytes: int, magnitude: int, elements: int, out: Bytes, stride: int) -> int:
    """Pages of `elements` bf16 or f32 elements (2 or 4 `plain_bytes`), one behind the other, as block pages `stride`
    apart. What lies between pages becomes zero, as does what a page has between exponents and elements. For each row
    of sixteen elements:

    - the shared exponent is the largest; denormals count as zero;
    - the 24-bit mantissa, hidden bit included, is cut at the shared exponent, then rounded half to even to `magnitude`
      bits (7 or 3), and saturates;
    - a magnitude of zero has no sign; infinity and NaN are numbers like any others, with exponent 255.
    """
    rows, lead = elements // BLOCK_ROW, block_lead_bytes(elements)
    page = lead + elements * (magnitude + 1) // 8
    result, given = out.reshape(-1, stride), values.reshape(-1, elements * plain_bytes)
    result[:, rows:lead] = result[:, page:] = 0
    for at in range(0, len(given), PAGES_AT_ONCE):
        # Values need not be aligned; the copy is.
        bits = np.ascontiguousarray(given[at : at + PAGES_AT_ONCE]).view(f"u{plain_bytes}").astype(np.uint32)
        bits <<= np.uint32(32 - 8 * plain_bytes)
        shared, small = _encoded(bits.reshape(-1, rows, BLOCK_ROW), magnitude)
        target = result[at : at + PAGES_AT_ONCE]
        target[:, :rows] = shared
        small = small.reshape(-1, elements)
        target[:, lead:page] = small if magnitude == 7 else small[:, 0::2] | small[:, 1::2] << 4
    return -1


def decode_bfp(
    source: Bytes, offsets: NDArray[np.int64], magnitude: int, elements: int, out: Bytes, plain_bytes: int
) -> int:
    """The block pages at `offsets` (n,) as pages of bf16 or f32 elements, one behind the other. Decoding normalises;
    what would need an exponent below zero becomes zero."""
    offsets = offsets.copy()
    rows, lead = elements // BLOCK_ROW, block_lead_bytes(elements)
    page = lead + elements * (magnitude + 1) // 8
    bad = _first((offsets < 0) | (offsets > source.size - page))
    if bad >= 0:
        return bad
    pages, result = np.lib.stride_tricks.sliding_window_view(source, page), out.reshape(len(offsets), -1)
    for at in range(0, len(offsets), PAGES_AT_ONCE):
        part = pages[offsets[at : at + PAGES_AT_ONCE]]
        body = part[:, lead:]
        if magnitude == 3:
            body = np.stack((body & 15, body >> 4), axis=-1)
        bits = _decoding_table(magnitude)[part[:, :rows, None], body.reshape(-1, rows, BLOCK_ROW)]
        exact = bits if plain_bytes == 4 else (bits >> 16).astype(np.uint16)
        result[at : at + PAGES_AT_ONCE] = exact.reshape(-1, elements).view(np.uint8)
    return -1


BLOCK_ROW = 16
"""Elements that share an exponent."""

PAGES_AT_ONCE = 256
"""A dozen passes go over them, which had better stay in a cache."""


def block_lead_bytes(elements: int) -> int:
    """Bytes of a block page before its elements: the exponents, in whole lines of 16 bytes."""
    rows = elements // BLOCK_ROW
    return -(-rows // 16) * 16


def _encoded(bits: NDArray[np.uint32], magnitude: int) -> tuple[Bytes, Bytes]:
    exponent = (bits >> 23 & 0xFF).astype(np.int32)
    shared = exponent.max(axis=-1)
    mantissa = np.where(exponent > 0, (bits & 0x7FFFFF | 0x800000).astype(np.int32), np.int32(0))
    mantissa >>= np.minimum(shared[..., None] - exponent, 24)
    shift = 24 - magnitude
    # half to even: add a half, or just less than it where the number that stays is even
    odd = mantissa >> shift & 1
    kept = np.minimum((mantissa + ((1 << (shift - 1)) - 1) + odd) >> shift, (1 << magnitude) - 1)
    sign = np.where(kept > 0, (bits >> 31 << magnitude).astype(np.int32), np.int32(0))
    return shared.astype(np.uint8), (kept | sign).astype(np.uint8)


@functools.cache
def _decoding_table(magnitude: int) -> NDArray[np.uint32]:
    """Shape (256, 2 ** (magnitude + 1)): f32 bits of each exponent and each byte or nibble."""
    number = np.arange(1 << (magnitude + 1))
    kept, sign = number & ((1 << magnitude) - 1), number >> magnitude
    up = magnitude - 1 - np.floor(np.log2(np.maximum(kept, 1))).astype(np.int64)
    exponent = np.arange(256)[:, None] - np.where(kept > 0, up, 0)
    fraction = (kept << up) & ((1 << (magnitude - 1)) - 1)
    bits = sign << 31 | np.maximum(exponent, 0) << 23 | fraction << (24 - magnitude)
    decoded = np.where(kept == 0, sign << 31, np.where(exponent < 0, 0, bits))
    return decoded.astype(np.uint32)
