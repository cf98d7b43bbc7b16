"""Recording what a prompt selects: prefill and greedy decode in this process, as sources and sinks do them.

Needs torch and transformers; nothing that a daemon imports imports this.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvd.errors import FingerprintMismatch, InvalidArgument
from kvd.profiling import recorded
from kvd.profiling.recorded import SUFFIX, Bits, Recorded, pack
from kvd_client.lanes import NOTHING
from kvd_client.selectors import Selector
from kvd_client.selectors.base import Index


def record(
    model: Any,
    prompt: Sequence[int],
    selector: Selector,
    *,
    share: float = 0.2,
    steps: int = 16,
    chunk: int | None = 256,
    name: str = "",
    model_id: str = "",
) -> Recorded:
    """What ``steps`` decode steps of one prompt (token ids) select, and what its last queries would.

    ``share`` of the tokens are selected in each step. Raises :class:`InvalidArgument` as the engine does.
    """
    from kvd_client.engines import selective
    from kvd_client.engines.prompt import AHEAD, SHARE
    from kvd_client.engines.transformers import spec_of

    spec, length = spec_of(model, model_id), len(prompt)
    stepped = np.zeros((spec.layers, steps, spec.kv_heads, length), np.bool_)
    asked: dict[int, list[Index]] = {}
    taken = [0] * spec.layers

    def on_select(layer: int, index: Index) -> None:
        _set(stepped[layer, taken[layer]], index)
        taken[layer] += 1

    local = selective.LocalTransfer(spec, [length], selector)
    first = selective.prefill_selective(model, [prompt], local, selector, chunk=chunk, on_queries=asked.__setitem__)
    made = selective.decode_selective(
        model, first.tokens, local, selector, share=share, max_new_tokens=steps + 1, mode="full", on_select=on_select
    )
    for _ in made:
        pass
    queries = np.zeros((spec.layers, max(map(len, asked.values()), default=0), spec.kv_heads, length), np.bool_)
    for layer, indices in asked.items():
        for at, index in enumerate(indices):
            _set(queries[layer, at], index)
    return Recorded(
        name=name,
        selector=selector.name,
        parameters=selector.parameters,
        model=spec.model,
        share=share,
        query_share=SHARE,
        length=length,
        steps=_packed(stepped),
        queries=_packed(queries),
        asked_ahead=AHEAD,
    )


@dataclasses.dataclass(frozen=True)
class Recording:
    """A folder of recordings, one file for each prompt of some domains: what it has stays, and what it lacks is made.

    A file is named by its domain, its number and its tokens, so that prompts of other texts are other files.
    """

    folder: Path
    selector: Selector
    model_id: str
    share: float
    steps: int

    def path(self, domain: str, number: int, prompt: Sequence[int]) -> Path:
        """Where the recording of a prompt is."""
        digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).hexdigest()[:8]
        return self.folder / f"{domain}-{number:02d}-{digest}{SUFFIX}"

    def missing(self, prompts: Mapping[str, Sequence[Sequence[int]]]) -> list[tuple[str, Path, Sequence[int]]]:
        """The prompts (token ids, by domain) that have no file yet: domain, path, tokens; the first of each domain,
        then the second, so that a part of them is something of everything.

        Raises :class:`FingerprintMismatch` where the folder has recordings of other prompts, or made in another way,
        :class:`InvalidProfile` for a damaged one, and :class:`InvalidArgument` for a folder that can't be used.
        """
        every = [
            (domain, self.path(domain, number, mine[number]), mine[number])
            for number in range(max(map(len, prompts.values())))
            for domain, mine in prompts.items()
            if number < len(mine)
        ]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = sorted(self.folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise InvalidArgument(f"{self.folder}: can't be used: {(error.strerror or str(error)).lower()}") from None
        known = {path for _, path, _ in every}
        for path in found:
            self._check(path, planned=path in known)
        return [one for one in every if one[1] not in found]

    def _check(self, path: Path, *, planned: bool) -> None:
        if not planned:
            raise FingerprintMismatch(
                f"{path} is of a prompt that these options don't make; give another folder, or the options that it was "
                "made with",
                file=str(path),
            )
        from kvd_client.engines.prompt import AHEAD

        one = recorded.read(path)
        mine = {
            "selector": self.selector.name,
            "parameters": json.loads(json.dumps(self.selector.parameters)),
            "model": self.model_id,
            "share": self.share,
            "steps": self.steps,
            "asked_ahead": AHEAD,
        }
        its = {name: getattr(one, name) for name in mine} | {
            "parameters": dict(one.parameters),
            "steps": one.step_count,
        }
        differences = {name: [its[name], mine[name]] for name in mine if its[name] != mine[name]}
        if differences:
            listed = ", ".join(f"{name} {old!r} instead of {new!r}" for name, (old, new) in differences.items())
            raise FingerprintMismatch(
                f"{path} was recorded with {listed}; give another folder, or the same options", **differences
            )

    def run(
        self, model: Any, missing: Sequence[tuple[str, Path, Sequence[int]]], told: Callable[[Path, int], None]
    ) -> Iterator[Path]:
        """Record what is missing; each file appears whole. ``told(path, number)`` hears before each."""
        for number, (domain, path, prompt) in enumerate(missing):
            told(path, number)
            made = record(
                model,
                prompt,
                self.selector,
                share=self.share,
                steps=self.steps,
                name=domain,
                model_id=self.model_id,
            )
            recorded.write(made, path)
            yield path


def _set(mask: Any, index: Index) -> None:
    for head, row in enumerate(index):
        mask[head, row[row != NOTHING]] = True


def _packed(mask: Any) -> Bits:
    return np.ascontiguousarray(pack(mask))
