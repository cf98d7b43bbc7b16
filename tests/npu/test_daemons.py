"""Tenstorrent's own library reads tensors whose bytes came through two daemons, and returns the originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd_client import KVSpec, Placement
from tests.integration.daemons import two_daemons
from tests.npu.judge import ask, in_page_order, python

pytestmark = pytest.mark.usefixtures("ttnn")

CONFIG: dict[str, dict[str, Any]] = {
    "npu.bh": {"channels": 8, "channel_bytes": "4MiB", "alignment": 64},
    "npu.wh": {"channels": 12, "channel_bytes": "4MiB", "alignment": 32},
}
WAIT_S = 20.0


@pytest.fixture(scope="session")
def ttnn() -> str:
    return python()


def exact_in_bf16(shape: tuple[int, ...]) -> Any:
    values = np.random.default_rng(23).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def test_the_vendors_library_reads_what_two_daemons_brought(tmp_path: Path) -> None:
    """K and V of two layers, ragged, one and three KV heads; pushed and pulled; bf16 and bfp8_b; 8 and 12 banks."""
    tokens, dim, asked, originals = 150, 96, [], []
    with two_daemons(tmp_path, **CONFIG) as (prefill, decode), prefill.client() as source, decode.client() as sink:
        for heads, device, codec, pull in ((1, "bh", "", False), (3, "wh", "", True), (3, "bh", "bfp8_b", True)):
            spec = KVSpec(layers=2, kv_heads=heads, entry_bytes=4 * dim, dtype="bfloat16", model="judged")
            values = exact_in_bf16((2, 2, tokens, heads, dim))
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            placement = Placement(layout="tenstorrent-tiled", device=device, codec=codec)
            name = f"{device}-{codec}-{pull}"
            with sink.decode(name, spec, [tokens], source="prefill", placement=placement, pull=pull) as arrived:
                with source.prefill(name, spec, [tokens]) as sent:
                    for layer in range(2):
                        k, v = (half.transpose(1, 0, 2)[None] for half in bits[layer])
                        sent.put_layer(layer, k=k, v=v)
                    sent.finish(timeout_s=WAIT_S)
                arrived.wait_ready(timeout_s=WAIT_S)
                tensors = arrived.tensors
                page = {"": 2048, "bfp8_b": 1088}[codec]
                for layer in range(2):
                    for kv in range(2):
                        banks = [tensors.share(layer, kv, bank).copy() for bank in range(tensors.channels)]
                        raw = in_page_order(banks, tensors.map.page_stride, tensors.map.pages, page)
                        original = np.ascontiguousarray(values[layer, kv].transpose(1, 0, 2))
                        one = {"shape": np.array(original.shape), "dtype": codec or "bf16", "layout": "tile"}
                        asked.append(one | {"raw": raw, "given": original})
                        originals.append(original)
    for tensor, original, answer in zip(asked, originals, ask(tmp_path, asked), strict=True):
        np.testing.assert_array_equal(tensor["raw"], answer["encoded"])
        if tensor["dtype"] == "bf16":
            np.testing.assert_array_equal(answer["values"].reshape(original.shape), original)
