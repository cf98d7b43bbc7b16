"""InfiniGen: a few columns of skewed keys, scored by a query that is known one layer ahead.

Offline, the singular value decomposition of a KV head's post-RoPE queries on a calibration text gives an orthogonal A
(head dim x head dim; section 4.2). QA and KA have the products of Q and K, but most of QA's length lies in few columns.
Of each request and head, the source picks the share ``columns`` of columns with the largest sum of absolute values over
the prompt's queries, and sends these columns of KA ahead: the partial keys. The sink scores with
s = q A[:, columns] · partial key / sqrt(head dim).

How many entries are selected follows the scores (section 4.3): the mean over a row's query heads of the number of s
above their greatest less ``alpha``, at most k. Where we differ from the paper:

- The query that is told a layer ahead is made of the residual stream with the layer's own norm, not of the previous
  layer's attention input, which that layer's norm has scaled (``query=input``).
- Its alpha is 5, whatever the prompt's length. What is left out is then each less than e^-5 of the greatest, but may be
  many: n tokens together at most n e^-alpha. So alpha is the logarithm of n here, and the bound the greatest itself.
- Its mean is over the batch too; here a row selects the same whichever others it decodes with.
- The greatest is sought behind the first ``sinks`` tokens. Many models give their first token a score far above all
  others' whatever the query, an attention sink, and then next to nothing is within alpha of it: on SmolLM2 at a cap of
  20 % and alpha 5, 9 % were selected that held 88 % of the attention; behind the sinks it is 15 % that hold 93 %.
- With several query heads to a KV head, which it does not have, an entry's score is the sum of the heads' softmaxes.
- Partial keys have eight bits, and twice the paper's columns, 0.6 of the head dimension, take the same bytes. Each
  column has 255 steps from its least to its greatest value in the row; the least itself is not sent, since it adds the
  same to all of a query's scores, which changes neither their order, nor a softmax, nor a difference. What rounding
  moves is small beside what a column less does: with 19 of 64 columns SmolLM2 missed facts that 38 of them find.

On SmolLM2 with at most 20 and at most 10 % selected: KL divergence of the next 64 tokens from the full cache (10^-3
nats, nine prompts of 1,024 to 4,096 tokens), and facts found of 120, of which the full cache finds 117:

==========================  ==========  ============  ==========
query                       alpha       divergence    found
==========================  ==========  ============  ==========
ahead, of the input         5           8.4, 19.6     109, 109
ahead, of the input         log n       3.9, 16.7
ahead, of the residual      5           7.6, 11.7
ahead, of the residual      log n       3.6, 10.5     116, 115
the layer's own             log n       2.7, 8.3      116, 115
all keys, the sum of heads              3.7, 10.5     115, 114
==========================  ==========  ============  ==========

Metadata is columns / 4 of an fp16 KV cache: 15 % at 0.6. Without weights A is the identity, which is the paper's
ablation: it works, and picks worse columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import (
    INPUT,
    RESIDUAL,
    Arrays,
    Chunk,
    Index,
    Selector,
    Shape,
    Training,
    best,
    check_k,
    group,
)
from kvd_client.selectors.weights import Weights
from kvd_client.spec import MetadataSpec

if TYPE_CHECKING:
    import torch

SKEW = "skew"
"""Weights: A, (layers, KV heads, head dim, head dim)."""
KEYS = "infinigen.keys"
"""uint8 (rows, KV heads, tokens, columns): the partial keys, in steps above the least of their column."""
COLUMNS = "infinigen.columns"
"""uint16 (rows, KV heads, columns): which columns of KA they are, ascending."""
STEPS = "infinigen.steps"
"""float32 (rows, KV heads, columns): what a step is; 0 where all keys are the same."""
_MOST = 255
_LIMIT = float(np.finfo(np.float32).max) / 4


@dataclasses.dataclass(frozen=True)
class InfiniGen(Selector):
    """``columns``: share of the head dimension, above 0 and at most 1; ``alpha``: how far below the greatest score an
    entry may be, 5 in the paper, or 0 for the logarithm of the row's tokens; ``sinks``: first tokens whose scores are
    not asked for the greatest, 0 in the paper; ``query``: what it is made of ahead, ``input`` in the paper."""

    name: ClassVar[str] = "infinigen"
    trained: ClassVar[bool] = True
    columns: float = 0.6
    alpha: float = 0.0
    sinks: int = 4
    ahead: bool = True
    query: str = RESIDUAL
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if not 0 < self.columns <= 1:
            raise InvalidArgument(
                f"columns is {self.columns}; give a share above 0 and at most 1", columns=self.columns
            )
        if not self.alpha >= 0:
            raise InvalidArgument(
                f"alpha is {self.alpha}; give a number above 0, or 0 for the logarithm of a row's tokens",
                alpha=self.alpha,
            )
        if self.sinks < 0:
            raise InvalidArgument(f"{self.sinks} attention sinks; give 0 or more", sinks=self.sinks)
        if self.query not in (RESIDUAL, INPUT):
            raise InvalidArgument(
                f"query is {self.query!r}; a query ahead is made of the {RESIDUAL!r} or of the {INPUT!r}",
                query=self.query,
            )
        if self.weights is not None:
            form = self.weights.head_dim
            self.weights.for_selector(self.name).array(SKEW, form, form)

    @classmethod
    def training(cls, layers: int, kv_heads: int, head_dim: int, **parameters: Any) -> Skewing:
        if parameters:
            raise InvalidArgument(f"training of {cls.name} has no {min(parameters)}", name=cls.name)
        return Skewing(layers, kv_heads, head_dim)

    def metadata(self, shape: Shape) -> tuple[MetadataSpec, ...]:
        heads, width = shape.rows * shape.kv_heads, self._width(shape)
        # Both ends must have the same A: its checksum in the name makes the daemons compare it.
        mark = f".{self.weights.fingerprint[:8]}" if self.weights is not None else ""
        return (
            MetadataSpec(name=KEYS + mark, layer_bytes=heads * shape.longest * width),
            MetadataSpec(name=COLUMNS + mark, layer_bytes=2 * heads * width),
            MetadataSpec(name=STEPS + mark, layer_bytes=4 * heads * width),
        )

    def summarize(self, shape: Shape, chunk: Chunk, arrays: Arrays) -> None:
        import torch

        skew = self._skew(chunk.layer)
        sums: torch.Tensor | None = chunk.scratch.get("sums")
        if sums is None:
            sums = chunk.scratch["sums"] = torch.zeros(shape.rows, shape.kv_heads, shape.head_dim, dtype=torch.float64)
        for row, queries in chunk.new_queries(shape):
            skewed = queries.float().flatten(1, 2)
            skewed = skewed if skew is None else skewed @ skew
            sums[row] += skewed.abs().sum(1, dtype=torch.float64)
        if chunk.stop < shape.longest:
            return
        keys, columns, steps = self._keys(shape, arrays), self._columns(shape, arrays), self._steps(shape, arrays)
        chosen = sums.topk(self._width(shape), dim=-1).indices.sort(-1).values
        columns[:] = chosen.numpy().astype(np.uint16)
        for row, length in enumerate(shape.lengths):
            mine = chunk.keys[row, :, :length].detach().to("cpu", torch.float32)
            mine = mine if skew is None else mine @ skew
            partial = mine.gather(2, chosen[row, :, None].expand(-1, length, -1)).clamp(-_LIMIT, _LIMIT)
            least, greatest = partial.aminmax(dim=1, keepdim=True)
            step = (greatest - least) / _MOST
            keys[row, :, :length] = ((partial - least) / step).nan_to_num(0).round().clamp(0, _MOST).byte().numpy()
            steps[row] = step[:, 0].numpy()

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
        scores, counts = self.scored(shape, queries, arrays, layer)
        return best(scores, shape.lengths, np.clip(counts.astype(np.int64), 1, np.array(k, np.int64)[:, None]))

    def scored(
        self, shape: Shape, queries: torch.Tensor, arrays: Arrays, layer: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
        """Of queries (rows, query heads, w, head dim) float32 (rows, KV heads, w, longest row): summed softmaxes, 0
        beyond a row's end; and float64 (rows, w): the mean number of entries above the greatest less ``alpha``."""
        import torch

        q, skew = group(queries, shape.kv_heads), self._skew(layer)
        columns = torch.from_numpy(self._columns(shape, arrays).astype(np.int64))
        g, w = q.shape[2:4]
        q = q.flatten(2, 3)
        if skew is not None:
            q = q @ skew
        q = q.gather(3, columns[:, :, None].expand(-1, -1, g * w, -1)) / float(np.sqrt(shape.head_dim))
        q = q * torch.from_numpy(self._steps(shape, arrays))[:, :, None]
        keys = torch.from_numpy(self._keys(shape, arrays)).float().transpose(2, 3)
        found = torch.zeros(shape.rows, shape.kv_heads, w, shape.longest)
        counts = np.empty((shape.rows, w))
        for row, length in enumerate(shape.lengths):
            s = (q[row] @ keys[row, :, :, :length]).unflatten(1, (g, w))
            # A prompt of nothing but sinks has no other greatest.
            greatest = s[..., self.sinks if self.sinks < length else 0 :].amax(-1, keepdim=True)
            alpha = self.alpha or math.log(length)
            counts[row] = (s > greatest - alpha).sum((0, 1, 3), dtype=torch.int32).numpy() / (shape.kv_heads * g)
            found[row, :, :, :length] = torch.softmax(s, -1).sum(1)
        return found.numpy(), counts

    def _width(self, shape: Shape) -> int:
        return max(int(self.columns * shape.head_dim), 1)

    def _skew(self, layer: int) -> torch.Tensor | None:
        return None if self.weights is None else self.weights.tensor(SKEW)[layer]

    def _keys(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.uint8]:
        array = arrays[self.metadata(shape)[0].name]
        return array.reshape(shape.rows, shape.kv_heads, shape.longest, self._width(shape))

    def _columns(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.uint16]:
        array = arrays[self.metadata(shape)[1].name]
        return array.view(np.uint16).reshape(shape.rows, shape.kv_heads, self._width(shape))

    def _steps(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.float32]:
        array = arrays[self.metadata(shape)[2].name]
        return array.view(np.float32).reshape(shape.rows, shape.kv_heads, self._width(shape))


class Skewing(Training):
    """A of each layer and KV head: the right singular vectors of its group's queries, by descending singular value.

    They are the eigenvectors of QᵀQ, which can be added up text by text. Their signs are arbitrary and cancel out.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._grams = np.zeros((layers, kv_heads, head_dim, head_dim))

    def add(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        q = queries.detach().to("cpu").double().reshape(len(keys), -1, keys.shape[2])
        self._grams[layer] += (q.transpose(1, 2) @ q).numpy()

    def finish(self, told: Callable[[int, int], None] | None = None) -> dict[str, npt.NDArray[np.float32]]:
        if not np.diagonal(self._grams, axis1=2, axis2=3).sum(-1).all():
            raise InvalidArgument("no calibration text was added; give at least one")
        _, vectors = np.linalg.eigh(self._grams)
        return {SKEW: vectors[..., ::-1].astype(np.float32)}
