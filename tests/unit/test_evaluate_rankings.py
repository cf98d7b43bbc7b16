"""Orders of sending against entries counted one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kvd.blocks import block_of
from kvd.importance.matrix import ImportanceMatrix
from kvd.importance.prompt import WEIGHT
from kvd.profiling.evaluate import rankings
from kvd.profiling.evaluate.statistics import Mean, interval, no_worse
from kvd.profiling.recorded import Recorded, pack
from kvd.transfer.replay import causal_sent

LAYERS, HEADS, STEPS, QUERIES = 5, 2, 18, 20
STEP_SLICES = slice(None), slice(0, 16), slice(0, 1)


def recorded(seed: int, length: int = 23) -> Recorded:
    dice = np.random.default_rng(seed)
    masks = [dice.random((LAYERS, n, HEADS, length)) < 0.3 for n in (STEPS, QUERIES)]
    for mask in masks:
        mask[:2] = False
    return Recorded(
        name="a",
        selector="exact",
        share=0.3,
        query_share=0.3,
        length=length,
        steps=pack(masks[0]),
        queries=pack(masks[1]),
    )


def naive_order(values: np.ndarray) -> list[tuple[int, int]]:
    """(layer, unit), layers 0 and 1 first, then by worth, equal ones by address."""
    units = itertools.product(range(values.shape[0]), range(values.shape[1]))
    return sorted(units, key=lambda at: (-math.inf if at[0] < 2 else -values[at], at))


def naive_sent(values: np.ndarray, share: float, order: str) -> set[tuple[int, int]]:
    budget = round(share * values.size)
    ranked = naive_order(values)
    if order == "global":
        return set(ranked[:budget])
    sent: list[tuple[int, int]] = []
    for layer in range(len(values) - 1):
        while len(sent) < (layer + 1) * budget // (len(values) - 1):
            best = next((at for at in ranked if at[0] <= layer and at not in sent), None)
            if best is None:
                break
            sent.append(best)
    return set(sent)


def naive_ratio(of: Recorded, blocks: int, unit: str, sent: set[tuple[int, int]], steps: slice) -> float:
    mask, missed, selected = of.step_mask()[:, steps], 0, 0
    for layer, _, head, token in np.argwhere(mask).tolist():
        if layer < 2:
            continue
        block = int(block_of(of.length, blocks, [token])[0])
        selected += 1
        missed += (layer, block if unit == "block" else head * blocks + block) not in sent
    return missed / selected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [7, 23, 40])
def test_ratios_are_those_of_entries_counted_one_by_one(seed: int, blocks: int) -> None:
    one = recorded(seed)
    counts = rankings.Counts.of(one, blocks)
    blocks = min(blocks, one.length)
    known = {"some": np.random.default_rng(seed).random(counts.steps.shape).round(1)}  # with equal ones
    found = rankings.ratios(counts, known, sent=(0.5, 0.7))
    for unit, units in (("block", rankings.by_block), ("head", rankings.by_head)):
        worth = {"some": units(known["some"]), "optimal": units(counts.steps)}
        for order, share, name in itertools.product(rankings.ORDERS, (0.5, 0.7), worth):
            sent = naive_sent(worth[name], share, order)
            expected = [naive_ratio(one, blocks, unit, sent, steps) for steps in STEP_SLICES]
            assert found[unit, order, share, name] == pytest.approx(expected), (unit, order, share, name)


@pytest.mark.parametrize("unit", rankings.UNITS)
def test_optimal_is_the_least_that_a_global_order_can_miss(unit: str) -> None:
    counts = rankings.Counts.of(recorded(9), 23)  # a token a block: all units cost and hold the same
    dice = np.random.default_rng(1)
    orders = {str(number): dice.random(counts.steps.shape) for number in range(20)}
    found = rankings.ratios(counts, orders, sent=(0.6,))
    best = found[unit, "global", 0.6, "optimal"][0]
    assert all(found[unit, "global", 0.6, name][0] >= best for name in orders)
    assert best < found[unit, "global", 0.6, "0"][0]


def test_a_link_that_waits_for_layers_sends_no_more_and_misses_no_less() -> None:
    counts = rankings.Counts.of(recorded(3), 23)
    found = rankings.ratios(counts, {}, sent=(0.7, 1.0))
    assert found["block", "causal", 0.7, "optimal"][0] > found["block", "global", 0.7, "optimal"][0]
    ranking = rankings.Ranking(rankings.by_block(counts.steps))
    sent = ranking.sent(0.7, "causal")
    assert sent.sum() == ranking.sent(0.7, "global").sum() == round(0.7 * LAYERS * 23)
    assert ranking.sent(1.0, "global").all()
    assert not sent[-1].any()
    for layer in range(LAYERS - 1):  # from here on only what the last turns carried
        assert sent[layer:].sum() <= -(-(LAYERS - 1 - layer) * sent.sum() // (LAYERS - 1))


def test_the_daemons_own_queue_sends_the_same_in_causal_order() -> None:
    # A token a block and one row: what remains different is how the queue cuts its turns.
    one = recorded(4, length=64)
    counts = rankings.Counts.of(one, 64)
    known = rankings.by_block(rankings.profile([rankings.Counts.of(recorded(seed, 64), 64) for seed in (1, 2, 3)]))
    mine = rankings.Ranking(known).sent(0.6, "causal")
    theirs = causal_sent(ImportanceMatrix(known), None, layers=LAYERS, length=64, sent=0.6)
    assert mine.sum() == theirs.sum()
    assert (mine & theirs).sum() >= 0.95 * mine.sum()
    selected = rankings.by_block(counts.steps)
    assert rankings.on_demand(selected, mine) == pytest.approx(rankings.on_demand(selected, theirs), abs=0.02)


def test_sequential_random_and_streaming_are_what_they_say() -> None:
    counts = rankings.Counts.of(recorded(2), 10)
    by_address = rankings.Ranking(rankings.by_block(rankings.sequential(counts))).sent(0.5, "global")
    assert np.flatnonzero(by_address).tolist() == list(range(25))
    stream = rankings.Ranking(rankings.by_block(rankings.streaming(counts))).sent(0.64, "global")
    assert [np.flatnonzero(row).tolist() for row in stream[2:]] == [[0, 7, 8, 9]] * 3
    one, same, other = (rankings.at_random(counts, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert np.array_equal(one[:, 0], one[:, 1])


def test_prompt_aware_is_the_mean_of_profile_and_queries() -> None:
    one = recorded(5)
    counts = rankings.Counts.of(one, 23)
    known = rankings.profile([rankings.Counts.of(recorded(6), 23), rankings.Counts.of(recorded(7), 23)])
    found = rankings.prompt_aware(known, counts)
    queries = one.query_mask()
    for layer in range(2, LAYERS):
        asked = (queries[layer, -1].astype(float) + 2 * queries[layer].mean(0)) / 3
        scaled = asked * known[layer].mean() / asked.mean()  # on the profile's scale
        assert found[layer] == pytest.approx((1 - WEIGHT) * known[layer] + WEIGHT * scaled, rel=1e-5)


def test_profiles_are_frequencies_and_learning_forgets_by_half() -> None:
    parts = [rankings.Counts.of(recorded(seed), 7) for seed in (1, 2)]
    masks = [recorded(seed).step_mask() for seed in (1, 2)]
    tokens = block_of(23, 7, np.arange(23))
    for part, mask in zip(parts, masks, strict=True):
        for block in range(7):
            assert part.frequency[:, :, block] == pytest.approx(mask[..., tokens == block].mean(axis=(1, 3)))
    assert rankings.profile(parts) == pytest.approx((parts[0].frequency + parts[1].frequency) / 2)
    start = np.zeros_like(parts[0].frequency)
    assert rankings.learnt(start, [parts[0]], 1.0) == pytest.approx(parts[0].frequency / 2)
    assert rankings.learnt(start, [parts[0]] * 3, 3.0) == pytest.approx(parts[0].frequency / 2)
    assert rankings.learnt(start, parts, 1.0) == pytest.approx(parts[0].frequency / 4 + parts[1].frequency / 2)


def test_the_closed_gap_is_a_share_of_the_gap() -> None:
    assert rankings.closed(0.3, 0.22, 0.2) == pytest.approx(0.8)
    assert rankings.closed(0.3, 0.35, 0.2) == pytest.approx(-0.5)
    assert rankings.closed(0.3, 0.3, 0.3) is None


def test_means_have_standard_errors() -> None:
    found = Mean.of([1.0, 2.0, 6.0])
    assert found.value == 3.0
    assert found.error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert Mean.of([2.0]).error is None
    with pytest.raises(ValueError, match="nothing"):
        Mean.of([])


def test_intervals_hold_the_middle_of_what_chance_makes() -> None:
    values = np.random.default_rng(0).normal(5.0, 1.0, (200, 1))
    low, high = interval(values.tolist(), lambda row: float(row[0]))
    error = values.std() / math.sqrt(200)
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.3 * error)
    assert interval([[1.0]], lambda row: math.nan) == []


def test_losses_are_told_from_chance() -> None:
    assert no_worse(0, 0) == 1.0
    assert no_worse(1, 0) == 0.5
    assert no_worse(6, 0) == pytest.approx(1 / 64)
    assert no_worse(3, 3) == pytest.approx(sum(math.comb(6, at) for at in (3, 4, 5, 6)) / 64)
