"""The reference engine against transformers by itself, on tiny random models and memory in this process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvd_client.engines.transformers import (  # noqa: E402
    decode,
    eos_of,
    generate_local,
    prefill,
    spec_of,
)
from kvd_client.errors import Aborted, InvalidArgument  # noqa: E402
from kvd_client.spec import KVSpec, part_layout  # noqa: E402
from tests.engine_models import CONFIGS, llama, random_model, random_prompts  # noqa: E402


class MemoryTransfer:
    """Both ends of a transfer in one process, on memory that begins full of NaN; a token put is a token
    arrived."""

    def __init__(self, spec: KVSpec, lengths: list[int], capacity: int) -> None:
        self.layout = part_layout(spec, heads=spec.kv_heads, rows=len(lengths), capacity=capacity)
        self.spec, self.lengths = spec, lengths
        shape = (spec.layers, len(lengths), capacity, spec.kv_heads, spec.entry_bytes)
        self.bytes = torch.full(shape, 0xFF, dtype=torch.uint8)
        self.arrived = torch.zeros((spec.layers, len(lengths), capacity), dtype=torch.bool)
        self.puts: list[tuple[int, int, int]] = []
        self.waits: list[int] = []
        self.idles: list[int] = []
        self.fails_from: int | None = None

    def put_layer(self, layer: int, *, k: Any, v: Any, start: int = 0) -> None:
        stop = start + k.shape[2]
        entries = torch.cat([k, v], dim=-1).permute(0, 2, 1, 3).contiguous().view(torch.uint8)
        for row, length in enumerate(self.lengths):
            end = max(min(stop, length), start)
            assert not self.arrived[layer, row, start:end].any(), "a token handed over twice"
            self.bytes[layer, row, start:end] = entries[row, : end - start]
            self.arrived[layer, row, start:end] = True
        self.puts.append((layer, start, stop))

    def wait_ready(self, layer: int | None = None) -> None:
        assert layer is not None
        self.waits.append(layer)
        if self.fails_from is not None and layer >= self.fails_from:
            raise Aborted("the prefill process gave the transfer up", layer=layer)
        for row, length in enumerate(self.lengths):
            assert self.arrived[layer, row, :length].all()

    def layer(self, layer: int) -> Any:
        return self.bytes[layer].numpy()

    def idle(self, layer: int) -> None:
        self.idles.append(layer)


def transferred(model: Any, prompts: list[list[int]], new: int, chunk: int | None = None) -> Any:
    """Prefill, then decode from the memory: the transfer, all new tokens of each row, all logits of each
    row."""
    lengths = [len(prompt) for prompt in prompts]
    transfer = MemoryTransfer(spec_of(model), lengths, max(lengths) + new - 1)
    done = prefill(model, prompts, transfer, chunk=chunk)
    tokens, logits = [[token] for token in done.tokens], [[row] for row in done.logits]
    for step in decode(model, done.tokens, transfer, lengths=lengths, max_new_tokens=new):
        for row in range(len(prompts)):
            tokens[row].append(step.tokens[row])
            logits[row].append(step.logits[row])
    return transfer, tokens, [torch.stack(row) for row in logits]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_row_equals_a_single_process_bit_by_bit(name: str, attention: str) -> None:
    model, prompts = random_model(name, attention), random_prompts(41)
    _, tokens, logits = transferred(model, prompts, 12)
    alone = generate_local(model, prompts, 12)
    assert tokens == alone.tokens
    assert torch.equal(logits[0], alone.logits[0])
    assert len(set(tokens[0])) > 1, "a model that repeats one token shows nothing"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_unequal_length_equal_each_row_alone(name: str, attention: str) -> None:
    model, prompts = random_model(name, attention), random_prompts(5, 40, 17, 1)
    _, tokens, logits = transferred(model, prompts, 12)
    alone = generate_local(model, prompts, 12)
    assert tokens == alone.tokens
    for mine, its in zip(logits, alone.logits, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_chunks_changes_nothing(name: str, chunk: int) -> None:
    model, prompts = random_model(name), random_prompts(30, 12)
    transfer, tokens, _ = transferred(model, prompts, 6, chunk)
    assert tokens == generate_local(model, prompts, 6).tokens
    starts = sorted({start for _, start, _ in transfer.puts})
    assert starts == list(range(0, 30, min(chunk, 30)))


def test_rows_of_equal_length() -> None:
    model, prompts = random_model("gemma3"), random_prompts(21, 21, 21)
    transfer, tokens, _ = transferred(model, prompts, 8)
    assert tokens == generate_local(model, prompts, 8).tokens
    assert transfer.puts == [(layer, 0, 21) for layer in range(6)]


def test_layers_are_handed_over_in_order_while_prefill_runs() -> None:
    model, seen = random_model("llama-gqa"), []
    transfer = MemoryTransfer(spec_of(model), [10], 10)

    def on_layer(layer: int, stop: int) -> None:
        seen.append((layer, stop))
        assert transfer.arrived[layer, 0, :stop].all()
        assert not transfer.arrived[layer + 1 :, 0, stop - 1].any()

    prefill(model, random_prompts(10), transfer, chunk=5, on_layer=on_layer)
    assert seen == [(layer, stop) for stop in (5, 10) for layer in range(4)]


def test_layers_are_waited_for_once_and_in_order() -> None:
    model = random_model("llama-gqa")
    transfer, _, _ = transferred(model, random_prompts(9), 4)
    assert transfer.waits == [0, 1, 2, 3]
    assert transfer.idles == [0, 1, 2, 3] * 3


def test_a_transfer_that_ends_early_ends_decode_with_its_error() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(9)
    transfer = MemoryTransfer(spec_of(model), [9], 12)
    first = prefill(model, prompts, transfer).tokens
    transfer.fails_from = 2
    with pytest.raises(Aborted):
        next(decode(model, first, transfer, lengths=[9], max_new_tokens=4))
    assert transfer.waits == [0, 1, 2]
    # The model is as it was: by itself it still works.
    assert generate_local(model, prompts, 1).tokens == [first]


def test_decode_ends_when_every_row_has_ended() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(9, 4)
    _, tokens, _ = transferred(model, prompts, 10)
    eos = {tokens[0][3], tokens[1][5]}
    lengths = [9, 4]
    transfer = MemoryTransfer(spec_of(model), lengths, 18)
    first = prefill(model, prompts, transfer).tokens
    steps = list(decode(model, first, transfer, lengths=lengths, max_new_tokens=10, eos=eos))
    made = [[first[row], *(step.tokens[row] for step in steps)] for row in range(2)]
    for row in range(2):
        end = next(i for i, token in enumerate(tokens[row]) if token in eos)
        assert made[row][: end + 1] == tokens[row][: end + 1]
        assert set(made[row][end:]) == {tokens[row][end]}
    assert generate_local(model, prompts, 10, eos=eos).tokens == [
        tokens[row][: next(i for i, token in enumerate(tokens[row]) if token in eos) + 1] for row in range(2)
    ]


def test_waiting_is_counted_on_the_given_clock() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(9)
    transfer = MemoryTransfer(spec_of(model), [9], 12)
    first = prefill(model, prompts, transfer).tokens
    ticks = itertools.count(100.0)
    steps = list(decode(model, first, transfer, lengths=[9], max_new_tokens=3, clock=lambda: next(ticks)))
    assert [step.index for step in steps] == [1, 2]
    assert [step.waited_s for step in steps] == [4.0, 0.0]  # four layers, each one tick from call to return
    assert [step.at for step in steps] == [108.0, 109.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_moves_half_the_bytes(dtype: Any) -> None:
    model, prompts = random_model("llama-gqa", dtype=dtype), random_prompts(20)
    transfer, tokens, logits = transferred(model, prompts, 6)
    assert transfer.spec.entry_bytes == 2 * 16 * 2
    alone = generate_local(model, prompts, 6)
    assert tokens == alone.tokens
    assert torch.equal(logits[0], alone.logits[0])


def test_spec_names_what_the_model_caches() -> None:
    spec = spec_of(random_model("gemma3"), "tiny/gemma", "r1")
    assert spec == KVSpec(
        layers=6,
        kv_heads=2,
        entry_bytes=2 * 16 * 4,
        dtype="float32",
        model="tiny/gemma",
        revision="r1",
        windows=(8, 8, 0, 8, 8, 0),
    )
    assert spec_of(random_model("qwen3-windows")).windows == (0, 0, 8, 8)
    assert spec_of(random_model("llama-gqa")).windows == ()
    assert spec_of(random_model("llama-gqa")).model == "llama"


def test_models_that_cache_something_else_are_refused() -> None:
    config = llama(layer_types=["full_attention", "linear_attention"] * 2)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama())
    model.config = config
    with pytest.raises(InvalidArgument, match="linear_attention"):
        spec_of(model)


@pytest.mark.parametrize(
    ("prompts", "chunk"),
    [([], None), ([[1], []], None), ([[1, 2]], 0)],
)
def test_prefill_refuses_what_makes_no_sense(prompts: list[list[int]], chunk: int | None) -> None:
    model = random_model("llama-gqa")
    with pytest.raises(InvalidArgument):
        prefill(model, prompts, MemoryTransfer(spec_of(model), [2], 2), chunk=chunk)


def test_decode_refuses_a_transfer_that_does_not_fit_before_computing() -> None:
    model = random_model("llama-gqa")
    spec = spec_of(model)
    with pytest.raises(InvalidArgument, match="room for 12 tokens") as caught:
        decode(model, [1], MemoryTransfer(spec, [9], 12), lengths=[9], max_new_tokens=5)
    assert caught.value.fields == {"capacity": 12, "need": 13}
    with pytest.raises(InvalidArgument, match="1 rows"):
        decode(model, [1, 1], MemoryTransfer(spec, [9], 20), lengths=[9, 9], max_new_tokens=5)
    with pytest.raises(InvalidArgument, match="first tokens"):
        decode(model, [1, 1], MemoryTransfer(spec, [9], 20), lengths=[9], max_new_tokens=5)
    other = spec_of(random_model("llama-mha"))
    with pytest.raises(InvalidArgument, match="4 KV heads"):
        decode(model, [1], MemoryTransfer(other, [9], 20), lengths=[9], max_new_tokens=5)


def test_eos_of_a_model() -> None:
    model = random_model("llama-gqa")
    assert eos_of(model) == frozenset()
    model.generation_config.eos_token_id = 3
    assert eos_of(model) == {3}
    model.generation_config.eos_token_id = [3, 5]
    assert eos_of(model) == {3, 5}
