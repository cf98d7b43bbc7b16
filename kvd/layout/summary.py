"""What a transfer between two layouts costs, way by way: the figures of ``kvd plan show``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from kvd.errors import InvalidArgument
from kvd.layout.descriptor import MAX_SIZE, Layout, Placed
from kvd.layout.models import ModelShape
from kvd.layout.plan import count_direct, plan_regroup
from kvd.layout.steps import RegroupPlan, Requests


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to send it: ``requests`` of ``smallest`` to ``largest`` bytes."""

    name: str
    about: str
    requests: int
    smallest: int
    largest: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One rank of the source sending to one of the target."""

    source_rank: int
    target_rank: int
    heads: tuple[int, int]
    plan: RegroupPlan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """All ranks together."""

    model: ModelShape
    tokens: int
    source: Layout
    target: Layout
    pairs: tuple[Pair, ...]
    ways: tuple[Way, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(pair.plan.payload_bytes for pair in self.pairs)

    @property
    def staging_bytes(self) -> int:
        return sum(pair.plan.staging_bytes for pair in self.pairs)


def summarise(
    model: ModelShape, tokens: int, source: Layout, target: Layout, *, source_ranks: int = 1, target_ranks: int = 1
) -> Summary:
    """Plan one request of ``tokens`` tokens, for every pair of ranks that share heads, and count each way's requests.

    Block tables are made up: blocks in a row, where memory is staging or fresh, and no two blocks adjacent, where it is
    a cache in use. Raises :class:`InvalidArgument` and :class:`UnsupportedLayout` as plans do.
    """
    if not 0 < tokens <= MAX_SIZE:
        raise InvalidArgument(f"{tokens} tokens can't be planned; give 1 to {MAX_SIZE}", tokens=tokens)
    pairs, counts = [], _Counts()
    for source_rank, target_rank, mine, theirs in _rank_pairs(model, source_ranks, target_ranks):
        a, b = _placed(source, model.held(tokens, mine)), _placed(target, model.held(tokens, theirs))
        plan = plan_regroup(a, b)
        heads = (max(mine[0], theirs[0]), min(mine[1], theirs[1]))
        pairs.append(Pair(source_rank, target_rank, heads, plan))
        counts.add(a, b, plan, model, heads)
    return Summary(model, tokens, source, target, tuple(pairs), counts.ways())


class _Counts:
    """Requests of each way, as they come."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, list[tuple[int, int, int]]]] = {}

    def add(self, source: Placed, target: Placed, plan: RegroupPlan, model: ModelShape, heads: tuple[int, int]) -> None:
        tokens = source.held["t"][1]
        geometry = target.geometry
        vectors = model.layers * model.parts * (heads[1] - heads[0]) * tokens
        plain = not (source.geometry.codec.is_block or geometry.codec.is_block)
        if plain:
            item = geometry.codec.item_bytes
            pieces = count_direct(source, target)
            each, vector = plan.payload_bytes // pieces, model.head_dim * item
            self._add("pieces", "contiguous on both sides, no regroup", pieces, each, each)
            self._add("token rows", "a head's K or V of one token", vectors, vector, vector)
        if target.layout.padding and target.layout.pages:
            pages = plan.staging_bytes // geometry.page_stride
            name = "tiles" if len(target.layout.inner) > 1 else "pages"
            self._add(name, "regrouped, one each", pages, geometry.page_stride, geometry.page_stride)
        if target.layout.table:
            apart = _placed(target.layout, dict(target.held), step=2)
            requests = plan_regroup(source, apart).requests
            self._add_table("scattered", "straight into a paged cache, no two blocks adjacent", requests)
        tensors = target.layout.tensors
        alike = all(digit.name in tensors for axis in ("l", "kv") for digit in target.layout.digits(axis))
        for layer in range(1 if alike else model.layers):
            for part in range(1 if alike else model.parts):
                one = plan_regroup(source, target, {"l": (layer, layer + 1), "kv": (part, part + 1)}).requests
                times = model.layers * model.parts if alike else 1
                self._add_table("layers", "layer by layer, K and V apart", one, times)
        self._add_table("channels", "staged per channel in one batch (HAWK)", plan.requests)

    def ways(self) -> tuple[Way, ...]:
        found = []
        for name, (about, rows) in self._found.items():
            counts, smallest, largest = zip(*rows, strict=True)
            found.append(Way(name, about, sum(counts), min(smallest), max(largest)))
        return tuple(found)

    def _add_table(self, name: str, about: str, requests: Requests, times: int = 1) -> None:
        lengths = requests[:, 3]
        self._add(name, about, len(lengths) * times, int(lengths.min()), int(lengths.max()))

    def _add(self, name: str, about: str, count: int, smallest: int, largest: int) -> None:
        self._found.setdefault(name, (about, []))[1].append((count, smallest, largest))


def _placed(layout: Layout, held: dict[str, tuple[int, int]], step: int = 1) -> Placed:
    """With a block table, where the layout has one: every ``step``-th block."""
    held = {axis: pair for axis, pair in held.items() if axis in layout.axis_names or pair[1] - pair[0] == 1}
    missing = {axis: (0, 1) for axis in layout.axis_names if axis not in held}
    if not layout.table:
        return Placed(layout, held | missing)
    axis, digits = next((axis, digits) for axis, digits in layout.axes if digits[0].name == layout.table)
    start, stop = (held | missing)[axis]
    blocks = -(-(stop - start) // math.prod(digit.radix for digit in digits[1:]))
    room = {} if digits[0].radix else {layout.table: blocks * step}
    return Placed(layout, held | missing, room, np.arange(blocks, dtype=np.int64) * step)


def _rank_pairs(
    model: ModelShape, source_ranks: int, target_ranks: int
) -> Iterator[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    for side, ranks in (("source", source_ranks), ("target", target_ranks)):
        if ranks < 1 or model.kv_heads % ranks:
            raise InvalidArgument(
                f"{model.kv_heads} KV heads can't be split evenly among {ranks} ranks of the {side}",
                ranks=ranks,
                heads=model.kv_heads,
            )
    mine, theirs = model.kv_heads // source_ranks, model.kv_heads // target_ranks
    for a in range(source_ranks):
        for b in range(target_ranks):
            if a * mine < (b + 1) * theirs and b * theirs < (a + 1) * mine:
                yield a, b, (a * mine, (a + 1) * mine), (b * theirs, (b + 1) * theirs)
