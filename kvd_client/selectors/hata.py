"""HATA: hash codes of queries and keys, compared by Hamming distance.

Code: the sign bits of x W, with W (head dim x bits) trained for each layer and KV head (:mod:`.hata_training`), or,
without weights, of independent normal numbers: random hyperplanes, which estimate angles. A query head's score of a key
is (1 - 2 * popcount(q xor k) / bits) * |k|: the angle between query and key times the key's length.

Where several query heads share a KV head, the paper adds their scores up (``reduce=sum``). The default here takes |q| /
sqrt(head dim) times the score for a logit and adds up the heads' softmaxes of it, as InfiniGen has it: a head that
attends to few tokens counts more. On SmolLM2 that diverges less from the full cache (0.0069 nats for 0.0122 at 20 %,
0.0198 for 0.0362 at 10 %, six prompts) and finds facts that sums lose. With one query head to a KV head both select the
same.

Metadata is bits / 8 + 2 bytes a token and KV head: of an fp16 KV cache 6.6 % with 256 bits at head dim 128, 13.3 % at
64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvd_client.errors import FingerprintMismatch, InvalidArgument
from kvd_client.selectors.base import Arrays, Chunk, Scores, ScoringSelector, Shape, Training, check_reduce, group
from kvd_client.selectors.weights import Weights
from kvd_client.spec import MetadataSpec

if TYPE_CHECKING:
    import torch

HASH = "hash"
"""Weights: W, (layers, KV heads, head dim, bits)."""
CODES = "hata.codes"
"""uint8 (rows, KV heads, tokens, bits / 8): as kvd_kernels.sign_codes makes them."""
NORMS = "hata.norms"
"""float16 (rows, KV heads, tokens): length of each key."""
WORD_BITS = 64
_LIMIT = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class Hata(ScoringSelector):
    """``bits`` a code, a multiple of 64; ``seed`` of the untrained projection, the same at both ends; ``reduce`` over
    the query heads of a KV head, ``softmax`` or ``sum``."""

    name: ClassVar[str] = "hata"
    trained: ClassVar[bool] = True
    bits: int = 0
    """0: those of the weights, or 256."""
    seed: int = 0
    reduce: str = "softmax"
    ahead: bool = False
    weights: Weights | None = None

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("softmax", "sum"))
        bits = self.bits or 256
        if self.weights is not None:
            matrix = self.weights.for_selector(self.name).arrays.get(HASH)
            bits = 0 if matrix is None else matrix.shape[-1]
            self.weights.array(HASH, self.weights.head_dim, bits)
            if self.bits not in (0, bits):
                raise FingerprintMismatch(
                    f"the weights have codes of {bits} bits, not of {self.bits}; train some, or leave bits out",
                    bits=[bits, self.bits],
                )
        if bits < WORD_BITS or bits % WORD_BITS:
            raise InvalidArgument(f"codes of {bits} bits; give a multiple of {WORD_BITS}", bits=bits)
        object.__setattr__(self, "bits", bits)

    @classmethod
    def training(cls, layers: int, kv_heads: int, head_dim: int, **parameters: Any) -> Training:
        from kvd_client.selectors.hata_training import HashTraining

        try:
            return HashTraining(layers, kv_heads, head_dim, **parameters)
        except TypeError as error:
            raise InvalidArgument(f"training of {cls.name} does not take these: {error}", name=cls.name) from None

    def metadata(self, shape: Shape) -> tuple[MetadataSpec, ...]:
        tokens = shape.rows * shape.kv_heads * shape.longest
        # Both ends must have the same W: its checksum in the name makes the daemons compare it.
        mark = f".{self.weights.fingerprint[:8]}" if self.weights is not None else ""
        return (
            MetadataSpec(name=CODES + mark, layer_bytes=tokens * self.bits // 8),
            MetadataSpec(name=NORMS + mark, layer_bytes=tokens * 2),
        )

    def summarize(self, shape: Shape, chunk: Chunk, arrays: Arrays) -> None:
        codes, norms = self._codes(shape, arrays), self._norms(shape, arrays)
        for row, keys in chunk.new_keys(shape):
            start, stop = chunk.start, chunk.start + keys.shape[1]
            keys = keys.float()
            for head in range(shape.kv_heads):
                codes[row, head, start:stop] = self._hash(keys[head], chunk.layer, head)
            norms[row, :, start:stop] = keys.norm(dim=-1).clamp(max=_LIMIT).half().numpy()

    def scores(self, shape: Shape, queries: torch.Tensor, arrays: Arrays, *, layer: int) -> Scores:
        import torch

        q = group(queries, shape.kv_heads)
        rows, heads, g, w, dim = q.shape
        norms = torch.from_numpy(self._norms(shape, arrays)).float()[:, :, None]
        codes = np.empty((rows, heads, g, w, self.bits // 8), np.uint8)
        for head in range(heads):
            codes[:, head] = self._hash(q[:, head].flatten(0, 2), layer, head).reshape(rows, g, w, -1)
        if self.reduce == "sum":
            scores: Scores = (self._agreement(shape, arrays, codes) * norms).numpy()
            return scores
        each = torch.stack([self._agreement(shape, arrays, codes[:, :, at : at + 1]) for at in range(g)], 2)
        logits = each * norms[:, :, None] * (q.norm(dim=-1, keepdim=True) / dim**0.5)
        found = torch.zeros(rows, heads, w, shape.longest)
        for row, length in enumerate(shape.lengths):
            found[row, :, :, :length] = torch.softmax(logits[row, ..., :length], -1).sum(1)
        return found.numpy()  # type: ignore[no-any-return]

    def _agreement(self, shape: Shape, arrays: Arrays, codes: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Of codes (rows, KV heads, G, w, bits / 8) float32 (rows, KV heads, w, tokens): from -G, where all bits of all
        heads differ from the key's, to G."""
        import torch
        from kvd_kernels import hamming

        rows, heads, g, w, size = codes.shape
        kept = self._codes(shape, arrays).reshape(rows * heads, shape.longest, size)
        asked = np.moveaxis(codes, 3, 0).reshape(w, rows * heads, g, size)
        differ = torch.from_numpy(np.stack([hamming(np.ascontiguousarray(each), kept) for each in asked], 1))
        return (g - 2 * differ.float() / self.bits).unflatten(0, (rows, heads))

    def _hash(self, x: torch.Tensor, layer: int, head: int) -> npt.NDArray[np.uint8]:
        from kvd_kernels import sign_codes

        w = projection(x.shape[-1], self.bits, self.seed)
        if self.weights is not None:
            w = self.weights.arrays[HASH][layer, head]
        found: npt.NDArray[np.uint8] = sign_codes(x.contiguous().numpy(), w)
        return found

    def _codes(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.uint8]:
        array = arrays[self.metadata(shape)[0].name]
        return array.reshape(shape.rows, shape.kv_heads, shape.longest, self.bits // 8)

    def _norms(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.float16]:
        array = arrays[self.metadata(shape)[1].name]
        return array.view(np.float16).reshape(shape.rows, shape.kv_heads, shape.longest)


@functools.cache
def projection(dim: int, bits: int, seed: int) -> npt.NDArray[np.float32]:
    """W without training, float32 (dim, bits), of independent normal numbers."""
    # Both ends make it themselves: NumPy promises that RandomState's numbers never change, of its newer generators not.
    return np.random.RandomState(seed).standard_normal((dim, bits)).astype(np.float32)
