"""The real model finds a number in a long prompt with a tenth of its entries, if the selection knows where it is.

``kvd profile evaluate`` measures this on many prompts; this is the least of it that a change must not break.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd.demo import importance, inference, texts
from kvd.demo import model as demo_model
from kvd.profiling.calibration import train
from kvd_client.engines.forced import forced, prompt_state
from kvd_client.selectors import Selector, create

TOKENS, DEPTH, NUMBER = 512, 0.3, "48213"
QUESTION = "What is the special magic number? Answer with the number."


@pytest.mark.model
def test_a_number_is_found_with_infinigen_and_hata_and_not_with_streaming() -> None:
    folder = demo_model.cached()
    if folder is None:
        pytest.skip("the model is not in the cache folder; run kvd demo once")
    model, tokenizer = inference.load(folder)
    document = tokenizer.encode(texts.default_text(), add_special_tokens=False)
    room = TOKENS - 100
    before, behind = (
        tokenizer.decode(document[: int(DEPTH * room)]),
        tokenizer.decode(document[int(DEPTH * room) : room]),
    )
    needle = f"\n\nThe special magic number is {NUMBER}. Remember it.\n\n"
    prompt = texts.prompt_ids(tokenizer, before + needle + behind, QUESTION, TOKENS)
    lead = tokenizer.encode("The special magic number is ", add_special_tokens=False)
    digits = tokenizer.encode(NUMBER, add_special_tokens=False)
    state = prompt_state(model, [*prompt, *lead[:-1]], chunk=256)
    other = texts.prompt_ids(tokenizer, importance.source_texts()[0], "", 256)
    infinigen = create("infinigen", weights=train("infinigen", model, [other]))
    ways: dict[str, tuple[Selector | None, float]] = {
        "full": (None, 1.0),
        "infinigen 20 %": (infinigen, 0.2),
        "infinigen 10 %": (infinigen, 0.1),
        "hata 20 %": (create("hata"), 0.2),
        "hata ahead 20 %": (create("hata", ahead=True), 0.2),
        "streaming 20 %": (create("streaming"), 0.2),
    }
    found = {}
    for name, (selector, share) in ways.items():
        run = forced(model, state, [lead[-1], *digits[:-1]], selector, share=share)
        found[name] = run.logits.argmax(1).tolist() == digits
    assert found == {name: not name.startswith("streaming") for name in ways}
