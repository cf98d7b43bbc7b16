"""The layout descriptor: axes in digits, digits in an order, pages on channels.

A tensor has named axes (a KV cache: ``l`` layers, ``kv`` K and V, ``h`` KV heads, ``t`` tokens, ``d`` head dimension;
any other names do as well). A :class:`Layout` factors each axis into *digits*, as a number in a mixed radix, and puts
all digits into one order, outermost first, with two cuts::

    l kv || B h T D | F G r c            t = B:* T:2 F:2 r:16      d = D:* G:2 c:16
    tensors   pages   in a page

Digits before ``||`` number separate tensors, those up to ``|`` number a tensor's pages, the rest a page's elements.
:class:`Placement` puts pages on the device's memory channels. One digit may go through a block table.

A :class:`Layout` knows no sizes but those of its own digits. A :class:`Placed` is a layout with the numbers of one side
of a transfer: which part of the tensor it holds, how much room its memory has, its block table, its tensors' bases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.layout.codec import codec

if TYPE_CHECKING:
    from kvd.layout.geometry import Geometry

Table: TypeAlias = npt.NDArray[np.int64]

Kind: TypeAlias = Literal["flat", "round-robin", "sharded", "digit"]
KINDS: tuple[Kind, ...] = ("flat", "round-robin", "sharded", "digit")

MAX_AXES, MAX_DIGITS, MAX_RADIX, MAX_CHANNELS, MAX_ALIGNMENT = 16, 32, 1 << 24, 256, 1 << 21
MAX_SIZE = 1 << 24
"""Of a range's end and of ``room``: tables of an axis have so many entries."""


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}; it must be between {low} and {high}", field=name, value=value)


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


@dataclasses.dataclass(frozen=True, slots=True)
class Digit:
    """A digit of an axis. ``radix`` 0 (written ``*``): as many as the axis needs; only an axis's first digit has it."""

    name: str
    radix: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor's page ``p`` of ``P`` goes; every page takes ``page_bytes`` rounded up to ``alignment``.

    ``flat``: one channel, page after page. ``round-robin``: channel ``p % channels``, slot ``p // channels``; with
    ``shard_pages``, shards of so many pages take turns instead of pages, each contiguous in its channel.
    ``sharded``: channel ``p // shard_pages``, slot ``p % shard_pages``; ``shard_pages`` 0 is as few whole rows (values
    of the last page digit) as the channels need to hold the tensor: height-sharded. ``digit``: the first page digit is
    the channel, and the others number its slots: width-sharded, say.
    A tensor begins at the same base in each channel, and at channel 0.
    """

    kind: Kind = "flat"
    channels: int = 1
    alignment: int = 1
    """In bytes."""
    shard_pages: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"there is no placement {self.kind!r}; use {', '.join(KINDS)}", kind=self.kind)
        _bounded("channels", self.channels, 1, MAX_CHANNELS)
        _bounded("alignment", self.alignment, 1, MAX_ALIGNMENT)
        _bounded("shard_pages", self.shard_pages, 0, 1 << 40)
        if self.kind == "flat" and self.channels != 1:
            raise InvalidArgument(
                f"a flat placement has one channel, not {self.channels}; use round-robin or sharded",
                channels=self.channels,
            )
        if self.shard_pages and self.kind not in ("sharded", "round-robin"):
            raise InvalidArgument(
                f"shard_pages is for sharded and round-robin placements, not {self.kind}", kind=self.kind
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Immutable and hashable; :class:`InvalidArgument` names what makes no sense. ``kvd.layout.notation`` has its
    text, TOML and wire forms."""

    name: str
    axes: tuple[tuple[str, tuple[Digit, ...]], ...]
    """Each axis with its digits, most significant first."""
    tensors: tuple[str, ...]
    """Digits before ``||``."""
    pages: tuple[str, ...]
    """Digits between ``||`` and ``|``."""
    inner: tuple[str, ...]
    """Digits of a page's elements. All digits, where there is no ``|``: a tensor is one page then."""
    codec: str
    """A name of ``kvd.layout.codec.CODECS``: ``bf16``, ``f32``, ``bfp8_b`` …"""
    placement: Placement = Placement()
    table: str = ""
    """The digit whose values are looked up in a block table; empty: none."""
    padding: bool = False
    """Elements of a page beyond the end of the tensor are part of it, and zero (tiles); so are the bytes up to the
    alignment. Otherwise they are never written (paged caches)."""

    def __post_init__(self) -> None:
        codec(self.codec)
        _bounded(f"the number of axes of layout {self.name!r}", len(self.axes), 1, MAX_AXES)
        names = [digit.name for _, digits in self.axes for digit in digits]
        order = self.tensors + self.pages + self.inner
        _bounded(f"the number of digits of layout {self.name!r}", len(names), 1, MAX_DIGITS)
        for name in dict.fromkeys((*names, *order)):
            factored, placed = names.count(name), order.count(name)
            if (factored, placed) != (1, 1):
                raise self._wrong(
                    f"its axes have digit {name} {_times(factored)} and its order {_times(placed)}; each digit must be "
                    "once in both, where an axis that is not factored is one digit of its own name",
                    "order",
                )
        for axis, digits in self.axes:
            for at, digit in enumerate(digits):
                if not digit.radix and at:
                    raise self._wrong(f"digit {digit.name} of axis {axis} is *, which only its first can be", axis)
                _bounded(f"digit {digit.name} of layout {self.name!r}", digit.radix, 0, MAX_RADIX)
        if self.table and self.table not in self.tensors + self.pages:
            raise self._wrong(f"its table is on {self.table!r}, which must be a digit before the page cut", "table")
        if self.table and all(self.table != digits[0].name for _, digits in self.axes):
            raise self._wrong(f"its table is on {self.table!r}, which must be an axis's first digit", "table")
        if codec(self.codec).is_block:
            if not self.padding:
                raise self._wrong(f"{self.codec} has whole pages only; set padding", "padding")
            if not self.inner or any(not self._radix(name) for name in self.inner):
                raise self._wrong(f"{self.codec} needs pages of a fixed size; cut them with | before digits", "order")

    def _wrong(self, what: str, field: str) -> InvalidArgument:
        return InvalidArgument(f"layout {self.name!r} makes no sense: {what}", layout=self.name, field=field)

    def _radix(self, name: str) -> int:
        return next(digit.radix for _, digits in self.axes for digit in digits if digit.name == name)

    def digits(self, axis: str) -> tuple[Digit, ...]:
        """The digits of an axis, most significant first; none for an axis that the layout doesn't have."""
        return next((digits for name, digits in self.axes if name == axis), ())

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A layout with the numbers of one side; :class:`InvalidArgument` names what doesn't fit.

    ``held`` maps every axis to the range of the whole tensor that lies here, ``(start, stop)``: tensor-parallel rank 1
    of 4 holds heads ``(2, 4)`` of 8. All addresses are counted from the range's start.
    """

    layout: Layout
    held: Mapping[str, tuple[int, int]]
    room: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Values that a ``*`` digit has memory for, where ``held`` needs fewer: the blocks of a paged cache."""
    table: Table | None = None
    """Shape (n,): where value ``i`` of the digit ``layout.table`` really is. ``n`` covers ``held``."""
    bases: Table | None = None
    """Shape (tensors,): byte offset of each tensor in each channel. ``None``: one behind the other from 0."""

    def __post_init__(self) -> None:
        for axis in self.layout.axis_names:
            if axis not in self.held:
                raise InvalidArgument(
                    f"layout {self.layout.name!r} has the axis {axis}; say which range of it is held", axis=axis
                )
        for axis, (start, stop) in self.held.items():
            if not 0 <= start < stop <= MAX_SIZE:
                raise InvalidArgument(
                    f"the held range of axis {axis} is {start} to {stop}; it must begin below its stop, which may be "
                    f"{MAX_SIZE} at most",
                    axis=axis,
                    start=start,
                    stop=stop,
                )
            if axis not in self.layout.axis_names and stop - start > 1:
                raise InvalidArgument(
                    f"layout {self.layout.name!r} has no axis {axis}, but {stop - start} of it are held", axis=axis
                )
        stars = {digits[0].name for _, digits in self.layout.axes if not digits[0].radix}
        for name, size in self.room.items():
            if name not in stars:
                raise InvalidArgument(
                    f"room is given for {name!r}, which is no * digit of layout {self.layout.name!r}", digit=name
                )
            _bounded(f"room for {name}", size, 1, MAX_SIZE)
        if (self.table is None) != (not self.layout.table):
            wanted = f"needs a block table for digit {self.layout.table}" if self.layout.table else "has no block table"
            raise InvalidArgument(f"layout {self.layout.name!r} {wanted}", layout=self.layout.name, field="table")
        # everything else needs the sizes, and is checked with them
        _ = self.geometry

    @functools.cached_property
    def geometry(self) -> Geometry:
        """The sizes and addresses that follow."""
        from kvd.layout.geometry import Geometry  # it is built of a Placed

        return Geometry(self)

    @property
    def channel_bytes(self) -> int:
        """Bytes that each channel needs, from the tensors' common base 0 on."""
        return self.geometry.channel_bytes

    def locate(self, **positions: npt.ArrayLike) -> tuple[Table, Table]:
        """``(channel, byte offset)`` of elements, from positions on the whole tensor's axes that broadcast together.

        Axes that hold one element need not be named. Raises :class:`InvalidArgument` for a position that isn't held,
        and for block formats, whose elements have no bytes of their own.
        """
        return self.geometry.locate(positions)
