"""HATA with untrained hashes: sign bits of random projections, compared by Hamming distance.

Score: (G - 2 * sum over the group's query heads of popcount(q xor k) / bits) * |k|, the angle between query and key
times the key's length. Metadata is bits / 8 + 2 bytes a token and KV head: 6.6 % of an fp16 KV cache with 256 bits at
head dim 128, 13.3 % at 64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Arrays, Chunk, Scores, ScoringSelector, Shape, group
from kvd_client.spec import MetadataSpec

if TYPE_CHECKING:
    import torch

CODES = "hata.codes"
"""uint8 (rows, KV heads, tokens, bits / 8): sign bits of k @ W, the first one in the highest bit."""
NORMS = "hata.norms"
"""float16 (rows, KV heads, tokens): length of each key."""
_LIMIT = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class Hata(ScoringSelector):
    """``bits`` a code, a multiple of 64; ``seed`` of the projection, the same at both ends."""

    name: ClassVar[str] = "hata"
    bits: int = 256
    seed: int = 0
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.bits < 64 or self.bits % 64:
            raise InvalidArgument(f"codes of {self.bits} bits; give a multiple of 64", bits=self.bits)

    def metadata(self, shape: Shape) -> tuple[MetadataSpec, ...]:
        tokens = shape.rows * shape.kv_heads * shape.longest
        return (
            MetadataSpec(name=CODES, layer_bytes=tokens * self.bits // 8),
            MetadataSpec(name=NORMS, layer_bytes=tokens * 2),
        )

    def summarize(self, shape: Shape, chunk: Chunk, arrays: Arrays) -> None:
        codes, norms = self._codes(shape, arrays), self._norms(shape, arrays)
        for row, keys in chunk.new_keys(shape):
            start, stop = chunk.start, chunk.start + keys.shape[1]
            keys = keys.float()
            codes[row, :, start:stop] = self._hash(keys)
            norms[row, :, start:stop] = keys.norm(dim=-1).clamp(max=_LIMIT).half().numpy()

    def scores(self, shape: Shape, query: torch.Tensor, arrays: Arrays) -> Scores:
        q = self._hash(group(query, shape.kv_heads)).view(np.uint64)
        k = self._codes(shape, arrays).view(np.uint64)
        heads = q.shape[2]
        distance = np.zeros((shape.rows, shape.kv_heads, shape.longest), np.int64)
        for head in range(heads):
            distance += popcount(q[:, :, head, None] ^ k)
        agreement = (heads * self.bits - 2 * distance).astype(np.float32) / np.float32(self.bits)
        scores: Scores = agreement * self._norms(shape, arrays).astype(np.float32)
        return scores

    def _hash(self, x: torch.Tensor) -> npt.NDArray[np.uint8]:
        import torch

        projected = x @ torch.from_numpy(projection(x.shape[-1], self.bits, self.seed))
        return np.packbits((projected > 0).numpy(), axis=-1)

    def _codes(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.uint8]:
        return arrays[CODES].reshape(shape.rows, shape.kv_heads, shape.longest, self.bits // 8)

    def _norms(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.float16]:
        return arrays[NORMS].view(np.float16).reshape(shape.rows, shape.kv_heads, shape.longest)


@functools.cache
def projection(dim: int, bits: int, seed: int) -> npt.NDArray[np.float32]:
    """W, float32 (dim, bits), of independent normal numbers."""
    # Both ends make it themselves: NumPy promises that RandomState's numbers never change, of its newer generators not.
    return np.random.RandomState(seed).standard_normal((dim, bits)).astype(np.float32)


def popcount(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Bits set in the last axis."""
    count = getattr(np, "bitwise_count", None)  # from NumPy 2.0 on
    bits = _BITS[np.ascontiguousarray(words).view(np.uint8)] if count is None else count(words)
    found: npt.NDArray[np.int64] = bits.sum(axis=-1, dtype=np.int64)
    return found


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
