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

import numpy as np
from kvd_kernels.regrouping import MAX_DIMS

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout import boxes as cutting
from kvd.layout.boxes import Boxes, Side, Terms
from kvd.layout.codec import Codec, check_conversion, codec
from kvd.layout.descriptor import Placed
from kvd.layout.opaque import as_pages
from kvd.layout.pages import PageOrder, merged
from kvd.layout.ranges import Ints, Ranges, common, page_terms, positions
from kvd.layout.steps import Copy, Decode, Encode, RegroupPlan, Requests


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
    check_pages(source, target)


def check_pages(source: Placed, target: Placed) -> None:
    """The part of :func:`check_convertible` that is about ranges: no page of the target has to be written by halves."""
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
    table = table[np.lexsort((table[:, 3], table[:, 2]))]
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

    def page_copies(self, box: Boxes, first: Ints, step: Ints, lines: Ints) -> Iterator[Copy]:
        """The copies of boxes into pages: those of line ``n`` of the target's tensors go ``n * step`` behind ``first``.

        In the order, within a tensor, of the side where a box's bytes lie further apart: neighbours then share its
        lines of cache and its pages.
        """
        terms = box.source
        by = first if box.reach(box.target_strides) > box.reach(box.source_strides) else terms.keys_and_bytes()
        order = np.argsort(by, kind="stable")
        terms = terms.reordered(order)
        places = np.empty((len(lines), len(first), 2), np.int64)
        channel = self._write_addresses(terms, places[:, :, 0])
        np.multiply(lines[:, None], step[order] if len(step) > 1 else step, out=places[:, :, 1])
        places[:, :, 1] += first[order]
        if by is not first and channel is None and places.size:
            places = _interleaved(places)
        yield from self._copies(box, places.reshape(-1, 2), channel, 0)

    def run_copies(self, box: Boxes, staging: Ints, outer: int) -> Iterator[Copy]:
        """The copies of boxes whose ``outer`` first dims are boxes of their own, each at its place in ``staging``."""
        offset = np.empty((len(box.source.outer_bytes), len(box.source.bytes)), np.int64)
        channel = self._write_addresses(box.source, offset)
        shape, strides = box.shape[:outer], box.source_strides[:outer]
        places = np.stack((_spread(offset.reshape(-1), shape, strides), staging), axis=1)
        if channel is not None:
            channel = _spread(channel, shape, (0,) * outer)
        by = int(box.reach(box.target_strides, outer) > box.reach(box.source_strides, outer))
        order = np.argsort(places[:, by], kind="stable")
        yield from self._copies(box, places[order], None if channel is None else channel[order], outer)

    def _copies(self, box: Boxes, places: Ints, channel: Ints | None, outer: int) -> Iterator[Copy]:
        if len(box.shape) - outer > MAX_DIMS:
            # more than the kernel has: the outermost become boxes, too
            more = slice(outer, len(box.shape) - MAX_DIMS)
            columns = [_spread(places[:, at], box.shape[more], box.strides(at)[more]) for at in (0, 1)]
            places, outer = np.stack(columns, axis=1), more.stop
            channel = None if channel is None else _spread(channel, box.shape[more], (0,) * len(box.shape[more]))
        for one in (0,) if channel is None else np.unique(channel):
            yield Copy(
                channel=int(one),
                places=places if channel is None else places[channel == one],
                shape=box.shape[outer:],
                source_strides=box.source_strides[outer:],
                target_strides=box.target_strides[outer:],
                item_bytes=box.item_bytes,
            )

    def _write_addresses(self, terms: Terms, out: Ints) -> Ints | None:
        """Byte offsets in the source into ``out``, shape (outer boxes, others); and the channels, if several."""
        np.add(terms.outer_bytes[:, None], terms.bytes, out=out)
        if self.decoded is not None:
            pages = self.decoded.place(terms.keys_of_all())[0]
            out += (pages * (self.side.geometry.page_elements * self.side.item_bytes)).reshape(out.shape)
            return None
        if not self.side.paged:
            return None
        channel, page = self.side.geometry.places(terms.keys_of_all())
        out += page.reshape(out.shape)
        return channel if self.side.geometry.channels > 1 else None


def _interleaved(places: Ints) -> Ints:
    """Places (tensors, boxes, 2), each tensor's in the source's order, with tensors that the source has side by side
    (K and V of an entry) taken together, box by box; others one after another as they were."""
    lines, reach = places[:, 0, 0], places[0, -1, 0] - places[0, 0, 0]
    apart = np.flatnonzero(np.abs(np.diff(lines)) > reach) + 1
    together = int(apart[0]) if len(apart) else len(lines)
    if together == 1 or len(lines) % together or len(apart) != len(lines) // together - 1 or (apart % together).any():
        return places
    return places.reshape(-1, together, places.shape[1], 2).swapaxes(1, 2)


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
        # the outer terms of the target are its tensors' alone
        lines = order.line(box.target.outer_keys // geometry.pages)
        copies += reading.page_copies(box, first * page + box.target.bytes, step * page, lines)
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
    runs = _runs(side, ranges)
    span = side.geometry.channel_bytes + 1
    begin = runs[:, 1] * span + runs[:, 2]
    copies: list[Copy] = []
    for box in cutting.cut(reading.side, side, ranges):
        channel, offset = box.target.addresses()
        address = offset if channel is None else channel * span + offset
        outer = 0
        while True:
            at = np.searchsorted(begin, address, side="right") - 1
            inside = address - begin[at]
            if (inside + box.reach(box.target_strides, outer) < runs[at, 3]).all():
                break
            # not in one run: the outermost dim becomes boxes of its own
            address = _spread(address, box.shape[outer : outer + 1], box.target_strides[outer : outer + 1])
            outer += 1
        copies += reading.run_copies(box, runs[at, 0] + inside, outer)
    return RegroupPlan(
        copies=tuple(copies),
        zero=np.empty(0, np.int64),
        zero_bytes=0,
        staging_bytes=int(runs[:, 3].sum()),
        requests=runs,
        payload_bytes=elements * side.item_bytes,
        decode=decode,
    )


def _runs(side: Side, ranges: dict[str, Ints]) -> Requests:
    """The contiguous runs of all elements in a layout, as requests from staging that has them one behind the other."""
    channels, offsets, lengths = [], [], []
    for box in cutting.cut(side, side, ranges):
        channel, offset = box.target.addresses()
        channel = np.zeros_like(offset) if channel is None else channel
        offsets.append(_spread(offset, box.shape, box.target_strides))
        channels.append(_spread(channel, box.shape, (0,) * len(box.shape)))
        lengths.append(np.full(len(offsets[-1]), box.item_bytes))
    channel, offset, length = (np.concatenate(parts) for parts in (channels, offsets, lengths))
    order = np.lexsort((offset, channel)) if channel.any() else np.argsort(offset, kind="stable")
    channel, offset, length = channel[order], offset[order], length[order]
    return merged(np.cumsum(length) - length, channel, offset, length)


def _spread(offsets: Ints, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ints:
    """Dims of boxes as boxes of their own."""
    cutting.check_count(len(offsets) * math.prod(shape))
    for count, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(count) * stride).reshape(-1)
    return offsets
