"""Quest: pages of tokens, with the least and the greatest value of each key dimension.

A page's score is an upper bound of the scores of its keys: sum over dimensions of max(q * min, q * max). Metadata is
1/16 of an fp16 KV cache with pages of 16 tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Arrays, Chunk, Scores, ScoringSelector, Shape, check_reduce, group, products
from kvd_client.spec import MetadataSpec

if TYPE_CHECKING:
    import torch

PAGES = "quest.pages"
"""float16 (rows, KV heads, pages, 2, head dim): least, greatest; pages count from each row's start."""
_LIMIT = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class Quest(ScoringSelector):
    """``page`` tokens share a score. It is summed (``reduce="sum"``) or maximized (``"max"``) over the query heads of
    a KV head; the best pages are taken until there are k tokens, of the last page its first ones."""

    name: ClassVar[str] = "quest"
    page: int = 16
    reduce: str = "sum"
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.page < 1:
            raise InvalidArgument(f"a page of {self.page} tokens; it must have at least 1", page=self.page)
        check_reduce(self.reduce)

    def metadata(self, shape: Shape) -> tuple[MetadataSpec, ...]:
        return (MetadataSpec(name=PAGES, layer_bytes=2 * int(np.prod(self._form(shape)))),)

    def summarize(self, shape: Shape, chunk: Chunk, arrays: Arrays) -> None:
        import torch

        pages = self._pages(shape, arrays)
        for row, keys in chunk.new_keys(shape):
            start, stop = chunk.start, chunk.start + keys.shape[1]
            first, last = start // self.page, (stop - 1) // self.page
            # Repeating a page's own keys changes neither end.
            front = keys[:, :1].expand(-1, start - first * self.page, -1)
            back = keys[:, -1:].expand(-1, (last + 1) * self.page - stop, -1)
            whole = torch.cat([front, keys, back], 1).float().clamp(-_LIMIT, _LIMIT).unflatten(1, (-1, self.page))
            low, high = whole.amin(2).half().numpy(), whole.amax(2).half().numpy()
            target = pages[row, :, first : last + 1]
            if start % self.page:
                low[:, 0] = np.minimum(low[:, 0], target[:, 0, 0])
                high[:, 0] = np.maximum(high[:, 0], target[:, 0, 1])
            target[:, :, 0], target[:, :, 1] = low, high

    def scores(self, shape: Shape, queries: torch.Tensor, arrays: Arrays, *, layer: int) -> Scores:
        import torch

        # q * max where q is positive, q * min where it is negative: one product of twice the dimensions.
        pages = torch.from_numpy(self._pages(shape, arrays)).float().flatten(3)
        q = group(queries, shape.kv_heads)
        bound = products(torch.cat([q.clamp(max=0), q.clamp(min=0)], -1), pages, self.reduce)
        return np.repeat(bound, self.page, axis=3)[..., : shape.longest]

    def _form(self, shape: Shape) -> tuple[int, ...]:
        return shape.rows, shape.kv_heads, -(-shape.longest // self.page), 2, shape.head_dim

    def _pages(self, shape: Shape, arrays: Arrays) -> npt.NDArray[np.float16]:
        return arrays[PAGES].view(np.float16).reshape(self._form(shape))
