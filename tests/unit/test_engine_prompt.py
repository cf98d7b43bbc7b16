"""What the prompt's last queries select: asked as decode will ask, whatever the chunks, they rank the blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvd.profiling.record_run import record  # noqa: E402
from kvd_client.engines import _transformers_adapter as adapter  # noqa: E402
from kvd_client.engines import forced, selective  # noqa: E402
from kvd_client.engines.prompt import (  # noqa: E402
    AHEAD,
    NARROW_SHARE,
    QUERIES,
    SHARE,
    SPAN,
    TOKENS_PER_QUERY,
    asked_tokens,
    shares_of,
)
from kvd_client.engines.transformers import spec_of  # noqa: E402
from kvd_client.errors import InvalidArgument  # noqa: E402
from kvd_client.selectors import create  # noqa: E402
from kvd_client.selectors.base import Shape  # noqa: E402
from kvd_client.selectors.exact import Exact  # noqa: E402
from tests.engine_models import normed, random_model, random_prompts, with_norms_of_its_own  # noqa: E402


class Ranked(selective.LocalTransfer):
    """Takes rankings; says from layer ``until`` on that they are of no use."""

    def __init__(self, *args: Any, until: int = 99) -> None:
        super().__init__(*args)
        self.until = until
        self.rankings: dict[int, Any] = {}
        self.put: list[int] = []

    def put_layer(self, layer: int, **how: Any) -> None:
        self.put.append(layer)
        super().put_layer(layer, **how)

    def rank(self, layer: int, shares: Any, *, wait: bool) -> bool:
        assert not wait
        assert self.put[-1] == layer  # its entries are on their way
        self.rankings[layer] = shares
        return layer < self.until


@dataclasses.dataclass(frozen=True)
class Remembering(Exact):
    """Keeps each query that it is asked for, by layer."""

    queries: ClassVar[dict[int, list[Any]]] = {}

    def select_many(self, shape: Shape, queries: Any, *args: Any, layer: int, steps: Any) -> Any:
        self.queries.setdefault(layer, []).extend(queries.clone().split(1, 2))
        return super().select_many(shape, queries, *args, layer=layer, steps=steps)


def run(name: str, selector: Any, lengths: list[int], *, until: int = 99, **how: Any) -> tuple[Ranked, dict[int, Any]]:
    model, told = random_model(name), {}
    transfer = Ranked(spec_of(model), lengths, selector, until=until)
    selective.prefill_selective(model, random_prompts(*lengths), transfer, selector, on_queries=told.__setitem__, **how)
    return transfer, told


@pytest.mark.parametrize("chunk", [None, 40, 7])
def test_the_last_queries_whatever_the_chunks(chunk: int | None) -> None:
    transfer, told = run("llama-gqa", create("exact"), [190, 161], chunk=chunk)
    assert sorted(told) == sorted(transfer.rankings) == [2, 3]
    _, whole = run("llama-gqa", create("exact"), [190, 161])
    for layer, indices in told.items():
        shares = [SHARE] * QUERIES + [NARROW_SHARE]
        for share, mine, its in zip(shares, indices, whole[layer], strict=True):
            assert mine.shape == (4, max(selective.entries_of([190, 161], share)))
            # Sums of other chunks differ in the last bit, which may tip a token.
            assert np.mean([np.isin(a, b).mean() for a, b in zip(mine, its, strict=True)]) > 0.95


@pytest.mark.parametrize("name", ["exact", "quest"])
def test_two_sizes_of_one_selection_share_its_scores(name: str) -> None:
    plain = create(name)
    asked: list[int] = []

    class Chooses(type(plain)):  # type: ignore[misc]
        """Has a way of its own to select, and so it is asked for both."""

        def select_many(self, shape: Shape, queries: Any, *args: Any, **how: Any) -> Any:
            asked.append(queries.shape[2])
            return super().select_many(shape, queries, *args, **how)

    for selector in (plain, Chooses()):
        transfer, told = run("llama-gqa", selector, [190, 161])
        if selector is plain:
            expected, ranked = told, transfer.rankings
    assert asked == [QUERIES, 1] * 2
    for layer, indices in told.items():
        for mine, its in zip(indices, expected[layer], strict=True):
            assert mine.shape == its.shape
            # Products of another number of queries may differ in the last bit, which may tip a token.
            assert np.mean([np.isin(a, b).mean() for a, b in zip(mine, its, strict=True)]) > 0.95
        assert np.abs(transfer.rankings[layer] - ranked[layer]).mean() < 0.01


def rotated(query: Any, positions: Any, theta: float) -> Any:
    """RoPE in float64: (heads, tokens, head dim) at positions (tokens,)."""
    half = query.shape[-1] // 2
    angle = np.asarray(positions)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (np.concatenate([f(angle)] * 2, 1) for f in (np.cos, np.sin))
    return query * cos + np.concatenate([-query[..., half:], query[..., :half]], -1) * sin


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma3"])
def test_queries_ask_from_the_next_positions_as_decode_projects_them(name: str, ahead: bool) -> None:
    model, lengths, selector = with_norms_of_its_own(random_model(name)), [180, 161], Remembering(ahead=ahead)
    streams: dict[int, list[Any]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, at=at: streams.setdefault(at, []).append(args[0]))
        for at, layer in enumerate(model.model.layers)
    ]
    selector.queries.clear()
    transfer = Ranked(spec_of(model), lengths, selector)
    selective.prefill_selective(model, random_prompts(*lengths), transfer, selector, chunk=37)
    for hook in hooks:
        hook.remove()
    windows = adapter.windows(model)
    wanted = [layer for layer in range(2, len(windows)) if not windows[layer]]
    assert sorted(selector.queries) == wanted
    theta = model.config.rope_parameters
    theta = theta.get("full_attention", theta)["rope_theta"]
    tokens = asked_tokens(lengths, 0).numpy()
    for layer in wanted:
        module = model.model.layers[layer].self_attn
        hidden = normed(model, layer, torch.cat(streams[layer - ahead], 1).detach().double().numpy())
        asked = torch.cat(selector.queries[layer], 2).numpy()
        for row, length in enumerate(lengths):
            q = hidden[row, tokens[row]] @ module.q_proj.weight.detach().double().numpy().T
            q = q.reshape(QUERIES, -1, module.head_dim)
            if hasattr(module, "q_norm"):
                q = module.q_norm(torch.from_numpy(q).float()).detach().double().numpy()
            q = np.concatenate([q, q[-1:]]).transpose(1, 0, 2)
            golden = (5**0.5 - 1) / 2
            # From the newest on; the narrow selection, which is the last one, asks from the next position.
            to = [length + int(AHEAD * (golden * at % 1)) for at in range(QUERIES, 0, -1)] + [length]
            np.testing.assert_allclose(asked[row], rotated(q, to, theta), rtol=1e-3, atol=1e-3)
    selector.queries.clear()


def test_prefill_computes_the_same_bits_whoever_watches() -> None:
    model, (prompt,) = random_model("gemma3"), random_prompts(90)
    logits = [
        selective.prefill_selective(
            model, [prompt], Ranked(spec_of(model), [90], selector), selector, prompt_aware=aware
        ).logits
        for selector in (create("quest"), create("quest", ahead=True))
        for aware in (True, False)
    ]
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def _refused(*_: Any) -> None:
    raise InvalidArgument("no projection")


def _broken(*_: Any) -> Any:
    def query_of(layer: int, hidden: Any) -> Any:
        raise RuntimeError("sizes do not match")

    return query_of


def _unlike(self: Any, positions: Any) -> Any:
    """As if the layer had its positions from elsewhere, or none."""
    usual = AT(self, positions + 7)
    return lambda layer, hidden: usual(layer, hidden)


AT = adapter.Ahead.at


@pytest.mark.parametrize(("name", "fault"), [("__init__", _refused), ("at", _broken), ("at", _unlike)])
def test_queries_of_other_models_are_asked_where_they_stand(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, selector, (prompt,) = random_model("llama-gqa"), Remembering(), random_prompts(140)
    state = forced.prompt_state(model, prompt)
    monkeypatch.setattr(adapter.Ahead, name, fault)
    selector.queries.clear()
    transfer = Ranked(spec_of(model), [140], selector)
    selective.prefill_selective(model, [prompt], transfer, selector)
    assert sorted(transfer.rankings) == [2, 3]
    tokens = asked_tokens([140], 0)[0]
    for layer, queries in selector.queries.items():
        expected = state.layers[layer].queries[:, [*tokens.tolist(), 139]]
        torch.testing.assert_close(torch.cat(queries, 2)[0], expected, rtol=1e-4, atol=1e-5)
    selector.queries.clear()


@given(st.lists(st.integers(1, 600), min_size=1, max_size=3), st.data())
def test_asked_tokens_end_at_the_newest_and_lie_ever_farther_apart(lengths: list[int], data: Any) -> None:
    start = data.draw(st.integers(0, min(lengths) - 1))
    tokens = asked_tokens(lengths, start)
    room = min(lengths) - start
    assert tokens.shape == (len(lengths), min(QUERIES, max(1, room // TOKENS_PER_QUERY)))
    for length, row in zip(lengths, tokens.tolist(), strict=True):
        assert row[-1] == length - 1
        assert row[0] >= start
        assert row[0] == length - min(room, SPAN) or len(row) == 1
        steps = np.diff(row)
        assert (steps >= 1).all()
        assert (np.diff(steps) <= 1).all()  # rounded


def test_a_recorded_prompt_is_asked_as_prefill_asks() -> None:
    model, (prompt,) = random_model("gemma3"), random_prompts(200)
    for selector in (create("quest"), create("quest", ahead=True)):
        told: dict[int, Any] = {}
        transfer = Ranked(spec_of(model), [200], selector)
        selective.prefill_selective(model, [prompt], transfer, selector, on_queries=told.__setitem__)
        found = forced.asked(model, forced.prompt_state(model, prompt), selector)
        assert sorted(found) == sorted(told) == [2, 5]
        for layer, indices in told.items():
            assert [len(each[0]) for each in found[layer]] == [len(each[0]) for each in indices]
            same = [
                np.isin(a, b).mean()
                for one, other in zip(found[layer], indices, strict=True)
                for a, b in zip(one, other, strict=True)
            ]
            assert np.mean(same) > 0.95


def test_windowed_layers_are_not_ranked() -> None:
    transfer, told = run("gemma3", create("quest"), [80])
    assert sorted(told) == [2, 5]
    assert sorted(transfer.rankings) == [2, 5]


@pytest.mark.parametrize(("tokens", "asked"), [(1, 1), (5, 1), (20, 2), (40, 4), (160, 16)])
def test_a_short_question_about_a_cached_document_has_few_queries(tokens: int, asked: int) -> None:
    """As many as a bounded share of its prefill pays for, the very last among them; that one is asked twice."""
    model, selector = random_model("llama-gqa"), Remembering()
    document, question = random_prompts(70, tokens)
    told: dict[int, Any] = {}
    transfer = Ranked(spec_of(model), [70 + tokens], selector)
    prefix = selective.prefix_of(model, document)
    prompt = [document + question]
    selector.queries.clear()
    selective.prefill_selective(model, prompt, transfer, selector, prefix=prefix, on_queries=told.__setitem__)
    assert {layer: len(indices) for layer, indices in told.items()} == {2: asked + 1, 3: asked + 1}
    few = selector.queries[2]
    selector.queries.clear()
    selective.prefill_selective(model, prompt, transfer, selector, on_queries=told.__setitem__)
    for mine, its in zip(few[-2:], selector.queries[2][-2:], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    selector.queries.clear()


def test_nobody_asks_where_it_is_of_no_use() -> None:
    assert sorted(run("gemma3", create("quest"), [80])[0].rankings) == [2, 5]
    model, selector = random_model("gemma3"), create("quest")
    for how in ({"until": 2}, {"prompt_aware": False}):
        transfer = Ranked(spec_of(model), [80], selector, until=int(how.pop("until", 99)))
        selective.prefill_selective(model, random_prompts(80), transfer, selector, **how)
        assert sorted(transfer.rankings) == ([] if how else [2])


def test_shares_are_what_the_formula_says() -> None:
    shape = Shape((10, 6), 2, 16, "float32")
    rng = np.random.default_rng(5)
    indices = []
    for _ in range(4):
        index = np.full((4, 3), -1, np.int32)
        for row, (length, n) in enumerate([(10, 3), (10, 3), (6, 2), (6, 2)]):
            index[row, :n] = np.sort(rng.permutation(length)[:n])
        indices.append(index)
    found = shares_of(shape, indices, blocks=4)
    for row, length in enumerate(shape.lengths):
        for block in range(4):
            tokens = [t for t in range(length) if t * 4 // length == block]
            c = {
                w: np.mean([[t in index[2 * row + h] for t in tokens] for index in indices[-w:] for h in range(2)])
                for w in (1, 4)
            }
            assert found[row, block] == pytest.approx((c[1] + 2 * c[4]) / 3)
    assert shares_of(shape, indices).shape == (2, 10)


def test_what_is_recorded_is_what_was_selected() -> None:
    model, selector, (prompt,) = random_model("llama-gqa"), create("quest"), random_prompts(170)
    one = record(model, prompt, selector, share=0.3, steps=3, name="random", model_id="m")
    assert (one.name, one.model, one.selector, one.length) == ("random", "m", "quest", 170)
    assert (one.step_count, one.query_count, one.layers, one.kv_heads) == (3, QUERIES + 1, 4, 2)
    transfer, told = Ranked(spec_of(model), [170], selector), {}
    selective.prefill_selective(model, [prompt], transfer, selector, chunk=256, on_queries=told.__setitem__)
    assert not one.step_mask()[:2].any()
    assert (one.step_mask(slice(2, None)).sum(-1) == 51).all()
    for layer in (2, 3):
        np.testing.assert_array_equal(np.argwhere(one.query_mask(layer)[-1, 1])[:, 0], told[layer][-1][1])
        np.testing.assert_allclose(
            (one.shares(1, 170)[layer] + 2 * one.shares(QUERIES + 1, 170)[layer]) / 3,
            transfer.rankings[layer][0],
            rtol=1e-6,
        )
