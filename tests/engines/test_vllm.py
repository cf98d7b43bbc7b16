"""Real vLLM engines, prefill and decode apart, against the tokens of one alone. See :mod:`tests.engines.vllms`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllms import Engine, connector, make_model, vllm_python
from tests.integration.daemons import DaemonProcess, two_daemons
from tests.waiting import eventually

if vllm_python() is None:
    pytest.skip("no vLLM: run python -m tests.engines.setup_vllm", allow_module_level=True)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PREFILL = {"do_remote_decode": True}
NEW = 12
CHUNK = 256
LAYERS, KV_BYTES = 4, 4 * 2 * 32 * 4
"""Of a token in one layer: heads, K and V, elements, float32."""


@dataclasses.dataclass
class Nodes:
    source: DaemonProcess
    sink: DaemonProcess
    prefill: Engine
    decode: Engine

    def alone(self, prompt: list[int]) -> list[int]:
        """What one engine says by itself."""
        tokens: list[int] = self.prefill.one(prompt, NEW)["tokens"]
        assert self.prefill.do("reset")
        return tokens

    def hand_over(self, prompt: list[int]) -> dict[str, Any]:
        answer = self.prefill.one(prompt, 1, PREFILL)
        assert answer["params"]["do_remote_prefill"], self.prefill.log.read_text()[-2000:]
        params: dict[str, Any] = answer["params"]
        return params

    def received(self) -> int:
        with self.sink.client() as client:
            return client.status().counters["bytes_received"]

    def check_free(self) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.do("memory") == {"requests": 0, "used": 0, "states": []}
        for daemon in (self.source, self.sink):
            eventually("the pool is free", lambda daemon=daemon: leases(daemon) == 0)


def leases(daemon: DaemonProcess) -> int:
    with daemon.client() as client:
        return client.status().memory.leases


def engine(folder: Path, name: str, model: Path, role: str, socket: str, block: int) -> Engine:
    return Engine(
        folder, name, model, block_size=block, enable_prefix_caching=True, max_num_batched_tokens=CHUNK,
        kv_transfer_config=connector(role, socket, deadline_s=60),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("engines")
    with two_daemons(folder, transfer={"rendezvous_s": 5.0}) as (source, sink):
        prefill = engine(folder, "prefill", model, "kv_producer", source.socket, 32)
        decode = engine(folder, "decode", model, "kv_consumer", sink.socket, 32)
        try:
            prefill.ready()
            decode.ready()
            yield Nodes(source, sink, prefill, decode)
        finally:
            prefill.destroy()
            decode.destroy()


def prompt(length: int, seed: int) -> list[int]:
    return [(i * i * 31 + i * 37 + seed * 101) % 509 + 3 for i in range(length)]


def test_a_prompt_and_one_that_shares_its_prefix(nodes: Nodes) -> None:
    first = prompt(700, 1)
    second = first[:480] + prompt(300, 2)
    wanted = [nodes.alone(p) for p in (first, second)]
    nodes.prefill.do("reset")
    before = nodes.received()
    got = nodes.decode.one(first, NEW, nodes.hand_over(first))
    assert got["tokens"] == wanted[0]
    whole = nodes.received() - before
    assert whole == -(-700 // 32) * 32 * LAYERS * KV_BYTES
    got = nodes.decode.one(second, NEW, nodes.hand_over(second))
    assert got["tokens"] == wanted[1]
    # 480 tokens are 15 blocks, which decode has; prefill has them too, and computes the rest only
    assert nodes.received() - before - whole == (-(-780 // 32) - 15) * 32 * LAYERS * KV_BYTES
    got = nodes.decode.one(first, NEW, nodes.hand_over(first))
    assert got["tokens"] == wanted[0]
    nodes.check_free()


def test_several_at_once_whose_sinks_come_first(nodes: Nodes) -> None:
    prompts = {f"at-once-{n}": prompt(length, 10 + n) for n, length in enumerate((33, 64, 200, 257, 511, 900))}
    wanted = {name: nodes.alone(p) for name, p in prompts.items()}
    nodes.decode.do("reset")
    before = nodes.received()
    for name, tokens in prompts.items():
        params = {"do_remote_prefill": True, "kvd_request": name, "kvd_source": "prefill"}
        nodes.decode.do("add", request=name, prompt=tokens, tokens=NEW, params=params)
    nodes.decode.do("step", times=3)
    assert set(nodes.decode.do("memory")["states"]) == {"WAITING_FOR_REMOTE_KVS"}
    for name, tokens in prompts.items():
        nodes.prefill.do("add", request=name, prompt=tokens, tokens=1, params={**PREFILL, "kvd_request": name})
    nodes.prefill.do("run")
    got = nodes.decode.do("run")
    assert {name: answer["tokens"] for name, answer in got.items()} == wanted
    assert nodes.received() - before == sum(-(-len(p) // 32) for p in prompts.values()) * 32 * LAYERS * KV_BYTES
    nodes.check_free()


def test_aborts_at_either_side(nodes: Nodes) -> None:
    tokens = prompt(600, 20)
    wanted = nodes.alone(tokens)
    nodes.decode.do("reset")
    named = {"do_remote_prefill": True, "kvd_request": "abort", "kvd_source": "prefill"}
    # decode gives up while it waits
    nodes.prefill.do("add", request="p", prompt=tokens, tokens=1, params={**PREFILL, "kvd_request": "abort"})
    nodes.prefill.do("step")  # a chunk
    nodes.decode.do("add", request="d", prompt=tokens, tokens=NEW, params=named)
    nodes.decode.do("step", times=3)
    assert nodes.decode.do("memory")["states"] == ["WAITING_FOR_REMOTE_KVS"]
    nodes.decode.do("abort", request="d")
    nodes.decode.do("run")
    nodes.prefill.do("run")
    # prefill gives up in the middle: decode computes the prompt itself
    nodes.prefill.do("reset")
    nodes.prefill.do("add", request="p", prompt=tokens, tokens=1, params={**PREFILL, "kvd_request": "again"})
    nodes.prefill.do("step")
    nodes.decode.do("add", request="d", prompt=tokens, tokens=NEW, params={**named, "kvd_request": "again"})
    nodes.decode.do("step", times=3)
    nodes.prefill.do("abort", request="p")
    nodes.prefill.do("run")
    assert nodes.decode.do("run")["d"]["tokens"] == wanted
    # decode never asks: rejected by an abort in the queue
    params = nodes.hand_over(tokens)
    nodes.decode.do("add", request="d", prompt=tokens, tokens=NEW, params=params)
    nodes.decode.do("abort", request="d")
    nodes.decode.do("run")
    # nobody has it any more
    nodes.decode.do("reset")
    assert nodes.decode.one(tokens, NEW, params)["tokens"] == wanted
    nodes.check_free()


@pytest.mark.parametrize("which", ["sink", "source"])
def test_a_daemon_dies_in_the_middle(nodes: Nodes, which: str) -> None:
    tokens = prompt(600, 30)
    wanted = nodes.alone(tokens)
    nodes.decode.do("reset")
    named = {"do_remote_prefill": True, "kvd_request": which, "kvd_source": "prefill"}
    nodes.prefill.do("add", request="p", prompt=tokens, tokens=1, params={**PREFILL, "kvd_request": which})
    nodes.prefill.do("step")
    nodes.decode.do("add", request="d", prompt=tokens, tokens=NEW, params=named)
    nodes.decode.do("step", times=20)
    assert nodes.decode.do("memory")["states"] == ["WAITING_FOR_REMOTE_KVS"]
    daemon = getattr(nodes, which)
    daemon.kill()
    assert nodes.decode.do("run")["d"]["tokens"] == wanted
    answer = nodes.prefill.do("run")["p"]
    assert answer["tokens"] == wanted[:1]
    if which == "source":
        assert not answer["params"]["do_remote_prefill"]  # so that decode does not ask for it
    daemon.start()
    before = nodes.received()
    nodes.prefill.do("reset")
    nodes.decode.do("reset")
    assert nodes.decode.one(tokens, NEW, nodes.hand_over(tokens))["tokens"] == wanted
    assert nodes.received() > before
    nodes.check_free()


def test_another_block_size_is_recomputed_and_one_engine_can_do_both(nodes: Nodes, model: Path, tmp_path: Path) -> None:
    tokens = prompt(500, 40)
    wanted = nodes.alone(tokens)
    large = engine(tmp_path, "large", model, "kv_both", nodes.sink.socket, 128)
    try:
        large.ready()  # longer than a source waits for its sink
        assert large.one(tokens, NEW, nodes.hand_over(tokens))["tokens"] == wanted
        (said,) = [line for line in large.log.read_text().splitlines() if "was not loaded" in line]
        assert re.search("FINGERPRINT_MISMATCH: .*block of 32 as CPU_ATTN .*block of 128 as CPU_ATTN", said)
        large.do("reset")
        params = large.one(tokens, 1, PREFILL)["params"]
        large.do("reset")
        warnings = large.log.read_text().count("was not loaded")
        assert large.one(tokens, NEW, params)["tokens"] == wanted
        assert large.log.read_text().count("was not loaded") == warnings
        assert large.do("memory")["used"] == 0
    finally:
        large.destroy()
