"""Tokens that wait to be sent, in order of class, then layer, then position; sorted when their turn comes.

What becomes ready, or gets other classes, is only noted, with the first class that it can have
(:meth:`kvd.transfer.order.Order.least`). When that is the first of all, its ranges are cut into pieces of one class
each. So what is ranked before its turn, as most layers are on a slow link, is sorted once, and nothing is sorted twice
without need.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator

from kvd.transfer.order import Order, Piece, Range


@dataclasses.dataclass(slots=True, eq=False)
class _Group:
    """What waits of some rows of a layer; either list has something."""

    first: int
    """The class of the first piece, or an earlier one while there is anything unsorted."""
    unsorted: list[Range] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    """The last one goes first."""


class Work:
    """What may go by one path. Ranges may overlap only where the caller can tell what of a piece is still to go."""

    __slots__ = ("_groups", "_keys", "_order")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._groups: dict[tuple[int, int], _Group] = {}
        """By layer and group of rows."""
        self._keys: list[tuple[int, int, int]] = []
        """Heap of (first class, layer, group). One that is not its group's any more is dropped as it comes first."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[tuple[int, Range]]:
        """Everything, with its layer, in no particular order."""
        for (layer, _), group in self._groups.items():
            for each in group.unsorted:
                yield layer, each
            for _, *piece in group.pieces:
                yield layer, (piece[0], piece[1], piece[2])

    def put(self, layer: int, piece: Range) -> None:
        key = layer, self._order.group(piece[0])
        least = self._order.least(*key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(least)
            heapq.heappush(self._keys, (least, *key))
        elif least < group.first:
            group.first = least
            heapq.heappush(self._keys, (least, *key))
        group.unsorted.append(piece)

    def first(self) -> tuple[int, list[Piece]]:
        """The layer of the first piece, and what waits of it and some rows of it, the last one first. There must be
        one. The caller may take pieces off the list's end and put parts of them there, and then calls :meth:`taken`."""
        while True:
            first, layer, number = self._keys[0]
            group = self._groups.get((layer, number))
            if group is None or group.first != first:
                heapq.heappop(self._keys)
                continue
            if not group.unsorted:
                return layer, group.pieces
            ranges = group.unsorted + [(row, start, stop) for _, row, start, stop in group.pieces]
            group.pieces = self._order.cut(layer, number, ranges)
            group.pieces.reverse()
            group.unsorted.clear()
            group.first = group.pieces[-1][0]
            heapq.heappush(self._keys, (group.first, layer, number))

    def taken(self) -> None:
        """What :meth:`first` returned has changed."""
        first, layer, number = self._keys[0]
        group = self._groups[layer, number]
        if not group.pieces:
            del self._groups[layer, number]
            heapq.heappop(self._keys)
        elif group.pieces[-1][0] != first:
            group.first = group.pieces[-1][0]
            heapq.heapreplace(self._keys, (group.first, layer, number))

    def sort_anew(self, layer: int) -> None:
        """The layer's classes have changed."""
        for number in self._order.groups:
            group = self._groups.get((layer, number))
            if group is not None:
                group.unsorted += [(row, start, stop) for _, row, start, stop in group.pieces]
                group.pieces.clear()
                group.first = self._order.least(layer, number)
                heapq.heappush(self._keys, (group.first, layer, number))

    def move_layers(self, first: int, target: Work) -> None:
        """Give the layers from ``first`` on to another."""
        for key in [key for key in self._groups if key[0] >= first]:
            group = self._groups.pop(key)
            there = target._groups.setdefault(key, group)
            if there is not group:
                there.unsorted += group.unsorted
                there.unsorted += [(row, start, stop) for _, row, start, stop in group.pieces]
                there.first = min(there.first, group.first)
            heapq.heappush(target._keys, (there.first, *key))
