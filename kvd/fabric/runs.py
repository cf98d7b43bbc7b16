"""Descriptor lists as one operation uses them: checked once, then cut into pieces of bounded size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.fabric.base import Region
from kvd.types import Descriptors

_COLUMNS = ("local offset", "remote offset", "length")

FEW = 32
"""Rows of a list so short that arithmetic on Python's integers beats NumPy's calls. Most lists are."""


class Runs:
    """A checked descriptor list: rows of local offset, remote offset, length; none of length 0.

    ``low`` and ``high`` bound the remote bytes, so that the far side can refuse the whole list before the first of
    its bytes arrives. They are Python integers: a hostile remote offset may lie anywhere.
    """

    __slots__ = ("ends", "high", "low", "nbytes", "rows")

    ends: npt.NDArray[np.int64]
    """Where each row ends among the list's bytes."""

    def __init__(self, rows: Descriptors) -> None:
        self.rows = rows
        if 0 < len(rows) <= FEW:
            ends, lows, total, high = [], [], 0, 0
            for _, low, length in rows.tolist():
                total += length
                ends.append(total)
                lows.append(low)
                if low + length > high:
                    high = low + length
            self.ends, self.nbytes, self.low = np.array(ends, np.int64), total, min(lows)
            self.high = high if self.low >= 0 else 0
            return
        self.ends = np.cumsum(rows[:, 2])
        self.nbytes = int(self.ends[-1]) if len(rows) else 0
        self.low = self.high = 0
        if len(rows):
            self.low = int(rows[:, 1].min())
            # Offset and length are below 2**63 each, so their sum fits into 64 bits without a sign.
            if self.low >= 0:
                self.high = int((rows[:, 1].view(np.uint64) + rows[:, 2].view(np.uint64)).max())

    def cut(self, start: int, nbytes: int, most: int) -> tuple[Descriptors, int]:
        """A copy of the descriptors of bytes ``start`` to ``start + nbytes`` of the list, and how many bytes it has.

        That may be fewer, at the list's end or since ``most`` rows are enough. ``start`` must lie before the end,
        ``nbytes`` and ``most`` be positive.
        """
        if len(self.rows) == 1:
            local, remote, length = self.rows[0].tolist()
            covered = min(nbytes, length - start)
            return np.array([[local + start, remote + start, covered]], np.int64), covered
        first = int(self.ends.searchsorted(start, "right"))
        stop = min(int(self.ends.searchsorted(start + nbytes, "left")) + 1, first + most, len(self.rows))
        rows = self.rows[first:stop].copy()
        covered = int(self.ends[stop - 1]) - start
        if covered > nbytes:
            rows[-1, 2] -= covered - nbytes
            covered = nbytes
        before = start - (int(self.ends[first - 1]) if first else 0)
        if before:
            rows[0] += (before, before, -before)
        return rows, covered


def checked_runs(region: Region, descriptors: Any) -> Runs:
    """``descriptors`` as :class:`Runs`, copied; raises :class:`InvalidArgument` if they leave ``region``.

    Rows of length 0 move nothing and are dropped; their local offset is checked, their remote offset is not.
    """
    array = np.asarray(descriptors)
    if array.size == 0:
        return Runs(np.empty((0, 3), np.int64))
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind != "i":
        raise InvalidArgument(
            f"descriptors of shape {array.shape} and type {array.dtype}; give int64 of shape (n, 3): "
            f"{', '.join(_COLUMNS)}",
            shape=list(array.shape),
        )
    rows = array.astype(np.int64)  # a copy: the caller may reuse the array at once
    if len(rows) <= FEW and all(size > 0 and 0 <= at <= region.nbytes - size for at, _, size in rows.tolist()):
        return Runs(rows)
    local, length = rows[:, 0], rows[:, 2]
    # The offset is compared with what is left of the region, since offset + length might not fit into 64 bits.
    if int(rows[:, ::2].min()) < 0 or int(length.max()) > region.nbytes or bool((local > region.nbytes - length).any()):
        bad = int(np.argmax((local < 0) | (length < 0) | (length > region.nbytes) | (local > region.nbytes - length)))
        raise InvalidArgument(
            f"descriptor {bad} takes {length[bad]} bytes at local offset {local[bad]} of a region of {region.nbytes} "
            "bytes; offset and length must be at least 0 and end inside the region",
            descriptor=bad,
            offset=int(local[bad]),
            length=int(length[bad]),
            region_bytes=region.nbytes,
        )
    if int(length.min()) == 0:
        rows = rows[length > 0]
    return Runs(rows)
