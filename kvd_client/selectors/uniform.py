"""Uniformly random tokens: a floor for comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvd_client.selectors.base import Arrays, Index, Selector, Shape, top_k

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Random(Selector):
    """Another choice for each layer and step, the same in every process for the same ``seed``."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def select(
        self, shape: Shape, query: torch.Tensor, arrays: Arrays, k: Sequence[int], *, layer: int, step: int
    ) -> Index:
        generator = np.random.default_rng([self.seed, layer, step])
        scores = generator.random((shape.rows, shape.kv_heads, shape.longest), np.float32)
        return top_k(scores, shape.lengths, k)
