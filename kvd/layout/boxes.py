"""Cutting a part of a tensor into boxes that lie in both layouts in the same, strided way.

On each axis, positions are cut where either layout changes its step: at its digits. Above some unit a layout isn't
strided any more, since a block table or the channels decide; up to there a range of positions is a few *segments*, each
a set of starts and the dims above a start. Boxes are the products of the axes' segments.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.layout.geometry import Geometry

MAX_BOXES = 1 << 25
"""Of a plan: 512 MiB of addresses. A layer of a model with 8 heads has so many tiles at 2 million tokens."""

Ints: TypeAlias = npt.NDArray[np.int64]

_MOST_LENGTHS = 8
"""More lengths of ranges than this are cut into single units, lest each becomes a copy of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start + i * unit + j * unit' + …`` of an axis, for every start and all ``i < count`` …"""

    starts: Ints
    dims: tuple[tuple[int, int], ...]
    """(count, unit), largest unit first."""


class Side:
    """One side's addresses as terms of the axes: a page key, and bytes that are strided.

    Where one channel and tensors in a row make everything strided, ``bytes`` is the address; otherwise, ``paged``, it
    counts within the page. ``item_bytes`` is for pages in decoded form.
    """

    def __init__(self, geometry: Geometry, item_bytes: int, *, paged: bool = False) -> None:
        self.geometry = geometry
        self.item_bytes = item_bytes
        gaps = geometry.tensors > 1 and geometry.shard_pages != geometry.pages
        self.paged = paged or geometry.channels > 1 or geometry.placed.bases is not None or gaps
        """Keys are in use. Forced where pages get addresses of another kind: staging, decoded pages."""
        layout = geometry.placed.layout
        self._inner = frozenset(layout.inner)
        self._strided = self._inner if self.paged else self._inner.union(layout.tensors, layout.pages) - {layout.table}

    def span(self, axis: str) -> int:
        """Below this unit positions are strided; 0: all of them."""
        below = 1
        for digit in reversed(self.geometry.placed.layout.digits(axis)):
            if digit.name not in self._strided:
                return below
            below *= self.geometry.radix[digit.name]
        return 0

    def units(self, axis: str) -> list[int]:
        """Where the step changes: the digits' units, 1 left out."""
        digits = self.geometry.placed.layout.digits(axis)
        return [self.geometry.below[digit.name] for digit in digits if self.geometry.below[digit.name] > 1]

    def origin(self, axis: str) -> int:
        return self.geometry.placed.held.get(axis, (0, 1))[0] if self.geometry.placed.layout.digits(axis) else 0

    def key(self, axis: str, positions: Ints) -> Ints:
        return self.geometry.key(axis, positions)

    def bytes(self, axis: str, positions: Ints) -> Ints:
        geometry = self.geometry
        found = geometry.inner(axis, positions) * self.item_bytes
        if not self.paged:
            # the keys of tensors and pages in a row are addresses
            found += geometry.key(axis, positions) * geometry.page_stride
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """One side's addresses of boxes: each box is one of ``outer`` and one of the others, outer ones first."""

    side: Side
    outer_keys: Ints
    outer_bytes: Ints
    keys: Ints
    bytes: Ints

    def keys_of_all(self) -> Ints:
        return (self.outer_keys[:, None] + self.keys).reshape(-1)

    def keys_and_bytes(self) -> Ints:
        """What sorts the boxes of one outer box by page and place."""
        return self.bytes if not self.side.paged else self.keys * self.side.geometry.page_stride + self.bytes

    def reordered(self, order: Ints) -> Terms:
        keys = self.keys[order] if self.side.paged else self.keys
        return dataclasses.replace(self, keys=keys, bytes=self.bytes[order])

    def addresses(self) -> tuple[Ints | None, Ints]:
        """``(channel, byte offset)`` of all boxes; no channels where there is only one."""
        offset = (self.outer_bytes[:, None] + self.bytes).reshape(-1)
        if not self.side.paged:
            return None, offset
        channel, page = self.side.geometry.places(self.keys_of_all())
        page += offset
        return channel if self.side.geometry.channels > 1 else None, page


@dataclasses.dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one shape; dims are in order of the target's strides."""

    source: Terms
    target: Terms
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int
    """Contiguous in both."""

    def __len__(self) -> int:
        return len(self.source.outer_bytes) * len(self.source.bytes)

    def strides(self, side: int) -> tuple[int, ...]:
        """0: the source's, 1: the target's."""
        return self.target_strides if side else self.source_strides

    def reach(self, strides: tuple[int, ...], first: int = 0) -> int:
        """How far apart a box's first and last bytes lie, its dims from ``first`` on."""
        return sum((n - 1) * step for n, step in zip(self.shape[first:], strides[first:], strict=True))


def cut(source: Side, target: Side, ranges: Mapping[str, Ints], outer: Collection[str] = ()) -> Iterator[Boxes]:
    """Boxes that together have every element of the ranges once. ``ranges``: axis to (n, 2), sorted and disjoint.

    Terms of the ``outer`` axes are kept apart.
    """
    axes = sorted(ranges, key=lambda axis: _weight(target, axis), reverse=True)
    segments = [segments_of(source, target, axis, ranges[axis]) for axis in axes]
    for chosen in _products(segments):
        check_count(math.prod(len(one.starts) for one in chosen))
        yield _boxes(source, target, dict(zip(axes, chosen, strict=True)), outer)


def segments_of(source: Side, target: Side, axis: str, ranges: Ints) -> list[Segment]:
    """The ranges of one axis, cut so that each segment's dims have one stride in both layouts."""
    origin = target.origin(axis)
    chain, top = _chain(source, target, axis)
    # every boundary of both layouts is a multiple of its unit from the target's origin, and so from the source's
    start, stop = ranges[:, 0] - origin, ranges[:, 1] - origin
    found: list[Segment] = []
    for at, unit in enumerate(chain):
        below = tuple((upper // lower, lower) for lower, upper in itertools.pairwise(chain[: at + 1]))[::-1]
        if at + 1 == len(chain):
            counts = (stop - start) // unit
            found += _tops(start, counts, unit, below, origin, one_each=top > 0)
            break
        upper = chain[at + 1]
        # up to the next multiple of the upper unit, and back from the last one
        low = np.minimum(-(-start // upper) * upper, stop)
        high = np.maximum(stop // upper * upper, low)
        for begin, end in ((start, low), (high, stop)):
            found += _tops(begin, (end - begin) // unit, unit, below, origin)
            # what is left of the pieces is less than a unit only at the ends, and was taken by the lower units
        start, stop = low, high
    return found


def _chain(source: Side, target: Side, axis: str) -> tuple[list[int], int]:
    """Units from 1 up, each dividing the next, and the largest strided one (0: no limit).

    What can't divide is brought down to its greatest common divisor: 16 and 24 meet at 8.
    """
    apart = abs(source.origin(axis) - target.origin(axis))
    top = math.gcd(source.span(axis), target.span(axis))
    units = sorted(set(source.units(axis)) | set(target.units(axis)))
    if top == 0 and (any(apart % unit for unit in units) or not _divide(units)):
        top = math.gcd(*units, apart) if apart else math.gcd(*units)
    if top:
        if apart:
            top = math.gcd(top, apart)
        while True:
            clashing = [unit for unit in units if unit % top and top % unit]
            inside = [unit for unit in units if top % unit == 0]
            if clashing:
                top = math.gcd(top, clashing[0])
            elif not _divide(inside):
                top = next(math.gcd(a, b) for a, b in itertools.pairwise(inside) if b % a)
            else:
                break
        units = inside
    chain = [1, *[unit for unit in units if unit > 1]]
    if top > chain[-1]:
        chain.append(top)
    return chain, top


def _divide(units: list[int]) -> bool:
    return all(b % a == 0 for a, b in itertools.pairwise(units))


def _tops(
    start: Ints, counts: Ints, unit: int, below: tuple[tuple[int, int], ...], origin: int, one_each: bool = False
) -> list[Segment]:
    """Segments for ``counts`` units from each start on; with ``one_each``, or too many lengths, a start for each."""
    some = counts > 0
    start, counts = start[some], counts[some]
    if not len(start):
        return []
    lengths = np.unique(counts)
    if one_each or len(lengths) > _MOST_LENGTHS:
        first = np.repeat(start - np.concatenate(([0], np.cumsum(counts)[:-1])) * unit, counts)
        return [Segment(first + np.arange(counts.sum()) * unit + origin, below)]
    return [
        Segment(start[counts == length] + origin, ((int(length), unit), *below) if length > 1 else below)
        for length in lengths
    ]


def _weight(target: Side, axis: str) -> int:
    """Axes in the target's order, roughly: by what a step of the first digit is worth."""
    digits = target.geometry.placed.layout.digits(axis)
    if not digits:
        return 0
    name, layout = digits[0].name, target.geometry.placed.layout
    group = 2 if name in layout.tensors else 1 if name in layout.pages else 0
    return group << 64 | target.geometry.weight[name]


def _products(segments: list[list[Segment]]) -> Iterator[list[Segment]]:
    if not segments:
        yield []
        return
    for rest in _products(segments[1:]):
        for one in segments[0]:
            yield [one, *rest]


def _boxes(source: Side, target: Side, chosen: Mapping[str, Segment], outer: Collection[str]) -> Boxes:
    dims: list[tuple[int, int, int]] = []
    for axis, segment in chosen.items():
        for count, unit in segment.dims:
            pair = segment.starts[0] + np.array((0, unit))
            steps = [int(np.diff(side.bytes(axis, pair))[0]) for side in (target, source)]
            dims.append((steps[0], steps[1], count))
    shape, source_strides, target_strides, item = _collapsed(dims, target.item_bytes)

    def terms(side: Side) -> Terms:
        sums = []
        for kept_apart in (True, False):
            starts = {axis: one.starts for axis, one in chosen.items() if (axis in outer) == kept_apart}
            keys = [side.key(axis, one) for axis, one in starts.items()] if side.paged else []
            sums += [sums_of(keys), sums_of([side.bytes(axis, one) for axis, one in starts.items()])]
        return Terms(side, *sums)

    return Boxes(terms(source), terms(target), shape, source_strides, target_strides, item)


def check_count(pieces: int) -> None:
    """Raise :class:`InvalidArgument` where a plan would be larger than :data:`MAX_BOXES`."""
    if pieces > MAX_BOXES:
        raise InvalidArgument(
            f"{pieces} pieces of a tensor are too many for one plan; plan parts of it, of {MAX_BOXES} pieces at most",
            pieces=pieces,
        )


def sums_of(terms: Sequence[Ints]) -> Ints:
    """The sums of one of each, the last term's counting fastest."""
    check_count(math.prod(len(one) for one in terms))
    found = np.zeros(1, np.int64)
    for one in terms:
        found = (found[:, None] + one).reshape(-1)
    return found


def _collapsed(
    dims: list[tuple[int, int, int]], item_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Dims (target stride, source stride, count) by target stride, largest first, neighbours joined if they can be."""
    item = item_bytes
    merged: list[list[int]] = []
    for target_stride, source_stride, count in sorted(dims, key=lambda dim: dim[:2]):
        if count == 1:
            continue
        if merged and [target_stride, source_stride] == [merged[-1][0] * merged[-1][2], merged[-1][1] * merged[-1][2]]:
            merged[-1][2] *= count
        elif not merged and target_stride == source_stride == item:
            item *= count
        else:
            merged.append([target_stride, source_stride, count])
    merged.reverse()
    return (
        tuple(count for _, _, count in merged),
        tuple(stride for _, stride, _ in merged),
        tuple(stride for stride, _, _ in merged),
        item,
    )
