"""Layouts of Tenstorrent tensors from what the library says of one: shape, tile, memory layout, shard.

A tensor's pages are its tiles, or, row-major, the rows of its shards. Sharded memory cuts the tensor into equal boxes
of whole pages, the last of which may reach beyond it; a box's pages lie in one channel in the order that they have in
the tensor, with room for all of them. "height", "width" and "block" see a matrix: all axes but the last count its rows.
"nd" has a size for each of the last axes, the first of which counts those before it, too.

Channel ``n`` is the ``n``-th core or bank in the order in which the library hands out shards: that of
``corerange_to_cores`` for the grid and orientation; for "block" that of the shards themselves, row by row.
``tests/data/tenstorrent/maps.json`` has what ttnn 0.81 says of where pages are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout.codec import codec as codec_named
from kvd.layout.descriptor import Digit, Layout, Placement

Memory: TypeAlias = Literal["interleaved", "height", "width", "block", "nd", "nd-contiguous"]
MEMORY: tuple[Memory, ...] = ("interleaved", "height", "width", "block", "nd", "nd-contiguous")
"""How shards are distributed, if there are any: "nd" is the library's ``ROUND_ROBIN_1D``, the last ``CONTIGUOUS_1D``;
its ``GRID_2D`` is "block"."""

FACE = 16
TILE_ROWS, TILE_COLUMNS = (1, 2, 4, 8, 16, 32), (16, 32)


def tensor(
    sizes: Mapping[str, int],
    *,
    codec: str = "bf16",
    tile: tuple[int, int] | None = (32, 32),
    transposed: bool = False,
    memory: Memory = "interleaved",
    shard: Sequence[int] = (),
    channels: int = 8,
    alignment: int = 64,
    tensors: Sequence[str] = (),
    name: str = "",
) -> Layout:
    """The layout of a tensor of these sizes.

    Args:
        sizes: axis to size, outermost first, two at least; the last two are the rows and columns of tiles.
        tile: rows and columns of a tile; None: row-major pages.
        transposed: the library's ``transpose_tile``: columns first, in the tile and in its faces.
        memory: one of :data:`MEMORY`.
        shard: elements, as in the library: rows and columns; for "nd" of the last axes, two at least.
        channels: banks or cores that shards or pages are handed out to.
        alignment: of pages, in bytes: 64 or 32 (DRAM of Blackhole, of Wormhole), 16 (L1).
        tensors: axes that number tensors of these sizes, as many as there are: layers, and K and V.

    Raises :class:`InvalidArgument` for what the library refuses as well, and :class:`UnsupportedLayout` where a shard
    would begin at different places of an axis that its rows fold: no digits say that.
    """
    axes, pages = list(sizes), list(sizes.values())
    _check_sizes(sizes, tensors)
    if memory not in MEMORY:
        raise InvalidArgument(f"there is no memory layout {memory!r}; use {', '.join(MEMORY)}", field="memory")
    _check_shard(pages, memory, shard)
    unit = _page(codec, tile, transposed, shard[-1] if shard else pages[-1])
    pages[-2:] = [-(-size // each) for size, each in zip(pages[-2:], unit, strict=True)]
    box = [*shard[:-2], *(-(-size // each) for size, each in zip(shard[-2:], unit, strict=False))]
    if any(size % each for size, each in zip(shard[-2:], unit, strict=False)):
        raise InvalidArgument(
            f"shards of {_times(shard)} elements are not made of whole tiles of {_times(unit)}", field="shard"
        )
    rows = math.prod(pages[:-1]) * unit[0]
    _check_whole(memory, rows, pages[-1] * unit[1] if tile else list(sizes.values())[-1], shard)
    if box[1:] == pages[len(pages) - len(box) + 1 :]:
        # a shard is a run of pages, wherever it begins
        split, count = list(pages), -(-math.prod(pages) // math.prod(box))
    else:
        split = _folded(axes, pages, box)
        count = math.prod(-(-size // part) for size, part in zip(pages, split, strict=True))
    place = _placement(memory, math.prod(box), count, channels, alignment)
    inside = _inside(tile, unit)
    factored, outer, within = [], [], []
    for at, (axis, size, part) in enumerate(zip(axes, pages, split, strict=True)):
        digits = [Digit(f"S{at}", -(-size // part))] if part < size else []
        outer += [digit.name for digit in digits]
        if part > 1 or not (digits or inside.get(at - len(axes))):
            digits.append(Digit(f"P{at}", part))
            within.append(f"P{at}")
        factored.append((axis, (*digits, *inside.get(at - len(axes), ()))))
    order = ("G", "F", "c", "r") if transposed else ("F", "G", "r", "c")
    made = {digit.name for digits in inside.values() for digit in digits}
    return Layout(
        name=name or f"ttnn-{memory}",
        axes=(*((axis, (Digit(axis, 0),)) for axis in tensors), *factored),
        tensors=tuple(tensors),
        pages=(*outer, *within),
        inner=tuple(digit for digit in order if digit in made),
        codec=codec,
        placement=place,
        padding=True,
    )


def _check_sizes(sizes: Mapping[str, int], tensors: Sequence[str]) -> None:
    if len(sizes) < 2 or not all(_is_size(size) for size in sizes.values()):
        raise InvalidArgument("a tensor has two axes at least, with sizes from 1 on", field="sizes")
    for axis in (*tensors, *sizes):
        if axis in ("F", "G", "r", "c") or (axis[:1] in ("S", "P") and axis[1:].isdigit()):
            raise InvalidArgument(f"{axis!r} is the name of a digit here; give the axis another", axis=axis)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_shard(sizes: list[int], memory: Memory, shard: Sequence[int]) -> None:
    ranks = {"interleaved": range(1), "nd": range(2, len(sizes) + 1), "nd-contiguous": range(2, len(sizes) + 1)}
    if len(shard) not in ranks.get(memory, range(2, 3)) or not all(_is_size(size) for size in shard):
        wanted = {"interleaved": "none", "nd": "two sizes or more, from 1 on", "nd-contiguous": "two sizes or more"}
        raise InvalidArgument(
            f"a shard of {list(shard)} makes no sense for memory layout {memory!r}, which has "
            f"{wanted.get(memory, 'rows and columns')}",
            field="shard",
            memory=memory,
        )


def _page(codec: str, tile: tuple[int, int] | None, transposed: bool, columns: int) -> tuple[int, int]:
    """Rows and columns of a page."""
    if tile is None:
        if codec_named(codec).is_block or transposed:
            raise InvalidArgument(f"a row-major tensor can't be {'transposed' if transposed else codec}", field="tile")
        return 1, columns
    if len(tile) != 2 or tile[0] not in TILE_ROWS or tile[1] not in TILE_COLUMNS:
        raise InvalidArgument(
            f"there are no tiles of {_times(tile)}; their rows are {', '.join(map(str, TILE_ROWS))} and their columns "
            f"{' or '.join(map(str, TILE_COLUMNS))}",
            field="tile",
        )
    if transposed and tile[0] < FACE:
        raise InvalidArgument(f"tiles of {_times(tile)} can't be transposed; they need {FACE} rows", field="transposed")
    return tile


def _inside(tile: tuple[int, int] | None, unit: tuple[int, int]) -> dict[int, tuple[Digit, ...]]:
    """Digits of a page, of the last axis (-1) and the one before it (-2)."""
    if tile is None:
        return {-1: (Digit("c", unit[1]),)}
    rows = min(FACE, tile[0])
    return {
        -2: (Digit("F", tile[0] // rows), Digit("r", rows)),
        -1: (Digit("G", tile[1] // FACE), Digit("c", FACE)),
    }


def _check_whole(memory: Memory, rows: int, columns: int, shard: Sequence[int]) -> None:
    for named, at, what, whole in (("height", 1, "columns", columns), ("width", 0, "rows", rows)):
        if memory == named and shard[at] != whole:
            raise InvalidArgument(
                f"shards of memory layout {memory!r} have all {whole} {what} of the tensor, not {shard[at]}",
                field="shard",
                **{what: whole},
            )


def _folded(axes: list[str], pages: list[int], box: list[int]) -> list[int]:
    """How many pages a shard has along each axis; its first size counts all axes that it has no size for."""
    last = len(pages) - len(box)
    split, left = [1] * last + box, box[0]
    # what begins the tensor may end in the middle of a shard
    first = next((at for at in range(last) if pages[at] > 1), last)
    for at in range(last, first, -1):
        if left % pages[at] and pages[at] % left:
            raise UnsupportedLayout(
                f"shards of {box[0]} rows of pages begin at different places of axis {axes[at]}, which has "
                f"{pages[at]}; choose one that divides the other",
                axis=axes[at],
                pages=pages[at],
                shard=box[0],
            )
        split[at] = min(left, pages[at])
        left //= split[at]
    split[first] = left
    return split


def _placement(memory: Memory, volume: int, count: int, channels: int, alignment: int) -> Placement:
    """Where ``count`` shards of ``volume`` pages go."""
    if memory in ("interleaved", "nd"):
        return Placement("round-robin", channels, alignment, volume if volume > 1 else 0)
    if memory == "nd-contiguous":
        if count % channels:
            raise InvalidArgument(
                f"{count} shards in a row can't be dealt out evenly to {channels} channels",
                field="channels",
                shards=count,
            )
        return Placement("sharded", channels, alignment, count // channels * volume)
    if count > channels:
        raise InvalidArgument(
            f"{count} shards need as many channels, of which there are {channels}", field="channels", shards=count
        )
    return Placement("sharded", channels, alignment, volume)


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
