"""StreamingLLM: the first tokens, which draw attention wherever the text goes, and the newest ones. No metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Arrays, Index, Selector, Shape, check_k

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Streaming(Selector):
    """``sinks`` first tokens, fewer where k is not larger than that, and the newest ones up to k."""

    name: ClassVar[str] = "streaming"
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InvalidArgument(f"{self.sinks} attention sinks; give 0 or more", sinks=self.sinks)

    def select(
        self, shape: Shape, query: torch.Tensor, arrays: Arrays, k: Sequence[int], *, layer: int, step: int
    ) -> Index:
        check_k(shape.lengths, k)
        index = np.full((shape.rows, shape.kv_heads, max(k)), -1, np.int32)
        for row, (length, n) in enumerate(zip(shape.lengths, k, strict=True)):
            sinks = min(self.sinks, n - 1)
            index[row, :, :sinks] = np.arange(sinks)
            index[row, :, sinks:n] = np.arange(length - (n - sinks), length)
        return index.reshape(shape.rows * shape.kv_heads, -1)
