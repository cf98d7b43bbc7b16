"""What the prompt's last queries select: they are the right queries, whatever the chunks, and rank the blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvd.profiling.record_run import record  # noqa: E402
from kvd_client.engines import selective  # noqa: E402
from kvd_client.engines.prompt import NARROW_SHARE, QUERIES, SHARE, shares_of  # noqa: E402
from kvd_client.engines.transformers import spec_of  # noqa: E402
from kvd_client.selectors import create  # noqa: E402
from kvd_client.selectors.base import Shape  # noqa: E402
from kvd_client.selectors.exact import Exact  # noqa: E402
from tests.engine_models import random_model, random_prompts  # noqa: E402


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

    def rank(self, layer: int, shares: Any) -> bool:
        assert self.put[-1] == layer  # its entries are on their way
        self.rankings[layer] = shares
        return layer < self.until


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
    transfer, told = run("llama-gqa", create("exact"), [160, 131], chunk=chunk)
    assert sorted(told) == sorted(transfer.rankings) == [2, 3]
    _, whole = run("llama-gqa", create("exact"), [160, 131])
    for layer, indices in told.items():
        shares = [SHARE] * QUERIES + [NARROW_SHARE]
        for share, mine, its in zip(shares, indices, whole[layer], strict=True):
            assert mine.shape == (4, max(selective.entries_of([160, 131], share)))
            # Sums of other chunks differ in the last bit, which may tip a token.
            assert np.mean([np.isin(a, b).mean() for a, b in zip(mine, its, strict=True)]) > 0.95


def test_the_last_query_is_that_of_a_decode_step_with_the_same_token() -> None:
    """Had the prompt been one token shorter, and everything been selected, the first step would have asked the same."""
    model, selector, (prompt,) = random_model("llama-gqa"), Remembering(), random_prompts(60)
    whole = Ranked(spec_of(model), [60], selector)
    selective.prefill_selective(model, [prompt], whole, selector)
    asked = {layer: queries[-1] for layer, queries in selector.queries.items()}
    selector.queries.clear()
    short = Ranked(spec_of(model), [59], selector)
    selective.prefill_selective(model, [prompt[:-1]], short, selector, prompt_aware=False)
    assert not selector.queries
    list(selective.decode_selective(model, [prompt[-1]], short, selector, share=1.0, max_new_tokens=2, mode="full"))
    for layer in (2, 3):
        torch.testing.assert_close(selector.queries[layer][0], asked[layer], rtol=1e-4, atol=1e-5)


def test_windowed_layers_are_not_ranked() -> None:
    transfer, told = run("gemma3", create("quest"), [80])
    assert sorted(told) == [2, 5]
    assert sorted(transfer.rankings) == [2, 5]


@pytest.mark.parametrize(("tokens", "asked"), [(1, 1), (5, 1), (16, 2), (40, 4), (128, 16)])
def test_a_short_question_about_a_cached_document_has_few_queries(tokens: int, asked: int) -> None:
    """As many as a bounded share of its prefill pays for, evenly among the last ones, the very last among them;
    that one is asked twice."""
    model, selector = random_model("llama-gqa"), Remembering()
    document, question = random_prompts(70, tokens)
    told: dict[int, Any] = {}
    transfer = Ranked(spec_of(model), [70 + tokens], selector)
    prefix = selective.prefix_of(model, document)
    prompt = [document + question]
    selective.prefill_selective(model, prompt, transfer, selector, prefix=prefix, on_queries=told.__setitem__)
    assert {layer: len(indices) for layer, indices in told.items()} == {2: asked + 1, 3: asked + 1}
    few, all_ = selector.queries[2], []
    torch.testing.assert_close(few[-1], few[-2])
    selector.queries.clear()
    selective.prefill_selective(model, prompt, transfer, selector, on_queries=told.__setitem__)
    all_ = selector.queries[2]
    torch.testing.assert_close(few[-1], all_[-1], rtol=1e-4, atol=1e-5)
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
    model, selector, (prompt,) = random_model("llama-gqa"), create("quest"), random_prompts(140)
    one = record(model, prompt, selector, share=0.3, steps=3, name="random", model_id="m")
    assert (one.name, one.model, one.selector, one.length) == ("random", "m", "quest", 140)
    assert (one.step_count, one.query_count, one.layers, one.kv_heads) == (3, QUERIES + 1, 4, 2)
    transfer, told = Ranked(spec_of(model), [140], selector), {}
    selective.prefill_selective(model, [prompt], transfer, selector, chunk=256, on_queries=told.__setitem__)
    assert not one.step_mask()[:2].any()
    assert (one.step_mask(slice(2, None)).sum(-1) == 42).all()
    for layer in (2, 3):
        np.testing.assert_array_equal(np.argwhere(one.query_mask(layer)[-1, 1])[:, 0], told[layer][-1][1])
        np.testing.assert_allclose(
            (one.shares(1, 140)[layer] + 2 * one.shares(QUERIES + 1, 140)[layer]) / 3,
            transfer.rankings[layer][0],
            rtol=1e-6,
        )
