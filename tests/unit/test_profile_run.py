"""Recording offline: prompts from texts, and counts from a model that really runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd.errors import InvalidArgument
from kvd.profiling.recorder import Recorder
from kvd.profiling.run import cut, run
from kvd_client.engines.selective import decode_selective_local
from kvd_client.engines.transformers import spec_of
from kvd_client.selectors import Selector, create
from tests.engine_models import random_model, random_prompts

LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Ends(Selector):
    """The first tokens and the last one, whatever the query."""

    name: ClassVar[str] = "ends"

    def select(self, shape: Any, query: Any, arrays: Any, k: Sequence[int], *, layer: int, step: int) -> Any:
        (n,), (length,) = k, shape.lengths
        row = np.r_[np.arange(n - 1), length - 1].astype(np.int32)
        return np.tile(row, (shape.kv_heads, 1))


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 12), st.integers(1, 20))
def test_prompts_are_pieces_of_the_texts_in_turns(lengths: list[int], tokens: int, most: int) -> None:
    counter = itertools.count()
    texts = [[next(counter) for _ in range(length)] for length in lengths]
    found = cut(texts, tokens, most)
    assert len(found) == min(most, sum(length // tokens for length in lengths))
    used = list(itertools.chain(*found))
    assert len(set(used)) == len(used)
    assert all(piece == list(range(piece[0], piece[0] + tokens)) for piece in found)
    origin = [next(at for at, text in enumerate(texts) if piece[0] in text) for piece in found]
    turns = [sum(earlier == at for earlier in origin[:number]) for number, at in enumerate(origin)]
    assert turns == sorted(turns)


def test_counts_are_those_of_what_was_selected() -> None:
    model = random_model("llama-gqa")
    recorder = Recorder(LAYERS, blocks=8)
    done: list[int] = []
    ticks = itertools.count()
    times = run(
        model,
        random_prompts(64, 64, 32),
        Ends(),
        recorder,
        share=0.25,
        steps=3,
        on_prompt=done.append,
        clock=lambda: float(next(ticks)),
    )
    assert done == [1, 2, 3]
    assert (times.tokens, times.seconds) == ((64, 64, 32), (1.0, 1.0, 1.0))
    short, long = recorder.groups()
    assert [(g.low, g.high, g.samples, g.steps) for g in (short, long)] == [(32, 64, 1, 3), (64, 128, 2, 6)]
    for group in (short, long):
        # A quarter of the tokens: the first two blocks but for one token, which is the last.
        length = group.low
        expected = np.array([1, (length / 8 - 1) / (length / 8), 0, 0, 0, 0, 0, 8 / length], np.float32)
        for layer in (2, 3):
            np.testing.assert_allclose(group.matrix.values[layer], expected, rtol=1e-6)
    profile = recorder.profile(spec_of(model), selector="ends", created=datetime.now(UTC), prefill=times)
    assert profile.timing() is None  # nobody has measured the link
    assert profile.blocks == 8


@pytest.mark.parametrize("name", ["exact", "quest", "hata"])
def test_the_selection_is_that_of_a_decode(name: str) -> None:
    model, (prompt,) = random_model("llama-gqa"), random_prompts(48)
    selector = create(name)
    recorder, expected = Recorder(LAYERS, blocks=6), Recorder(LAYERS, blocks=6)
    run(model, [prompt], selector, recorder, share=0.25, steps=4)
    with expected.batch([48]) as recording:
        decode_selective_local(model, [prompt], selector, share=0.25, max_new_tokens=5, on_select=recording.add)
    (mine,), (theirs,) = recorder.groups(), expected.groups()
    np.testing.assert_array_equal(mine.matrix.values, theirs.matrix.values)
    # 12 of 48 tokens in each step, layer and head.
    assert mine.matrix.values[2:].mean() == pytest.approx(0.25)


@pytest.mark.parametrize(("share", "steps"), [(0.0, 1), (1.5, 1), (float("nan"), 1), (0.1, 0)])
def test_what_records_nothing_is_refused(share: float, steps: int) -> None:
    with pytest.raises(InvalidArgument):
        run(None, random_prompts(40), create("quest"), Recorder(LAYERS), share=share, steps=steps)
