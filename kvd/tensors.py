"""A part's tensors in their layout: what :mod:`kvd.layout` calls placed, for each row of the batch.

One end's tensors lie in the channels of a device, or token-major in a lease; a transfer brings tokens from one form to
the other. Pure arithmetic on what both daemons know of each other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout import named
from kvd.layout.codec import codec
from kvd.layout.descriptor import Digit, Layout, Placed
from kvd.layout.kept import End, Plans
from kvd.layout.steps import RegroupPlan
from kvd_client.layouts import Placement, Target
from kvd_client.spec import MAX_HEADS, PartLayout, TokenRange

Layers: TypeAlias = Sequence[tuple[int, Sequence[TokenRange]]]
"""Tokens by layer."""

MAX_CHANNELS, MAX_BLOCKS = 32, 1 << 24
PLANS = Plans()
"""What the transfers of this process have in common."""
AXES = ("l", "kv", "h", "t", "d")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """One end of a transfer: its rows, each a :class:`Placed` with its own blocks."""

    rows: tuple[Placed, ...]
    channels: int
    block_tokens: int
    """What is moved has whole blocks of this many tokens, or ends with a row."""

    @property
    def heads(self) -> tuple[int, int]:
        """The range that the tensors have of the model's: a part's, or those of the cache that it is in."""
        return self.rows[0].held["h"]


class Route:
    """From one end's tensors to the other's.

    ``heads`` are those that go, ``(start, stop)``; None: all that both ends have. Layers differ in where they lie, not
    in what is to be done, and so do transfers of the same form: what ``plans`` has is moved.
    """

    def __init__(
        self, source: Tensors, target: Tensors, heads: tuple[int, int] | None = None, plans: Plans | None = None
    ) -> None:
        self.source, self.target = source, target
        both = max(source.heads[0], target.heads[0]), min(source.heads[1], target.heads[1])
        self._heads = heads if heads != both else None
        self._plans = PLANS if plans is None else plans
        self._ends: dict[int, tuple[End, End]] = {}
        """By row."""

    def plan(self, layers: Layers) -> list[RegroupPlan]:
        """What brings these tokens over: a plan for each row, and each run of layers of which the same tokens go.
        Raises as :func:`~kvd.layout.plan.plan_regroup`."""
        plans = []
        for first, last, row, ranges in _alike(layers):
            ends = self._ends.get(row)
            if ends is None:
                source, target = (End(one.rows[row], self._plans) for one in (self.source, self.target))
                ends = self._ends[row] = source, target
            plans.append(self._plans.plan(*ends, (first, last), ranges, self._heads))
        return plans


def in_lease(layout: PartLayout, lengths: Sequence[int], head_start: int, placement: Placement) -> Tensors:
    """The tensors of a part that has them token-major in its lease; addresses count from the lease's start.

    ``placement`` is the other end's, which says what the elements are.
    """
    form = _lease_layout(placement.dtype)
    starts = layout.layer_offset(0) + layout.layer_stride * np.arange(layout.layers, dtype=np.int64)
    rows = []
    for row, length in enumerate(lengths):
        held = _held(layout, length, head_start, placement)
        bases = starts + row * layout.capacity * layout.token_bytes
        rows.append(Placed(form, held, room={"t": layout.capacity}, bases=bases))
    return Tensors(tuple(rows), 1, 1)


def on_device(
    layout: PartLayout,
    lengths: Sequence[int],
    head_start: int,
    placement: Placement,
    *,
    channels: int,
    alignment: int,
    blocks: int,
    table: npt.NDArray[np.int64],
    bases: npt.NDArray[np.int64] | None = None,
    heads: tuple[int, int] | None = None,
) -> Tensors:
    """The tensors of a part that lie on a device of ``channels`` channels.

    ``table``: shape (rows, blocks of a row), the block that each really is, of ``blocks``. ``bases``: where each tensor
    begins in each channel, None: one behind the other from 0. ``heads``: where the tensors have more than the part,
    how many, and which of them is the part's first. Raises :class:`UnsupportedLayout` where the layout is unknown or
    does not fit the device, and :class:`InvalidArgument` for heads that the tensors do not have.
    """
    count, skipped = (layout.heads, 0) if heads is None else heads
    if not 0 <= skipped <= min(head_start, count - layout.heads) or count > MAX_HEADS:
        raise InvalidArgument(
            f"heads {head_start} to {head_start + layout.heads} can't begin at head {skipped} of tensors of {count}",
            heads=[layout.heads, count],
            head=skipped,
        )
    has = {"h": (head_start - skipped, head_start - skipped + count)}
    form = device_layout(placement, channels=channels, alignment=alignment)
    if not form.table and len(lengths) > 1:
        raise UnsupportedLayout(
            f"layout {placement.layout!r} has no block table, so that it holds one sequence, not {len(lengths)}",
            rows=len(lengths),
        )
    if form.table:
        room = {form.table: blocks}
    else:  # one sequence, whose pages may be numbered by its length
        first, *others = form.digits("t")
        room = {} if first.radix else {first.name: -(-layout.capacity // math.prod(digit.radix for digit in others))}
    rows = tuple(
        Placed(
            form,
            _held(layout, length, head_start, placement) | has,
            room=room,
            table=one[: -(-length // placement.block_tokens)] if form.table else None,
            bases=bases,
        )
        for length, one in zip(lengths, table, strict=True)
    )
    return Tensors(rows, channels, placement.block_tokens)


@functools.lru_cache(maxsize=64)
def device_layout(placement: Placement, *, channels: int, alignment: int) -> Layout:
    """The layout that a placement names; raises :class:`UnsupportedLayout`."""
    form = named.get(
        placement.layout,
        codec=placement.codec or placement.dtype,
        block=placement.block_tokens,
        channels=channels,
        alignment=alignment,
    )
    if placement.codec:
        form = dataclasses.replace(form, codec=placement.codec)  # a user's own layout names one, too
    if form.placement.kind == "flat" and channels > 1:
        raise UnsupportedLayout(
            f"layout {placement.layout[:64]!r} puts everything into one channel, and the device has {channels}; choose "
            "one that spreads its pages",
            channels=[1, channels],
        )
    if form.placement.alignment % alignment:
        raise UnsupportedLayout(
            f"pages of layout {placement.layout[:64]!r} are aligned to {form.placement.alignment} bytes, and the "
            f"device wants {alignment}",
            alignment=[form.placement.alignment, alignment],
        )
    if form.placement.channels > channels:
        raise UnsupportedLayout(
            f"layout {placement.layout!r} is for {form.placement.channels} channels, and the device has {channels}",
            channels=[form.placement.channels, channels],
        )
    return form


def block_count(layout: PartLayout, placement: Placement) -> int:
    """Blocks of each row of a part."""
    return -(-layout.capacity // placement.block_tokens)


def block_table(layout: PartLayout, placement: Placement, blocks: int, table: bytes) -> npt.NDArray[np.int64]:
    """Shape (rows, blocks of a row); raises :class:`InvalidArgument` for a table that names what does not exist, or a
    block twice."""
    each = block_count(layout, placement)
    if not table:
        return np.arange(layout.rows * each, dtype=np.int64).reshape(layout.rows, each)
    if len(table) != 4 * layout.rows * each:
        raise InvalidArgument(
            f"the block table has {len(table) // 4} entries; {layout.rows} rows of {each} blocks need "
            f"{layout.rows * each}",
            entries=len(table) // 4,
            need=layout.rows * each,
        )
    found = np.frombuffer(table, np.int32).astype(np.int64)
    if found.min() < 0 or found.max() >= blocks or len(np.unique(found)) != len(found):
        raise InvalidArgument(
            f"the block table names blocks {found.min()} to {found.max()}; it must name each of {len(found)} blocks "
            f"once, from 0 to {blocks - 1}",
            blocks=blocks,
        )
    return found.reshape(layout.rows, each)


def of_target(layout: PartLayout, lengths: Sequence[int], head_start: int, target: Target) -> Tensors:
    """The sink's tensors as it describes them; raises :class:`UnsupportedLayout` or :class:`InvalidArgument`."""
    placement = target.placement.check()
    if len(target.bases) % 8 or not 1 <= target.channels <= MAX_CHANNELS or not 1 <= target.blocks <= MAX_BLOCKS:
        raise InvalidArgument(
            f"a target of {target.channels} channels, {target.blocks} blocks and {len(target.bases)} bytes of bases "
            "makes no sense",
            channels=target.channels,
            blocks=target.blocks,
        )
    return on_device(
        layout,
        lengths,
        head_start,
        placement,
        channels=target.channels,
        alignment=target.alignment,
        blocks=target.blocks,
        table=block_table(layout, placement, target.blocks, target.table),
        bases=np.frombuffer(target.bases, np.int64),
        heads=(target.heads, target.first_head) if target.heads else None,
    )


def _held(layout: PartLayout, length: int, head_start: int, placement: Placement) -> dict[str, tuple[int, int]]:
    elements = codec(placement.dtype)
    item = elements.item_bytes
    if elements.is_block or layout.entry_bytes % (placement.tensors * item):
        raise UnsupportedLayout(
            f"entries of {layout.entry_bytes} bytes are not {placement.tensors} vectors of {placement.dtype}; say in "
            "the placement's dtype what the elements are",
            entry_bytes=layout.entry_bytes,
            dtype=placement.dtype,
        )
    return {
        "l": (0, layout.layers),
        "kv": (0, placement.tensors),
        "h": (head_start, head_start + layout.heads),
        "t": (0, length),
        "d": (0, layout.entry_bytes // (placement.tensors * item)),
    }


@functools.lru_cache(maxsize=32)
def _lease_layout(codec: str) -> Layout:
    """As :class:`~kvd_client.spec.PartLayout` arranges one row."""
    return Layout(
        name="kvd",
        axes=tuple((axis, (Digit(axis, 0),)) for axis in AXES),
        tensors=("l",),
        pages=(),
        inner=("t", "h", "kv", "d"),
        codec=codec,
    )


def _alike(layers: Layers) -> list[tuple[int, int, int, npt.NDArray[np.int64]]]:
    """``(first layer, last excluded, row, ranges)``, layers of which the same tokens go taken together."""
    by_row: dict[tuple[int, bytes], list[int]] = {}
    for layer, ranges in layers:
        rows: dict[int, list[tuple[int, int]]] = {}
        for r in ranges:
            rows.setdefault(r.row, []).append((r.start, r.stop))
        for row, pieces in rows.items():
            by_row.setdefault((row, np.array(pieces, np.int64).tobytes()), []).append(layer)
    found = []
    for (row, packed), members in by_row.items():
        ranges_of_row = np.frombuffer(packed, np.int64).reshape(-1, 2)
        members.sort()
        start = 0
        for i in range(1, len(members) + 1):
            if i == len(members) or members[i] != members[i - 1] + 1:
                found.append((members[start], members[i - 1] + 1, row, ranges_of_row))
                start = i
    return found
