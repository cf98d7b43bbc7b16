"""Importance by KV head: how much more, or less, each head of a layer selects of a part of the prompt than all do.

A layer's KV heads select different tokens, and with masks by head each one's entries are sent in an order of their own.
Which of a prompt's *tokens* a head prefers hardly carries over from one prompt to the next, but which *parts* of it
does. So an importance matrix stays one number a block for all heads of a layer, and has beside it one a head and cell,
a fortieth of the prompt: a block's importance for a head is the matrix's, times the head's share of the cell over the
mean of all heads. Recorded selections of SmolLM2 by the profile of other domains lack 0.012 to 0.035 less of what
decode selects at half and a quarter sent than by the matrix alone. One number a head and *block* wins no more with
many recorded prompts, and with few the gain is lost to their noise.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd_client.protocol import COUNT_CELLS

CELLS = COUNT_CELLS
"""Parts of the prompt that recordings tell apart. 125 and 330 win as much, 10 a third less."""
MAX_CELLS = 1024

Values = npt.NDArray[np.float32]


class HeadImportance:
    """How often an entry of each cell was selected by each head: float32 (layers, KV heads, cells). Immutable.

    Cells are equal parts of a prompt, as blocks are. Raises :class:`InvalidArgument` for another number of dimensions,
    more than :data:`MAX_CELLS` cells, and naming the first value that is NaN, negative or infinite; layers 0 and 1,
    which are sent whole, are taken as 0.
    """

    __slots__ = ("values",)

    def __init__(self, values: npt.ArrayLike) -> None:
        own = np.array(values, np.float32)
        if own.ndim != 3 or not own.size or own.shape[2] > MAX_CELLS:
            raise InvalidArgument(
                f"importance by head has shape (layers, KV heads, cells), with at most {MAX_CELLS} cells, not "
                f"{own.shape}",
                shape=list(own.shape),
            )
        own[:ALWAYS_LAYERS] = 0
        wrong = ~(np.isfinite(own) & (own >= 0))
        if wrong.any():
            layer, head, cell = np.argwhere(wrong)[0].tolist()
            raise InvalidArgument(
                f"the importance of layer {layer}, KV head {head}, cell {cell} is {own[layer, head, cell]}; it must be "
                "a finite number, 0 or more: record the profile again",
                layer=layer,
                head=head,
                cell=cell,
                value=float(own[layer, head, cell]),
            )
        own.setflags(write=False)
        self.values = own

    @property
    def layers(self) -> int:
        return int(self.values.shape[0])

    @property
    def heads(self) -> int:
        return int(self.values.shape[1])

    @property
    def cells(self) -> int:
        return int(self.values.shape[2])

    def factors(self, first: int = 0, count: int | None = None) -> Values:
        """What multiplies a layer's importance for each of ``count`` heads from ``first`` on (default: all): float32
        (layers, count, cells), 1 on average over all heads, and where nothing is known."""
        mean = self.values.mean(axis=1, keepdims=True)
        chosen = self.values[:, first : None if count is None else first + count]
        found: Values = np.divide(chosen, mean, out=np.ones_like(chosen), where=mean > 0)
        return found


def by_head(values: Values, factors: Values) -> Values:
    """Importance of one layer's blocks, (blocks,), by head: (heads, blocks). ``factors``: (heads, cells)."""
    found: Values = values * factors[:, _cells_of(len(values), factors.shape[1])]
    return found


def sample_by_head(values: Values, factors: Values, count: int) -> Values:
    """About ``count`` of all layers' importance by head, from blocks all over the prompt. ``values``: (layers, blocks),
    ``factors``: (layers, heads, cells)."""
    blocks = values.shape[1]
    at = np.arange(0, blocks, max(1, values.size * factors.shape[1] // count))
    found: Values = values[:, None, at] * factors[:, :, _cells_of(blocks, factors.shape[2])[at]]
    return found.ravel()


@functools.lru_cache(maxsize=8)
def _cells_of(blocks: int, cells: int) -> npt.NDArray[np.int64]:
    """The cell in which the middle of each block lies. Read-only."""
    found: npt.NDArray[np.int64] = (2 * np.arange(blocks) + 1) * cells // (2 * blocks)
    found.setflags(write=False)
    return found
