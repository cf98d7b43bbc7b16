"""Public operations that change a tensor's layout; what holds for all is in `kvd_kernels.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import checks, native

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on

MAX_DIMS = 8
MAX_BYTES = 2**62


def regroup(
    source: NDArray[Any] | Buffer,
    target: NDArray[Any] | Buffer,
    places: NDArray[np.int64],
    shape: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    item_bytes: int,
    *,
    stream_from: int = 0,
) -> None:
    """Copy boxes of one shape, each from one strided place to another (HAWK, section 4.3, step 1).

    For each box ``(s, t)`` of `places` and every index ``(a, b, …)`` below `shape`, `item_bytes` bytes go from
    ``s + a * source_strides[0] + b * source_strides[1] + …`` of `source` to ``t + a * target_strides[0] + …`` of
    `target`. Bytes of `target` in no box stay as they are; what two boxes both write is undefined.

    Fastest with the outermost target stride first, and with boxes that fill cache lines of 64 bytes in memory that
    begins on one: then a large result bypasses the caches. The order of the boxes should be that of the
    side whose bytes lie apart, `source` when tiling and `target` when untiling: neighbours then share its lines and
    pages, which is worth up to 1.8x.

    Args:
        source: memory.
        target: memory.
        places: int64 (boxes, 2): offsets of each box in `source` and in `target`, in bytes. A block table is such an
            array.
        shape: how often each dim is repeated, outermost first; up to 8 dims, () for plain runs.
        source_strides: bytes between neighbours of each dim in `source`, 0 or more.
        target_strides: the same in `target`.
        item_bytes: contiguous bytes on both sides.
        stream_from: how many bytes a large result has; 0: 8 MiB, from which on it pays whatever `target` is. Where that
            has not been touched for long, so that its lines would have to be loaded to be written, less does, too.

    Raises:
        IndexError: a box leaves `source` or `target`; then nothing has been written.
        TypeError, ValueError: see `kvd_kernels.ops`.
    """
    op = "regroup"
    checks.array(op, "places", places, checks.INT64, (2,))
    if places.shape[1] != 2:
        raise ValueError(f"{op}: places has shape {places.shape}; it must be (boxes, 2)")
    if not len(shape) == len(source_strides) == len(target_strides) <= MAX_DIMS:
        raise ValueError(
            f"{op}: shape has {len(shape)} dims, source_strides {len(source_strides)} and target_strides "
            f"{len(target_strides)}; all must have the same number, {MAX_DIMS} at most"
        )
    dims = [
        (
            checks.extent(op, "shape", size, MAX_BYTES),
            checks.extent(op, "source_strides", source_stride, MAX_BYTES),
            checks.extent(op, "target_strides", target_stride, MAX_BYTES),
        )
        for size, source_stride, target_stride in zip(shape, source_strides, target_strides, strict=True)
    ]
    item_bytes = checks.positive(op, "item_bytes", item_bytes)
    stream_from = checks.extent(op, "stream_from", stream_from, MAX_BYTES)
    src, result = checks.memory_of(op, "source", source), checks.memory_of(op, "target", target, writable=True)
    checks.apart(op, "target", result, ("source", src), ("places", places))
    if len(places) == 0 or 0 in shape:
        return
    reach = [item_bytes + sum((size - 1) * strides[side] for size, *strides in dims) for side in (0, 1)]
    bad = 0
    if reach[0] <= src.size and reach[1] <= result.size:
        triples = np.array(dims, np.int64).reshape(-1, 3)
        bad = native.active.regroup(src, result, places, triples, item_bytes, stream_from)
    if bad >= 0:
        s, t = places[bad].tolist()
        raise IndexError(
            f"{op}: box {bad} reads {reach[0]} bytes from {s} on and writes {reach[1]} from {t} on, but source has "
            f"{src.size} bytes and target {result.size}; check places and strides against the layouts"
        )


def zero(target: NDArray[Any] | Buffer, offsets: NDArray[np.int64], nbytes: int) -> None:
    """Zero `nbytes` bytes of `target` at each of `offsets`, int64 (n,): pages that padding is in.

    Raises:
        IndexError: some of the bytes are outside of `target`; then nothing has been written.
        TypeError, ValueError: see `kvd_kernels.ops`.
    """
    op = "zero"
    checks.array(op, "offsets", offsets, checks.INT64, (1,))
    nbytes = checks.extent(op, "nbytes", nbytes, MAX_BYTES)
    result = checks.memory_of(op, "target", target, writable=True)
    checks.apart(op, "target", result, ("offsets", offsets))
    if len(offsets) == 0 or nbytes == 0:
        return
    bad = native.active.zero(result, offsets, nbytes) if nbytes <= result.size else 0
    if bad >= 0:
        raise IndexError(
            f"{op}: offsets[{bad}] is {offsets[bad]}, where {nbytes} bytes do not fit into a target of {result.size}; "
            "check it against the layout"
        )
