"""HATA: hash codes of queries and keys, compared by Hamming distance.

Code: the sign bits of x W, with W (head dim x bits) trained for each layer and KV head (:mod:`.hata_training`), or,
without weights, of independent normal numbers: random hyperplanes, which estimate angles. Score: (G - 2 * sum over the
group's query heads of popcount(q xor k) / bits) * |k|, the angle between query and key times the key's length.

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
from kvd_client.selectors.base import Arrays, Chunk, Scores, ScoringSelector, Shape, Training, group
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
    """``bits`` a code, a multiple of 64; ``seed`` of the untrained projection, the same at both ends."""

    name: ClassVar[str] = "hata"
    trained: ClassVar[bool] = True
    bits: int = 0
    """0: those of the weights, or 256."""
    seed: int = 0
    ahead: bool = False
    weights: Weights | None = None

    def __post_init__(self) -> None:
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
        from kvd_kernels import hamming

        q, size = group(queries, shape.kv_heads), self.bits // 8
        rows, heads, g, w, _ = q.shape
        asked = np.empty((w, rows, heads, g, size), np.uint8)
        for head in range(heads):
            codes = self._hash(q[:, head].permute(2, 0, 1, 3).flatten(0, 2), layer, head)
            asked[:, :, head] = codes.reshape(w, rows, g, size)
        kept = self._codes(shape, arrays).reshape(rows * heads, shape.longest, size)
        distances = [hamming(each, kept) for each in asked.reshape(w, rows * heads, g, size)]
        distance = torch.from_numpy(np.stack(distances, 1)).unflatten(0, (rows, heads))
        agreement = (g * self.bits - 2 * distance).float() / self.bits
        scores: Scores = (agreement * torch.from_numpy(self._norms(shape, arrays)).float()[:, :, None]).numpy()
        return scores

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
