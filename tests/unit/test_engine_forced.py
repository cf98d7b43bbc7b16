"""Forced runs: many decode steps in one pass are the steps that decode takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd_client.engines.forced import forced, prompt_state, summaries  # noqa: E402
from kvd_client.engines.selective import decode_selective_local  # noqa: E402
from kvd_client.errors import InvalidArgument  # noqa: E402
from kvd_client.selectors import create  # noqa: E402
from tests.engine_models import random_model, random_prompts  # noqa: E402

LENGTH, STEPS = 70, 6


@pytest.fixture(scope="module", params=["llama-gqa", "llama-mha", "qwen3-windows"])
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@pytest.mark.parametrize("name", ["exact", "quest", "hata", "infinigen", "streaming", "random"])
def test_a_pass_makes_the_logits_and_selections_of_decode(model: Any, name: str) -> None:
    (prompt,) = random_prompts(LENGTH)
    selector = create(name)
    seen: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
    calls: dict[int, int] = {}

    def on_select(layer: int, index: npt.NDArray[np.int32]) -> None:
        calls[layer] = calls.get(layer, 0) + 1
        seen[layer, calls[layer]] = index.copy()

    run = decode_selective_local(model, [prompt], selector, share=0.3, max_new_tokens=STEPS + 1, on_select=on_select)
    found: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
    made = forced(
        model,
        prompt_state(model, prompt),
        run.tokens[0][:STEPS],
        selector,
        share=0.3,
        on_select=lambda layer, step, index: found.update({(layer, step): index.copy()}),
    )
    torch.testing.assert_close(made.logits, run.logits[0][1:], rtol=1e-3, atol=1e-3)
    assert made.logits.argmax(-1).tolist() == run.tokens[0][1:]
    assert found.keys() == seen.keys()
    assert all(np.array_equal(found[key], seen[key]) for key in seen)


def test_without_a_selector_it_is_the_models_own_forward(model: Any) -> None:
    (text,) = random_prompts(LENGTH + STEPS)
    made = forced(model, prompt_state(model, text[:LENGTH]), text[LENGTH:], None)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([text])).logits[0, LENGTH:]
    torch.testing.assert_close(made.logits, expected, rtol=1e-3, atol=1e-3)


def test_everything_selected_is_no_selection(model: Any) -> None:
    (text,) = random_prompts(LENGTH + STEPS)
    state = prompt_state(model, text[:LENGTH])
    full = forced(model, state, text[LENGTH:], None)
    every = forced(model, state, text[LENGTH:], create("exact"), share=1.0)
    torch.testing.assert_close(every.logits, full.logits)
    assert every.selected == every.chances  # none where all layers but 0 and 1 have windows


def test_a_state_grows_by_what_is_behind_it(model: Any) -> None:
    (text,) = random_prompts(LENGTH)
    grown = prompt_state(model, text, known=prompt_state(model, text[:50]))
    whole = prompt_state(model, text)
    assert grown.tokens == whole.tokens
    for one, other in zip(grown.layers, whole.layers, strict=True):
        for name in ("queries", "keys", "values"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidArgument, match="other tokens"):
        prompt_state(model, text[1:], known=whole)


def test_the_share_is_what_was_selected() -> None:
    model = random_model("llama-gqa")
    (text,) = random_prompts(LENGTH + STEPS)
    state = prompt_state(model, text[:LENGTH]).to(torch.half)
    selector = create("quest")
    made = forced(model, state, text[LENGTH:], selector, share=0.2, metadata=summaries(model, state, selector))
    layers, heads = len(state.layers) - 2, state.layers[0].keys.shape[0]
    assert (made.selected, made.chances) == (layers * heads * STEPS * 14, layers * heads * STEPS * LENGTH)
    assert made.share == pytest.approx(0.2)
    with pytest.raises(InvalidArgument, match="no tokens"):
        forced(model, state, [], selector)
