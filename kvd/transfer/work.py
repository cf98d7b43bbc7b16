"""Pieces of work in order of class, then layer, then position; and what lets some rows of one layer be sorted anew."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

Piece: TypeAlias = tuple[int, int, int]
"""Row, start (included), stop (excluded)."""

ROWS = 4
"""A layer's pieces are found by so many rows of a batch: sorting a row's anew takes up to a millisecond."""


class Work:
    """Pieces in a bucket for each (class, layer, :data:`ROWS` rows), the buckets in a heap: pieces of one bucket come
    in the order of their positions, so that neighbours are sent as one run, and those of some rows of a layer are found
    without looking at the others."""

    __slots__ = ("_buckets", "_classes", "_keys")

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int, int], list[Piece]] = {}
        """By (class, layer, rows), each a heap; none is empty."""
        self._keys: list[tuple[int, int, int]] = []
        """Heap of the buckets' keys. One whose bucket is gone, or that is there twice, is dropped as it comes first."""
        self._classes: dict[tuple[int, int], set[int]] = {}
        """By (layer, rows), the classes of its buckets."""

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __iter__(self) -> Iterator[tuple[int, int, Piece]]:
        """All pieces with their classes and layers, in no particular order."""
        for (rank, layer, _), bucket in self._buckets.items():
            for piece in bucket:
                yield rank, layer, piece

    def push(self, rank: int, layer: int, piece: Piece) -> None:
        rows = piece[0] // ROWS
        bucket = self._buckets.get((rank, layer, rows))
        if bucket is None:
            self._buckets[rank, layer, rows] = [piece]
            self._classes.setdefault((layer, rows), set()).add(rank)
            heapq.heappush(self._keys, (rank, layer, rows))
        else:
            heapq.heappush(bucket, piece)

    def push_row(self, layer: int, row: int, ranks: list[int], starts: list[int], stops: list[int]) -> None:
        """Many pieces of a row at once; a ranking brings hundreds."""
        buckets, rows = self._buckets, row // ROWS
        for rank, start, stop in zip(ranks, starts, stops, strict=True):
            bucket = buckets.get((rank, layer, rows))
            if bucket is None:
                self.push(rank, layer, (row, start, stop))
            else:
                heapq.heappush(bucket, (row, start, stop))

    def pop(self) -> tuple[int, int, Piece]:
        """The first piece, with its class and layer. There must be one."""
        while self._keys[0] not in self._buckets:
            heapq.heappop(self._keys)
        rank, layer, _ = key = self._keys[0]
        bucket = self._buckets[key]
        piece = heapq.heappop(bucket)
        if not bucket:
            heapq.heappop(self._keys)
            self._forget(key)
        return rank, layer, piece

    def take_rows(self, layer: int, rows: int) -> list[tuple[int, Piece]]:
        """Take the pieces of a layer's rows from ``ROWS * rows`` on, :data:`ROWS` of them, out; each with its class."""
        found = []
        for rank in sorted(self._classes.get((layer, rows), ())):
            found += [(rank, piece) for piece in self._buckets[rank, layer, rows]]
            self._forget((rank, layer, rows))
        return found

    def move_layers(self, first: int, target: Work) -> None:
        """Give the layers from ``first`` on to another."""
        for layer, rows in [key for key in self._classes if key[0] >= first]:
            for rank, piece in self.take_rows(layer, rows):
                target.push(rank, layer, piece)

    def _forget(self, key: tuple[int, int, int]) -> None:
        del self._buckets[key]
        classes = self._classes[key[1:]]
        classes.discard(key[0])
        if not classes:
            del self._classes[key[1:]]
