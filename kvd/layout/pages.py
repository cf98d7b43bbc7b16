"""Pages in the order of their addresses, channel by channel: the order in which staging memory has them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.layout.geometry import Geometry

Ints: TypeAlias = npt.NDArray[np.int64]


class PageOrder:
    """The pages ``key + tensor * geometry.pages`` of all ``keys`` and ``tensors``, by channel, tensor and address.

    Most often ``keys`` are pages of one tensor and the same pages of many tensors are meant. Then only those of one are
    sorted, since a page's place grows by the same step from each tensor to the next; a tensor's *line* is its place
    among the tensors by base. Keys that differ in their tensors as well go with the single tensor 0.
    """

    def __init__(self, geometry: Geometry, keys: Ints, tensors: Ints) -> None:
        self._geometry = geometry
        self._apart = bool(len(keys)) and int(keys.max()) >= geometry.pages
        """Keys have tensors of their own."""
        by_base = np.argsort(geometry.bases, kind="stable")
        self._tensor_rank = np.empty_like(by_base)
        self._tensor_rank[by_base] = np.arange(len(by_base))
        self._bases_in_order = geometry.bases[by_base]
        # of the meant tensors alone, by base
        self._ranks_of_tensors = np.sort(self._tensor_rank[tensors])
        self._bases = np.zeros(1, np.int64) if self._apart else self._bases_in_order[self._ranks_of_tensors]
        self._per_channel = geometry.shard_pages * (geometry.tensors if self._apart else 1)
        numbers = self._numbers(keys)
        total = geometry.channels * self._per_channel
        self._ranks: Ints | None = None
        if total <= 8 * len(keys) + 4096:
            # most of the memory's pages are meant: marking them is a sort
            marks = np.zeros(total, np.bool_)
            marks[numbers] = True
            self._sorted: Ints = np.flatnonzero(marks)
            self._ranks = np.cumsum(marks, dtype=np.int64) - 1
        else:
            self._sorted = np.sort(numbers)
        self._channel = self._sorted // self._per_channel
        self._counts = np.bincount(self._channel, minlength=geometry.channels)
        self._before = np.cumsum(self._counts) - self._counts

    def __len__(self) -> int:
        return len(self._sorted) * len(self._bases)

    def place(self, keys: Ints) -> tuple[Ints, Ints]:
        """``(first, step)``: the pages' places in line 0, and from there to the next line's, in pages."""
        numbers = self._numbers(keys)
        rank: Ints = self._ranks[numbers] if self._ranks is not None else np.searchsorted(self._sorted, numbers)
        if self._geometry.channels == 1:
            return rank, self._counts
        channel = numbers // self._per_channel
        # the other tensors' pages in the channels before it come first, too
        return rank + self._before[channel] * (len(self._bases) - 1), self._counts[channel]

    def line(self, tensors: Ints) -> Ints:
        """The lines of tensors that are meant."""
        return np.searchsorted(self._ranks_of_tensors, self._tensor_rank[tensors]).astype(np.int64, copy=False)

    def places(self, keys: Ints) -> Ints:
        """The pages' places in all lines, one line after another."""
        first, step = self.place(keys)
        return (first + np.arange(len(self._bases))[:, None] * step).reshape(-1)

    def requests(self) -> Ints:
        """(n, 4): staging offset, channel, offset in it, length, for whole pages; runs are maximal."""
        offset = self._offsets()
        runs = merged(offset, self._channel, offset, np.full(len(offset), self._geometry.page_stride))
        pieces = []
        for channel in np.unique(runs[:, 1]):
            _, _, start, length = runs[runs[:, 1] == channel].T
            pieces.append(
                np.stack(
                    (
                        np.full(len(start) * len(self._bases), channel),
                        (self._bases[:, None] + start).reshape(-1),
                        np.tile(length, len(self._bases)),
                    )
                )
            )
        # what ends a tensor and what begins the next may touch
        channels, target, lengths = np.concatenate(pieces, axis=1)
        return merged(np.cumsum(lengths) - lengths, channels, target, lengths)

    def by_channel(self) -> list[tuple[int, Ints]]:
        """``(channel, byte offsets)`` of all pages, in order."""
        offset = self._offsets()
        return [
            (int(channel), (self._bases[:, None] + offset[self._channel == channel]).reshape(-1))
            for channel in np.unique(self._channel)
        ]

    def _offsets(self) -> Ints:
        """Of the sorted pages: within the tensor, or within the channel where keys have tensors of their own."""
        geometry = self._geometry
        within = self._sorted - self._channel * self._per_channel
        if self._apart:
            tensor, within = np.divmod(within, geometry.shard_pages)
        offset: Ints = within * geometry.page_stride
        return offset + self._bases_in_order[tensor] if self._apart else offset

    def _numbers(self, keys: Ints) -> Ints:
        """A number for each page that grows with channel and address."""
        geometry = self._geometry
        channel, slot = geometry.channel_slot(keys)
        if geometry.channels > 1:
            slot = slot + channel * self._per_channel
        return slot + self._tensor_rank[keys // geometry.pages] * geometry.shard_pages if self._apart else slot


def merged(source: Ints, channel: Ints, target: Ints, length: Ints) -> Ints:
    """Requests (n, 4) from pieces sorted by channel and target; neighbours on both sides are one."""
    if not len(source):
        return np.empty((0, 4), np.int64)
    end_source, end_target = source[:-1] + length[:-1], target[:-1] + length[:-1]
    new = (target[1:] != end_target) | (source[1:] != end_source) | (channel[1:] != channel[:-1])
    first = np.concatenate(([0], np.flatnonzero(new) + 1))
    return np.stack((source[first], channel[first], target[first], np.add.reduceat(length, first)), axis=1)
