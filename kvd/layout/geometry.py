"""What follows from a layout and its numbers: sizes, and the address of every element, as sums over the axes.

An element's *key* numbers its page among the pages of all tensors: ``tensor * pages + page``. Both the key and the
place within the page are sums of one term an axis, since every digit belongs to one axis and has one weight. So a few
tables of an axis's length describe a tensor of any size, and a block table is just another term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.layout.codec import Codec, codec

if TYPE_CHECKING:
    from kvd.layout.descriptor import Placed, Table

MAX_BYTES, MAX_TENSORS = 1 << 54, 1 << 20
"""Of a channel, so that a channel and an address in it make one int64; and of a layout."""


class Geometry:
    """The numbers of a :class:`Placed`. Raises :class:`InvalidArgument` where they don't fit each other."""

    def __init__(self, placed: Placed) -> None:
        layout = placed.layout
        self.placed = placed
        self.codec: Codec = codec(layout.codec)
        self.radix: dict[str, int] = {}
        """Values that each digit has memory for."""
        self.below: dict[str, int] = {}
        """What a step of each digit is on its axis."""
        self._axis: dict[str, str] = {}
        for axis, digits in layout.axes:
            unit = 1
            for digit in reversed(digits):
                self.below[digit.name], self._axis[digit.name] = unit, axis
                start, stop = placed.held[axis]
                self.radix[digit.name] = digit.radix or self._room(digit.name, -(-(stop - start) // unit))
                unit *= self.radix[digit.name]
            if stop - start > unit:
                raise InvalidArgument(
                    f"layout {layout.name!r} has {unit} places on axis {axis}, but {stop - start} are held",
                    axis=axis,
                    places=unit,
                )
        self.tensors = self._product(layout.tensors)
        self.pages = self._product(layout.pages)
        """Of one tensor, those of all its room."""
        self.page_elements = self._product(layout.inner)
        for what, count, most in (
            ("tensors", self.tensors, MAX_TENSORS),
            ("pages", self.pages * self.tensors, MAX_BYTES),
            ("elements a page", self.page_elements, MAX_BYTES),
        ):
            if count > most:
                raise InvalidArgument(
                    f"layout {layout.name!r} would have {count} {what}; {most} is the most", layout=layout.name
                )
        self.page_bytes = self.codec.page_bytes(self.page_elements)
        alignment = layout.placement.alignment
        self.page_stride = -(-self.page_bytes // alignment) * alignment
        self.channels = layout.placement.channels
        self.turn_pages = (layout.placement.kind == "round-robin" and layout.placement.shard_pages) or 1
        """Round robin: pages that go to a channel at a time."""
        self.shard_pages = self._shard_pages()
        """Pages of a tensor in its fullest channel."""
        if layout.placement.kind == "digit" and layout.pages and self.radix[layout.pages[0]] > self.channels:
            name = layout.pages[0]
            raise InvalidArgument(
                f"{self.channels} channels can't hold the {self.radix[name]} values of digit {name}, one each, of "
                f"layout {layout.name!r}; make its shards wider, or give more channels",
                channels=self.channels,
                digit=name,
                values=self.radix[name],
            )
        if self.shard_pages * self.channels < self.pages:
            raise InvalidArgument(
                f"{self.channels} channels of {self.shard_pages} pages can't hold the {self.pages} pages of a tensor "
                f"in layout {layout.name!r}; give shards of {-(-self.pages // self.channels)} pages or more",
                channels=self.channels,
                shard_pages=self.shard_pages,
                pages=self.pages,
            )
        self.tensor_stride = self.shard_pages * self.page_stride
        """Bytes of one tensor in each channel."""
        if self.tensor_stride * self.tensors > MAX_BYTES:
            raise InvalidArgument(f"layout {layout.name!r} would take more than {MAX_BYTES} bytes", layout=layout.name)
        self.bases = self._bases()
        self.channel_bytes = int(self.bases.max()) + self.tensor_stride
        self.weight = {
            name: unit
            for group in (layout.tensors, layout.pages, layout.inner)
            for name, unit in zip(group, self._units(group), strict=True)
        }
        """Of each digit within its group: among tensors, pages, or elements of a page."""
        self._check_table()

    def key(self, axis: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The axis's term of the page key, for positions on the whole tensor's axis."""
        layout = self.placed.layout
        found = np.zeros(positions.shape, np.int64)
        for digit in layout.digits(axis):
            if digit.name in layout.inner:
                continue
            found += self._value(digit.name, positions) * self.key_weight(digit.name)
        return found

    def inner(self, axis: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The axis's term of the element's number within its page."""
        layout = self.placed.layout
        found = np.zeros(positions.shape, np.int64)
        for digit in layout.digits(axis):
            if digit.name in layout.inner:
                found += self._value(digit.name, positions) * self.weight[digit.name]
        return found

    def key_weight(self, digit: str) -> int:
        """What a step of a digit outside the page adds to the key."""
        return self.weight[digit] * (self.pages if digit in self.placed.layout.tensors else 1)

    def channel_slot(self, keys: Table) -> tuple[Table, Table]:
        """``(channel, slot)`` of pages; a slot counts ``page_stride`` within its tensor's bytes."""
        page = keys % self.pages if self.tensors > 1 else keys
        if self.channels == 1:
            return np.zeros_like(page), page
        if self.placed.layout.placement.kind != "round-robin":
            channel = page // self.shard_pages
            return channel, page - channel * self.shard_pages
        turn = page if self.turn_pages == 1 else page // self.turn_pages
        slot = turn // self.channels
        channel = turn - slot * self.channels
        if self.turn_pages > 1:
            slot = slot * self.turn_pages + page - turn * self.turn_pages
        return channel, slot

    def places(self, keys: Table) -> tuple[Table, Table]:
        """``(channel, byte offset)`` of pages."""
        channel, slot = self.channel_slot(keys)
        slot *= self.page_stride
        if self.tensors > 1:
            slot += self.bases[keys // self.pages]
        else:
            slot += int(self.bases[0])
        return channel, slot

    def locate(self, positions: Mapping[str, npt.ArrayLike]) -> tuple[Table, Table]:
        """See :meth:`Placed.locate`."""
        if self.codec.is_block:
            raise InvalidArgument(
                f"single elements of {self.codec.name} have no bytes of their own", codec=self.codec.name
            )
        held = self.placed.held
        if unknown := set(positions) - set(held):
            raise InvalidArgument(f"there is no axis {min(unknown)!r}; there are {', '.join(held)}", axis=min(unknown))
        keys, inner = np.zeros((), np.int64), np.zeros((), np.int64)
        for axis, (start, stop) in held.items():
            at = np.asarray(positions.get(axis, start), np.int64)
            if (axis not in positions and stop - start > 1) or (
                at.size and not (at.min() >= start and at.max() < stop)
            ):
                raise InvalidArgument(f"axis {axis} is held from {start} to {stop}; name positions in it", axis=axis)
            keys, inner = keys + self.key(axis, at), inner + self.inner(axis, at)
        channel, offset = self.places(keys)
        return channel, offset + inner * self.codec.item_bytes

    def padded_stop(self, axis: str) -> int:
        """Where the axis would end if the last value of its first digit were full: the padding's end."""
        digits = self.placed.layout.digits(axis)
        start, stop = self.placed.held.get(axis, (0, 1))
        if not digits:
            return stop
        unit = self.below[digits[0].name]
        return start + unit * (digits[0].radix or -(-(stop - start) // unit))

    def _room(self, digit: str, needed: int) -> int:
        placed = self.placed
        if placed.layout.table == digit and digit not in placed.room:
            raise InvalidArgument(
                f"digit {digit} of layout {placed.layout.name!r} goes through a block table; say in room how many "
                "blocks the memory has",
                digit=digit,
            )
        room = placed.room.get(digit, needed)
        if placed.layout.table != digit and room < needed:
            raise InvalidArgument(
                f"digit {digit} of layout {placed.layout.name!r} has room for {room}, but {needed} are needed",
                digit=digit,
                need=needed,
                room=room,
            )
        return room

    def _value(self, name: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        axis = self._axis[name]
        local = positions - self.placed.held[axis][0]
        if self.below[name] > 1:
            local = local // self.below[name]
        if name != self.placed.layout.digits(axis)[0].name:
            local = local % self.radix[name]
        if name == self.placed.layout.table:
            assert self.placed.table is not None
            local = self.placed.table[local]
        return local

    def _shard_pages(self) -> int:
        layout = self.placed.layout
        if layout.placement.kind == "round-robin":
            return -(-self.pages // (self.turn_pages * self.channels)) * self.turn_pages
        if layout.placement.shard_pages:
            return layout.placement.shard_pages
        if layout.placement.kind == "digit" and layout.pages:
            return self.pages // self.radix[layout.pages[0]]
        row = self.radix[layout.pages[-1]] if layout.placement.kind == "sharded" and layout.pages else 1
        return -(-(self.pages // row) // self.channels) * row

    def _product(self, names: tuple[str, ...]) -> int:
        return math.prod(self.radix[name] for name in names)

    def _units(self, names: tuple[str, ...]) -> list[int]:
        return [self._product(names[at + 1 :]) for at in range(len(names))]

    def _bases(self) -> Table:
        given = self.placed.bases
        if given is None:
            return np.arange(self.tensors, dtype=np.int64) * self.tensor_stride
        if given.shape != (self.tensors,) or given.dtype != np.int64:
            raise InvalidArgument(
                f"bases have shape {given.shape} and type {given.dtype}; give {self.tensors} int64 numbers",
                tensors=self.tensors,
            )
        order = np.sort(given)
        if order[0] < 0 or int(order[-1]) > MAX_BYTES or (np.diff(order) < self.tensor_stride).any():
            raise InvalidArgument(
                f"tensors of {self.tensor_stride} bytes in a channel overlap, or begin before 0 or beyond {MAX_BYTES}; "
                "space their bases",
                tensor_bytes=self.tensor_stride,
            )
        return given

    def _check_table(self) -> None:
        table, name = self.placed.table, self.placed.layout.table
        if table is None:
            return
        start, stop = self.placed.held[self._axis[name]]
        needed, room = -(-(stop - start) // self.below[name]), self.radix[name]
        if table.ndim != 1 or table.dtype != np.int64 or len(table) < needed:
            raise InvalidArgument(
                f"the block table has shape {table.shape} and type {table.dtype}; give int64 numbers of the {needed} "
                "blocks that are held",
                blocks=needed,
            )
        used = table[:needed]
        if used.min() < 0 or used.max() >= room:
            wrong = int(used.min() if used.min() < 0 else used.max())
            raise InvalidArgument(
                f"the block table names block {wrong}, but the memory has blocks 0 to {room - 1}",
                block=wrong,
                room=room,
            )
        if len(np.unique(used)) != needed:
            raise InvalidArgument("the block table names a block twice", blocks=needed)
