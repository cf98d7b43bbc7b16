"""Which part of a tensor a plan is about: what both sides hold, of what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout.descriptor import Placed
from kvd.layout.geometry import Geometry

Ints: TypeAlias = npt.NDArray[np.int64]

Ranges: TypeAlias = Mapping[str, "tuple[int, int] | npt.NDArray[np.int64]"]
"""Parts of a tensor: axis to (start, stop), or to an (n, 2) array of several disjoint ranges. Axes not named: all."""

MAX_PADDING = 1 << 20
"""Pages along an axis that are padding alone; a shard that begins at the end of a tensor has some."""


def common(source: Placed, target: Placed, within: Ranges | None) -> dict[str, Ints]:
    """Axis to (n, 2): sorted, disjoint and not empty each; an axis may have no range, where the sides don't meet.

    Raises :class:`UnsupportedLayout` for an axis that only one side has, and :class:`InvalidArgument` for ranges that
    make no sense.
    """
    axes = dict.fromkeys((*target.layout.axis_names, *source.layout.axis_names))
    if unknown := set(within or ()) - set(axes):
        name = min(unknown)
        raise InvalidArgument(f"there is no axis {name!r}; the layouts have {', '.join(axes)}", axis=name)
    found = {}
    for axis in axes:
        (a, b), (c, d) = _held(source, target, axis)
        ranges = np.array([[max(a, c), min(b, d)]], np.int64)
        if within and axis in within:
            ranges = _clipped(_checked(axis, within[axis]), *ranges[0].tolist())
        found[axis] = ranges[ranges[:, 0] < ranges[:, 1]]
    return found


def positions(ranges: Ints) -> Ints:
    """All positions in the ranges, in their order."""
    lengths = ranges[:, 1] - ranges[:, 0]
    first = np.repeat(ranges[:, 0] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return first + np.arange(int(lengths.sum()), dtype=np.int64)


def page_terms(geometry: Geometry, axis: str, ranges: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The axis's terms of the keys of all pages that the ranges fill, and whether each is full of elements.

    Where the ranges reach the end of the axis, pages of its padding belong to them. Raises :class:`InvalidArgument`
    where a page has elements that the ranges leave out.
    """
    start, stop = geometry.placed.held.get(axis, (0, 1))
    layout = geometry.placed.layout
    digits = layout.digits(axis)
    size = 1
    for digit in digits:
        size *= geometry.radix[digit.name] if digit.name in layout.inner else 1
    chosen = positions(ranges)
    keys = geometry.key(axis, chosen)
    if size == 1 and geometry.padded_stop(axis) == stop:
        return keys, np.ones(len(keys), np.bool_)
    found, counts = np.unique(keys, return_counts=True)
    whole, lengths = np.unique(geometry.key(axis, np.arange(start, stop)), return_counts=True)
    left_out = lengths[np.searchsorted(whole, found)] > counts
    if left_out.any():
        at = int(chosen[np.flatnonzero(keys == found[left_out][0])[0]])
        raise InvalidArgument(
            f"the pages of layout {layout.name!r} hold {size} places of axis {axis}, and the one of {axis} {at} would "
            f"be cut; choose ranges that begin and end with pages, or send elements alone",
            axis=axis,
            position=at,
            page=size,
        )
    full = counts == size
    if ranges[-1, 1] == stop:
        padding = np.setdiff1d(_padding(geometry, axis, start, stop), found)
        found = np.concatenate((found, padding))
        full = np.concatenate((full, np.zeros(len(padding), np.bool_)))
    return found, full


def _padding(geometry: Geometry, axis: str, start: int, stop: int) -> Ints:
    """The axis's terms of pages that have places behind its end. One place each is enough: those of a step of the
    finest digit that numbers pages are in one page."""
    layout = geometry.placed.layout
    outside = [geometry.below[digit.name] for digit in layout.digits(axis) if digit.name not in layout.inner]
    step = min(outside, default=1)
    begin, end = start + (stop - start) // step * step, geometry.padded_stop(axis)
    if (end - begin) // step > MAX_PADDING:
        raise InvalidArgument(
            f"layout {layout.name!r} has {end - stop} places of padding on axis {axis}, where {stop - start} are held; "
            "make its digits smaller",
            axis=axis,
            places=end - stop,
        )
    return geometry.key(axis, np.maximum(np.arange(begin, end, step), stop))


def _held(source: Placed, target: Placed, axis: str) -> tuple[tuple[int, int], tuple[int, int]]:
    mine, theirs = source.held.get(axis), target.held.get(axis)
    if mine is None or theirs is None:
        there = theirs if mine is None else mine
        assert there is not None
        if there[1] - there[0] > 1:
            side, other = ("source", "target") if mine is None else ("target", "source")
            layout = (source if mine is None else target).layout.name
            raise UnsupportedLayout(
                f"the {side}'s layout {layout!r} has no axis {axis}, of which the {other} holds {there[1] - there[0]}",
                axis=axis,
                layout=[source.layout.name, target.layout.name],
            )
        return there, there
    return mine, theirs


def _checked(axis: str, given: tuple[int, int] | Ints) -> Ints:
    ranges = np.array(given, np.int64).reshape(-1, 2)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    if (ranges[:, 0] > ranges[:, 1]).any() or (ranges[1:, 0] < ranges[:-1, 1]).any() or (ranges < 0).any():
        raise InvalidArgument(
            f"ranges of axis {axis} go backwards, overlap or begin before 0; give disjoint (start, stop)", axis=axis
        )
    return ranges


def _clipped(ranges: Ints, low: int, high: int) -> Ints:
    """Within the bounds; ranges that touch as one."""
    ranges = np.clip(ranges, low, max(low, high))
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if len(ranges) < 2:
        return ranges
    first = np.flatnonzero(np.concatenate(([True], ranges[1:, 0] != ranges[:-1, 1])))
    last = np.concatenate((first[1:] - 1, [len(ranges) - 1]))
    return np.stack((ranges[first, 0], ranges[last, 1]), axis=1)
