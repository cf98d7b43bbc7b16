"""From selections to importance: counts that grow as decode runs, offline or in a daemon (SmartGen, equation 1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds
from kvd.errors import InvalidArgument
from kvd.importance.heads import CELLS, HeadImportance
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix


class SelectionCounts:
    """How often the entries of each block were selected, and how often they could have been.

    Equation 1 divides a block's selections by its entries. Prompts of different lengths and decodes of different
    lengths go into one matrix, so the division here is by entries times steps: the share of steps in which an entry
    of the block is selected. For equal numbers of steps that is equation 1 up to a constant, with the same order.
    """

    __slots__ = ("chances", "selected")

    def __init__(self, layers: int, blocks: int) -> None:
        if layers < 1 or blocks < 1:
            raise InvalidArgument(
                f"selections can't be counted over {layers} layers and {blocks} blocks", layers=layers, blocks=blocks
            )
        self.selected = np.zeros((layers, blocks))
        """Shape (layers, blocks): selections of the block's entries."""
        self.chances = np.zeros((layers, blocks))
        """Shape (layers, blocks): entries times steps."""

    @property
    def layers(self) -> int:
        return int(self.selected.shape[0])

    @property
    def blocks(self) -> int:
        return int(self.selected.shape[1])

    def add(self, layer: int, selections: npt.ArrayLike, *, length: int, heads: int, steps: int) -> None:
        """Add what one sequence selected of its prompt in one layer.

        ``selections`` has one number a block (``kvd_kernels.accumulate_blocks``), over ``heads`` KV heads and
        ``steps`` decode steps; ``length`` is the prompt's. Raises :class:`InvalidArgument`, with nothing added, for a
        layer or shape that does not fit, and naming the block that has more selections than there were chances.
        """
        counts = np.asarray(selections, np.float64)
        self._check(layer, length, heads, steps)
        if counts.shape != (self.blocks,):
            raise InvalidArgument(
                f"selections have shape {counts.shape}; give one number for each of {self.blocks} blocks",
                shape=list(counts.shape),
                blocks=self.blocks,
            )
        chances = np.diff(block_bounds(length, self.blocks)) * float(heads * steps)
        # Written so that NaN is wrong too.
        wrong = ~((counts >= 0) & (counts <= chances))
        if wrong.any():
            block = int(np.argmax(wrong))
            raise InvalidArgument(
                f"layer {layer}, block {block} has {counts[block]:g} selections and {chances[block]:g} chances "
                f"({heads} heads, {steps} steps, {length} tokens); count each selection once",
                layer=layer,
                block=block,
            )
        self.selected[layer] += counts
        self.chances[layer] += chances

    def merge(self, other: SelectionCounts) -> None:
        """Add another's counts; raises :class:`InvalidArgument` where its shape differs."""
        _merge(self, other)

    def matrix(self, heads: HeadCounts | None = None) -> ImportanceMatrix:
        """The importance as counted so far, with how ``heads`` differ.

        A block without chances (every prompt had fewer tokens than blocks) takes the value of the block before it,
        which had the token at its position; a layer without any counts is 0.
        """
        values = _rates(self.selected, self.chances)
        values[:ALWAYS_LAYERS] = 0
        return ImportanceMatrix(values, None if heads is None else heads.importance())

    def _check(self, layer: int, length: int, heads: int, steps: int) -> None:
        if not 0 <= layer < self.layers:
            raise InvalidArgument(
                f"layer {layer} does not exist; selections are counted in layers 0 to {self.layers - 1}", layer=layer
            )
        if length < 1 or heads < 1 or steps < 1:
            raise InvalidArgument(
                f"a sequence of {length} tokens, {heads} heads and {steps} steps has no selections to count",
                length=length,
                heads=heads,
                steps=steps,
            )


class HeadCounts:
    """As :class:`SelectionCounts`, by KV head, in cells of the prompt (:mod:`kvd.importance.heads`)."""

    __slots__ = ("chances", "selected")

    def __init__(self, layers: int, heads: int, cells: int = CELLS) -> None:
        self.selected = np.zeros((layers, heads, cells))
        """Selections of the cell's entries by each head."""
        self.chances = np.zeros((layers, cells))
        """Entries of a head times steps."""

    def add(self, layer: int, selections: npt.NDArray[np.int64], *, length: int, steps: int) -> None:
        """Add what one sequence of ``length`` prompt tokens selected in one layer: (KV heads, cells), over ``steps``
        decode steps. Raises :class:`InvalidArgument`, with nothing added, where that can't be."""
        chances = np.diff(block_bounds(length, self.selected.shape[2])) * float(steps)
        fits = selections.shape == self.selected.shape[1:]
        if not fits or not ((selections >= 0) & (selections <= chances)).all():
            raise InvalidArgument(
                f"layer {layer}: selections by head of shape {selections.shape} do not fit {steps} steps over {length} "
                f"tokens, by head and cell {self.selected.shape[1:]}; count each selection once",
                layer=layer,
            )
        self.selected[layer] += selections
        self.chances[layer] += chances

    def merge(self, other: HeadCounts) -> None:
        """Add another's counts; raises :class:`InvalidArgument` where its shape differs."""
        _merge(self, other)

    def importance(self) -> HeadImportance:
        """As counted so far; a cell without chances takes the values of the one before."""
        return HeadImportance(_rates(self.selected, np.broadcast_to(self.chances[:, None], self.selected.shape)))


def _merge(into: SelectionCounts | HeadCounts, other: SelectionCounts | HeadCounts) -> None:
    if other.selected.shape != into.selected.shape:
        raise InvalidArgument(
            f"counts of shape {other.selected.shape} can't be added to counts of shape {into.selected.shape}",
            shape=list(other.selected.shape),
        )
    into.selected += other.selected
    into.chances += other.chances


def _rates(selected: npt.NDArray[np.float64], chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Selections over chances; what had none takes what is before it along the last axis, 0 at the first."""
    known = chances > 0
    values = np.divide(selected, chances, out=np.zeros_like(selected), where=known)
    before = np.maximum.accumulate(np.where(known, np.arange(selected.shape[-1]), 0), axis=-1)
    found: npt.NDArray[np.float64] = np.take_along_axis(values, before, axis=-1)
    return found
