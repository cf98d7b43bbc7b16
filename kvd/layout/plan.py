"""From one layout to another in two steps (HAWK, section 4.3).

Step 1, on the source's device: a *regroup* puts the elements into staging memory, so that each channel of the target
gets one contiguous piece whose inner order is already the target's. It is a few batched strided copies, one kernel
call each. Step 2: a request list, (n, 4) int64: staging offset, channel, target offset, length; its runs are maximal,
so that there are as few requests as the target has contiguous pieces.

Pure: arrays in, arrays out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from kvd_kernels.regrouping import MAX_DIMS

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout import boxes as cutting
from kvd.layout.boxes import Boxes, Side
from kvd.layout.codec import Codec, check_conversion, codec
from kvd.layout.descriptor import Placed
from kvd.layout.opaque import as_pages
from kvd.layout.pages import PageOrder, merged
from kvd.layout.ranges import Ints, Ranges, common, page_terms, positions
from kvd.types import Descriptors

Requests: TypeAlias = npt.NDArray[np.int64]
"""Shape (n, 4): source (or staging) offset, channel, offset in that channel, length; sorted by channel and offset."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One call of ``kvd_kernels.regroup``: boxes of one shape, each from one place to another.

    Box ``i``: for every index ``(a, b, …)`` below ``shape``, ``item_bytes`` bytes go from
    ``places[i, 0] + a * source_strides[0] + b * source_strides[1] + …`` of source channel ``channel`` to
    ``places[i, 1] + a * target_strides[0] + …`` of the staging memory. Dims are collapsed as far as they go in both;
    the outermost target stride comes first. All in bytes.
    """

    channel: int
    """0 where the plan decodes: the copies read the decoded pages."""
    places: npt.NDArray[np.int64]
    """Shape (n, 2): source offset, staging offset."""
    shape: tuple[int, ...]
    """() for plain runs of ``item_bytes``."""
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return len(self.places) * math.prod(self.shape) * self.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """Before the copies: pages of a block format become plain, one behind the other, in memory of ``nbytes``."""

    block: Codec
    plain: Codec
    elements: int
    """Of a page."""
    places: tuple[tuple[int, Ints], ...]
    """(source channel, page offsets); decoded pages are in this order."""

    @property
    def nbytes(self) -> int:
        return sum(len(offsets) for _, offsets in self.places) * self.elements * self.plain.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """After the copies, which go to memory of ``nbytes`` instead of staging: its pages are encoded into staging."""

    block: Codec
    plain: Codec
    elements: int
    pages: int
    stride: int
    """From one encoded page to the next, in staging."""

    @property
    def nbytes(self) -> int:
        return self.pages * self.elements * self.plain.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RegroupPlan:
    """Both steps. Staging memory has ``staging_bytes``; the requests' source offsets count from its start."""

    copies: tuple[Copy, ...]
    """Step 1. They write disjoint bytes, in any order, after ``zero``."""
    zero: Ints
    """Staging offsets of pages that padding is in: ``zero_bytes`` each are zeroed before the copies."""
    zero_bytes: int
    staging_bytes: int
    requests: Requests
    """Step 2."""
    payload_bytes: int
    """Bytes of the elements alone; what ``staging_bytes`` has more is padding."""
    decode: Decode | None = None
    encode: Encode | None = None

    def by_channel(self) -> dict[int, Descriptors]:
        """Channel to (n, 3): staging offset, offset in the channel, length; only channels that get something."""
        return {
            int(channel): self.requests[self.requests[:, 1] == channel][:, [0, 2, 3]]
            for channel in np.unique(self.requests[:, 1])
        }


def plan_regroup(source: Placed, target: Placed, within: Ranges | None = None, *, partial: bool = False) -> RegroupPlan:
    """What brings the part ``within`` of the tensor, as far as both sides hold it, from one layout to the other.

    With ``layout.padding`` in the target whole pages are written, padding included: ranges must begin and end with
    pages (tokens: at multiples of the tile's rows) or at the end of what the target holds. ``partial`` writes the
    elements alone, wherever they lie, and no padding; requests are smaller then.

    Raises :class:`UnsupportedLayout` where the layouts can't be converted, and :class:`InvalidArgument` for ranges that
    make no sense or cut pages. Sides that hold no common part get an empty plan.
    """
    source, target, plain, ranges = _prepared(source, target, within)
    if not all(len(one) for one in ranges.values()):
        none = np.empty(0, np.int64)
        return RegroupPlan((), none, 0, 0, np.empty((0, 4), np.int64), 0)
    if partial and target.geometry.codec.is_block:
        raise UnsupportedLayout(
            f"single elements can't be written into {target.layout.codec}; send whole pages", codec=target.layout.codec
        )
    decode, reading = _reading(source, plain, ranges)
    elements = math.prod(int((one[:, 1] - one[:, 0]).sum()) for one in ranges.values())
    if target.layout.padding and not partial:
        return _in_pages(reading, target, plain, ranges, elements, decode)
    return _in_runs(reading, Side(target.geometry, plain.item_bytes), ranges, elements, decode)


def check_convertible(source: Placed, target: Placed) -> None:
    """Raise :class:`UnsupportedLayout`, with the fields that differ, unless all that both sides hold can be sent.

    What :func:`plan_regroup` would find out later, at the price of one look at each axis.
    """
    check_conversion(source.geometry.codec, target.geometry.codec)
    ranges = common(source, target, None)
    if not target.layout.padding or not all(len(one) for one in ranges.values()):
        return
    try:
        for axis, one in ranges.items():
            page_terms(target.geometry, axis, one)
    except InvalidArgument as error:
        raise UnsupportedLayout(
            f"source {source.layout.name!r} and target {target.layout.name!r} hold different ranges: {error.message}",
            layout=[source.layout.name, target.layout.name],
            **error.fields,
        ) from None


def plan_direct(source: Placed, target: Placed, within: Ranges | None = None) -> dict[int, Requests]:
    """Step 2 without step 1: source channel to requests whose runs are maximal and contiguous on both sides.

    Padding is not written. Raises as :func:`plan_regroup`, and :class:`UnsupportedLayout` where a block format would
    have to be encoded or decoded.
    """
    source, target, plain, ranges = _prepared(source, target, within)
    if source.geometry.codec.is_block or target.geometry.codec.is_block:
        raise UnsupportedLayout(
            f"{source.layout.codec} becomes {target.layout.codec} by a regroup only",
            codec=[source.layout.codec, target.layout.codec],
        )
    if not all(len(one) for one in ranges.values()):
        return {}
    reading, writing = Side(source.geometry, plain.item_bytes), Side(target.geometry, plain.item_bytes)
    pieces = []
    for box in cutting.cut(reading, writing, ranges):
        columns = [
            np.zeros(len(box), np.int64) if column is None else column
            for terms in (box.source, box.target)
            for column in terms.addresses()
        ]
        none = (0,) * len(box.shape)
        strides = (none, box.source_strides, none, box.target_strides)
        spread = [_spread(column, box.shape, each) for column, each in zip(columns, strides, strict=True)]
        pieces.append(np.stack((*spread, np.full(len(spread[0]), box.item_bytes)), axis=1))
    table = np.concatenate(pieces)
    table = table[_sorted(table[:, 2], table[:, 3])]
    return {int(one): merged(*table[table[:, 0] == one][:, 1:].T) for one in np.unique(table[:, 0])}


def count_direct(source: Placed, target: Placed, within: Ranges | None = None) -> int:
    """How many pieces are contiguous on both sides, without listing them: neighbours that would merge count apart."""
    source, target, plain, ranges = _prepared(source, target, within)
    if not all(len(one) for one in ranges.values()):
        return 0
    sides = Side(source.geometry, plain.item_bytes), Side(target.geometry, plain.item_bytes)
    return sum(len(box) * math.prod(box.shape) for box in cutting.cut(*sides, ranges))


def _prepared(source: Placed, target: Placed, within: Ranges | None) -> tuple[Placed, Placed, Codec, dict[str, Ints]]:
    """Both sides, the codec in which elements are moved, and the ranges; equal block pages are opaque elements."""
    mine, theirs = source.geometry.codec, target.geometry.codec
    check_conversion(mine, theirs)
    ranges = common(source, target, within)
    if not mine.is_block:
        return source, target, mine, ranges
    if mine == theirs and all(len(one) for one in ranges.values()):
        opaque = as_pages(source, target, ranges)
        if opaque:
            return opaque[0], opaque[1], opaque[0].geometry.codec, opaque[2]
    return source, target, codec("f32") if theirs.is_block else theirs, ranges


def _reading(source: Placed, plain: Codec, ranges: dict[str, Ints]) -> tuple[Decode | None, Reading]:
    geometry = source.geometry
    if not geometry.codec.is_block:
        return None, Reading(Side(geometry, plain.item_bytes), None)
    keys = cutting.sums_of([np.unique(geometry.key(axis, positions(one))) for axis, one in ranges.items()])
    order = PageOrder(geometry, keys, np.zeros(1, np.int64))
    decode = Decode(geometry.codec, plain, geometry.page_elements, tuple(order.by_channel()))
    return decode, Reading(Side(geometry, plain.item_bytes, paged=True), order)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Where copies read: the source's channels, or its pages once they are decoded."""

    side: Side
    decoded: PageOrder | None

    def copies(self, box: Boxes, staging: Ints, depth: int) -> Iterator[Copy]:
        """The copies of boxes whose outer dims, all but the last ``depth``, are spread out in ``staging`` already."""
        outer = len(box.shape) - depth
        if depth > MAX_DIMS:
            more = slice(outer, len(box.shape) - MAX_DIMS)
            staging = _spread(staging, box.shape[more], box.target_strides[more])
            outer = more.stop
        channel, offset = self._addresses(box)
        offset = _spread(offset, box.shape[:outer], box.source_strides[:outer])
        places = np.empty((len(staging), 2), np.int64)
        places[:, 0], places[:, 1] = offset, staging
        if channel is not None:
            channel = _spread(channel, box.shape[:outer], (0,) * outer)
        shape, strides = box.shape[outer:], (box.source_strides[outer:], box.target_strides[outer:])
        # In the order of the side where a box's bytes lie further apart: neighbours then share its lines and pages.
        reach = [sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) for steps in strides]
        by = int(reach[1] > reach[0])
        for one in (0,) if channel is None else np.unique(channel):
            some = places if channel is None else places[channel == one]
            yield Copy(
                channel=int(one),
                places=some[np.argsort(some[:, by], kind="stable")],
                shape=shape,
                source_strides=strides[0],
                target_strides=strides[1],
                item_bytes=box.item_bytes,
            )

    def _addresses(self, box: Boxes) -> tuple[Ints | None, Ints]:
        if self.decoded is None:
            return box.source.addresses()
        terms, page = box.source, self.side.geometry.page_elements * self.side.item_bytes
        keys = (terms.outer_keys[:, None] + terms.keys).reshape(-1)
        return None, self.decoded.places(keys) * page + (terms.outer_bytes[:, None] + terms.bytes).reshape(-1)


def _in_pages(
    reading: Reading, target: Placed, plain: Codec, ranges: dict[str, Ints], elements: int, decode: Decode | None
) -> RegroupPlan:
    """Whole pages of the target, padding included."""
    geometry = target.geometry
    outer = _tensor_axes(target)
    terms = {axis: page_terms(geometry, axis, one) for axis, one in ranges.items()}
    apart = [terms[axis] for axis in outer]
    tensors = cutting.sums_of([one // geometry.pages for one, _ in apart])
    rest = [one for axis, one in terms.items() if axis not in outer]
    keys = cutting.sums_of([one for one, _ in rest])
    cutting.check_count(len(keys) * len(tensors))
    order = PageOrder(geometry, keys, tensors)
    block = geometry.codec.is_block
    page = geometry.page_elements * plain.item_bytes if block else geometry.page_stride
    zero = np.empty(0, np.int64)
    if not block and geometry.page_bytes < geometry.page_stride:
        zero = np.arange(len(order), dtype=np.int64)
    elif not all(full.all() for _, full in terms.values()):
        first, step = order.place(keys)
        gaps = [cutting.sums_of([(~full).astype(np.int64) for _, full in some]) for some in (apart, rest)]
        zero = np.sort((first + order.line(tensors)[:, None] * step)[gaps[0][:, None] + gaps[1] > 0])
    copies: list[Copy] = []
    for box in cutting.cut(reading.side, Side(geometry, plain.item_bytes, paged=True), ranges, outer):
        first, step = order.place(box.target.keys)
        # the outer terms of the target are its tensors' alone, in their order
        lines = order.line(box.target.outer_keys // geometry.pages)
        staging = (first * page + box.target.bytes + lines[:, None] * (step * page)).reshape(-1)
        copies += reading.copies(box, staging, len(box.shape))
    stride = geometry.page_stride
    return RegroupPlan(
        copies=tuple(copies),
        zero=zero * page,
        zero_bytes=page,
        staging_bytes=len(order) * stride,
        requests=order.requests(),
        payload_bytes=len(order) * geometry.page_bytes if block else elements * plain.item_bytes,
        decode=decode,
        encode=Encode(geometry.codec, plain, geometry.page_elements, len(order), stride) if block else None,
    )


def _tensor_axes(target: Placed) -> list[str]:
    """The axes that number tensors; none if one of them numbers pages or elements as well."""
    layout = target.layout
    found = []
    for axis, digits in layout.axes:
        numbers = {digit.name in layout.tensors for digit in digits}
        if numbers == {True, False}:
            return []
        found += [axis] * (True in numbers)
    return found


def _in_runs(
    reading: Reading, side: Side, ranges: dict[str, Ints], elements: int, decode: Decode | None
) -> RegroupPlan:
    """The elements alone: staging has the target's contiguous runs, one behind the other."""
    found, depths, channels, offsets, lengths = [], [], [], [], []
    for box in cutting.cut(reading.side, side, ranges):
        run, depth = box.item_bytes, 0
        for count, stride in zip(reversed(box.shape), reversed(box.target_strides), strict=True):
            if stride != run:
                break
            run, depth = run * count, depth + 1
        channel, offset = box.target.addresses()
        outer = len(box.shape) - depth
        channel = np.zeros_like(offset) if channel is None else channel
        offset = _spread(offset, box.shape[:outer], box.target_strides[:outer])
        channel = _spread(channel, box.shape[:outer], (0,) * outer)
        found.append(box)
        depths.append(depth)
        channels.append(channel)
        offsets.append(offset)
        lengths.append(np.full(len(offset), run, np.int64))
    channel, offset, length = (np.concatenate(parts) for parts in (channels, offsets, lengths))
    order = _sorted(channel, offset)
    channel, offset, length = channel[order], offset[order], length[order]
    staged = np.cumsum(length) - length
    staging = np.empty_like(staged)
    staging[order] = staged
    ends = np.cumsum([len(each) for each in offsets])
    return RegroupPlan(
        copies=tuple(
            copy
            for box, depth, part in zip(found, depths, np.split(staging, ends[:-1]), strict=True)
            for copy in reading.copies(box, part, depth)
        ),
        zero=np.empty(0, np.int64),
        zero_bytes=0,
        staging_bytes=int(length.sum()),
        requests=merged(staged, channel, offset, length),
        payload_bytes=elements * side.item_bytes,
        decode=decode,
    )


def _spread(offsets: Ints, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ints:
    """Dims of boxes as boxes of their own."""
    cutting.check_count(len(offsets) * math.prod(shape))
    for count, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(count) * stride).reshape(-1)
    return offsets


def _sorted(channel: Ints, offset: Ints) -> Ints:
    """The order by channel and offset."""
    if channel.any():
        return np.lexsort((offset, channel))
    return np.argsort(offset, kind="stable")
