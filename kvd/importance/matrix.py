"""The importance matrix: how often the entries of each KV block get selected (SmartGen, section 4.1, equation 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument

if TYPE_CHECKING:
    from kvd.importance.heads import HeadImportance

ALWAYS_LAYERS = 2
"""Layers whose blocks are infinitely important: selection skips them, so decode needs all of each."""

BlockMask: TypeAlias = npt.NDArray[np.bool_]
"""Shape (layers, blocks): some of the blocks."""


class ImportanceMatrix:
    """Importance of each block, float32 of shape (layers, blocks): infinite in layers 0 and 1, elsewhere the mean
    number of times that an entry of the block was selected. Columns are positions relative to the prompt's length
    (:mod:`kvd.blocks`). ``heads``, where it is known, says how the heads of a layer differ. Immutable, so that running
    transfers can share it.

    Raises :class:`InvalidArgument` for anything but two dimensions, and naming the first layer and block whose value
    is NaN, negative, or infinite from layer 2 on. What is given for layers 0 and 1 does not matter otherwise.
    """

    __slots__ = ("_order", "_ranks", "heads", "values")

    def __init__(self, values: npt.ArrayLike, heads: HeadImportance | None = None) -> None:
        own = np.array(values, dtype=np.float32)
        if own.ndim != 2 or not own.size:
            raise InvalidArgument(
                f"an importance matrix has shape (layers, blocks), not {own.shape}", shape=list(own.shape)
            )
        wrong = np.isnan(own) | (own < 0)
        wrong[ALWAYS_LAYERS:] |= np.isinf(own[ALWAYS_LAYERS:])
        if wrong.any():
            layer, block = (int(at) for at in np.argwhere(wrong)[0])
            raise InvalidArgument(
                f"the importance of layer {layer}, block {block} is {own[layer, block]}; it must be a finite number, "
                "0 or more: record the profile again",
                layer=layer,
                block=block,
                value=float(own[layer, block]),
            )
        own[:ALWAYS_LAYERS] = np.inf
        own.setflags(write=False)
        if heads is not None and heads.layers != len(own):
            raise InvalidArgument(
                f"importance by head has {heads.layers} layers, and the matrix {len(own)}",
                layers=[heads.layers, len(own)],
            )
        self.values, self.heads = own, heads
        self._order: npt.NDArray[np.int64] | None = None
        self._ranks: npt.NDArray[np.int64] | None = None

    @classmethod
    def sequential(cls, layers: int, blocks: int) -> ImportanceMatrix:
        """No knowledge: every block as important as the next, so that the order is that of addresses."""
        return cls(np.zeros((layers, blocks), np.float32))

    def with_heads(self, heads: HeadImportance | None) -> ImportanceMatrix:
        """The same matrix, and how heads differ from ``heads``; what was sorted is not sorted again."""
        if heads is self.heads:
            return self
        found = ImportanceMatrix(self.values, heads)
        found._order, found._ranks = self.order(), self.ranks()
        return found

    @property
    def layers(self) -> int:
        return int(self.values.shape[0])

    @property
    def blocks(self) -> int:
        return int(self.values.shape[1])

    def __repr__(self) -> str:
        return f"<ImportanceMatrix of {self.layers} layers, {self.blocks} blocks>"

    def order(self) -> npt.NDArray[np.int64]:
        """Blocks, the most important first, as ``layer * blocks + block``; equal ones by layer, then position."""
        if self._order is None:
            # A stable sort of the negated values; -inf comes first.
            self._order = np.argsort(-self.values, axis=None, kind="stable").astype(np.int64)
            self._order.setflags(write=False)
        return self._order

    def ranks(self) -> npt.NDArray[np.int64]:
        """Each block's place in :meth:`order`, shape (layers, blocks); 0 is the most important."""
        if self._ranks is None:
            ranks = np.empty(self.values.size, np.int64)
            ranks[self.order()] = np.arange(ranks.size)
            self._ranks = ranks.reshape(self.values.shape)
            self._ranks.setflags(write=False)
        return self._ranks

    def top(self, count: int) -> BlockMask:
        """The ``count`` most important blocks (all, if there are fewer)."""
        if count < 0:
            raise InvalidArgument(f"a budget of {count} blocks makes no sense; give 0 or more", count=count)
        chosen = np.zeros(self.values.size, np.bool_)
        chosen[self.order()[:count]] = True
        return chosen.reshape(self.values.shape)

    def resampled(self, blocks: int) -> ImportanceMatrix:
        """The same importance over another number of blocks, each the mean of what it covers.

        For prompts with fewer tokens than blocks: ``min(blocks, longest row)`` leaves each block at least one token.
        """
        if blocks < 1:
            raise InvalidArgument(f"a layer can't be cut into {blocks} blocks; give at least one", blocks=blocks)
        if blocks == self.blocks:
            return self
        values = np.zeros((self.layers, blocks))
        values[ALWAYS_LAYERS:] = resampled_columns(self.values[ALWAYS_LAYERS:], blocks)
        return ImportanceMatrix(values, self.heads)


def resampled_columns(values: npt.NDArray[Any], blocks: int) -> npt.NDArray[np.float64]:
    """``values`` (n, M) over another number of blocks, each the mean of what it covers."""
    rows, before = values.shape
    sums = np.zeros((rows, before + 1))
    np.cumsum(values, axis=1, dtype=np.float64, out=sums[:, 1:])
    edges = np.arange(blocks + 1) * before / blocks
    below = np.minimum(edges.astype(np.int64), before - 1)
    at_edges = sums[:, below] + (edges - below) * (sums[:, below + 1] - sums[:, below])
    # Rounding may leave a difference of equal sums just below zero.
    found: npt.NDArray[np.float64] = np.maximum(np.diff(at_edges, axis=1), 0) * (blocks / before)
    return found
