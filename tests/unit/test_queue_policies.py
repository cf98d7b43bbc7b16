"""Which ready tokens a selective transfer sends next: ranked blocks, budgets and idle windows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget
from kvd.importance.matrix import ImportanceMatrix
from kvd.transfer.policy import RUN_BYTES, Profiled, Selective, choose_policy
from kvd.types import Path
from kvd_client.spec import PartLayout, TokenRange
from tests.unit.queue_helpers import Source

DEEP = PartLayout(layers=5, heads=1, entry_bytes=4, rows=1, capacity=40)


def matrix(layers: int = 5, blocks: int = 10, seed: int = 0) -> ImportanceMatrix:
    values = np.random.default_rng(seed).random((layers, blocks)).astype(np.float32)
    values[:2] = np.inf
    return ImportanceMatrix(values)


def source(mode: str, lengths: tuple[int, ...] = (40,), known: Profiled | None = None, **settings: object) -> Source:
    known = known or Profiled(matrix())
    policy = choose_policy(
        mode, Selective(**{"speculative": "windows", **settings}), known, layers=5, lengths=lengths, token_bytes=1 << 20
    )  # type: ignore[arg-type]
    return Source(msgspec.structs.replace(DEEP, rows=len(lengths)), lengths, policy)


def everything(one: Source) -> None:
    for layer in range(5):
        one.ready(layer, None, 0, max(one.tokens.lengths))


def blocks_of(taken: list[tuple[int, tuple[TokenRange, ...]]]) -> list[tuple[int, int]]:
    """(layer, block) in order; blocks of 4 tokens, whole."""
    return [(layer, start // 4) for layer, ranges in taken for r in ranges for start in range(r.start, r.stop, 4)]


def test_blocks_go_in_order_of_importance() -> None:
    one = source("profile")
    everything(one)
    order = []
    while taken := one.queue.take(16):  # a block at a time
        order += blocks_of(taken)
    expected = [(int(block) // 10, int(block) % 10) for block in matrix().order()]
    assert order == expected


def test_an_important_late_layer_overtakes_blocks_that_wait() -> None:
    one = source("profile")
    best = next(int(b) for b in matrix().order() if b >= 40)  # the most important block of layer 4
    for layer in range(4):
        one.ready(layer, None, 0, 40)
    one.queue.take(2 * 160)  # layers 0 and 1
    one.ready(4, None, 0, 40)
    order = blocks_of(one.drain(16))
    place = order.index((4, best % 10))
    later = order[place + 1 :]
    ranks = matrix().ranks()
    assert all(ranks[block] > ranks[4, best % 10] for block in later)
    assert place < len(order) - 1


def test_the_deadline_budget_ends_with_the_first_token_but_not_for_the_layers_that_decode_needs_whole() -> None:
    one = source("parallel")
    everything(one)
    one.queue.take(160)
    one.queue.finish()
    assert one.queue.path is Path.PROACTIVE
    rest = one.drain()
    assert rest == [(1, (TokenRange(0, 0, 40),))]
    assert one.queue.path is None
    assert one.queue.pending_tokens == 3 * 40


def test_the_fixed_budget_is_equation_2() -> None:
    known = Profiled(matrix(), prefill_s=1.0, transfer_s=2.0)
    one = source("parallel", known=known, budget="fixed")
    everything(one)
    sent = blocks_of(one.drain(16))
    assert len(sent) == block_budget(5, 10, 1.0, 2.0) == 20
    ranks = matrix().ranks()
    assert {int(ranks[block]) for block in sent} == set(range(20))
    one.queue.finish()
    assert one.drain() == []


def test_partial_transfer_sends_the_first_blocks_by_address() -> None:
    one = source("partial", known=Profiled(matrix(), prefill_s=1.5, transfer_s=2.0))
    everything(one)
    budget = block_budget(5, 10, 1.5, 2.0)
    assert sorted(blocks_of(one.drain(16))) == [(b // 10, b % 10) for b in range(budget)]


def test_low_load_is_full_transfer() -> None:
    one = source("speculative", known=Profiled(matrix(), prefill_s=9.0, transfer_s=2.0), budget="fixed")
    everything(one)
    assert len(blocks_of(one.drain())) == 50


def test_windows_bring_a_share_of_everything_in_order_and_save_up_no_more_than_one_iteration() -> None:
    one = source("speculative", share=0.1)
    everything(one)
    one.queue.take(2 * 160)
    one.queue.finish()
    assert one.drain() == []
    counts = []
    for _ in range(5):
        one.queue.window()
        counts.append(sum(r.stop - r.start for _, ranges in one.drain() for r in ranges))
    assert sum(counts) == 20  # a tenth of 5 layers of 40 tokens
    for _ in range(50):
        one.queue.window()
    assert sum(r.stop - r.start for _, ranges in one.drain() for r in ranges) == 20


def test_adaptive_speculation_starts_with_the_first_window_and_then_goes_on() -> None:
    one = source("speculative", speculative="adaptive")
    everything(one)
    one.queue.take(2 * 160)
    one.queue.finish()
    assert one.drain() == []  # the first decode step needs the link for its fetches
    one.queue.window()
    assert sum(r.stop - r.start for _, ranges in one.drain() for r in ranges) == 3 * 40


def test_a_short_prompt_has_few_classes_so_that_writes_are_not_small() -> None:
    wide = choose_policy("profile", Selective(), Profiled(matrix()), layers=5, lengths=(40,), token_bytes=1 << 20)
    small = choose_policy("profile", Selective(), Profiled(matrix()), layers=5, lengths=(40,), token_bytes=4)
    assert wide.classes is not None
    assert small.classes is not None
    assert len(np.unique(wide.classes)) == 50
    assert len(np.unique(small.classes)) <= 8 + 4  # behind layers 0 and 1 four quarters and two halves for two


def test_what_always_goes_has_its_own_classes_and_what_is_next_the_smallest() -> None:
    ten = ImportanceMatrix.sequential(30, 1000)
    policy = choose_policy("profile", Selective(), Profiled(ten), layers=30, lengths=(2000,), token_bytes=1536)
    assert policy.classes is not None
    always, rest = np.bincount(policy.classes[:2].ravel()), np.bincount(policy.classes[2:].ravel())
    assert not always[: len(rest)][rest[: len(always)] > 0].any()
    step = -(-30_000 // (2000 * 1536 // RUN_BYTES))
    assert always.tolist() == [step, 2000 - step]
    assert rest[len(always) :].tolist()[:8] == [step // 4] * 4 + [step // 2] * 2 + [step] * 2
    assert rest.sum() == 28_000


def test_without_speculation_the_rest_waits_for_fetches() -> None:
    one = source("parallel")
    everything(one)
    one.queue.finish()
    one.drain()
    one.queue.window()
    assert one.drain() == []


def test_a_sliding_window_layer_sends_what_it_can_still_see_first() -> None:
    one = Source(DEEP, (40,), windows=(0, 8, 0, 8, 0))
    everything(one)
    order = one.drain(40)
    late = [(layer, ranges) for layer, ranges in order if layer in (1, 3) and ranges[0].start < 32]
    assert order[-len(late) :] == late
    assert sum(r.stop - r.start for _, ranges in order for r in ranges) == 200


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(InvalidArgument, match="choose one of full, partial"):
        choose_policy("fast", Selective(), Profiled(), layers=5, lengths=(40,), token_bytes=4)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_each_token_is_handed_out_once_whatever_the_policy_and_the_order_of_events(data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    mode = data.draw(st.sampled_from(["full", "partial", "profile", "parallel", "speculative"]))
    known = Profiled(
        matrix(blocks=data.draw(st.integers(1, 60)), seed=data.draw(st.integers(0, 9))),
        prefill_s=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        transfer_s=data.draw(st.sampled_from([0.0, 1.0])),
    )
    one = source(mode, lengths, known, budget=data.draw(st.sampled_from(["fixed", "deadline"])), share=0.3)
    seen: set[tuple[int, int, int]] = set()
    rung: set[tuple[int, int, int]] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["ready", "ready", "take", "window", "finish"])):
            case "ready":
                layer, start = data.draw(st.integers(0, 4)), data.draw(st.integers(0, max(lengths)))
                stop = data.draw(st.integers(start, max(lengths)))
                one.ready(layer, None, start, stop)
                rung |= {(layer, r, t) for r, n in enumerate(lengths) for t in range(start, min(stop, n))}
            case "take":
                limit = data.draw(st.integers(1, 400))
                taken = one.queue.take(limit)
                tokens = [(layer, r.row, t) for layer, ranges in taken for r in ranges for t in range(r.start, r.stop)]
                assert len(tokens) * 4 <= max(4, limit)
                assert len(set(tokens)) == len(tokens)
                assert not seen & set(tokens)
                seen |= set(tokens)
            case "window":
                one.queue.window()
            case _:
                one.queue.finish()
        assert seen <= rung
        assert one.queue.pending_tokens == len(rung) - len(seen)
    if mode == "full":
        one.drain()
        assert one.queue.pending_tokens == 0
