"""Block-format pages that mean the same on both sides move as they are: each is one element of many bytes."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvd.layout.descriptor import Layout, Placed
from kvd.layout.ranges import Ints


def as_pages(source: Placed, target: Placed, ranges: dict[str, Ints]) -> tuple[Placed, Placed, dict[str, Ints]] | None:
    """Both sides and the ranges with pages for elements; None if the pages differ inside, or don't cover the same
    positions: those have to be decoded and encoded again."""
    if _inside(source) != _inside(target):
        return None
    units = {axis: unit for axis, unit in _page_units(source.layout).items() if unit > 1}
    for axis, unit in units.items():
        (a, b), (c, d) = source.held[axis], target.held[axis]
        if a % unit or c % unit or (b != d and (b % unit or d % unit)):
            return None
        if any(start % unit or (stop % unit and stop != b) for start, stop in ranges[axis].tolist()):
            return None
    ranges = ranges | {axis: -(-ranges[axis] // unit) for axis, unit in units.items()}
    return _with_pages(source, units), _with_pages(target, units), ranges


def _page_units(layout: Layout) -> dict[str, int]:
    found = {}
    for axis, digits in layout.axes:
        found[axis] = 1
        for digit in digits:
            found[axis] *= digit.radix if digit.name in layout.inner else 1
    return found


def _inside(placed: Placed) -> list[tuple[str, int, int, int]]:
    """What a page is: of each digit its axis, its unit there, its radix, and its weight in the page."""
    geometry, layout = placed.geometry, placed.layout
    return sorted(
        (axis, geometry.below[digit.name], digit.radix, geometry.weight[digit.name])
        for axis, digits in layout.axes
        for digit in digits
        if digit.name in layout.inner and digit.radix > 1
    )


def _with_pages(placed: Placed, units: dict[str, int]) -> Placed:
    layout = placed.layout
    outside = tuple(
        (axis, tuple(digit for digit in digits if digit.name not in layout.inner)) for axis, digits in layout.axes
    )
    return Placed(
        layout=dataclasses.replace(
            layout,
            axes=tuple((axis, digits) for axis, digits in outside if digits),
            inner=(),
            codec=f"raw:{placed.geometry.page_bytes}",
        ),
        held={
            axis: (start // units.get(axis, 1), -(-stop // units.get(axis, 1)))
            for axis, (start, stop) in placed.held.items()
        },
        room=placed.room,
        table=placed.table,
        bases=None if placed.bases is None else np.asarray(placed.bases),
    )
