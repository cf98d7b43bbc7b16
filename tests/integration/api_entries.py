"""KV entries for tests of the local API: one spec, random keys and values, and whether they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvd_client import KVSpec

SPEC = KVSpec(layers=3, kv_heads=2, entry_bytes=32, dtype="float32", model="test")
DIM = 4
"""float32 values of half an entry."""


def random_kv(rows: int, tokens: int, seed: int = 0, heads: int = SPEC.kv_heads) -> list[Any]:
    """K and V, of the shape (rows, heads, tokens, DIM)."""
    rng = np.random.default_rng(seed)
    return [rng.random((rows, heads, tokens, DIM), dtype=np.float32) for _ in "kv"]


def check_equal(transfer: Any, layer: int, k: Any, v: Any, lengths: Sequence[int]) -> None:
    for row, length in enumerate(lengths):
        for got, sent in ((transfer.k(layer, np.float32), k), (transfer.v(layer, np.float32), v)):
            np.testing.assert_array_equal(got[row, :length], sent[row, :, :length].transpose(1, 0, 2))
