"""What a profile says, in numbers small enough to print, and what may be wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.importance.heads import by_head
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.profiling.profile import Profile

SHARES = (0.5, 0.25)
"""Of all blocks, layers 0 and 1 included, for which the expected on-demand ratio is given."""

FEW_PROMPTS = 10
FAR_OFF = 2.0
"""A gap between groups by at least this factor leaves lengths to a matrix of quite another length."""


def summary(profile: Profile) -> dict[str, Any]:
    """Plain values, for JSON and tables: the profile's fields, its groups, its times with the budget at each measured
    length, and :func:`warnings`; not the matrices."""
    return {
        "kvd": profile.kvd,
        "model": profile.model,
        "revision": profile.revision,
        "layers": profile.layers,
        "kv_heads": profile.kv_heads,
        "entry_bytes": profile.entry_bytes,
        "selector": profile.selector,
        "parameters": dict(profile.parameters),
        "blocks": profile.blocks,
        "link_rate": profile.link_rate,
        "created": profile.created.isoformat(),
        "notes": profile.notes,
        "groups": [
            {
                "low": group.low,
                "high": group.high,
                "prompts": group.samples,
                "steps": group.steps,
                "mean": _mean(group.matrix),
                "on_demand_ratio": {str(share): on_demand_ratio(group.matrix, share) for share in SHARES},
                "cells": group.matrix.heads.cells if group.matrix.heads is not None else 0,
                "on_demand_ratio_by_head": {str(share): on_demand_by_head(group.matrix, share) for share in SHARES},
                "positions": positions(group.matrix),
            }
            for group in profile.groups
        ],
        "times": _times(profile),
        "warnings": warnings(profile),
    }


def on_demand_ratio(matrix: ImportanceMatrix, share: float) -> float | None:
    """Expected share of selected entries that is still missing if the most important ``share`` of all blocks was sent,
    layers 0 and 1 left out of the ratio; None where nothing was selected.

    For prompts like those recorded, at the first decode step: later steps find what earlier ones fetched.
    """
    values = matrix.values[ALWAYS_LAYERS:].astype(np.float64)
    total = float(values.sum())
    if not total:
        return None
    sent = matrix.top(int(matrix.values.size * share))[ALWAYS_LAYERS:]
    return float(values[~sent].sum()) / total


def on_demand_by_head(matrix: ImportanceMatrix, share: float) -> float | None:
    """As :func:`on_demand_ratio` with masks by head, where the profile tells heads apart; else None."""
    heads = matrix.heads
    if heads is None or matrix.layers <= ALWAYS_LAYERS:
        return None
    factors, numbers = heads.factors(), range(ALWAYS_LAYERS, matrix.layers)
    values = np.stack([by_head(matrix.values[layer], factors[layer]) for layer in numbers]).astype(np.float64).ravel()
    total = float(values.sum())
    if not total:
        return None
    every = matrix.values.size * heads.heads
    sent = max(0, int(every * share) - ALWAYS_LAYERS * matrix.blocks * heads.heads)
    return float(np.sort(values)[::-1][sent:].sum()) / total


def positions(matrix: ImportanceMatrix, parts: int = 10) -> list[float]:
    """Mean importance of layers 2 on in each tenth of the prompt; empty where there are no such layers."""
    if matrix.layers <= ALWAYS_LAYERS:
        return []
    tenths: list[float] = matrix.resampled(parts).values[ALWAYS_LAYERS:].mean(axis=0).tolist()
    return tenths


def warnings(profile: Profile) -> list[str]:
    """What a usable profile lacks, one sentence each."""
    found = []
    before = None
    for group in profile.groups:
        name = f"the group of {group.low} to {group.high - 1} tokens"
        if before is not None and group.low / before.high >= FAR_OFF:
            found.append(f"no group has {before.high} to {group.low - 1} tokens; record prompts of such lengths")
        before = group
        if group.samples < FEW_PROMPTS:
            found.append(f"{name} has {group.samples} prompts; {FEW_PROMPTS} or more make a steadier profile")
        empty = np.flatnonzero(~group.matrix.values[ALWAYS_LAYERS:].any(axis=1)) + ALWAYS_LAYERS
        if empty.size:
            listed = ", ".join(map(str, empty[:8])) + (" …" if empty.size > 8 else "")
            found.append(f"{name} has no selections in layers {listed}; their blocks go last")
    for name, times in (("prefill", profile.prefill), ("transfer", profile.transfer)):
        if not times:
            found.append(f"the time of {name} was not measured; without it equation 2 gives no budget")
    return found


def _mean(matrix: ImportanceMatrix) -> float | None:
    values = matrix.values[ALWAYS_LAYERS:]
    return float(values.mean(dtype=np.float64)) if values.size else None


def _times(profile: Profile) -> list[dict[str, Any]]:
    """A row for each measured length, with T_p and T_t of the models that are used."""
    timing = profile.timing()
    if timing is None:
        return []
    lengths = sorted({*profile.prefill.tokens, *profile.transfer.tokens})
    everything = profile.layers * profile.blocks
    return [
        {
            "tokens": tokens,
            "prefill_s": timing.prefill_s(tokens),
            "transfer_s": timing.transfer_s(tokens),
            "budget": (budget := timing.budget(profile.layers, profile.blocks, tokens)),
            "budget_share": budget / everything,
        }
        for tokens in lengths
    ]
