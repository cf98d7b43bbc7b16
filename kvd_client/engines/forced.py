"""Selection measured without decoding: the next tokens of a text are given, and one pass computes all steps at once.

A decode step sees what its query selects of the prompt, and every token that decode has made. If those tokens are known
beforehand (teacher forcing), each step's attention differs from the others' by its mask only: the prompt's tokens that
its own query selected, and the new tokens up to its own. So one pass over T tokens with a mask for each query is T
steps of :func:`kvd_client.engines.selective.decode_selective` fed with the same tokens, at a fraction of the cost. A
greedy decode makes exactly the expected tokens if and only if each of them is the most likely one after the tokens
before it, so exact answers can be checked this way too.

Prompts are computed once (:func:`prompt_state`) and serve any number of runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvd_client.counters import ALWAYS_LAYERS
from kvd_client.engines import _transformers_adapter as adapter
from kvd_client.engines.local import shape_from
from kvd_client.engines.prompt import QUERIES, SPAN, TOKENS_PER_QUERY, PromptQueries
from kvd_client.engines.selective import entries_of
from kvd_client.engines.transformers import run_prompts, spec_of
from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Arrays, Chunk, Index, Selector, Shape

__all__ = ["Forced", "LayerState", "PromptState", "asked", "forced", "prompt_state", "summaries"]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerState:
    """What prefill computed in one layer."""

    queries: torch.Tensor
    """Post-RoPE (query heads, tokens, head dim)."""
    keys: torch.Tensor
    """Post-RoPE (KV heads, tokens, head dim); ``values`` too."""
    values: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PromptState:
    """A prompt and what prefill computed of it, with full attention."""

    tokens: tuple[int, ...]
    layers: tuple[LayerState, ...]

    @property
    def length(self) -> int:
        return len(self.tokens)

    def to(self, dtype: torch.dtype) -> PromptState:
        """The same in another precision; half of it is half the memory."""
        return PromptState(
            self.tokens,
            tuple(LayerState(x.queries.to(dtype), x.keys.to(dtype), x.values.to(dtype)) for x in self.layers),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Forced:
    """What a forced run computed."""

    logits: torch.Tensor
    """(steps, vocabulary): row t stands behind the t-th given token."""
    selected: int
    """Entries selected, all steps, layers from 2 on and KV heads together."""
    chances: int
    """Entries that could have been."""

    @property
    def share(self) -> float:
        """Of the prompt's entries, what a step selected on average."""
        return self.selected / self.chances if self.chances else 0.0


def prompt_state(
    model: Any,
    prompt: Sequence[int],
    *,
    known: PromptState | None = None,
    chunk: int | None = None,
) -> PromptState:
    """Prefill a prompt with full attention and keep what selection algorithms summarize.

    ``known`` is the state of the prompt's first tokens, which are not computed again. Raises :class:`InvalidArgument`
    where it is not, and for an empty prompt.
    """
    cached = 0 if known is None else known.length
    if known is not None and tuple(prompt[:cached]) != known.tokens:
        raise InvalidArgument("the known state is of other tokens than the prompt begins with")
    queries: dict[int, list[torch.Tensor]] = {}
    parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def watch(layer: int, start: int, query: torch.Tensor) -> None:
        queries.setdefault(layer, []).append(query[0])

    def put(layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        parts.setdefault(layer, []).append((k[0], v[0]))

    cache = adapter.PrefillCache(adapter.text_config(model), put)
    if known is not None:
        for number, state in enumerate(known.to(model.dtype).layers):
            queries[number] = [state.queries]
            cache.update(state.keys[None], state.values[None], number)
    run_prompts(model, [prompt], cache, chunk=chunk, cached=cached, watch=watch)
    layers = tuple(
        LayerState(
            torch.cat(queries[layer], 1),
            torch.cat([k for k, _ in parts[layer]], 1),
            torch.cat([v for _, v in parts[layer]], 1),
        )
        for layer in sorted(parts)
    )
    return PromptState(tuple(prompt), layers)


def summaries(model: Any, state: PromptState, selector: Selector) -> list[Arrays]:
    """The selector's metadata of each layer."""
    shape = _shape(model, state)
    specs = selector.metadata(shape)
    found: list[Arrays] = []
    for number, layer in enumerate(state.layers):
        arrays = {spec.name: np.zeros(spec.layer_bytes, np.uint8) for spec in specs}
        if specs:
            selector.summarize(shape, Chunk(number, 0, layer.keys[None], layer.queries[None], {}), arrays)
        found.append(arrays)
    return found


def asked(
    model: Any, state: PromptState, selector: Selector, *, metadata: Sequence[Arrays] | None = None
) -> dict[int, list[Index]]:
    """By layer, the KV indices that prefill ranks the prompt's blocks by (:class:`PromptQueries`), from the newest
    tokens' queries; ``metadata`` as in :func:`forced`."""
    shape = _shape(model, state)
    metadata = summaries(model, state, selector) if metadata is None else metadata
    found: dict[int, list[Index]] = {}
    queries = PromptQueries(model, shape, selector, told=found.__setitem__)
    windows = adapter.windows(model)
    # The cache brings the state's own K and V, and only the tokens that are asked run again.
    start = max(state.length - max(SPAN, QUERIES * TOKENS_PER_QUERY), 0)

    def watch(layer: int, at: int, query: torch.Tensor) -> None:
        if layer >= ALWAYS_LAYERS and not windows[layer]:
            queries.add(layer, at, query, metadata[layer])

    cache = adapter.PrefillCache(adapter.text_config(model), lambda layer, at, k, v: None)
    for number, layer in enumerate(state.to(model.dtype).layers if start else ()):
        cache.update(layer.keys[None, :, :start], layer.values[None, :, :start], number)
    with queries.watching():
        run_prompts(model, [state.tokens], cache, cached=start, watch=watch)
    return found


def forced(
    model: Any,
    state: PromptState,
    tokens: Sequence[int],
    selector: Selector | None,
    *,
    share: float = 1.0,
    metadata: Sequence[Arrays] | None = None,
    on_select: Callable[[int, int, Index], None] | None = None,
) -> Forced:
    """Run decode steps whose input tokens are given.

    Layers 0 and 1 attend to the whole prompt, the others to ``share`` of it as ``selector`` selects for each step's
    query (None: to all); new tokens are always seen, and sliding windows hold. ``metadata`` is what :func:`summaries`
    made, if it is there already. ``on_select(layer, step, index)`` sees each KV index, steps counted from 1.

    Raises :class:`InvalidArgument` where there are no tokens, or ``share`` is out of range.
    """
    if not tokens:
        raise InvalidArgument("no tokens were given to run")
    if selector is not None and metadata is None:
        metadata = summaries(model, state, selector)
    run = _Run(model, state, selector, share, metadata, len(tokens), on_select)
    device = model.device
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=device)
    positions = torch.arange(state.length, state.length + len(tokens), device=device)[None]
    cache = adapter.DecodeCache(len(state.layers), lambda layer, k, v: (k, v), lambda: state.length)
    with run.looking_ahead(positions):
        logits = adapter.call_forced(model, ids, positions, cache, run)[0]
    return Forced(logits, run.selected, run.chances)


def _shape(model: Any, state: PromptState) -> Shape:
    return shape_from(spec_of(model), [state.length])


class _Run:
    """One pass; :class:`~kvd_client.engines._transformers_adapter.Step`."""

    def __init__(
        self,
        model: Any,
        state: PromptState,
        selector: Selector | None,
        share: float,
        metadata: Sequence[Arrays] | None,
        steps: int,
        on_select: Callable[[int, int, Index], None] | None,
    ) -> None:
        self.eager = adapter.is_eager(model)
        self.selected = self.chances = 0
        self._model, self._state, self._selector, self._metadata = model, state, selector, metadata
        self._steps, self._on_select = steps, on_select
        self._shape, self._windows = _shape(model, state), adapter.windows(model)
        self._wanted = entries_of([state.length], share)
        step = torch.arange(steps)
        self._new = step[:, None] >= step
        self._early: dict[int, torch.Tensor] = {}
        """Queries that were known while the layer before computed."""

    def looking_ahead(self, positions: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """While this lasts, queries come from the layer before where the selector wants them so."""
        if self._selector is None or not self._selector.ahead:
            return contextlib.nullcontext()
        return adapter.Ahead(self._model, self._selector.query).watching(positions, self._begins)

    def _begins(self, layer: int, query_of: Callable[[int], torch.Tensor]) -> None:
        following = layer + 1
        if ALWAYS_LAYERS <= following < len(self._windows) and not self._windows[following]:
            self._early[following] = query_of(following)

    def look(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        state, window = self._state.layers[layer], self._windows[layer]
        heads, group = state.keys.shape[0], query.shape[1] // state.keys.shape[0]
        new = self._new
        if window:
            first = self._state.length + torch.arange(self._steps) + 1 - window
            prompt = (torch.arange(self._state.length) >= first[:, None]).expand(heads, -1, -1)
            new = new & (torch.arange(self._steps) + self._state.length >= first[:, None])
        elif layer < ALWAYS_LAYERS or self._selector is None:
            prompt = torch.ones(1, 1, 1, dtype=torch.bool).expand(heads, self._steps, self._state.length)
        else:
            prompt = self._select(layer, query)
        sees = torch.cat([prompt, new.expand(heads, -1, -1)], 2).repeat_interleave(group, 0)[None]
        keys = torch.cat([state.keys[None].to(key.dtype), key], 2)
        values = torch.cat([state.values[None].to(value.dtype), value], 2)
        return keys, values, sees.to(query.device)

    def _select(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        assert self._selector is not None
        assert self._metadata is not None
        heads = self._shape.kv_heads
        query = self._early.pop(layer, query)
        sees = np.zeros((heads, self._steps, self._state.length), bool)
        steps = range(1, self._steps + 1)
        found = self._selector.select_many(
            self._shape, query, self._metadata[layer], self._wanted, layer=layer, steps=steps
        )
        for step, index in zip(steps, found, strict=True):
            for head, row in enumerate(index):
                sees[head, step - 1, row[row >= 0]] = True
            if self._on_select is not None:
                self._on_select(layer, step, index)
        self.selected += int(sees.sum())
        self.chances += sees.size
        return torch.from_numpy(sees)
