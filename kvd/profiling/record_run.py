"""Recording what a prompt selects: prefill and greedy decode in this process, as sources and sinks do them.

Needs torch and transformers; nothing that a daemon imports imports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvd.profiling.recorded import Bits, Recorded, pack
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
    from kvd_client.engines.prompt import SHARE
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
    )


def _set(mask: Any, index: Index) -> None:
    for head, row in enumerate(index):
        mask[head, row[row != NOTHING]] = True


def _packed(mask: Any) -> Bits:
    return np.ascontiguousarray(pack(mask))
