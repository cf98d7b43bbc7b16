"""A tiny random decoder in NumPy, so that the guest need not load torch: grouped-query attention, greedy decoding.

The KV cache is asked for layer by layer through a callback, so that it can lie in this process or come from a daemon,
whole or as the entries that a selector chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from kvd_client import KVSpec

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY = 4, 4, 2, 16, 64, 211
DENSE_LAYERS = 2
"""The first ones see all tokens even where the others select."""
LONGEST = 1024
SPEC = KVSpec(layers=LAYERS, kv_heads=KV_HEADS, entry_bytes=2 * DIM * 4, dtype="float32", model="tiny")

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Prompt: TypeAlias = Callable[[int, Floats], tuple[Floats, Floats]]
"""Given a layer and a token's queries (HEADS, DIM): the prompt's keys and values that it sees, each
(KV_HEADS, n, DIM)."""


class TinyModel:
    """The same in every process, for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)

        def random(*shape: int, scale: float = 1.0) -> Floats:
            return (generator.standard_normal(shape) * scale / np.sqrt(shape[-2])).astype(np.float32)

        self.embedding = random(VOCABULARY, HIDDEN, scale=5.0)
        self.positions = random(LONGEST, HIDDEN, scale=10.0)
        self.head = random(HIDDEN, VOCABULARY)
        self.probes = random(KV_HEADS, LONGEST, DIM)
        """What the selector holds against the queries in place of keys, which the sink does not have."""
        self.layers = [
            {
                "q": random(HIDDEN, HEADS * DIM, scale=3.0),
                "k": random(HIDDEN, KV_HEADS * DIM, scale=3.0),
                "v": random(HIDDEN, KV_HEADS * DIM),
                "o": random(HEADS * DIM, HIDDEN),
                "up": random(HIDDEN, 2 * HIDDEN),
                "down": random(2 * HIDDEN, HIDDEN),
            }
            for _ in range(LAYERS)
        ]

    def prefill(self, tokens: list[int], out: list[int]) -> Iterator[tuple[int, Floats, Floats]]:
        """Layer by layer: its number, and keys and values (KV_HEADS, len(tokens), DIM). The first token goes to
        ``out`` at the end."""
        n = len(tokens)
        hidden = self.embedding[tokens] + self.positions[:n]
        causal = np.where(np.tri(n, dtype=bool), np.float32(0), np.float32(-np.inf))
        for number, layer in enumerate(self.layers):
            q, k, v = self._project(layer, hidden)
            yield number, k, v
            hidden = self._rest(layer, hidden, _attend(q, k, v, causal))
        out.append(self._next(hidden[-1]))

    def decode(self, prompt_tokens: int, first: int, count: int, prompt: Prompt) -> list[int]:
        """``count`` tokens, ``first`` included."""
        tokens = [first]
        own: list[list[tuple[Floats, Floats]]] = [[] for _ in self.layers]
        while len(tokens) < count:
            hidden = (self.embedding[tokens[-1]] + self.positions[prompt_tokens + len(tokens) - 1])[None]
            for number, layer in enumerate(self.layers):
                q, k, v = self._project(layer, hidden)
                own[number].append((k, v))
                seen = [prompt(number, q[:, 0]), *own[number]]
                keys, values = (np.concatenate([pair[half] for pair in seen], axis=1) for half in (0, 1))
                hidden = self._rest(layer, hidden, _attend(q, keys, values, np.float32(0)))
            tokens.append(self._next(hidden[0]))
        return tokens

    def select(self, queries: Floats, tokens: int, k: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """For each KV head the ``k`` of the prompt's tokens that suit its queries best, in order."""
        scores = np.einsum("gd,gnd->gn", queries.reshape(KV_HEADS, -1, DIM).sum(axis=1), self.probes[:, :tokens])
        return np.sort(np.argsort(-scores, axis=1)[:, :k], axis=1).astype(np.int32)

    def _project(self, layer: dict[str, Floats], hidden: Floats) -> tuple[Floats, Floats, Floats]:
        normed = _normed(hidden)
        return tuple((normed @ layer[name]).reshape(len(hidden), -1, DIM).swapaxes(0, 1) for name in "qkv")  # type: ignore[return-value]

    def _rest(self, layer: dict[str, Floats], hidden: Floats, attention: Floats) -> Floats:
        hidden = hidden + attention @ layer["o"]
        return hidden + np.maximum(_normed(hidden) @ layer["up"], 0) @ layer["down"]

    def _next(self, hidden: Floats) -> int:
        return int((_normed(hidden) @ self.head).argmax())


def _normed(hidden: Floats) -> Floats:
    return hidden / np.sqrt((hidden * hidden).mean(axis=-1, keepdims=True) + np.float32(1e-6))


def _attend(q: Floats, k: Floats, v: Floats, mask: Any) -> Floats:
    """(n, HEADS * DIM) of queries (HEADS, n, DIM)."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(DIM)) + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights / weights.sum(axis=-1, keepdims=True) @ v
    return mixed.swapaxes(0, 1).reshape(q.shape[1], -1)
