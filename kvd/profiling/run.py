"""Recording offline: a model runs over texts, and what its decode selects is counted (SmartGen, section 4.1).

Each prompt is prefilled and decoded in this process, greedily, with the selection at work: the queries are those that a
decode with this selection really has. Prefill is timed on the way, the summaries for the selection included, as a
source makes them. Needs torch and transformers; nothing that a daemon imports imports this.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvd.errors import InvalidArgument
from kvd.profiling.recorder import Recorder
from kvd.profiling.timing import Times
from kvd_client.selectors import Selector

WARM_UP = 16
"""Tokens of a run before the first that is timed: memory, caches and kernels are chosen in the first one."""


def cut(texts: Sequence[Sequence[int]], tokens: int, most: int) -> list[Sequence[int]]:
    """At most ``most`` prompts of ``tokens`` tokens: pieces of the texts that share no token, first one of each text,
    then the second of each, and so on. Texts that are too short give none."""

    def pieces(text: Sequence[int]) -> Iterator[Sequence[int]]:
        return (text[start : start + tokens] for start in range(0, len(text) - tokens + 1, tokens))

    turns = itertools.zip_longest(*map(pieces, texts))
    found = (piece for turn in turns for piece in turn if piece is not None)
    return list(itertools.islice(found, most))


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    selector: Selector,
    recorder: Recorder,
    *,
    share: float,
    steps: int,
    on_prompt: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Run prompts (token ids, any lengths) and add what each selects to ``recorder``; returns T_p of each.

    ``share`` of a prompt's tokens are selected in each of ``steps`` decode steps, in layers 2 and following.
    ``on_prompt`` gets the number of prompts done. Raises :class:`InvalidArgument` where ``share``, ``steps`` or a
    prompt makes no sense, and for models that the reference engine can't serve.
    """
    from kvd_client.engines.selective import LocalTransfer, decode_selective, prefill_selective
    from kvd_client.engines.transformers import spec_of

    if steps < 1 or not 0 < share <= 1:
        raise InvalidArgument(
            f"{steps} decode steps that select {share} of a prompt record nothing; give 1 or more, and a share of more "
            "than 0 and at most 1",
            steps=steps,
            share=share,
        )
    spec = spec_of(model)
    seconds = []
    for number, prompt in enumerate(prompts):
        if not number:
            short = prompt[:WARM_UP]
            prefill_selective(model, [short], LocalTransfer(spec, [len(short)], selector), selector)
        local = LocalTransfer(spec, [len(prompt)], selector)
        since = clock()
        first = prefill_selective(model, [prompt], local, selector)
        seconds.append(clock() - since)
        with recorder.batch([len(prompt)]) as recording:
            decoded = decode_selective(
                model,
                first.tokens,
                local,
                selector,
                share=share,
                max_new_tokens=steps + 1,
                mode="full",
                on_select=recording.add,
            )
            for _ in decoded:
                pass
        if on_prompt is not None:
            on_prompt(number + 1)
    return Times(tuple(map(len, prompts)), tuple(seconds))
