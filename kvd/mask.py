"""Residency masks, and sets of tokens: which are there, ready, sent, arrived.

A mask is int8, shape (rows, capacity), one a layer: 0 padding (never loaded), 1 local, 2 remote. It lies in the lease
behind the layers (:class:`kvd_client.spec.PartLayout`), where the inference process maps it and the peer's mask bytes
land, so that everything here works on views of that memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd_client.spec import MASK_LOCAL, MASK_PADDING, MASK_REMOTE, PartLayout, TokenRange

Mask: TypeAlias = npt.NDArray[np.int8]

Places: TypeAlias = npt.NDArray[np.int64]
"""Shape (n,): tokens of one layer, each as row * capacity + token."""


def mask_view(memory: memoryview, layout: PartLayout, layer: int) -> Mask:
    """Layer ``layer``'s mask as a view of a lease's memory, shape (rows, capacity).

    Raises :class:`InvalidArgument` for a layer that does not exist, or memory shorter than the layout.
    """
    if not 0 <= layer < layout.layers:
        raise InvalidArgument(
            f"layer {layer} does not exist; the part has layers 0 to {layout.layers - 1}", layer=layer
        )
    view: Mask = mask_views(memory, layout)[layer]
    return view


def mask_views(memory: memoryview, layout: PartLayout) -> Mask:
    """All masks as one view, shape (layers, rows, capacity); raises :class:`InvalidArgument` as :func:`mask_view`."""
    if memory.nbytes < layout.nbytes:
        raise InvalidArgument(
            f"the memory has {memory.nbytes} bytes and the layout needs {layout.nbytes}",
            need=layout.nbytes,
            size=memory.nbytes,
        )
    return np.ndarray(
        (layout.layers, layout.rows, layout.capacity),
        np.int8,
        memory,
        layout.masks_offset,
        (layout.mask_stride, layout.capacity, 1),
    )


def init_masks(memory: memoryview, layout: PartLayout, lengths: Sequence[int]) -> None:
    """Before a transfer begins: 2 within each row's length, 0 beyond, in every layer.

    Ranges that the sink holds already stay 2 here: they become 1 when the process has put their bytes in place.
    Raises :class:`InvalidArgument` where the lengths do not fit the layout.
    """
    check_lengths(lengths, layout.rows, layout.capacity)
    row = np.arange(layout.capacity) < np.asarray(lengths)[:, None]
    mask_views(memory, layout)[:] = np.where(row, MASK_REMOTE, MASK_PADDING).astype(np.int8)


def mark(mask: Mask, ranges: Iterable[TokenRange]) -> None:
    """Mark some tokens of one layer as local. The caller has put their bytes in place before."""
    for part in ranges:
        mask[part.row, part.start : part.stop] = MASK_LOCAL


def check_lengths(lengths: Sequence[int], rows: int, capacity: int) -> None:
    """Raise :class:`InvalidArgument` unless there is one length a row, from 1 to ``capacity``."""
    if len(lengths) != rows:
        raise InvalidArgument(f"there are {len(lengths)} lengths for {rows} rows; give one a row", rows=rows)
    for row, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise InvalidArgument(
                f"lengths[{row}] is {length}; it must be between 1 and the capacity of {capacity}",
                row=row,
                length=length,
                capacity=capacity,
            )


class IntervalSet:
    """A set of integers as sorted disjoint intervals that do not touch; ``start`` included, ``stop`` excluded.

    Empty intervals are allowed in every question and change nothing.
    """

    __slots__ = ("_starts", "_stops", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0
        """How many integers are in it."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Put ``[start, stop)`` in; returns what was not in it before."""
        if start >= stop:
            return []
        new = self.gaps(start, stop)
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        low = min(start, self._starts[first]) if first < last else start
        high = max(stop, self._stops[last - 1]) if first < last else stop
        self._starts[first:last] = [low]
        self._stops[first:last] = [high]
        self.total += _length(new)
        return new

    def contains(self, start: int, stop: int) -> bool:
        """Whether all of ``[start, stop)`` is in it."""
        if start >= stop:
            return True
        at = bisect.bisect_right(self._starts, start) - 1
        return at >= 0 and stop <= self._stops[at]

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``[start, stop)`` that are in it."""
        if start >= stop:
            return []
        first = bisect.bisect_right(self._stops, start)
        last = bisect.bisect_left(self._starts, stop)
        return [(max(start, self._starts[at]), min(stop, self._stops[at])) for at in range(first, last)]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``[start, stop)`` that are not in it."""
        found = []
        for low, high in self.within(start, stop):
            if start < low:
                found.append((start, low))
            start = high
        if start < stop:
            found.append((start, stop))
        return found


class TokenFlags:
    """Tokens of all layers and rows, a byte each, where they come singly and by the thousand: what intervals would take
    a microsecond each for is one operation on an array here. Layers cost memory from their first use on.

    Ranges must lie inside the rows; nothing here checks that.
    """

    __slots__ = ("_capacity", "_layers", "_rows")

    def __init__(self, rows: int, capacity: int) -> None:
        self._rows, self._capacity = rows, capacity
        self._layers: dict[int, npt.NDArray[np.bool_]] = {}

    def _of(self, layer: int) -> npt.NDArray[np.bool_]:
        flags = self._layers.get(layer)
        if flags is None:
            flags = self._layers[layer] = np.zeros(self._rows * self._capacity, np.bool_)
        return flags

    def add(self, layer: int, row: int, start: int, stop: int) -> int:
        """Put a range in; how many of its tokens were not in it before."""
        part = self._of(layer)[row * self._capacity + start : row * self._capacity + stop]
        new = part.size - int(np.count_nonzero(part))
        part[:] = True
        return new

    def mark_all(self, layer: int, ranges: Iterable[TokenRange]) -> None:
        """As :meth:`add`, for those who know the answer."""
        flags, capacity = self._of(layer), self._capacity
        for each in ranges:
            flags[each.row * capacity + each.start : each.row * capacity + each.stop] = True

    def gaps(self, layer: int, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a range that are not in it."""
        part = self._of(layer)[row * self._capacity + start : row * self._capacity + stop]
        if not part.any():
            return [(start, stop)] if start < stop else []
        return [(start + low, start + high) for low, high in _runs(np.flatnonzero(~part))]

    def absent(self, layer: int, places: Places) -> npt.NDArray[np.bool_]:
        """Which of ``places`` are not in it."""
        found: npt.NDArray[np.bool_] = ~self._of(layer)[places]
        return found

    def add_places(self, layer: int, places: Places) -> None:
        self._of(layer)[places] = True

    def subtract_places(self, layer: int, places: Places) -> None:
        self._of(layer)[places] = False

    def ranges(self, places: Places) -> list[tuple[int, int, int]]:
        """Ascending places as row, start and stop of runs of tokens."""
        found = []
        for low, high in _runs(places):
            while low < high:
                row, start = divmod(low, self._capacity)
                stop = min(start + high - low, self._capacity)
                found.append((row, start, stop))
                low += stop - start
        return found


def _runs(numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of neighbours: start (included), stop (excluded)."""
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts = numbers[np.concatenate(([0], breaks + 1))]
    stops = numbers[np.concatenate((breaks, [numbers.size - 1]))] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in intervals)
