"""Selectors that look ahead: the next layer's selection and its fetch, made while a layer computes."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvd.profiling.calibration import train  # noqa: E402
from kvd_client.engines import _transformers_adapter as adapter  # noqa: E402
from kvd_client.engines.selective import (  # noqa: E402
    decode_selective,
    decode_selective_local,
    prefill_selective,
    shape_of,
)
from kvd_client.engines.transformers import generate_local  # noqa: E402
from kvd_client.errors import FingerprintMismatch, InvalidArgument  # noqa: E402
from kvd_client.protocol import Fetch  # noqa: E402
from kvd_client.selectors import Selector, Weights, create, parse  # noqa: E402
from kvd_client.selectors.exact import Exact  # noqa: E402
from tests.engine_models import CONFIGS, normed, random_model, random_prompts, with_norms_of_its_own  # noqa: E402
from tests.unit.test_engine_selective import NEW, PAIRS, SHARE, FakeTransfer, through  # noqa: E402


def infinigen_of(model: Any) -> Selector:
    return create("infinigen", weights=train("infinigen", model, random_prompts(40, 30)))


@pytest.mark.parametrize(("name", "mode", "turn"), PAIRS)
def test_every_mode_equals_one_process_bit_by_bit(name: str, mode: str, turn: int) -> None:
    model, prompts = random_model(name), random_prompts(60, 33)
    for selector in (infinigen_of(model), parse(["hata:ahead=1", "quest:ahead=1"][turn % 2])):
        _, tokens, logits, steps = through(model, prompts, selector, mode, window_tokens=4)
        alone = decode_selective_local(model, prompts, selector, share=SHARE, max_new_tokens=NEW)
        assert tokens == alone.tokens
        for mine, its in zip(logits, alone.logits, strict=True):
            assert torch.equal(mine, its)
        assert (mode == "full") == all(step.fetched == 0 for step in steps)


@pytest.mark.parametrize("name", CONFIGS)
def test_selecting_everything_ahead_is_the_model_by_itself(name: str) -> None:
    model, prompts = random_model(name), random_prompts(5, 40, 17, 1)
    alone = generate_local(model, prompts, 12)
    for selector in (parse("exact:ahead=1"), create("infinigen", alpha=1e30)):
        run = decode_selective_local(model, prompts, selector, share=1.0, max_new_tokens=12)
        assert run.tokens == alone.tokens


@dataclasses.dataclass(frozen=True)
class Told(Exact):
    """Tells of each query."""

    queries: ClassVar[dict[tuple[int, int], Any]] = {}
    ahead: bool = True
    query: str = "residual"

    def select(self, shape: Any, query: Any, arrays: Any, k: Any, *, layer: int, step: int) -> Any:
        self.queries[step, layer] = query.clone()
        return super().select(shape, query, arrays, k, layer=layer, step=step)


@pytest.mark.parametrize("made_of", ["residual", "input"])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen3", "gemma3"])
def test_the_query_ahead_is_the_next_projection_of_this_layers_state(name: str, made_of: str) -> None:
    model, lengths = with_norms_of_its_own(random_model(name)), (30, 12)
    inputs: dict[int, Any] = {}
    hooks = [
        (layer if made_of == "residual" else layer.self_attn).register_forward_pre_hook(
            lambda module, args, kwargs, at=at: inputs.__setitem__(
                at, (args[0] if args else kwargs["hidden_states"]).clone()
            ),
            with_kwargs=True,
        )
        for at, layer in enumerate(model.model.layers)
    ]
    Told.queries.clear()
    told = Told(query=made_of)
    decode_selective_local(model, random_prompts(*lengths), told, share=SHARE, max_new_tokens=4)
    for hook in hooks:
        hook.remove()
    windows = adapter.windows(model)
    wanted = [layer for layer in range(2, len(windows)) if not windows[layer]]
    assert sorted(layer for step, layer in Told.queries if step == 3) == wanted
    theta = model.config.rope_parameters
    theta = theta.get("full_attention", theta)["rope_theta"]
    for layer in wanted:
        module = model.model.layers[layer].self_attn
        x = inputs[layer - 1].double().numpy()[:, 0]
        if made_of == "residual":
            x = normed(model, layer, x)
        q = x @ module.q_proj.weight.detach().double().numpy().T
        q = q.reshape(2, -1, module.head_dim)
        if hasattr(module, "q_norm"):
            q = module.q_norm(torch.from_numpy(q).float()).detach().double().numpy()
        half = module.head_dim // 2
        # The token that step 3 takes in has the position behind two tokens made before.
        angle = np.array(lengths)[:, None] + 2
        angle = angle * theta ** (-np.arange(half) / half)
        cos, sin = (np.concatenate([f(angle)] * 2, 1)[:, None] for f in (np.cos, np.sin))
        expected = q * cos + np.concatenate([-q[..., half:], q[..., :half]], -1) * sin
        np.testing.assert_allclose(Told.queries[3, layer][:, :, 0].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_fetches_are_on_their_way_while_the_layer_before_computes() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(60)
    happened: list[str] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args, at=at: happened.append(f"mlp {at}"))
        for at, layer in enumerate(model.model.layers)
    ]
    orders = []
    for selector in (parse("quest:ahead=1"), create("quest")):
        transfer = FakeTransfer(model, selector, [60])
        first = prefill_selective(model, prompts, transfer, selector).tokens
        transfer.come()  # the metadata; else the first step can only select when it has waited for it
        submit = transfer.connection.submit

        def told(message: Any, submit: Any = submit) -> int:
            if isinstance(message, Fetch):
                happened.append(f"fetch {message.layer}")
            return int(submit(message))

        transfer.connection.submit = told  # type: ignore[method-assign]
        happened.clear()
        step = next(
            iter(
                decode_selective(
                    model, first, transfer.transfer, selector, share=SHARE, mode="parallel", max_new_tokens=NEW
                )
            )
        )
        orders.append(list(happened))
        assert step.fetched > 0
        assert step.fetch_s >= step.fetch_wait_s
        assert step.select_s > 0
    for hook in hooks:
        hook.remove()
    assert orders[0] == ["mlp 0", "fetch 2", "mlp 1", "fetch 3", "mlp 2", "mlp 3"]
    assert orders[1] == ["mlp 0", "mlp 1", "fetch 2", "mlp 2", "fetch 3", "mlp 3"]


def test_hooks_are_gone_after_a_step_even_after_an_error() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(30)
    plain = generate_local(model, prompts, 3).tokens

    class Broken(Told):
        def select(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        decode_selective_local(model, prompts, Broken(), share=SHARE, max_new_tokens=3)
    assert not any(layer._forward_pre_hooks or layer.self_attn._forward_pre_hooks for layer in model.model.layers)
    assert generate_local(model, prompts, 3).tokens == plain


def test_a_layers_own_state_gives_its_own_query_where_nothing_is_normed_before_attention() -> None:
    config = transformers.Olmo2Config(  # it norms the query of all heads together instead
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(1)
    model, ids = transformers.Olmo2ForCausalLM(config).eval(), torch.arange(5)[None]
    for made_of in ("residual", "input"):
        told: dict[int, Any] = {}
        own: dict[int, Any] = {}
        ahead = adapter.Ahead(model, made_of)
        with torch.no_grad(), ahead.watching(ids, lambda at, query_of, told=told: told.update({at: query_of(at)})):
            adapter.call_watched(model, ids, transformers.DynamicCache(config=config), own.__setitem__)
        assert sorted(own) == sorted(told) == [0, 1, 2]
        for layer, query in own.items():
            torch.testing.assert_close(told[layer], query)


def test_models_whose_queries_cant_be_told_are_refused() -> None:
    model = random_model("llama-gqa")
    del model.model.layers[3].self_attn.q_proj
    with pytest.raises(InvalidArgument, match="layer 3 of LlamaForCausalLM"):
        adapter.Ahead(model)
    config = transformers.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    with pytest.raises(InvalidArgument, match="GPT2LMHeadModel has no rotary positions"):
        adapter.Ahead(transformers.GPT2LMHeadModel(config))


def test_weights_of_another_form_are_refused_before_anything_is_computed() -> None:
    model, prompts = random_model("llama-gqa"), random_prompts(30)
    made = train("infinigen", random_model("llama-mha"), random_prompts(30))
    transfer = FakeTransfer(model, create("quest"), [30])
    for attempt in (
        lambda: prefill_selective(model, prompts, transfer, create("infinigen", weights=made)),
        lambda: decode_selective(
            model, [1], transfer.transfer, create("infinigen", weights=made), share=SHARE, max_new_tokens=3
        ),
    ):
        with pytest.raises(FingerprintMismatch, match="4 KV heads"):
            attempt()


def test_training_names_the_model_and_what_it_was_made_from() -> None:
    model, told = random_model("llama-gqa"), []
    made = train(
        "hata",
        model,
        random_prompts(40, 50),
        bits=64,
        steps=2,
        notes="n",
        told=lambda *at: told.append(at),
    )
    assert isinstance(made, Weights)
    assert (made.selector, made.layers, made.kv_heads, made.head_dim) == ("hata", 4, 2, 16)
    assert dict(made.parameters) == {"bits": 64, "steps": 2, "prompts": 2, "tokens": 90}
    assert (datetime.now(UTC) - made.created).total_seconds() < 600
    assert told == [
        ("calibration, prompts", 0, 2),
        ("calibration, prompts", 1, 2),
        ("training, steps", 0, 2),
        ("training, steps", 1, 2),
    ]
    assert create("hata", weights=made).metadata(shape_of(model, [10]))[0].layer_bytes == 10 * 2 * 8
    with pytest.raises(InvalidArgument, match="at least one prompt"):
        train("hata", model, [])
