"""Weights of the demo's selector: trained on other texts than the demo's prompt, once, and then kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvd.demo import importance, texts
from kvd.demo.model import cache_folder
from kvd.errors import InvalidArgument, InvalidProfile
from kvd.profiling import calibration, files
from kvd_client import selectors
from kvd_client.selectors import weights

FORM = 1
"""Grows when training changes, so that an old result isn't taken for a new one."""
PROMPTS, TOKENS = 4, 512


def find(model: Any, tokenizer: Any, name: str, folder: Path, selector: str, told: calibration.Told) -> Path | None:
    """The file of a selector's weights for a model (in ``folder``); None for one that is not trained. Made now if it
    is not there, from the first of :data:`kvd.demo.importance.SOURCES`; ``told`` hears of it."""
    kind = selectors.parse(selector)
    if not kind.trained:
        return None
    training = {"bits": kind.parameters["bits"]} if "bits" in kind.parameters else {}
    key = json.dumps([FORM, name, importance.fingerprint(folder), kind.name, training, PROMPTS, TOKENS])
    path = cache_folder() / "weights" / f"{kind.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    if path.exists():
        try:
            weights.read(path)
            return path
        except (InvalidProfile, InvalidArgument):
            path.unlink(missing_ok=True)  # it can be made again
    from kvd_client.engines.transformers import spec_of

    sources = importance.source_texts()[:PROMPTS]
    prompts = [texts.prompt_ids(tokenizer, text, "", TOKENS) for text in sources]
    most = min(TOKENS, int(model.config.get_text_config(decoder=True).max_position_embeddings))
    made = calibration.train(
        kind.name,
        model,
        [prompt[:most] for prompt in prompts],
        spec=spec_of(model, name),
        told=told,
        notes=f"kvd demo: {', '.join(importance.SOURCES[:PROMPTS])}",
        **training,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{path.parent}: can't be made: {error.strerror}", file=str(path.parent)) from None
    files.replace_file(path, weights.encode(made))
    return path
