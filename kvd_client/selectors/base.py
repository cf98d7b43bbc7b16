"""The contract of KV selection algorithms, and what they have in common.

An algorithm works at both ends. The source summarizes each layer's keys into a few named byte arrays, the selection
metadata, which travel ahead of the KV entries; the sink scores the prompt's tokens for a decode step's query by them.
Both ends know the same :class:`Shape`, so the arrays need no header. What derives from the model's weights alone is
loaded at both ends (:mod:`kvd_client.selectors.weights`) and does not travel.

The query is the layer's own, or one that is known earlier: an algorithm that looks *ahead* gets the layer's query
projection of the state in which the previous layer begins, while that layer still computes, and its fetches are on
their way meanwhile (InfiniGen, section 4.3). The contract is the same: who gives the query is the engine's business.

The paper takes the previous layer's attention input for that state. That layer's norm has scaled it, by other factors
than the layer's own will. Here it is the residual stream, with the layer's own norm applied, at the cost of one norm of
one token: on SmolLM2 the squared error of the queries falls from 32 to 23 % of their variance (medians of 28 layers, on
texts of three domains; 23 layers gain). A matrix from input to query, fitted to a calibration text by least squares,
leaves 16 %, and so does the residual stream behind attention, of which only the MLP's time remains to fetch in. Both
win little with that: with 10 % selected the divergence from the full cache falls by another seventh.

Layers 0 and 1 are always complete and never ask. Tokens that decode made are always local and always seen, so they
are no part of it; the newest prompt token is always selected.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InvalidArgument
from kvd_client.spec import MetadataSpec

if TYPE_CHECKING:
    import torch

    from kvd_client.selectors.weights import Weights

RESIDUAL, INPUT = "residual", "input"
"""What a query ahead is made of: the residual stream at the previous layer, or that layer's attention input."""

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What prefill has just computed of a layer's prompt: tokens ``start`` (included) to ``stop`` (excluded).

    Tokens beyond a row's length are padding. Each token comes once, in ascending order, in chunks of any size.
    """

    layer: int
    start: int
    keys: torch.Tensor
    """Post-RoPE keys of all tokens up to ``stop``: (rows, KV heads, stop, head dim)."""
    queries: torch.Tensor | None
    """Post-RoPE queries of the chunk's tokens: (rows, query heads, stop - start, head dim); None of a prefix whose KV
    cache was there before, since nobody computed them for this request."""
    scratch: dict[str, Any]
    """The algorithm's own, the same dictionary in all chunks of a layer of a transfer."""

    @property
    def stop(self) -> int:
        return int(self.keys.shape[2])

    def new_keys(self, shape: Shape) -> list[tuple[int, torch.Tensor]]:
        """``(row, keys)`` of each row with tokens in the chunk: on the CPU, (KV heads, tokens, head dim), without
        padding."""
        return _rows(shape, self.keys[:, :, self.start :], self.start)

    def new_queries(self, shape: Shape) -> list[tuple[int, torch.Tensor]]:
        """As :meth:`new_keys`, by KV head and query head of its group: (KV heads, G, tokens, head dim)."""
        if self.queries is None:
            return []
        return [(row, q.unflatten(0, (shape.kv_heads, -1))) for row, q in _rows(shape, self.queries, self.start)]


class Training(abc.ABC):
    """Makes a model's weights for an algorithm, from calibration texts."""

    @abc.abstractmethod
    def add(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """A layer of one more text: post-RoPE (query heads, tokens, head dim) and (KV heads, tokens, head dim)."""

    @abc.abstractmethod
    def finish(self, told: Callable[[int, int], None] | None = None) -> dict[str, npt.NDArray[np.float32]]:
        """The tensors of :class:`Weights`, (layers, KV heads, ...); ``told(done, total)`` hears of long work. Raises
        :class:`InvalidArgument` where the texts were not enough."""


class Selector(abc.ABC):
    """A KV selection algorithm with its parameters; no state, so that one object serves all requests.

    A subclass is a frozen dataclass whose fields are the parameters, all with defaults. Those that are trained for a
    model have a field ``weights`` as well, which is no parameter.
    """

    name: ClassVar[str]
    deployable: ClassVar[bool] = True
    """False where the metadata is as large as the keys: an oracle for runs in one process."""
    trained: ClassVar[bool] = False
    """Whether there are weights for it, which ``kvd profile train`` makes."""
    ahead: bool = False
    """Whether to select for a layer while the previous one computes."""
    query: str = RESIDUAL
    """What the query is then made of, ``residual`` or ``input``."""
    weights: Weights | None = None

    @property
    def parameters(self) -> dict[str, str | int | float]:
        """The parameters by name, as profiles record them; ``ahead`` and ``query`` where it is on, of weights their
        checksum."""
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        names = (field.name for field in fields if field.name not in ("weights", "ahead", "query"))
        found: dict[str, str | int | float] = {name: getattr(self, name) for name in names}
        if self.ahead:
            found |= {"ahead": True, "query": self.query}
        if self.weights is not None:
            found["weights"] = self.weights.fingerprint
        return found

    @classmethod
    def training(cls, layers: int, kv_heads: int, head_dim: int, **parameters: Any) -> Training:
        """What trains the algorithm for a model of that form; raises :class:`InvalidArgument` where nothing does, and
        for parameters that it does not have."""
        raise InvalidArgument(f"selector {cls.name!r} is not trained", name=cls.name)

    def check(self, shape: Shape, layers: int) -> None:
        """Raise :class:`FingerprintMismatch` where the weights are of another form of model; the engine asks before it
        computes anything."""
        if self.weights is not None:
            self.weights.check_form(layers, shape.kv_heads, shape.head_dim)

    def metadata(self, shape: Shape) -> tuple[MetadataSpec, ...]:
        """The arrays of a layer, for opening a transfer; none by default."""
        return ()

    def summarize(self, shape: Shape, chunk: Chunk, arrays: Arrays) -> None:
        """Source: put what the chunk brings into the layer's arrays; nothing by default.

        The arrays must be complete with the chunk that reaches the longest row's end, and not before. Their former
        content does not matter. Chunks of other sizes may only make the difference that the keys themselves have.
        """
        if self.metadata(shape):
            raise TypeError(f"{type(self).__name__} has metadata, but no summarize that fills it")

    @abc.abstractmethod
    def select(
        self, shape: Shape, query: torch.Tensor, arrays: Arrays, k: Sequence[int], *, layer: int, step: int
    ) -> Index:
        """Sink: the KV index of a layer and decode step.

        ``query``: post-RoPE (rows, query heads, 1, head dim); query heads ``[h * G, (h + 1) * G)`` belong to KV head
        ``h``. ``k``: the most entries of each row, 1 to the row's length; all but :class:`InfiniGen` take as many.
        ``step`` counts decode steps from 1.

        Returns int32 (rows * KV heads, the longest row): ascending token positions, the newest prompt token among
        them; a shorter row has -1 behind them. The same arguments give the same index, whichever other rows there are.
        """

    def select_many(
        self,
        shape: Shape,
        queries: torch.Tensor,
        arrays: Arrays,
        k: Sequence[int],
        *,
        layer: int,
        steps: Sequence[int],
    ) -> list[Index]:
        """What :meth:`select` gives for each of several queries of a layer, (rows, query heads, w, head dim), query i
        being step ``steps[i]``'s.

        One call for all is cheaper where an algorithm overrides this. Then products of matrices may round the last bits
        of scores differently, and of tokens whose scores differ by no more than that another may be selected.
        """
        return [
            self.select(shape, queries[:, :, i : i + 1], arrays, k, layer=layer, step=step)
            for i, step in enumerate(steps)
        ]


class ScoringSelector(Selector):
    """An algorithm that gives each token a score, and takes the highest."""

    @abc.abstractmethod
    def scores(self, shape: Shape, queries: torch.Tensor, arrays: Arrays, *, layer: int) -> Scores:
        """Of queries (rows, query heads, w, head dim) float32 (rows, KV heads, w, longest row); what stands beyond a
        row's length does not matter."""

    def select(
        self, shape: Shape, query: torch.Tensor, arrays: Arrays, k: Sequence[int], *, layer: int, step: int
    ) -> Index:
        return self.select_many(shape, query, arrays, k, layer=layer, steps=[step])[0]

    def select_many(
        self,
        shape: Shape,
        queries: torch.Tensor,
        arrays: Arrays,
        k: Sequence[int],
        *,
        layer: int,
        steps: Sequence[int],
    ) -> list[Index]:
        check_k(shape.lengths, k)
        scores = self.scores(shape, queries, arrays, layer=layer)
        return best(scores, shape.lengths, np.repeat(np.array(k, np.int64)[:, None], scores.shape[2], 1))


def best(scores: Scores, lengths: Sequence[int], k: npt.NDArray[np.int64]) -> list[Index]:
    """Of each query the tokens with the highest scores, as :func:`top_k` takes them: ``scores`` (rows, heads, w,
    tokens), ``k`` (rows, w)."""
    from kvd_kernels import top_k as take

    rows, heads, w, tokens = scores.shape
    flat = np.ascontiguousarray(scores).reshape(-1, tokens)
    wanted = np.repeat(k[:, None], heads, 1).reshape(-1)
    index: Index = take(flat, np.repeat(np.array(lengths, np.int64), heads * w), wanted)
    if w == 1:
        return [index]
    index = index.reshape(rows * heads, w, -1)
    return [np.ascontiguousarray(index[:, each, : k[:, each].max()]) for each in range(w)]


def top_k(scores: Scores, lengths: Sequence[int], k: Sequence[int]) -> Index:
    """Of each row the ``k[row]`` tokens with the highest scores, the newest one always: int32 (rows * heads, max(k)),
    ascending, -1 behind shorter rows. Equal scores: the earlier token. Not a number: last.

    ``scores``: float32 (rows, heads, tokens). Raises :class:`InvalidArgument` for a ``k`` beyond its row.
    """
    check_k(lengths, k)
    return best(scores[:, :, None], lengths, np.array(k, np.int64)[:, None])[0]


def check_k(lengths: Sequence[int], k: Sequence[int]) -> None:
    """Raise :class:`InvalidArgument` unless each row has that many tokens."""
    if len(k) != len(lengths) or any(not 1 <= n <= length for n, length in zip(k, lengths, strict=True)):
        raise InvalidArgument(
            f"{list(k)} entries can't be selected of rows with {list(lengths)} tokens; give each row 1 to its length",
            k=list(k),
            lengths=list(lengths),
        )


def group(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries (rows, query heads, w, head dim) by KV head, float32 on the CPU: (rows, KV heads, G, w, head dim)."""
    import torch

    return queries.detach().to("cpu", torch.float32).unflatten(1, (kv_heads, -1))


def products(queries: torch.Tensor, keys: torch.Tensor, how: str) -> Scores:
    """Dot products of grouped queries (rows, KV heads, G, w, dim) with keys (rows, KV heads, tokens, dim), their
    ``sum`` or ``max`` over the query heads: (rows, KV heads, w, tokens)."""
    keys = keys.transpose(2, 3)
    if how == "sum":  # of the products it is the product of the sum
        return (queries.sum(2) @ keys).numpy()  # type: ignore[no-any-return]
    each = queries.flatten(2, 3) @ keys
    return each.unflatten(2, queries.shape[2:4]).amax(2).numpy()  # type: ignore[no-any-return]


def check_reduce(how: str, known: Sequence[str] = ("sum", "max")) -> None:
    if how not in known:
        listed = " or ".join(map(repr, known))
        raise InvalidArgument(f"reduce is {how!r}; it must be {listed} over the query heads", reduce=how)


def _rows(shape: Shape, x: torch.Tensor, start: int) -> list[tuple[int, torch.Tensor]]:
    return [
        (row, x[row, :, : length - start].detach().to("cpu"))
        for row, length in enumerate(shape.lengths)
        if start < length
    ]
