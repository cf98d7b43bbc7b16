"""The public operations: arguments are checked here, then the chosen implementation works.

What holds for all of them:

- Nothing is converted or copied on the quiet: a wrong dtype, shape or layout is refused with TypeError or
  ValueError.
- All indices are checked before the first byte is written: an IndexError leaves outputs as they were. If
  somebody else changes an index while the kernel runs, the C code notices and raises as well, then possibly
  with rows already written, and still without touching memory outside of the arguments.
- Memory (`source`, `out`, `values`, `target`) is anything with the buffer protocol that is contiguous, of any
  item type: a NumPy array, a bytearray, a memoryview of a mapping. It is taken as bytes.
- Outputs may not overlap inputs, except where a function says so.
- Work above some ten microseconds runs without the GIL; shorter work keeps it, since getting it back may take
  longer than the work. An argument must not be resized or unmapped meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import checks, native
from .reference import Index

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on


def partition(
    index: NDArray[np.int32],
    mask: NDArray[np.int8],
    heads: int,
    out: NDArray[np.int32] | None = None,
    counts: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Put the remote entries of each row first, each lane in its old order.

    This is algorithm 1 of SmartGen, section 4.2.

    Args:
        index: KV index, int32 (B·H, k), token positions; row ``b * heads + h``.
        mask: int8 (B, N): 0 padding, 1 local, 2 remote. Each byte is read once, so that a byte which turns
            from 2 to 1 meanwhile puts its entry into one lane or the other, never into both or none.
        heads: H.
        out: where the reordered index goes, int32 (B·H, k); it may be `index` itself. New memory by default.
        counts: where the numbers of remote entries go, int32 (B·H,). New memory by default.

    Returns:
        (out, counts): entries ``out[i, :counts[i]]`` are remote, ``out[i, counts[i]:]`` are local.

    Raises:
        IndexError: a position is outside of the mask or points at padding.
        TypeError, ValueError: see the module.
    """
    op = "partition"
    checks.array(op, "index", index, checks.INT32, (2,))
    checks.array(op, "mask", mask, checks.MASK, (2,))
    heads = checks.positive(op, "heads", heads)
    rows, k = index.shape
    batch, tokens = mask.shape
    if rows != batch * heads:
        raise ValueError(
            f"{op}: index has {rows} rows, but mask has {batch} sequences, which makes {batch * heads} rows "
            f"with {heads} heads; pass index and mask of the same batch"
        )
    out = checks.output(op, "out", out, checks.INT32, (rows, k))
    counts = checks.output(op, "counts", counts, checks.INT32, (rows,))
    checks.apart(op, "out", out, ("mask", mask), ("counts", counts))
    checks.apart(op, "counts", counts, ("mask", mask), ("index", index))
    if out is not index:
        checks.apart(op, "out", out, ("index", index))
    if rows == 0:
        return out, counts
    bad = native.active.partition(index, mask, heads, out, counts) if tokens or not k else 0
    if bad >= 0:
        row, column = divmod(bad, k)
        value, b = int(index[row, column]), row // heads
        where = f"{op}: index[{row}, {column}] is {value}"
        if not 0 <= value < tokens:
            raise IndexError(f"{where}, but mask has {tokens} tokens; pass index and mask of the same layer and step")
        raise IndexError(
            f"{where}, and mask[{b}, {value}] is {mask[b, value]}; only 1 (local) and 2 (remote) can be "
            "loaded: leave padded tokens out of the KV index"
        )
    return out, counts


def token_entries(
    index: NDArray[np.int32], tokens: int, heads: int, out: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Turn a KV index into flat entries: position t of row ``b * heads + h`` is ``(b * tokens + t) * heads + h``.

    Args:
        index: KV index, int32 (B·H, k), token positions.
        tokens: N, the tokens for which each sequence has memory.
        heads: H.
        out: int64 (B·H, k). New memory by default.

    Raises:
        IndexError: a position is negative or at least `tokens`.
        TypeError, ValueError: see the module.
    """
    op = "token_entries"
    checks.array(op, "index", index, checks.INT32, (2,))
    tokens, heads = checks.positive(op, "tokens", tokens), checks.positive(op, "heads", heads)
    rows, k = index.shape
    if rows % heads:
        raise ValueError(f"{op}: index has {rows} rows, which is not a multiple of {heads} heads")
    out = checks.output(op, "out", out, checks.INT64, (rows, k))
    checks.apart(op, "out", out, ("index", index))
    if rows:
        bad = native.active.token_entries(index, tokens, heads, out)
        if bad >= 0:
            row, column = divmod(bad, k)
            raise IndexError(
                f"{op}: index[{row}, {column}] is {index[row, column]}, but a sequence has {tokens} tokens "
                f"(0 to {tokens - 1}); pass the index and the length of the same layer and step"
            )
    return out


def gather(
    source: NDArray[Any] | Buffer,
    entry_bytes: int,
    index: Index,
    out: NDArray[Any] | Buffer,
    to: Index | None = None,
) -> None:
    """Copy entries: ``out[i] = source[index[i]]``, or with `to` ``out[to[i]] = source[index[i]]``.

    Fastest into memory that begins on a 32-byte boundary (64 with `to`), with entries of a multiple of that:
    then a result of 8 MiB and more bypasses the caches.

    Args:
        source: memory of a whole number of entries.
        entry_bytes: bytes of one entry.
        index: int32 or int64 (n,), flat entries of `source`, in any order, repeats allowed.
        out: memory of exactly n entries; with `to`, of any number of entries.
        to: int32 or int64 (n,), flat entries of `out`; of an entry named twice the last value stays. This is
            how the local lane goes behind the remote one, row by row: ``gather(kv, size, entries[local], out,
            np.flatnonzero(local))``.

    Raises:
        IndexError: an index is outside of its memory.
        TypeError, ValueError: see the module.
    """
    op = "gather"
    entry_bytes = checks.positive(op, "entry_bytes", entry_bytes)
    checks.array(op, "index", index, checks.INDEX, (1,))
    src, result = checks.memory_of(op, "source", source), checks.memory_of(op, "out", out, writable=True)
    entries, room = (
        checks.entries_of(op, "source", src, entry_bytes),
        checks.entries_of(op, "out", result, entry_bytes),
    )
    checks.apart(op, "out", result, ("source", src), ("index", index))
    if to is None:
        if room != len(index):
            raise ValueError(f"{op}: out has room for {room} entries, but index names {len(index)}; pass out[:n]")
    else:
        checks.array(op, "to", to, checks.INDEX, (1,))
        if len(to) != len(index):
            raise ValueError(f"{op}: to has {len(to)} entries, but index has {len(index)}; they go in pairs")
        checks.apart(op, "out", result, ("to", to))
    if len(index) == 0:
        return
    bad = native.active.gather(src, entry_bytes, index, result, to)
    if bad >= len(index) and to is not None:
        checks.refuse_entry(op, "to", to, bad - len(index), room, "out")
    if bad >= 0:
        checks.refuse_entry(op, "index", index, bad, entries, "source")


def scatter(values: NDArray[Any] | Buffer, entry_bytes: int, index: Index, target: NDArray[Any] | Buffer) -> None:
    """``target[index[i]] = values[i]`` in entries of `entry_bytes`; of an entry named twice the last value
    stays.

    Args:
        values: memory of exactly n entries.
        entry_bytes: bytes of one entry.
        index: int32 or int64 (n,), flat entries of `target`.
        target: memory of a whole number of entries.

    Raises:
        IndexError: an index is outside of `target`.
        TypeError, ValueError: see the module.
    """
    op = "scatter"
    entry_bytes = checks.positive(op, "entry_bytes", entry_bytes)
    checks.array(op, "index", index, checks.INDEX, (1,))
    src, result = (
        checks.memory_of(op, "values", values),
        checks.memory_of(op, "target", target, writable=True),
    )
    given, entries = (
        checks.entries_of(op, "values", src, entry_bytes),
        checks.entries_of(op, "target", result, entry_bytes),
    )
    if given != len(index):
        raise ValueError(f"{op}: values has {given} entries, but index names {len(index)}; pass values[:n]")
    checks.apart(op, "target", result, ("values", src), ("index", index))
    if given == 0:
        return
    bad = native.active.scatter(src, entry_bytes, index, result)
    if bad >= 0:
        checks.refuse_entry(op, "index", index, bad, entries, "target")


def copy_runs(source: NDArray[Any] | Buffer, target: NDArray[Any] | Buffer, descriptors: NDArray[np.int64]) -> None:
    """``target[t : t + n] = source[s : s + n]`` in bytes, for each descriptor (s, t, n), in their order.

    `source` and `target` may overlap or be the same memory: each run is then moved as memmove would, and a
    later run sees what earlier ones wrote.

    Args:
        source: memory.
        target: memory.
        descriptors: int64 (runs, 3): source offset, target offset, length, in bytes. Runs of length 0 are
            fine.

    Raises:
        IndexError: a run has a negative field or leaves `source` or `target`.
        TypeError, ValueError: see the module.
    """
    op = "copy_runs"
    checks.array(op, "descriptors", descriptors, checks.INT64, (2,))
    if descriptors.shape[1] != 3:
        raise ValueError(f"{op}: descriptors has shape {descriptors.shape}; it must be (runs, 3)")
    src, result = (
        checks.memory_of(op, "source", source),
        checks.memory_of(op, "target", target, writable=True),
    )
    checks.apart(op, "target", result, ("descriptors", descriptors))
    if len(descriptors) == 0:
        return
    bad = native.active.copy_runs(src, result, descriptors)
    if bad >= 0:
        s, t, n = descriptors[bad].tolist()
        raise IndexError(
            f"{op}: run {bad} copies {n} bytes from {s} to {t}, but source has {src.size} bytes and target "
            f"{result.size}; check offsets and lengths against the regions"
        )


def accumulate(index: NDArray[np.int32], counts: NDArray[np.int64] | NDArray[np.float64]) -> None:
    """Count selections per token: add one to a token's cell for every time that the KV index names it.

    Args:
        index: KV index, int32 (B·H, k), token positions.
        counts: int64 or float64, (B, N) for counts per sequence, or (N,) for all sequences together. Added to
            in place.

    Raises:
        IndexError: a position is negative or at least N.
        TypeError, ValueError: see the module.
    """
    op = "accumulate"
    checks.array(op, "index", index, checks.INT32, (2,))
    checks.array(op, "counts", counts, checks.COUNTS, (1, 2))
    sequences = counts.shape[0] if counts.ndim == 2 else 1
    tokens = counts.shape[-1]
    # With as many blocks as tokens each block is one token.
    lengths = np.array([tokens] * sequences, np.int64)
    _accumulate(op, index, counts, np.zeros(sequences, np.int64), lengths, False)


def accumulate_blocks(
    index: NDArray[np.int32],
    counts: NDArray[np.int64] | NDArray[np.float64],
    lengths: int | NDArray[np.int64],
    starts: int | NDArray[np.int64] = 0,
    beyond: Literal["refuse", "skip"] = "refuse",
) -> None:
    """Count selections per KV block: position t of a sequence counts for block ``(t - start) * M // length``.

    Positions relative to the prompt's length are what importance matrices are about (SmartGen, equation 1,
    section 4.1). Blocks are counted, not averaged: the mean is the caller's division by steps and tokens.

    Args:
        index: KV index, int32 (B·H, k), token positions.
        counts: int64 or float64, (B, M) for counts per sequence, or (M,) for all sequences together. Added to
            in place.
        lengths: prompt length in tokens, 1 or more: one for all sequences, or int64 (B,).
        starts: position of each sequence's first token, where padding comes first: one for all, or int64
            (B,).
        beyond: what to do with positions from ``start + length`` on: "refuse" them, or "skip" them, as is
            right for tokens that were generated after the prompt.

    Raises:
        IndexError: a position is before its sequence's start, or beyond its end (unless skipped).
        TypeError, ValueError: see the module.
    """
    op = "accumulate_blocks"
    checks.array(op, "index", index, checks.INT32, (2,))
    checks.array(op, "counts", counts, checks.COUNTS, (1, 2))
    if beyond not in ("refuse", "skip"):
        raise ValueError(f'{op}: beyond is {beyond!r}; pass "refuse" or "skip"')
    if counts.ndim == 2:
        sequences = counts.shape[0]
    else:
        sequences = next((len(a) for a in (lengths, starts) if isinstance(a, np.ndarray) and a.ndim), 1)
    own_lengths = checks.per_sequence(op, "lengths", lengths, 1, sequences)
    own_starts = checks.per_sequence(op, "starts", starts, 0, sequences)
    _accumulate(op, index, counts, own_starts, own_lengths, beyond == "skip")


def _accumulate(
    op: str,
    index: NDArray[np.int32],
    counts: Any,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    skip: bool,
) -> None:
    checks.writable_array(op, "counts", counts)
    rows, k = index.shape
    sequences = len(starts)
    if (rows % sequences if sequences else rows) != 0:
        raise ValueError(f"{op}: index has {rows} rows, which cannot be divided evenly among {sequences} sequences")
    checks.apart(op, "counts", counts, ("index", index))
    if rows == 0 or k == 0:
        return
    if counts.shape[-1] == 0:
        raise ValueError(f"{op}: counts has shape {counts.shape}, no cells to count in; give it at least one")
    bad = native.active.accumulate(index, counts, starts, lengths, skip)
    if bad >= 0:
        row, column = divmod(bad, k)
        s = row // (rows // sequences)
        raise IndexError(
            f"{op}: index[{row}, {column}] is {index[row, column]}, but sequence {s} has tokens {starts[s]} to "
            f"{starts[s] + lengths[s] - 1}; pass the index and the lengths of the same request"
        )
