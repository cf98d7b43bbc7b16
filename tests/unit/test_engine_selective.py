"""The engine with KV selection on tiny random models: every mode and order of arrival against one process."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvd_client.engines._transformers_adapter import call  # noqa: E402
from kvd_client.engines.selective import (  # noqa: E402
    LocalTransfer,
    decode_selective,
    decode_selective_local,
    entries_of,
    landing_entries,
    prefill_selective,
    prefix_of,
    shape_of,
)
from kvd_client.engines.transformers import generate_local, spec_of  # noqa: E402
from kvd_client.errors import Aborted, DeadlineExceeded, InvalidArgument  # noqa: E402
from kvd_client.protocol import MODES  # noqa: E402
from kvd_client.ring import EVENT_IDLE  # noqa: E402
from kvd_client.selectors import create  # noqa: E402
from kvd_client.spec import MASK_LOCAL  # noqa: E402
from tests.engine_models import CONFIGS, random_model, random_prompts  # noqa: E402
from tests.unit.selection_fakes import FakeConnection, FakeDaemon  # noqa: E402

NEW, SHARE = 8, 0.2


class FakeTransfer(FakeDaemon):
    """Both ends of a transfer in this process: prefill puts into the source's bytes, and what the sink waits for
    comes then: a fetch is answered, or else a few more tokens of the first layer that is not complete arrive."""

    def __init__(self, model: Any, selector: Any, lengths: list[int], connection: FakeConnection | None = None) -> None:
        spec = spec_of(model)
        super().__init__(
            lengths,
            connection=connection,
            layers=spec.layers,
            heads=spec.kv_heads,
            entry_bytes=spec.entry_bytes,
            landing_entries=landing_entries(model, lengths, SHARE),
            metadata=selector.metadata(shape_of(model, lengths)),
        )
        self.arrays = {a.name: np.zeros((spec.layers, a.layer_bytes), np.uint8) for a in self.layout.metadata}
        self.ready: list[int] = []
        self.window_tokens = 0
        self.connection.on_block = self.block
        self.connection.ring = self.ring  # type: ignore[method-assign]

    # --- the source

    def put_layer(self, layer: int, *, k: Any, v: Any, start: int = 0) -> None:
        entries = torch.cat([k, v], -1).permute(0, 2, 1, 3).contiguous().view(torch.uint8).numpy()
        self.source[layer, :, start : start + entries.shape[1]] = entries

    def metadata(self, layer: int, name: str) -> Any:
        return self.arrays[name][layer]

    def metadata_ready(self, layer: int) -> None:
        self.ready.append(layer)

    # --- what travels

    def block(self) -> None:
        for daemon in self.connection.daemons.values():
            assert isinstance(daemon, FakeTransfer)
            daemon.come()

    def come(self) -> None:
        if self.connection.unanswered:
            self.connection.answer_next()
        for layer in self.ready:
            for name, array in self.arrays.items():
                self.transfer.metadata(layer, name)[:] = array[layer]
            self.memory.bytes[self.layout.metadata_mask_offset + layer] = MASK_LOCAL
        for layer, row in itertools.product(range(self.layout.layers), range(self.layout.rows)):
            missing = np.nonzero(self.mask(layer)[row] == 2)[0]
            if len(missing):
                self.push(layer, row, missing[0], missing[0] + 7)
                return

    def ring(self, part: Any, kind: int, layer: int, row: int, start: int, stop: int) -> None:
        self.connection.events.append((kind, layer))
        for at in range(self.layout.layers):
            self.push(at, layer % self.layout.rows, layer * 5, layer * 5 + self.window_tokens)


def through(
    model: Any, prompts: list[list[int]], selector: Any, mode: str, *, window_tokens: int = 0, **how: Any
) -> tuple[FakeTransfer, list[list[int]], list[Any], list[Any]]:
    """Prefill and decode: the transfer, tokens and logits of each row, the steps."""
    transfer = FakeTransfer(model, selector, [len(prompt) for prompt in prompts])
    transfer.window_tokens = window_tokens
    first = prefill_selective(model, prompts, transfer, selector, **how)
    steps = list(
        decode_selective(model, first.tokens, transfer.transfer, selector, share=SHARE, mode=mode, max_new_tokens=NEW)
    )
    rows = range(len(prompts))
    tokens = [[first.tokens[row], *(step.tokens[row] for step in steps)] for row in rows]
    logits = [torch.stack([first.logits[row], *(step.logits[row] for step in steps)]) for row in rows]
    return transfer, tokens, logits, steps


# Each family of models in two of the five modes, each mode with two of the five families.
PAIRS = [
    (name, mode, turn + other)
    for turn, name in enumerate(CONFIGS)
    for other, mode in enumerate(MODES)
    if (turn + other) % 5 in (0, 2)
]


@pytest.mark.parametrize(("name", "mode", "turn"), PAIRS)
def test_every_mode_equals_one_process_bit_by_bit(name: str, mode: str, turn: int) -> None:
    model, prompts = random_model(name), random_prompts(60, 33)
    for selector in (create("quest"), create(["hata", "random", "streaming"][turn % 3])):
        _, tokens, logits, steps = through(model, prompts, selector, mode, window_tokens=4)
        alone = decode_selective_local(model, prompts, selector, share=SHARE, max_new_tokens=NEW)
        assert tokens == alone.tokens
        for mine, its in zip(logits, alone.logits, strict=True):
            assert torch.equal(mine, its)
        assert (mode == "full") == all(step.fetched == 0 for step in steps)


@pytest.mark.parametrize(
    ("selector", "attention"),
    [("quest", "sdpa"), ("quest", "eager"), ("exact", "sdpa"), ("hata", "sdpa"), ("streaming", "sdpa")],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_selecting_everything_is_the_model_by_itself(name: str, selector: str, attention: str) -> None:
    model, prompts = random_model(name, attention), random_prompts(5, 40, 17, 1)
    run = decode_selective_local(model, prompts, create(selector), share=1.0, max_new_tokens=12)
    alone = generate_local(model, prompts, 12)
    assert run.tokens == alone.tokens
    for mine, its in zip(run.logits, alone.logits, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_attention_sees_the_selected_tokens_and_no_others() -> None:
    model, (prompt,) = random_model("llama-gqa"), random_prompts(50)
    run = decode_selective_local(model, [prompt], create("streaming"), share=SHARE, max_new_tokens=NEW)
    # The same with transformers' own cache, cut down by hand behind layer 1.
    kept = [0, 1, 2, 3, *range(44, 50)]
    cache = transformers.DynamicCache(config=model.config)
    logits = [call(model, torch.tensor([prompt]), cache)[0, -1]]
    for layer in cache.layers[2:]:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    for step in range(NEW - 1):
        token, position = logits[-1].argmax()[None, None], torch.tensor([[50 + step]])
        logits.append(call(model, token, cache, position_ids=position)[0, -1])
    torch.testing.assert_close(run.logits[0], torch.stack(logits), rtol=1e-4, atol=1e-4)
    assert run.tokens != generate_local(model, [prompt], NEW).tokens, "the selection must make a difference"


@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_that_the_source_has_is_not_computed_again(name: str, rows: int, chunk: int | None) -> None:
    model, (document, *questions) = random_model(name), random_prompts(40, 6, 11)
    prompts = [document + question for question in questions[:rows]]
    selector = create("quest")
    plain = decode_selective_local(model, prompts, selector, share=SHARE, max_new_tokens=NEW)
    prefix = prefix_of(model, document, chunk=chunk)
    ran: list[tuple[int, int]] = []
    transfer = FakeTransfer(model, selector, [len(prompt) for prompt in prompts])
    prefill_selective(
        model, prompts, transfer, selector, prefix=prefix, chunk=chunk, on_layer=lambda *at: ran.append(at)
    )
    layers = transfer.layout.layers
    assert ran[:layers] == [(layer, 40) for layer in range(layers)], "all layers of the prefix at once"
    assert transfer.ready == list(range(layers))
    again = decode_selective_local(
        model, prompts, selector, share=SHARE, max_new_tokens=NEW, prefix=prefix, chunk=chunk
    )
    assert again.tokens == plain.tokens
    for mine, its in zip(again.logits, plain.logits, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    _, tokens, logits, _ = through(model, prompts, selector, "parallel", prefix=prefix, chunk=chunk)
    assert tokens == again.tokens
    assert all(torch.equal(mine, its) for mine, its in zip(logits, again.logits, strict=True))


def test_a_prefix_may_be_a_cache_of_transformers() -> None:
    model, (document, question) = random_model("llama-gqa"), random_prompts(40, 6)
    cache = transformers.DynamicCache(config=model.config)
    call(model, torch.tensor([document]), cache)
    how: dict[str, Any] = {"share": SHARE, "max_new_tokens": NEW}
    runs = [
        decode_selective_local(model, [document + question], create("quest"), prefix=prefix, **how).tokens
        for prefix in (cache, prefix_of(model, document))
    ]
    assert runs[0] == runs[1]


def test_prefixes_that_do_not_fit() -> None:
    model, (document, question) = random_model("gemma3"), random_prompts(40, 6)
    prefix = list(prefix_of(model, document))
    cache = transformers.DynamicCache(config=model.config)
    call(model, torch.tensor([document]), cache)
    short = [(k[:, :, :30], v) for k, v in prefix]
    prompt = document + question
    for bad, said in ((prefix[:3], "3 layers"), (cache, "windowed"), (short, "layer 0"), (prefix, "40 tokens")):
        transfer = LocalTransfer(spec_of(model), [len(prompt)], create("quest"))
        with pytest.raises(InvalidArgument, match=said):
            prefill_selective(model, [prompt if bad is not prefix else document], transfer, create("quest"), prefix=bad)


def test_metadata_is_announced_ahead_of_the_layers_entries() -> None:
    model, seen = random_model("llama-gqa"), []
    transfer = FakeTransfer(model, create("hata"), [20])
    put, ready = transfer.put_layer, transfer.metadata_ready
    transfer.put_layer = lambda layer, **how: (seen.append(("entries", layer)), put(layer, **how))  # type: ignore
    transfer.metadata_ready = lambda layer: (seen.append(("metadata", layer)), ready(layer))  # type: ignore
    prefill_selective(model, random_prompts(20), transfer, create("hata"))
    assert seen == [(what, layer) for layer in range(4) for what in ("metadata", "entries")]


def test_what_is_missing_is_fetched_once_and_kept() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(60)
    _, _, _, steps = through(model, prompts, create("streaming"), "parallel")
    assert [step.selected for step in steps] == [2 * 2 * 12] * (NEW - 1)
    assert steps[0].fetched > 0
    assert steps[0].on_demand_ratio == steps[0].fetched / 48
    assert [step.fetched for step in steps[1:]] == [0] * (NEW - 2), "the same tokens are selected in each step"


def test_idle_windows_are_rung_in_the_speculative_mode_from_the_second_step_on() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(60)
    for mode in MODES:
        transfer, _, _, _ = through(model, prompts, create("quest"), mode)
        rung = [layer for kind, layer in transfer.connection.events if kind == EVENT_IDLE]
        assert rung == ([0, 1, 2, 3] * (NEW - 2) if mode == "speculative" else [])


def test_windowed_layers_select_their_window() -> None:
    model, prompts = random_model("gemma3"), random_prompts(60, 5)
    seen: list[int] = []
    run = decode_selective_local(
        model,
        prompts,
        create("quest"),
        share=SHARE,
        max_new_tokens=NEW,
        on_select=lambda layer, index: seen.append(layer),
    )
    assert set(seen) == {2, 5}, "the others have a window of 8"
    assert landing_entries(model, [60, 5], SHARE) == 12
    assert landing_entries(model, [60, 5], 0.0) == 8
    assert landing_entries(random_model("llama-gqa"), [60, 5], 0.0) == 1
    assert len(run.tokens) == 2


def test_one_batch_of_several_transfers() -> None:
    model, selector = random_model("qwen3"), create("quest")
    groups = [random_prompts(60), random_prompts(21, 33), random_prompts(47)]
    connection = FakeConnection()
    transfers = [FakeTransfer(model, selector, [len(p) for p in group], connection) for group in groups]
    locals_ = [LocalTransfer(spec_of(model), [len(p) for p in group], selector) for group in groups]
    for group, transfer, local in zip(groups, transfers, locals_, strict=True):
        first = prefill_selective(model, group, transfer, selector).tokens
        assert prefill_selective(model, group, local, selector).tokens == first
    firsts = [1, 2, 3, 4]
    how: dict[str, Any] = {"share": SHARE, "max_new_tokens": NEW}
    runs = [
        list(decode_selective(model, firsts, batch, selector, mode="parallel", **how))
        for batch in ([transfer.transfer for transfer in transfers], locals_)
    ]
    for mine, its in zip(*runs, strict=True):
        assert mine.tokens == its.tokens
        assert torch.equal(mine.logits, its.logits)
        assert (mine.selected, its.fetched) == (its.selected, 0)
    assert runs[0][0].fetched > 0


def test_steps_end_with_the_text_and_are_seen_as_they_are_made() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(30)
    how: dict[str, Any] = {"share": SHARE, "max_new_tokens": NEW}
    tokens = decode_selective_local(model, prompts, create("quest"), **how).tokens[0]
    seen: list[Any] = []
    run = decode_selective_local(model, prompts, create("quest"), eos={tokens[3]}, on_step=seen.append, **how)
    assert run.tokens == [tokens[:4]]
    assert [step.index for step in seen] == [1, 2, 3]
    assert [step.tokens for step in seen] == [[token] for token in tokens[1:4]]


def test_waiting_is_counted_on_the_given_clock_and_bounded() -> None:
    model, prompts, selector = random_model("llama-gqa"), random_prompts(30), create("quest")
    transfer = FakeTransfer(model, selector, [30])
    first = prefill_selective(model, prompts, transfer, selector).tokens
    ticks = itertools.count(100.0)
    steps = list(
        decode_selective(
            model,
            first,
            transfer.transfer,
            selector,
            share=SHARE,
            max_new_tokens=3,
            clock=lambda: next(ticks),
        )
    )
    assert [step.waited_s for step in steps] == [4.0, 0.0], "layers 0 and 1, the metadata of 2 and 3: a tick each"
    still = FakeTransfer(model, selector, [30])
    still.connection.on_block = None
    decode = decode_selective(model, first, still.transfer, selector, share=SHARE, max_new_tokens=3, timeout_s=0.0)
    with pytest.raises(DeadlineExceeded, match="layer 0"):
        next(decode)


def test_a_transfer_that_ends_ends_decode_with_its_error() -> None:
    model, prompts, selector = random_model("llama-gqa"), random_prompts(30), create("quest")
    transfer = FakeTransfer(model, selector, [30])
    first = prefill_selective(model, prompts, transfer, selector).tokens
    decode = decode_selective(
        model, first, transfer.transfer, selector, share=SHARE, mode="parallel", max_new_tokens=NEW
    )
    next(decode)
    transfer.fail(Aborted("the prefill process gave the transfer up"))
    with pytest.raises(Aborted):
        next(decode)
    assert generate_local(model, prompts, 1).tokens == [first], "the model is as it was"


def test_how_many_entries_a_share_is() -> None:
    assert entries_of([100, 2000, 1, 3], 0.07) == [7, 140, 1, 1]
    assert entries_of([5, 1], 0.0) == [1, 1]
    assert entries_of([5, 1], 1.0) == [5, 1]
    for share in (-0.1, 1.1):
        with pytest.raises(InvalidArgument):
            entries_of([5], share)


def test_what_makes_no_sense_is_refused_before_computing() -> None:
    model, selector = random_model("llama-gqa"), create("quest")
    transfer = FakeTransfer(model, selector, [30])
    sink: Any = transfer.transfer

    def decode(*first: int, on: Any = sink, of: Any = model, **how: Any) -> Any:
        return decode_selective(of, first, on, selector, **{"share": SHARE, "max_new_tokens": 3, **how})

    for attempt, said in (
        (lambda: decode(1, mode="fast"), "no mode 'fast'"),
        (lambda: decode(1, 2), "2 first tokens"),
        (lambda: decode(1, share=2.0), "share is 2.0"),
        (lambda: decode(on=[]), "at least one transfer"),
        (lambda: decode(1, of=random_model("llama-mha")), "4 KV heads|the model needs 1, 4"),
        (lambda: prefill_selective(model, [[]], transfer, selector), "one token"),
        (lambda: prefill_selective(model, [[1] * 30], transfer, create("exact")), "one process"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            attempt()
    assert transfer.connection.sent == []
