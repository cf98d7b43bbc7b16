"""In which order a source part's tokens matter: the class of each, by the policy, the prompt's rankings and windows.

A :class:`Policy` gives each KV block of each layer a class, the first class first. What prefill finds out about the
prompt on its way (:meth:`Order.rank`) replaces those of a layer, row by row. :meth:`Order.cut` makes pieces of one
class each out of ranges of tokens, of :data:`ROWS` rows at a time: one pass over arrays, whose cost is by the call and
hardly by the piece, so a layer's rows are cut together, and only once the queue has come to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds, join_runs, window_start
from kvd.importance.heads import by_head, sample_by_head
from kvd.importance.matrix import ALWAYS_LAYERS, resampled_columns
from kvd.importance.prompt import Scale, Values, combined

Range: TypeAlias = tuple[int, int, int]
"""Row, start (included), stop (excluded)."""
Piece: TypeAlias = tuple[int, int, int, int]
"""Class, row, start (included), stop (excluded)."""

ROWS = 8
"""Rows of a batch that are cut together: a hundred microseconds each time, and as much again for a few hundred pieces.
"""
_LAST_CLASS = 1 << 14
_NO_CLASS = -1
_SAMPLE = 1 << 13
"""Values by head that tell where classes begin: to sort all of them, 10 to 100 times as many, takes milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """How a transfer is sent. The default is full transfer: everything, layer by layer, as it becomes ready."""

    mode: str = "full"
    classes: npt.NDArray[np.int16] | None = None
    """Shape (layers, blocks): each block's class, 0 first. None: one class."""
    proactive_classes: int | None = None
    """Blocks of the first so many classes are pushed whenever they are ready; None: all."""
    until_finish: bool = False
    """The proactive path ends when the source's process has finished prefill (the first token exists)."""
    share: float = 0.0
    """Speculative path: share of all tokens that may go in the windows of one decode iteration; 0: none at all."""
    adaptive: bool = False
    """Speculative path: once a window has been signalled, go on without waiting for more; the link's bound on delay is
    the limit."""
    importance: Values | None = None
    """Shape (layers, blocks): the profile's, where there is one."""
    head_factors: Values | None = None
    """Shape (layers, KV heads, cells): what multiplies the profile's importance for each head of a sequence, where
    each is a row of its own (:mod:`kvd.importance.heads`). Classes of a layer are then by head."""
    rankable: bool = False
    """Whether what the prompt's queries select changes the order."""
    budget_tokens: int = 0
    """For status: tokens (summed over layers) that the budget allowed; 0: no budget."""


class Order:
    """Of one part. ``windows`` and ``grain`` as :class:`~kvd.transfer.queue.SendQueue` has them."""

    def __init__(
        self, layers: int, lengths: Sequence[int], policy: Policy, *, windows: Sequence[int] = (), grain: int = 1
    ) -> None:
        self.policy = policy
        self._lengths, self._windows, self._grain = lengths, windows, grain
        self._stride = max(lengths, default=0) + 1
        """Tokens are numbered through, row by row, with a number between rows that is none's: nothing joins there."""
        self._blocks = 1 if policy.classes is None else policy.classes.shape[1]
        self._least = [0] * layers if policy.classes is None else policy.classes.min(axis=1).tolist()
        """By layer, the policy's first class in it."""
        self._by_head: dict[int, npt.NDArray[np.int16]] = {}
        """By layer, (KV heads, blocks): the classes of heads that the profile tells apart; made when asked for."""
        self._head_least: dict[int, int] = {}
        """By such a layer, the first class of any head."""
        self._cells: dict[int, npt.NDArray[np.int64]] = {}
        """By group of rows: where each block begins, and each row ends; (rows * (blocks + 1),)."""
        self._scale: Scale | None = None
        """Of the policy's classes; made when the first layer is ranked, or its heads told apart."""
        self._ranked: dict[int, npt.NDArray[np.int16]] = {}
        """By layer, (rows, blocks): the classes of a layer that was ranked, instead of the policy's."""
        self._ranked_least: dict[int, list[int]] = {}
        """By layer that was ranked, the first class of each group of rows."""

    def group(self, row: int) -> int:
        """The rows that are cut together with this one."""
        return row // ROWS

    @property
    def groups(self) -> range:
        """All groups of rows."""
        return range(-(-len(self._lengths) // ROWS))

    def least(self, layer: int, group: int) -> int:
        """No token of these rows has an earlier class."""
        ranked = self._ranked_least.get(layer)
        if ranked is not None:
            return ranked[group]
        if self.policy.head_factors is not None and layer not in self._head_least:
            heads = self._classes_by_head(layer)
            self._head_least[layer] = self._least[layer] if heads is None else int(heads.min())
        return self._head_least.get(layer, self._least[layer])

    def rank(self, layer: int, shares: Values, weight: float) -> bool:
        """What the prompt's last queries would select of a layer: its classes from now on are by that and the profile
        (:func:`kvd.importance.prompt.combined`). ``shares``: float32 (rows, blocks) with any number of blocks.

        False, with nothing changed, where the order is not importance's to choose: full transfer, the paper's fixed
        budget, layers 0 and 1.
        """
        policy = self.policy
        if not policy.rankable or policy.classes is None or layer < ALWAYS_LAYERS:
            return False
        if shares.shape[1] != self._blocks:
            shares = np.minimum(resampled_columns(shares, self._blocks), 1).astype(np.float32)
        known = None if policy.importance is None else policy.importance[layer]
        if known is not None and policy.head_factors is not None:
            heads = by_head(known, policy.head_factors[layer])
            known = np.tile(heads, (len(shares) // len(heads), 1))
        found = combined(known, shares, weight)
        classes = self._ranked[layer] = self._scale_for(found).classes(found)
        by_row = classes.min(axis=1)
        self._ranked_least[layer] = np.minimum.reduceat(by_row, np.arange(0, len(by_row), ROWS)).tolist()
        return True

    def _scale_for(self, values: Values) -> Scale:
        """That of the profile's classes, or without a profile one made of the first ranked layer: layers resemble each
        other more than nothing does."""
        if self._scale is None:
            assert self.policy.classes is not None
            classes = self.policy.classes
            if self.policy.importance is not None and self.policy.head_factors is not None:
                importance, factors = self.policy.importance, self.policy.head_factors
                sample = sample_by_head(importance[ALWAYS_LAYERS:], factors[ALWAYS_LAYERS:], _SAMPLE)
                self._scale = Scale.of_sizes(sample, np.bincount(classes[ALWAYS_LAYERS:].ravel()))
            elif self.policy.importance is not None:
                self._scale = Scale.of_classes(self.policy.importance, classes)
            else:
                first, last = int(classes[:ALWAYS_LAYERS].max()), int(classes.max())
                self._scale = Scale.of_values(values, last - first + 1, first)
        return self._scale

    def cut(self, layer: int, group: int, ranges: Sequence[Range]) -> list[Piece]:
        """Ranges of a group's rows, in any order and overlapping or not, as pieces in order of class, then row, then
        position. Pieces of one class never touch, but across a block of no tokens."""
        if self.policy.classes is None and len(ranges) == 1 and not self._edge(layer, ranges[0][0]):
            return [(0, *ranges[0])]
        return self._cut(layer, group, ranges, self._classes(layer, group))

    def split(self, layer: int, piece: Range, limit: int) -> list[tuple[bool, Range]]:
        """A range by whether its classes are before ``limit``."""
        group = self.group(piece[0])
        found = self._cut(layer, group, [piece], self._classes(layer, group) >= limit)
        return [(late == 0, (row, start, stop)) for late, row, start, stop in found]

    def _classes(self, layer: int, group: int) -> npt.NDArray[np.int16]:
        """(rows, blocks) or (blocks,)."""
        ranked = self._ranked.get(layer)
        if ranked is not None:
            return ranked[group * ROWS : (group + 1) * ROWS]
        heads = self._classes_by_head(layer)
        if heads is not None:
            found: npt.NDArray[np.int16] = heads[np.array(self._rows(group)) % len(heads)]
            return found
        return np.zeros(1, np.int16) if self.policy.classes is None else self.policy.classes[layer]

    def _classes_by_head(self, layer: int) -> npt.NDArray[np.int16] | None:
        """(KV heads, blocks), by the classes that the matrix of all heads has; None where heads do not differ."""
        policy = self.policy
        if policy.head_factors is None or policy.importance is None or layer < ALWAYS_LAYERS:
            return None
        if layer not in self._by_head:
            values = by_head(policy.importance[layer], policy.head_factors[layer])
            self._by_head[layer] = self._scale_for(values).classes(values)
        return self._by_head[layer]

    def _cut(
        self, layer: int, group: int, ranges: Sequence[Range], classes: npt.NDArray[np.int16] | npt.NDArray[np.bool_]
    ) -> list[Piece]:
        cells, blocks, stride = self._cells_of(group), self._blocks, self._stride
        kinds = np.full((len(cells) // (blocks + 1), blocks + 1), _NO_CLASS, np.int16)
        kinds[:, :-1] = classes
        kinds = kinds.ravel()
        # Neighbours of one class are one cell. Of cells that begin at one place all but the last have no token.
        firsts = np.concatenate(([0], np.flatnonzero(kinds[1:] != kinds[:-1]) + 1))
        cells, kinds = cells[firsts], kinds[firsts]
        known = np.array(ranges, np.int64)
        runs = join_runs(known[:, :1] * stride + known[:, 1:])
        edges = np.array([row * stride + self._edge(layer, row) for row in self._rows(group)])
        places = np.sort(np.concatenate((cells, runs.ravel(), edges)))
        lows, highs = places[:-1], places[1:]
        run = np.searchsorted(runs[:, 0], lows, side="right") - 1
        inside = (run >= 0) & (lows < runs[run, 1]) & (lows < highs)
        lows, highs = lows[inside], highs[inside]
        found = kinds[np.searchsorted(cells, lows, side="right") - 1]
        rows = lows // stride
        found[lows < edges[rows - group * ROWS]] = _LAST_CLASS
        by_class = np.argsort(found, kind="stable")
        found, rows, lows, highs = found[by_class], rows[by_class], lows[by_class], highs[by_class]
        at = rows * stride
        return list(zip(found.tolist(), rows.tolist(), (lows - at).tolist(), (highs - at).tolist(), strict=True))

    def _edge(self, layer: int, row: int) -> int:
        """Tokens before it are out of a sliding-window layer's sight and matter least; they still make the cache
        complete."""
        if not self._windows:
            return 0
        return window_start(self._lengths[row], self._windows[layer]) // self._grain * self._grain

    def _rows(self, group: int) -> range:
        return range(group * ROWS, min((group + 1) * ROWS, len(self._lengths)))

    def _cells_of(self, group: int) -> npt.NDArray[np.int64]:
        found = self._cells.get(group)
        if found is None:
            rows = self._rows(group)
            bounds = {length: self._bounds(length) for length in {self._lengths[row] for row in rows}}
            found = np.concatenate([row * self._stride + bounds[self._lengths[row]] for row in rows])
            self._cells[group] = found
        return found

    def _bounds(self, length: int) -> npt.NDArray[np.int64]:
        bounds = block_bounds(length, self._blocks)
        if self._grain > 1:  # a KV block ends where the nearest block of the layout does
            bounds = np.minimum((bounds + self._grain // 2) // self._grain * self._grain, length)
            bounds[-1] = length
        return bounds
