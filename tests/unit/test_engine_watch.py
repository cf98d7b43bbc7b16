"""Prefill that is watched computes the same bits, and tells of every layer's query."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvd_client.engines import _transformers_adapter as adapter  # noqa: E402
from kvd_client.engines.transformers import run_prompts  # noqa: E402
from tests.engine_models import CONFIGS, random_model, random_prompts  # noqa: E402


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_watched_prefill_gives_the_same_bits(name: str, attention: str) -> None:
    model, prompts = random_model(name, attention), random_prompts(70, 41)
    keys: dict[tuple[int, int], Any] = {}
    queries: dict[tuple[int, int], Any] = {}

    def cache(into: dict[tuple[int, int], Any]) -> Any:
        return adapter.PrefillCache(
            adapter.text_config(model), lambda layer, start, k, v: into.setdefault((layer, start), k)
        )

    plain = run_prompts(model, prompts, cache({}), chunk=32)
    watched = run_prompts(
        model, prompts, cache(keys), chunk=32, watch=lambda layer, start, q: queries.setdefault((layer, start), q)
    )
    assert torch.equal(watched.logits, plain.logits)
    assert list(queries) == list(keys)  # each layer's query right behind its keys
    heads = adapter.text_config(model).num_attention_heads
    for (layer, start), query in queries.items():
        rows, _, tokens, dim = keys[layer, start].shape
        assert query.shape == (rows, heads, tokens, dim)
    assert adapter.is_eager(model) == (attention == "eager")


def test_the_query_is_the_one_of_attention() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(24)
    found: dict[int, Any] = {}
    cache = adapter.PrefillCache(adapter.text_config(model), lambda layer, start, k, v: None)
    run_prompts(model, prompts, cache, watch=lambda layer, start, q: found.setdefault(layer, q))
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(torch.tensor(prompts)))
        q = layer.self_attn.q_proj(hidden).unflatten(-1, (4, 16)).transpose(1, 2)
        cos, sin = model.model.rotary_emb(hidden, torch.arange(24)[None])
        turned = torch.cat([-q[..., 8:], q[..., :8]], -1)
        torch.testing.assert_close(found[0], q * cos[:, None] + turned * sin[:, None])
