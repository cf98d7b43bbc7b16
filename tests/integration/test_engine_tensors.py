"""Tokens decoded from a cache that went through a device's layout equal those without it, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvd_client import Placement  # noqa: E402
from kvd_client.engines.transformers import decode, generate_local, prefill, spec_of  # noqa: E402
from tests.engine_models import random_model, random_prompts  # noqa: E402
from tests.integration.daemons import DaemonProcess, two_daemons  # noqa: E402

NEW = 10
WAIT_S = 30.0
CODECS = {torch.float32: "f32", torch.bfloat16: "bf16"}
NPU = {"channels": 7, "channel_bytes": "4MiB", "alignment": 64}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), **{"npu.npu": NPU}) as pair:
        yield pair


@pytest.mark.parametrize(
    ("way", "dtype"),
    [(way, torch.float32) for way in ("push", "pull", "cache", "back")] + [("push", torch.bfloat16)],
    ids=str,
)
def test_tokens_and_logits_are_those_of_one_process(
    daemons: tuple[DaemonProcess, DaemonProcess], way: str, dtype: Any
) -> None:
    """Ragged rows of a Llama with two KV heads; ``back``: prefill's own tensors lie on a device."""
    model, prompts = random_model("llama-gqa", dtype=dtype), random_prompts(70, 200, 31)
    lengths, spec = [len(prompt) for prompt in prompts], spec_of(model)
    placement = Placement(layout="tenstorrent", device="npu", dtype=CODECS[dtype])
    capacity = max(lengths) + NEW - 1
    with daemons[0].client("prefill") as source, daemons[1].client("decode") as sink:
        options: dict[str, Any] = {"placement": placement, "pull": way == "pull"}
        if way == "cache":
            table = torch.randperm(30, generator=torch.Generator().manual_seed(1))[: 3 * 7].reshape(3, 7).tolist()
            options = {"cache": sink.open_cache(spec, placement, 30), "blocks": table}
        elif way == "back":
            options = {}
        with sink.decode(way, spec, lengths, capacity=capacity, source="prefill", **options) as transfer:
            with source.prefill(way, spec, lengths, placement=placement if way == "back" else None) as cache:
                first = prefill(model, prompts, cache).tokens
                cache.finish(timeout_s=WAIT_S)
            steps = list(decode(model, first, transfer, lengths=lengths, max_new_tokens=NEW))
    alone = generate_local(model, prompts, NEW)
    assert [[first[row], *(step.tokens[row] for step in steps)] for row in range(3)] == alone.tokens
