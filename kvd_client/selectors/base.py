"""The contract of KV selection algorithms, and what they have in common.

An algorithm works at both ends. The source summarizes each layer's keys into a few named byte arrays, the selection
metadata, which travel ahead of the KV entries; the sink scores the prompt's tokens for a decode step's query by them.
Both ends know the same :class:`Shape`, so the arrays need no header.

Layers 0 and 1 are always complete and never ask. Tokens that decode made are always local and always seen, so they
are no part of it; the newest prompt token is always selected.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InvalidArgument
from kvd_client.spec import MetadataSpec

if TYPE_CHECKING:
    import torch

Index = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[np.uint8]]
"""A layer's metadata by name, each uint8 (its layer_bytes,), aligned to 64 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What both ends know of a transfer's part."""

    lengths: tuple[int, ...]
    """Prompt tokens of each row."""
    kv_heads: int
    head_dim: int
    dtype: str
    """Of K and V, as torch names it."""

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


class Selector(abc.ABC):
    """A KV selection algorithm with its parameters; no state, so that one object serves all requests."""

    name: ClassVar[str]
    deployable: ClassVar[bool] = True
    """False where the metadata is as large as the keys: an oracle for runs in one process."""

    @property
    def parameters(self) -> dict[str, str | int | float]:
        """The parameters by name, as profiles record them."""
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}

    def metadata(self, shape: Shape) -> tuple[MetadataSpec, ...]:
        """The arrays of a layer, for opening a transfer; none by default."""
        return ()

    def summarize(self, shape: Shape, k: torch.Tensor, start: int, arrays: Arrays) -> None:
        """Source: put tokens ``start`` and following of a layer into its arrays; nothing by default.

        ``k``: post-RoPE keys (rows, KV heads, tokens, head dim). Tokens beyond a row's length are padding. Each token
        comes once, in ascending order, in chunks of any size. The arrays' former content does not matter.
        """
        if self.metadata(shape):
            raise TypeError(f"{type(self).__name__} has metadata, but no summarize that fills it")

    @abc.abstractmethod
    def select(
        self, shape: Shape, query: torch.Tensor, arrays: Arrays, k: Sequence[int], *, layer: int, step: int
    ) -> Index:
        """Sink: the KV index of a layer and decode step.

        ``query``: post-RoPE (rows, query heads, 1, head dim); query heads ``[h * G, (h + 1) * G)`` belong to KV head
        ``h``. ``k``: entries to select in each row, 1 to the row's length. ``step`` counts decode steps from 1.

        Returns int32 (rows * KV heads, max(k)): ascending token positions, the newest prompt token among them; a row
        with fewer than ``max(k)`` entries has -1 behind them. The same arguments give the same index.
        """


class ScoringSelector(Selector):
    """An algorithm that gives each token a score, and takes the highest."""

    @abc.abstractmethod
    def scores(self, shape: Shape, query: torch.Tensor, arrays: Arrays) -> Scores:
        """float32 (rows, KV heads, longest row); what stands beyond a row's length does not matter."""

    def select(
        self, shape: Shape, query: torch.Tensor, arrays: Arrays, k: Sequence[int], *, layer: int, step: int
    ) -> Index:
        return top_k(self.scores(shape, query, arrays), shape.lengths, k)


def top_k(scores: Scores, lengths: Sequence[int], k: Sequence[int]) -> Index:
    """Of each row the ``k[row]`` tokens with the highest scores, the newest one always: int32 (rows * heads, max(k)),
    ascending, -1 behind shorter rows. Equal scores: the earlier token. Not a number: last.

    ``scores``: float32 (rows, heads, tokens). Raises :class:`InvalidArgument` for a ``k`` beyond its row.
    """
    check_k(lengths, k)
    rows, heads, _ = scores.shape
    index = np.full((rows, heads, max(k)), -1, np.int32)
    for row, (length, n) in enumerate(zip(lengths, k, strict=True)):
        limit = float(np.finfo(np.float32).max)
        mine = np.nan_to_num(scores[row, :, :length], nan=-limit, posinf=limit, neginf=-limit)
        mine[:, length - 1] = np.inf
        least = np.partition(mine, length - n, axis=1)[:, length - n, None]
        above = mine > least
        level = mine == least
        room = n - above.sum(axis=1, keepdims=True)
        chosen = above | (level & (level.cumsum(axis=1) <= room))
        index[row, :, :n] = np.nonzero(chosen)[1].reshape(heads, n)
    return index.reshape(rows * heads, -1)


def check_k(lengths: Sequence[int], k: Sequence[int]) -> None:
    """Raise :class:`InvalidArgument` unless each row has that many tokens."""
    if len(k) != len(lengths) or any(not 1 <= n <= length for n, length in zip(k, lengths, strict=True)):
        raise InvalidArgument(
            f"{list(k)} entries can't be selected of rows with {list(lengths)} tokens; give each row 1 to its length",
            k=list(k),
            lengths=list(lengths),
        )


def group(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A decode step's query by KV head, float32 on the CPU: (rows, KV heads, G, head dim)."""
    import torch

    rows, heads, _, dim = query.shape
    return query.detach().to("cpu", torch.float32).reshape(rows, kv_heads, heads // kv_heads, dim)


def over_group(scores: torch.Tensor, how: str) -> Scores:
    """(rows, KV heads, G, tokens) to (rows, KV heads, tokens): the ``sum`` or the ``max`` over the query heads."""
    found: Scores = (scores.sum(2) if how == "sum" else scores.amax(2)).numpy()
    return found


def check_reduce(how: str) -> None:
    if how not in ("sum", "max"):
        raise InvalidArgument(f"reduce is {how!r}; it must be 'sum' or 'max' over the query heads", reduce=how)


def rows_of(shape: Shape, k: torch.Tensor, start: int) -> list[tuple[int, Any]]:
    """``(row, keys)`` of each row that has tokens in the chunk, keys (KV heads, tokens, head dim) without padding."""
    return [
        (row, k[row, :, : length - start].detach().to("cpu"))
        for row, length in enumerate(shape.lengths)
        if start < length
    ]
