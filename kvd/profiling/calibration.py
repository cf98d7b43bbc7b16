"""Calibration: a model runs over texts, and a selector's weights are made of its queries and keys.

Needs torch and transformers; nothing that a daemon imports imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from kvd.errors import InvalidArgument
from kvd_client.selectors import Weights, kind_of
from kvd_client.spec import KVSpec

CHUNK = 256
"""Tokens that prefill computes at a time, which bounds the memory of attention."""

Told = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def train(
    name: str,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    spec: KVSpec | None = None,
    told: Told | None = None,
    notes: str = "",
    **parameters: Any,
) -> Weights:
    """Weights of selector ``name`` for a model, from prompts (token ids).

    ``spec`` names the model as transfers do; by default it is the engine's own. ``parameters`` are the training's.
    Raises :class:`InvalidArgument` for a selector that is not trained, for parameters that it does not have, and for
    too little to train from.
    """
    from kvd_client.engines.selective import shape_of
    from kvd_client.engines.transformers import spec_of

    if not prompts:
        raise InvalidArgument("there is nothing to calibrate with; give at least one prompt")
    spec = spec or spec_of(model)
    dim = shape_of(model, [1]).head_dim
    training = kind_of(name).training(spec.layers, spec.kv_heads, dim, **parameters)
    for number, prompt in enumerate(prompts):
        if told is not None:
            told("calibration, prompts", number, len(prompts))
        for layer, (queries, keys) in enumerate(_computed(model, prompt)):
            training.add(layer, queries, keys)
    arrays = training.finish(None if told is None else lambda done, total: told("training, steps", done, total))
    return Weights(
        selector=name,
        model=spec.model,
        revision=spec.revision,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=dim,
        arrays=arrays,
        parameters={**parameters, "prompts": len(prompts), "tokens": sum(map(len, prompts))},
        created=datetime.now(UTC),
        notes=notes,
    )


def _computed(model: Any, prompt: Sequence[int]) -> list[tuple[Any, Any]]:
    """Post-RoPE queries and keys of each layer: (heads, tokens, head dim)."""
    import torch

    from kvd_client.engines import _transformers_adapter as adapter
    from kvd_client.engines.transformers import run_prompts

    queries: dict[int, list[Any]] = {}
    keys: dict[int, list[Any]] = {}

    def put(layer: int, start: int, k: Any, v: Any) -> None:
        keys.setdefault(layer, []).append(k[0])

    def watch(layer: int, start: int, query: Any) -> None:
        queries.setdefault(layer, []).append(query[0])

    cache = adapter.PrefillCache(adapter.text_config(model), put)
    run_prompts(model, [prompt], cache, chunk=CHUNK, watch=watch)
    return [(torch.cat(queries[layer], 1), torch.cat(keys[layer], 1)) for layer in sorted(keys)]
