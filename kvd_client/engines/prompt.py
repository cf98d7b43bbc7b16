"""Importance that knows the prompt: what the prompt's last queries would select, were they decode steps.

The last queries exist at prefill, and decode's resemble them in all but one thing: they ask from other positions. So
each of them is asked as decode will ask. Its layer input is projected anew as if it stood at one of the next
:data:`AHEAD` positions, over which the queries are spread evenly; and where decode's selector looks ahead, it is the
state of the layer before that is projected. What decode's own selector picks for them is counted by KV block: c_w, the
share of (KV head, token of the block, query) triples over w queries in which the token is selected. (c_1 + 2 c_w)/3
ranks a layer's blocks anew as soon as the layer's last chunk is done; the daemon puts it beside the profile
(:meth:`kvd_client.PrefillTransfer.rank`).

Which queries: the newest ones most, since behind a question decode's first steps resemble them, and some of the
:data:`SPAN` tokens before, since later steps resemble all of these. So their distances grow by a constant factor.

The very last query is asked twice, the second time from the next position and for a few entries only, and c_1 is that.
On a slow link little more than a twentieth of the cache goes before the second token, and among blocks that all are in
a query's upper fifth this tells the best ones.

Measured on SmolLM2, of the gap between profile and optimum with half and a quarter of the blocks sent, a unit per layer
and block; seven prompts of three domains that the profile was not made of, 64 teacher-forced steps, 20 % selected;
weight 3/4, from the third row on without c_1:

===========================================  =======  =========  =======
asked                                         exact   infinigen   hata
===========================================  =======  =========  =======
the last 16 queries where they stand          59, 63    48, 53    61, 64
the same, a layer early where steps are       59, 63    54, 58    61, 64
the same, spread over the next 64 positions   77, 76    73, 74    78, 76
16 with growing distances over 128 tokens     78, 78    76, 77    80, 78
16 at equal distances over 128 tokens         81, 79    79, 79    83, 81
all 128                                       83, 80    82, 81    85, 82
===========================================  =======  =========  =======

Equal distances win where a text goes on. Behind a question in chat form (six prompts, greedy decode, exact selection)
they lose 25 and 39 points in the first four steps, which decide when the second token comes; growing ones lose 10 and
13, and in all 64 steps they close 74 and 75 % where queries that stand close 66 and 69. The mean of queries as one
query, and two sizes of selection from each, won less than they cost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from kvd_kernels import accumulate_blocks

from kvd_client.engines import _transformers_adapter as adapter
from kvd_client.engines._selective_steps import entries_of
from kvd_client.errors import InvalidArgument
from kvd_client.lanes import NOTHING
from kvd_client.protocol import MAX_FRAME
from kvd_client.selectors.base import INPUT, Arrays, Index, ScoringSelector, Selector, Shape, best

QUERIES = 16
"""w: how many of the prompt's last queries are asked."""
SPAN = 128
"""They are among so many of the prompt's last tokens."""
AHEAD = 64
"""They ask from the next so many positions."""
SHARE = 0.2
"""Each query's selection, as a share of the prompt."""
NARROW_SHARE = 0.05
"""That of the last query when it is asked again."""
TOKENS_PER_QUERY = 10
"""A query is asked for each so many computed tokens at most, which bounds its share of a short prefill."""
BLOCKS = 1000
"""KV blocks a layer that are told apart, as profiles do."""

_MOST_BYTES = MAX_FRAME - 4096
"""Of a ranking, which is one message."""
_GOLDEN = (5**0.5 - 1) / 2
_SAME = 0.05
"""Of a query's length: how far one that was projected anew may be from the model's own, for other sums of products."""

Shares = npt.NDArray[np.float32]
"""Shape (rows, blocks), or by head (rows * KV heads, blocks): 0 to 1."""


class PromptQueries:
    """Collects some of the last queries of each row, layer by layer, and asks ``selector`` what they would select.

    Once for each layer ``rank(layer, shares)`` gets what :func:`shares_of` makes of their selections (with ``by_head``
    of each head's own), and says whether it is of use; ``told(layer, indices)`` gets the KV index of each query, the
    newest token's last, and behind it the narrow one. Where few tokens are computed (a short question about a cached
    prefix) there are fewer queries (:data:`TOKENS_PER_QUERY`).

    Models and layers that make their queries in another way than :class:`Ahead` knows are asked where they stand. For
    selectors that don't look ahead that shows in the newest query, which must come out as the model has it; those that
    do select by the same projection in decode.
    """

    def __init__(
        self,
        model: Any,
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
        self._model, self._shape, self._selector, self._queries = model, shape, selector, queries
        self._k, self._narrow = entries_of(shape.lengths, SHARE), entries_of(shape.lengths, NARROW_SHARE)
        self._rank, self._told, self._by_head = rank, told, by_head
        self._tokens = torch.empty(0)
        """(rows, w): whose queries are asked, ascending; known with the first chunk."""
        self._kept: dict[int, list[_Kept]] = {}
        """Per layer and row."""
        self._inputs: dict[int, torch.Tensor] = {}
        """What a chunk's queries are made of (rows, tokens, hidden size): of the layer that computes, and of the one
        before."""
        self._ahead: adapter.Ahead | None = None
        self._project: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the model's run; without it, and for models that can't be watched, queries ask where they stand."""
        with contextlib.ExitStack() as stack:
            if self.wanted:
                with contextlib.suppress(InvalidArgument):
                    made_of = self._selector.query if self._selector.ahead else INPUT
                    self._ahead = adapter.Ahead(self._model, made_of)
                if self._ahead is not None:
                    stack.enter_context(self._ahead.states(self._sees))
            yield

    def _sees(self, layer: int, hidden: torch.Tensor) -> None:
        self._inputs = {at: each for at, each in self._inputs.items() if at == layer - 1} | {layer: hidden}

    def add(self, layer: int, start: int, query: torch.Tensor, arrays: Arrays) -> None:
        """A chunk's post-RoPE queries (rows, query heads, tokens, head dim), from token ``start`` on; with the chunk
        that reaches the longest row's end, ``arrays`` must be complete."""
        shape, stop = self._shape, start + query.shape[2]
        if not self._tokens.numel():
            self._tokens = asked_tokens(shape.lengths, start, self._queries)
            if self._ahead is not None:
                self._project = self._ahead.at(self._positions())
        hidden = self._inputs.get(layer - 1 if self._selector.ahead else layer)
        kept = self._kept.setdefault(layer, [_Kept() for _ in range(shape.rows)])
        for row, tokens in enumerate(self._tokens):
            here = (tokens[(tokens >= start) & (tokens < stop)] - start).to(query.device)
            if len(here):
                kept[row].queries.append(query[row][:, here])
                if hidden is not None:
                    kept[row].inputs.append(hidden[row][here])
        if stop >= shape.longest:
            indices = self._ask(layer, self._kept.pop(layer), arrays)
            if self._told is not None:
                self._told(layer, indices)
            if self._rank is not None and not self._rank(layer, self._shares(indices)):
                self._rank = None
                self.wanted = self._told is not None

    def _shares(self, indices: list[Index]) -> Shares:
        return shares_of(self._shape, indices, by_head=self._by_head)

    def _ask(self, layer: int, kept: list[_Kept], arrays: Arrays) -> list[Index]:
        queries = torch.stack([torch.cat(each.queries, 1) for each in kept])
        queries = torch.cat([queries, queries[:, :, -1:]], 2)
        if self._project is not None and all(each.inputs for each in kept):
            queries = self._moved(layer, torch.stack([torch.cat(each.inputs) for each in kept]), queries)
        count, selector, shape = queries.shape[2] - 1, self._selector, self._shape
        if _selects_by_scores(selector):  # which both sizes share
            scores = selector.scores(shape, queries, arrays, layer=layer)
            return best(scores, shape.lengths, np.array([self._k] * count + [self._narrow], np.int64).T)
        indices = selector.select_many(shape, queries[:, :, :count], arrays, self._k, layer=layer, steps=[0] * count)
        return [*indices, selector.select(shape, queries[:, :, count:], arrays, self._narrow, layer=layer, step=0)]

    def _positions(self) -> torch.Tensor:
        """(rows, w + 2): where each query asks from, then the newest again, for the narrow selection from the next
        position and for the comparison from its own."""
        newest_first = torch.arange(self._tokens.shape[1], 0, -1)
        # Multiples of the golden ratio lie evenly, however many there are.
        offsets = (newest_first * _GOLDEN % 1 * AHEAD).long()
        lengths = torch.tensor(self._shape.lengths)[:, None]
        return torch.cat([lengths + offsets, lengths, lengths - 1], 1)

    def _moved(self, layer: int, inputs: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Queries as decode asks them: ``inputs`` (rows, w, hidden size) give (rows, query heads, w + 1, head dim), the
        form of ``own``."""
        assert self._project is not None
        newest = inputs[:, -1:]
        try:
            found = self._project(layer, torch.cat([inputs, newest, newest], 1))
        except (RuntimeError, TypeError, ValueError):  # another family's rotation may take something else
            self._project = None
            return own
        same, its = found[:, :, -1:].float(), own[:, :, -1:].float()
        if not self._selector.ahead and bool((same - its).norm() > _SAME * its.norm()):
            return own
        return found[:, :, :-1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """Of one row and layer, in ascending order of chunks."""

    queries: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """(query heads, tokens, head dim)."""
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """(tokens, hidden size); empty where they are not seen."""


def asked_tokens(lengths: Sequence[int], computed_from: int, most: int = QUERIES) -> torch.Tensor:
    """(rows, w): the tokens of each row whose queries are asked, ascending, where those from ``computed_from`` on are
    computed. Seen from the row's end their distances grow by a constant factor, or by 1 where that is less."""
    room = min(lengths) - computed_from
    span, count = min(room, SPAN), max(1, min(most, room // TOKENS_PER_QUERY))
    distances = [0]
    for each in range(1, count):
        distances.append(max(distances[-1] + 1, round(span ** (each / (count - 1))) - 1))
    return torch.tensor([[length - 1 - distance for distance in reversed(distances)] for length in lengths])


def _selects_by_scores(selector: Selector) -> TypeGuard[ScoringSelector]:
    """Whether nothing but its scores decides what a selector takes."""
    kind = type(selector)
    return (
        isinstance(selector, ScoringSelector)
        and kind.select is ScoringSelector.select
        and kind.select_many is ScoringSelector.select_many
    )


def shares_of(shape: Shape, indices: Sequence[Index], blocks: int = BLOCKS, *, by_head: bool = False) -> Shares:
    """(c_1 + 2 c_w)/3 of w indices, c_1 being the last one's; over all KV heads of a row, or of each ``by_head``.
    Blocks without a token have 0."""
    rows, heads = (shape.rows * shape.kv_heads, 1) if by_head else (shape.rows, shape.kv_heads)
    blocks = max(1, min(blocks, shape.longest, _MOST_BYTES // (4 * rows)))
    lengths = np.repeat(np.array(shape.lengths, np.int64), rows // shape.rows)
    last, all_ = np.zeros((2, rows, blocks), np.int64)
    for counts, some in ((last, indices[-1:]), (all_, indices[:-1])):
        if some:
            entries = np.concatenate(some, axis=1)
            entries[entries == NOTHING] = np.iinfo(np.int32).max
            accumulate_blocks(entries, counts, lengths, beyond="skip")
    all_ += last
    chances = _chances(shape.lengths, rows, blocks, heads)
    found: Shares = ((last + 2 / max(len(indices), 1) * all_) / (3 * chances)).astype(np.float32)
    return found


@functools.lru_cache(maxsize=8)
def _chances(lengths: tuple[int, ...], rows: int, blocks: int, heads: int) -> npt.NDArray[np.float64]:
    """(rows, blocks): how often one query can select of each block; 1 where it has no token. Read-only."""
    edges = -(-np.arange(blocks + 1) * np.repeat(np.array(lengths), rows // len(lengths))[:, None] // blocks)
    found: npt.NDArray[np.float64] = np.maximum(np.diff(edges, axis=1) * heads, 1).astype(np.float64)
    found.setflags(write=False)
    return found
