"""Orders of sending, judged offline by what decode steps really selected.

A unit is what an order ranks: a KV block of one layer, or of one layer and KV head. Layers 0 and 1 are sent first in
any order, as decode needs all of them. The on-demand ratio is the share of the entries selected in later layers that
had not been sent when decode began; nothing is sent, and nothing fetched is kept, after that.

Two ways to send ``sent`` of all units while prefill runs:

- ``global``: the whole order is known at the start (a reused prefix, or a ranking after prefill);
- ``causal``: layer l's blocks, and what is known of its queries, exist once layer l is computed. While each layer but
  the first runs, the link carries the same amount, and takes the best of what exists; the last layer's blocks come too
  late (as :func:`kvd.transfer.replay.causal_sent` has it, which runs the daemon's own queue).

The pure part of the evaluation: NumPy arrays in, numbers out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.importance.prompt import combined, mixed
from kvd.profiling.recorded import Recorded

Values = npt.NDArray[np.float64]
"""(layers, units of a layer): what a unit is worth, the more the earlier it is sent. Units of a layer with heads are
head by head."""
Sent = npt.NDArray[np.bool_]

SENT = (0.5, 0.25, 0.1)
ORDERS = ("global", "causal")
EARLY = 16
"""Steps: after about as many, speculation has sent the rest of a transfer."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """How one prompt's selections fall into blocks, float64 (layers, KV heads, blocks) each."""

    tokens: Values
    """Tokens of each block, (blocks,)."""
    steps: Values
    """Selections in all decode steps; ``early`` in the first :data:`EARLY` of them, ``first`` in the very first."""
    early: Values
    first: Values
    asked: Values
    """(c_1 + 2 c_w) / 3 of the prompt's last queries, as prefill hands it to the daemon."""
    step_count: int

    @classmethod
    def of(cls, recorded: Recorded, blocks: int) -> Counts:
        """``blocks`` a layer, fewer where the prompt has fewer tokens."""
        blocks = min(blocks, recorded.length)
        every = recorded.shares(recorded.query_count, blocks, heads=True)
        return cls(
            tokens=np.diff(block_bounds(recorded.length, blocks)).astype(np.float64),
            steps=recorded.counts(blocks, heads=True).astype(np.float64),
            early=recorded.counts(blocks, steps=slice(0, EARLY), heads=True).astype(np.float64),
            first=recorded.counts(blocks, steps=0, heads=True).astype(np.float64),
            asked=mixed(recorded.shares(1, blocks, heads=True), every),
            step_count=recorded.step_count,
        )

    @property
    def frequency(self) -> Values:
        """The share of steps in which a token of the block was selected, (layers, KV heads, blocks)."""
        return self.steps / (self.tokens * self.step_count)


def profile(prompts: Sequence[Counts], weights: Sequence[float] | None = None) -> Values:
    """The mean frequency of some prompts of one length, (layers, KV heads, blocks); each prompt weighs the same, or as
    ``weights`` say."""
    return np.average([one.frequency for one in prompts], axis=0, weights=weights)


def learnt(start: Values, prompts: Sequence[Counts], half_life: float) -> Values:
    """What a profile becomes that follows the workload: after each prompt, what was known before weighs half as much
    as ``half_life`` prompts before."""
    keep, found = 0.5 ** (1.0 / half_life), start
    for one in prompts:
        found = keep * found + (1.0 - keep) * one.frequency
    return found


def prompt_aware(known: Values, counts: Counts) -> Values:
    """F, the profile d and the prompt's queries, as the daemon ranks by it (:mod:`kvd.importance.prompt`); all
    (layers, KV heads, blocks)."""
    shares = counts.asked.reshape(len(known), 1, -1).astype(np.float32)
    profiles = known.reshape(len(known), -1).astype(np.float32)
    found = [combined(mine, its)[0] for mine, its in zip(profiles, shares, strict=True)]
    return np.stack(found).reshape(known.shape).astype(np.float64)


def streaming(counts: Counts, sinks: int = 1) -> Values:
    """The first block, then the newest ones, in every layer and head."""
    layers, heads, blocks = counts.steps.shape
    worth = np.arange(blocks, dtype=np.float64)
    worth[:sinks] = blocks
    return np.broadcast_to(worth, (layers, heads, blocks)).copy()


def sequential(counts: Counts) -> Values:
    """By address: layer after layer, from the first token on."""
    layers, heads, blocks = counts.steps.shape
    worth = -np.arange(layers * blocks, dtype=np.float64).reshape(layers, 1, blocks)
    return np.broadcast_to(worth, (layers, heads, blocks)).copy()


def at_random(counts: Counts, seed: int) -> Values:
    """Uniform; the same for all heads of a block, so that it is an order of blocks too."""
    layers, heads, blocks = counts.steps.shape
    worth = np.random.default_rng(seed).random((layers, 1, blocks))
    return np.broadcast_to(worth, (layers, heads, blocks)).copy()


def by_block(values: Values) -> Values:
    """(layers, KV heads, blocks) to units of blocks: the mean over the heads, (layers, blocks)."""
    found: Values = values.mean(axis=1)
    return found


def by_head(values: Values) -> Values:
    """(layers, KV heads, blocks) to units of blocks and heads: (layers, KV heads * blocks)."""
    return values.reshape(len(values), -1)


UNITS = {"block": by_block, "head": by_head}


class Ranking:
    """Units in order of their worth, layers 0 and 1 first; equal ones by address, as the daemon has them.

    ``values``: (layers, units of a layer).
    """

    def __init__(self, values: Values) -> None:
        worth = values.copy()
        worth[:ALWAYS_LAYERS] = np.inf
        self._form = values.shape
        self._order = np.argsort(-worth, axis=None, kind="stable")
        self._layers = self._order // values.shape[1]

    def sent(self, share: float, order: str) -> Sent:
        """Which units have been sent when decode begins, in the shape of the values."""
        budget = round(share * len(self._order))
        found = np.zeros(len(self._order), np.bool_)
        if order == "global":
            found[self._order[:budget]] = True
            return found.reshape(self._form)
        turns, gone = self._form[0] - 1, 0
        waiting = np.ones(len(self._order), np.bool_)  # by place in the order
        for layer in range(turns):
            quota = (layer + 1) * budget // turns - gone
            best = np.flatnonzero(waiting & (self._layers <= layer))[:quota]
            waiting[best] = False
            gone += len(best)
        found[self._order[~waiting]] = True
        return found.reshape(self._form)


def on_demand(selections: Values, sent: Sent) -> float:
    """The share of ``selections`` (units as in ``sent``) in units that were not sent, layers 0 and 1 left out; 0 where
    nothing was selected."""
    chosen, there = selections[ALWAYS_LAYERS:], sent[ALWAYS_LAYERS:]
    total = float(chosen.sum())
    return float(chosen[~there].sum()) / total if total else 0.0


Ratios = dict[tuple[str, str, float, str], tuple[float, float, float]]
"""By unit, order of the transfer, share sent and ranking: on-demand ratio of all steps, the early ones, the first."""


def ratios(counts: Counts, rankings: Mapping[str, Values], *, sent: Sequence[float] = SENT) -> Ratios:
    """On-demand ratios of one prompt. ``rankings`` are (layers, KV heads, blocks); ``optimal`` is added, which knows
    what the steps will select."""
    found: Ratios = {}
    for unit, units in UNITS.items():
        steps = [units(each) for each in (counts.steps, counts.early, counts.first)]
        for name, values in (*rankings.items(), ("optimal", counts.steps)):
            ranking = Ranking(units(values))
            for order in ORDERS:
                for share in sent:
                    gone = ranking.sent(share, order)
                    every, early, first = (on_demand(each, gone) for each in steps)
                    found[unit, order, share, name] = every, early, first
    return found


def closed(profile: float, found: float, optimal: float) -> float | None:
    """The share of the gap from a profile's ratio to the optimal one that a ranking closes; None without a gap."""
    return (profile - found) / (profile - optimal) if profile > optimal else None
