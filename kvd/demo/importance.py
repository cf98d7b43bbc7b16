"""The profile behind the demo's importance: recorded from other texts than the demo's prompt, once, and then kept."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvd.demo import texts
from kvd.demo.model import cache_folder
from kvd.errors import InvalidArgument, InvalidProfile
from kvd.profiling import files
from kvd.profiling.profile import Profile
from kvd.profiling.recorder import Recorder, group_range
from kvd.profiling.run import run
from kvd_client.selectors import Selector

FORM = 3
"""Grows when recording changes, so that an old result isn't taken for a new one."""
SHARE = 0.1
"""Selected while recording, whatever the demo selects: the order of blocks depends little on it."""
STEPS = 8
SOURCES = (
    *("argparse", "statistics", "difflib", "_pydecimal", "inspect", "tarfile"),
    *("doctest", "optparse", "turtle", "typing", "pickle", "shutil"),
)
"""Modules of the standard library whose sources are the texts; the demo's own are chapters about the language."""
QUESTIONS = ("What does this module do?", "Which functions above would you call first, and why?")


def profile(
    model: Any,
    tokenizer: Any,
    name: str,
    folder: Path,
    selector: Selector,
    tokens: int,
    told: Callable[[int, int], None],
) -> tuple[Profile, Path]:
    """The profile of a model (in ``folder``) and algorithm for prompts of ``tokens`` tokens, and its file.

    Recorded now if it is not there: a prompt from each of :data:`SOURCES`, as short as the lengths that share a group
    with ``tokens`` allow. ``told(done, total)`` hears of it.
    """
    low = max(group_range(tokens)[0], texts.MIN_TOKENS)
    key = json.dumps([FORM, name, fingerprint(folder), selector.name, selector.parameters, low])
    path = cache_folder() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.kvdprofile"
    if path.exists():
        try:
            return files.read(path), path
        except (InvalidProfile, InvalidArgument):
            path.unlink(missing_ok=True)  # it can be made again
    from kvd_client.engines.transformers import spec_of

    spec = spec_of(model, name)
    prompts = [
        texts.prompt_ids(tokenizer, text, question, low)
        for text, question in zip(source_texts(), itertools.cycle(QUESTIONS), strict=False)
    ]
    told(0, len(prompts))
    recorder = Recorder(spec.layers)
    times = run(
        model,
        prompts,
        selector,
        recorder,
        share=SHARE,
        steps=STEPS,
        on_prompt=lambda done: told(done, len(prompts)),
    )
    made = recorder.profile(
        spec,
        selector=selector.name,
        parameters=selector.parameters | {"share": SHARE},
        prefill=times,
        created=datetime.now(UTC),
        notes=f"kvd demo: {', '.join(SOURCES)}",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{path.parent}: can't be made: {error.strerror}", file=str(path.parent)) from None
    files.write(made, path)
    return made, path


def described(made: Profile, path: Path) -> dict[str, Any]:
    """What the demo tells of a profile."""
    group = made.groups[0]
    return {
        "file": path.name,
        "prompts": group.samples,
        "steps": group.steps,
        "lengths": f"{group.low}-{group.high - 1}",
    }


def timed(made: Profile, tokens: int, prefill_s: float, transfer_s: float, link: int) -> Profile:
    """The profile with T_p and T_t as they are here, which decide the budget of equation 2."""
    from kvd.profiling.timing import Times

    return dataclasses.replace(
        made,
        prefill=Times((tokens,), (prefill_s,)),
        transfer=Times((tokens,), (transfer_s,)),
        link_rate=link,
    )


def source_texts() -> list[str]:
    """The texts of :data:`SOURCES` that this Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for module in SOURCES:
        path = folder / f"{module}.py"
        if path.is_file():
            found.append(path.read_text(encoding="utf-8"))
    if not found:
        raise InvalidArgument(
            f"this Python has no sources in {folder}, from which the demo records importance; choose --mode full"
        )
    return found


def fingerprint(folder: Path) -> list[Any]:
    """What tells one model's folder from another's without reading its weights."""
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    weights = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    return [config, weights]
