"""Where elements lie, one at a time, straight from the descriptor's definition; and layouts to try it on."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
from hypothesis import strategies as st

from kvd.layout.descriptor import Digit, Layout, Placed, Placement
from kvd.layout.execute import in_turns

UNTOUCHED = 0xEE

TOML = """
name = "my-npu"
order = "l kv || B h T D | F G r c"
codec = "bf16"
padding = true
table = "B"

[axes]
t = "B:* T:1 F:2 r:16"
d = "D:* G:2 c:16"

[placement]
kind = "round-robin"
channels = 8
alignment = 64
"""
"""The layout named ``tenstorrent`` with blocks of 32 tokens, as somebody's file."""


class Oracle:
    """A :class:`Placed`, understood with plain integers."""

    def __init__(self, placed: Placed, item: int) -> None:
        self.placed, self.item = placed, item
        layout = placed.layout
        self.radix: dict[str, int] = {}
        self.unit: dict[str, int] = {}
        self.axis: dict[str, str] = {}
        for axis, digits in layout.axes:
            unit = 1
            size = placed.held[axis][1] - placed.held[axis][0]
            for digit in reversed(digits):
                self.unit[digit.name], self.axis[digit.name] = unit, axis
                self.radix[digit.name] = digit.radix or placed.room.get(digit.name, math.ceil(size / unit))
                unit *= self.radix[digit.name]
        self.pages = math.prod(self.radix[name] for name in layout.pages)
        self.tensors = math.prod(self.radix[name] for name in layout.tensors)
        page = math.prod(self.radix[name] for name in layout.inner) * item
        self.stride = math.ceil(page / layout.placement.alignment) * layout.placement.alignment
        channels, self.turn = layout.placement.channels, 1
        if layout.placement.kind == "digit":
            self.each = self.pages // self.radix[layout.pages[0]]
        elif layout.placement.kind == "sharded":
            row = self.radix[layout.pages[-1]] if layout.pages else 1
            self.each = layout.placement.shard_pages or math.ceil(self.pages // row / channels) * row
        elif layout.placement.kind == "round-robin":
            self.turn = layout.placement.shard_pages or 1
            self.each = math.ceil(math.ceil(self.pages / self.turn) / channels) * self.turn
        else:
            self.each = math.ceil(self.pages / channels)

    def number(self, group: tuple[str, ...], position: dict[str, int]) -> int:
        found = 0
        for name in group:
            axis = self.axis[name]
            value = (position[axis] - self.placed.held[axis][0]) // self.unit[name]
            if name != dict(self.placed.layout.axes)[axis][0].name:
                value %= self.radix[name]
            if name == self.placed.layout.table:
                value = int(self.placed.table[value])
            found = found * self.radix[name] + value
        return found

    def page(self, position: dict[str, int]) -> tuple[int, int]:
        """(channel, offset) of the page."""
        layout = self.placed.layout
        tensor, page = self.number(layout.tensors, position), self.number(layout.pages, position)
        base = tensor * self.each * self.stride if self.placed.bases is None else int(self.placed.bases[tensor])
        if layout.placement.kind == "round-robin":
            shard, within = divmod(page, self.turn)
            slot = shard // layout.placement.channels * self.turn + within
            return shard % layout.placement.channels, base + slot * self.stride
        if layout.placement.kind == "flat":
            return 0, base + page * self.stride
        return page // self.each, base + page % self.each * self.stride

    def element(self, position: dict[str, int]) -> tuple[int, int]:
        channel, offset = self.page(position)
        return channel, offset + self.number(self.placed.layout.inner, position) * self.item

    def memory(self) -> list[np.ndarray]:
        size = self.each * self.stride
        top = (self.tensors - 1) * size if self.placed.bases is None else int(self.placed.bases.max())
        return [np.full(top + size, UNTOUCHED, np.uint8) for _ in range(self.placed.layout.placement.channels)]

    def padded_stop(self, axis: str) -> int:
        first = dict(self.placed.layout.axes)[axis][0]
        start, stop = self.placed.held[axis]
        return start + self.unit[first.name] * (first.radix or math.ceil((stop - start) / self.unit[first.name]))


def positions(ranges: dict[str, list[int]]) -> list[dict[str, int]]:
    return [dict(zip(ranges, values, strict=True)) for values in itertools.product(*ranges.values())]


def value_of(position: dict[str, int], item: int) -> bytes:
    """An element's bytes: different for different positions, nearly always."""
    number = hash(tuple(sorted(position.items()))) & 0xFFFFFFFF
    return (
        np.random.default_rng(number).bytes(item)
        if item > 8
        else (number * 2654435761 % 2**64).to_bytes(8, "little")[:item]
    )


def fill(oracle: Oracle, chosen: list[dict[str, int]]) -> list[np.ndarray]:
    """Memory of one side with its elements in place."""
    memory = oracle.memory()
    for position in chosen:
        channel, offset = oracle.element(position)
        memory[channel][offset : offset + oracle.item] = np.frombuffer(value_of(position, oracle.item), np.uint8)
    return memory


def perform(plan, sources: list[np.ndarray], targets: list[np.ndarray], turn_bytes: int = sys.maxsize) -> None:
    """Both steps."""
    staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
    for _ in in_turns(plan, sources, staging, turn_bytes):
        pass
    for source, channel, target, length in plan.requests.tolist():
        assert source >= 0
        assert source + length <= len(staging)
        assert target >= 0
        assert target + length <= len(targets[channel])
        targets[channel][target : target + length] = staging[source : source + length]


def run_count(marks: list[np.ndarray]) -> int:
    """Maximal contiguous runs of marked bytes, in all channels."""
    return sum(int((np.diff(np.concatenate(([0], mark.astype(np.int8)))) == 1).sum()) for mark in marks)


@st.composite
def layouts(draw, axes: dict[str, int], item: int, channels: int = 12, padding: bool | None = None) -> Layout:
    """Any layout of these axes, each of about the given size."""
    factored = []
    for axis, size in axes.items():
        radices = []
        left = size
        while left > 1 and draw(st.booleans()):
            radix = draw(st.integers(1, min(left, 6)))
            radices.append(radix)
            left = -(-left // radix)
        first = draw(st.sampled_from((0, left)))
        names = [f"{axis}{at}" for at in range(len(radices) + 1)]
        factored.append((axis, tuple(Digit(n, r) for n, r in zip(names, (first, *radices), strict=True))))
    names = [digit.name for _, digits in factored for digit in digits]
    order = draw(st.permutations(names))
    first, second = sorted((draw(st.integers(0, len(order))), draw(st.integers(0, len(order)))))
    tensors, pages, inner = tuple(order[:first]), tuple(order[first:second]), tuple(order[second:])
    kinds = ["flat", "round-robin", "sharded", *(["digit"] if pages else [])]
    kind = draw(st.sampled_from(kinds))
    count = 1 if kind == "flat" else draw(st.integers(1, channels))
    firsts = [digits[0].name for _, digits in factored if digits[0].name in tensors + pages]
    padded = draw(st.booleans()) if padding is None else padding
    if kind == "digit":
        # as many channels as the digit has values, and no table on it
        digit = next(d for _, digits in factored for d in digits if d.name == pages[0])
        axis = next(a for a, digits in factored if digit in digits)
        unit = math.prod(d.radix for d in dict(factored)[axis][1:])
        count = digit.radix or -(-axes[axis] // unit)
        firsts = [name for name in firsts if name != pages[0]]
    table = draw(st.sampled_from(["", *firsts]))
    return Layout(
        name="random",
        axes=tuple(factored),
        tensors=tensors,
        pages=pages,
        inner=inner,
        codec=f"raw:{item}",
        placement=Placement(
            kind, count, draw(st.sampled_from((1, 4, 32))), draw(st.integers(0, 3)) if kind == "round-robin" else 0
        ),
        table=table,
        padding=padded,
    )


@st.composite
def placements(draw, layout: Layout, held: dict[str, tuple[int, int]]) -> Placed:
    """A layout with room, a block table and bases."""
    room, table = {}, None
    placed_digit = layout.pages[0] if layout.placement.kind == "digit" else ""
    for axis, digits in layout.axes:
        unit = math.prod(digit.radix for digit in digits[1:])
        needed = -(-(held[axis][1] - held[axis][0]) // unit)
        size = digits[0].radix or needed
        if not digits[0].radix and digits[0].name != placed_digit and draw(st.booleans()):
            size = room[digits[0].name] = needed + draw(st.integers(0, 3))
        if digits[0].name == layout.table:
            if not digits[0].radix:
                room[digits[0].name] = size
            table = np.array(draw(st.permutations(range(size)))[:needed], np.int64)
    plain = Placed(layout, held, room, table)
    if not draw(st.booleans()):
        return plain
    geometry = plain.geometry
    step = geometry.tensor_stride + draw(st.sampled_from((0, 0, 8)))
    order = draw(st.permutations(range(min(geometry.tensors, 64))))
    bases = np.arange(geometry.tensors, dtype=np.int64)
    bases[: len(order)] = order
    return Placed(layout, held, room, table, bases * step + draw(st.sampled_from((0, 16))))
