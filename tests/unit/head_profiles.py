"""Importance that tells the KV heads of a small model apart, for tests."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from kvd.importance.heads import CELLS, HeadImportance
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling.profile import Profile, ProfileGroup
from kvd_client.spec import KVSpec

LAYERS, HEADS, BLOCKS, LENGTH = 8, 2, 80, 160
SPEC = KVSpec(layers=LAYERS, kv_heads=HEADS, entry_bytes=16, dtype="float16", model="m")


def split(seed: int = 0, heads: int = HEADS, cells: int = CELLS) -> HeadImportance:
    """Each head prefers another half of the prompt: the first the beginning, the last the end."""
    values = 0.01 + 0.01 * np.random.default_rng(seed).random((LAYERS, heads, cells))
    for head in range(heads):
        values[:, head, head * cells // heads : (head + 1) * cells // heads] += 0.5
    return HeadImportance(values)


def matrix_of(heads: HeadImportance | None = None) -> ImportanceMatrix:
    return ImportanceMatrix(np.random.default_rng(7).random((LAYERS, BLOCKS)), heads)


def profile_of(heads: HeadImportance | None, kv_heads: int = HEADS) -> Profile:
    return Profile(
        model="m",
        layers=LAYERS,
        kv_heads=kv_heads,
        entry_bytes=16,
        selector="quest",
        groups=(ProfileGroup(128, 256, matrix_of(heads), 9, 90),),
        created=datetime(2026, 1, 2, tzinfo=UTC),
    )
