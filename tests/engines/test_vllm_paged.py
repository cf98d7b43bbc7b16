"""Copies between vLLM's paged cache and a lease, for every form of cache; on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd_client.engines._vllm_paged import PagedCache
from kvd_client.errors import UnsupportedLayout

LAYERS, BLOCKS, HEADS, INNER, ELEMENTS = 3, 12, 2, 16, 8


def caches(form: str, dtype: torch.dtype, inner: int = INNER, seed: int = 0) -> dict[str, torch.Tensor]:
    """Layers as vLLM's backends make them: named in no order, and with strides of their own."""
    made = {}
    for layer in (10, 2, 1):
        order = {"hnd": (BLOCKS, HEADS, inner, ELEMENTS), "nhd": (BLOCKS, inner, HEADS, ELEMENTS)}
        shape = order.get(form, (BLOCKS, inner, ELEMENTS))
        values = torch.from_numpy(np.random.default_rng(seed + layer).integers(0, 100, shape)).to(dtype)
        made[f"model.layers.{layer}.attn"] = values.transpose(1, 2) if form == "nhd" else values
    return made


def logical(cache: PagedCache, layer: int, blocks: list[int], cuts: int) -> torch.Tensor:
    """(tokens, heads, elements) of a request, token by token."""
    tensor = cache.layers[layer]
    kernel = [block * cuts + cut for block in blocks for cut in range(cuts)]
    return torch.cat([tensor[k].transpose(0, 1) for k in kernel])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("unit", ["block", "token"])
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("form", ["hnd", "nhd", "mla"])
def test_what_is_gathered_arrives(form: str, cuts: int, unit: str, dtype: torch.dtype) -> None:
    source = PagedCache(caches(form, dtype), INNER * cuts, unit)
    sink = PagedCache(caches(form, dtype, seed=50), INNER * cuts, unit)
    assert [source.index[f"model.layers.{n}.attn"] for n in (1, 2, 10)] == [0, 1, 2]
    tokens = 2 * INNER * cuts + 5
    units = source.units(tokens)
    there, here = [4, 0, 2], [1, 5, 3]
    before = [layer.clone() for layer in sink.layers]
    for layer in range(LAYERS):
        entries = np.zeros((units, source.heads, source.entry_bytes), np.uint8)
        middle = units // 2
        assert source.gather(layer, there, 0, middle, entries[:middle]) is None
        source.gather(layer, there, middle, units, entries[middle:])
        sink.scatter(layer, here, 1, units, entries[1:], sink.mark())
        held = source.unit_tokens
        sent, got = (logical(c, layer, b, cuts) for c, b in ((source, there), (sink, here)))
        assert torch.equal(got[held:tokens], sent[held:tokens])
    # nothing else was touched, the held unit included
    for layer, old in enumerate(before):
        left = PagedCache({f"layers.{n}": t for n, t in enumerate([old])}, INNER * cuts, unit)
        others = [b for b in range(BLOCKS // cuts) if b not in here]
        assert torch.equal(logical(sink, layer, others, cuts), logical(left, 0, others, cuts))
        held_now, held_then = (logical(c, n, here, cuts)[: sink.unit_tokens] for c, n in ((sink, layer), (left, 0)))
        assert torch.equal(held_now, held_then)


def test_vllm_26744_tokens_fit_blocks_of_any_size() -> None:
    small = PagedCache(caches("hnd", torch.float16, 4), 4, "token")
    large = PagedCache(caches("nhd", torch.float16, 16, seed=9), 16, "token")
    assert small.entry_bytes == large.entry_bytes
    there, here, tokens = [7, 1, 3, 8, 11, 2], [6, 4], 21
    for layer in range(LAYERS):
        entries = np.zeros((tokens, HEADS, small.entry_bytes), np.uint8)
        small.gather(layer, there, 0, tokens, entries)
        large.scatter(layer, here, 0, tokens, entries, None)
        assert torch.equal(logical(large, layer, here, 1)[:tokens], logical(small, layer, there, 1)[:tokens])


def test_layers_that_share_a_cache_are_one() -> None:
    made = caches("hnd", torch.float32)
    made["model.layers.11.attn"] = made["model.layers.2.attn"]
    cache = PagedCache(made, INNER, "block")
    assert len(cache.layers) == LAYERS
    assert cache.index["model.layers.11.attn"] == cache.index["model.layers.2.attn"] == 1


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (torch.zeros(2, BLOCKS, INNER, HEADS, ELEMENTS), "blocks, heads, tokens, elements"),
        (torch.zeros(BLOCKS, HEADS, INNER, 2 * ELEMENTS), "different forms"),
        (torch.zeros(BLOCKS, HEADS, INNER, ELEMENTS, dtype=torch.float16), "different forms"),
    ],
)
def test_what_can_not_be_moved_is_refused(odd: torch.Tensor, said: str) -> None:
    with pytest.raises(UnsupportedLayout, match=said):
        PagedCache({**caches("hnd", torch.float32), "model.layers.3.attn": odd}, INNER, "block")
    with pytest.raises(UnsupportedLayout, match="list"):
        PagedCache({"state": [odd]}, INNER, "block")  # type: ignore[dict-item]
    with pytest.raises(UnsupportedLayout, match="can't consist"):
        PagedCache(caches("hnd", torch.float32), INNER + 1, "block")
