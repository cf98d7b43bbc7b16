"""Importance that knows the prompt: what the prompt's last queries would select, were they decode steps.

The last queries exist at prefill, and decode's first ones resemble them. Each is given to decode's own selector, and
what it picks is counted by KV block: c_w, the share of (KV head, token of the block, query) triples over the last w
queries in which the token is selected. (c_1 + 2 c_w)/3 ranks a layer's blocks anew as soon as the layer's last chunk
is done; the daemon puts it beside the profile (:meth:`kvd_client.PrefillTransfer.rank`).

The very last query is asked twice, the second time for a few entries only, and c_1 is that. On a slow link little more
than a twentieth of the cache goes before the second token, and among blocks that all are in a query's upper fifth this
tells the best ones. With half or a quarter of the blocks sent it makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from kvd_kernels import accumulate_blocks

from kvd_client.engines._selective_steps import entries_of
from kvd_client.lanes import NOTHING
from kvd_client.protocol import MAX_FRAME
from kvd_client.selectors.base import Arrays, Index, Selector, Shape

QUERIES = 16
"""w: how many of the prompt's last queries are asked."""
SHARE = 0.2
"""Each query's selection, as a share of the prompt."""
NARROW_SHARE = 0.05
"""That of the last query when it is asked again."""
TOKENS_PER_QUERY = 8
"""A query is asked for each so many computed tokens at most, which bounds its share of a short prefill; then some of
the last queries are left out, evenly."""
BLOCKS = 1000
"""KV blocks a layer that are told apart, as profiles do."""

_MOST_BYTES = MAX_FRAME - 4096
"""Of a ranking, which is one message."""

Shares = npt.NDArray[np.float32]
"""Shape (rows, blocks), or by head (rows * KV heads, blocks): 0 to 1."""


class PromptQueries:
    """Collects the last queries of each row, layer by layer, and asks ``selector`` what they would select.

    Once for each layer ``rank(layer, shares)`` gets what :func:`shares_of` makes of their selections (with ``by_head``
    of each head's own), and says whether it is of use; ``told(layer, indices)`` gets the KV index of each query, at
    last the narrow one of the prompt's last query. Where few tokens are computed (a short question about a cached
    prefix) there are fewer queries (:data:`TOKENS_PER_QUERY`).
    """

    def __init__(
        self,
        shape: Shape,
        selector: Selector,
        *,
        rank: Callable[[int, Shares], bool] | None = None,
        told: Callable[[int, list[Index]], None] | None = None,
        queries: int = QUERIES,
        by_head: bool = False,
    ) -> None:
        self.wanted = rank is not None or told is not None
        """Whether anybody still wants to know."""
        self._shape, self._selector, self._queries = shape, selector, queries
        self._k, self._narrow = entries_of(shape.lengths, SHARE), entries_of(shape.lengths, NARROW_SHARE)
        self._rank, self._told, self._by_head = rank, told, by_head
        self._kept: dict[int, list[torch.Tensor]] = {}
        """Per layer, of each row (query heads, tokens so far, head dim), at most the last ones."""
        self._computed: dict[int, int] = {}
        """Tokens of each layer so far."""

    def add(self, layer: int, start: int, query: torch.Tensor, arrays: Arrays) -> None:
        """A chunk's post-RoPE queries (rows, query heads, tokens, head dim), from token ``start`` on; with the chunk
        that reaches the longest row's end, ``arrays`` must be complete."""
        shape, stop = self._shape, start + query.shape[2]
        kept = self._kept.setdefault(layer, [query[row, :, :0] for row in range(shape.rows)])
        self._computed[layer] = self._computed.get(layer, 0) + query.shape[2]
        for row, length in enumerate(shape.lengths):
            first, last = max(start, length - self._queries), min(stop, length)
            if first < last:
                kept[row] = torch.cat([kept[row], query[row, :, first - start : last - start]], 1)
        if stop >= shape.longest:
            indices = self._ask(layer, self._kept.pop(layer), arrays)
            if self._told is not None:
                self._told(layer, indices)
            if self._rank is not None and not self._rank(layer, self._shares(indices)):
                self._rank = None
                self.wanted = self._told is not None

    def _shares(self, indices: list[Index]) -> Shares:
        return shares_of(self._shape, indices, by_head=self._by_head)

    def _ask(self, layer: int, kept: list[torch.Tensor], arrays: Arrays) -> list[Index]:
        count = min(each.shape[1] for each in kept)
        last = torch.stack([each[:, each.shape[1] - count :] for each in kept])
        most = max(1, self._computed.pop(layer) // TOKENS_PER_QUERY)
        chosen = range(count - 1, -1, -math.ceil(count / most))[::-1]
        indices = self._selector.select_many(
            self._shape, last[:, :, list(chosen)], arrays, self._k, layer=layer, steps=[0] * len(chosen)
        )
        narrow = self._selector.select(self._shape, last[:, :, -1:], arrays, self._narrow, layer=layer, step=0)
        return [*indices, narrow]


def shares_of(shape: Shape, indices: Sequence[Index], blocks: int = BLOCKS, *, by_head: bool = False) -> Shares:
    """(c_1 + 2 c_w)/3 of w indices, c_1 being the last one's; over all KV heads of a row, or of each ``by_head``.
    Blocks without a token have 0."""
    rows, heads = (shape.rows * shape.kv_heads, 1) if by_head else (shape.rows, shape.kv_heads)
    blocks = max(1, min(blocks, shape.longest, _MOST_BYTES // (4 * rows)))
    lengths = np.repeat(np.array(shape.lengths, np.int64), rows // shape.rows)
    last, all_ = np.zeros((2, rows, blocks), np.int64)
    for counts, some in ((last, indices[-1:]), (all_, indices)):
        entries = np.concatenate(some, axis=1)
        entries[entries == NOTHING] = np.iinfo(np.int32).max
        accumulate_blocks(entries, counts, lengths, beyond="skip")
    edges = -(-np.arange(blocks + 1) * lengths[:, None] // blocks)
    chances = np.maximum(np.diff(edges, axis=1), 1) * heads
    found: Shares = ((last + 2 * all_ / max(len(indices), 1)) / (3 * chances)).astype(np.float32)
    return found
