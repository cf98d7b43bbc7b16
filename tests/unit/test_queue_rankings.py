"""What the prompt's own queries say of a layer reorders what is unsent of it, and loses and repeats nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.blocks import block_of
from kvd.importance.matrix import ImportanceMatrix
from kvd.importance.prompt import Scale, combined
from kvd.transfer import order
from kvd.transfer.order import ROWS, Order, Piece, Policy, Range
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd_client.spec import PartLayout, TokenRange
from tests.unit.queue_helpers import Source, tokens_of

RANKED = PartLayout(layers=5, heads=1, entry_bytes=10, rows=2, capacity=16)


def ranked_policy(matrix: ImportanceMatrix | None, *, budget: str = "deadline", mode: str = "parallel") -> Policy:
    return choose_policy(
        mode,
        Selective(budget=budget, blocks=8),
        Profiled(matrix=matrix, prefill_s=1.0, transfer_s=2.0),
        layers=5,
        lengths=(16, 10),
        token_bytes=1 << 20,
    )


def some_profile(blocks: int = 8) -> ImportanceMatrix:
    return ImportanceMatrix(np.random.default_rng(3).random((5, blocks)))


@pytest.mark.parametrize("profile", [some_profile(), some_profile(3), None])
def test_a_ranking_decides_about_what_is_unsent_of_its_layer(profile: ImportanceMatrix | None) -> None:
    one = Source(RANKED, (16, 10), ranked_policy(profile))
    one.ready(3, None, 0, 16)
    shares = np.zeros((2, 8), np.float32)
    shares[0, 5], shares[1, 2] = 1.0, 1.0
    assert one.queue.rank(3, shares, 1.0)
    assert one.queue.pending_tokens == 26
    # Of row 0 (16 tokens) block 5 is tokens 10 and 11, of row 1 (10 tokens) block 2 is token 3.
    blocks = 8 if profile is None else profile.blocks
    taken = tokens_of(one.queue.take(one.queue.layout.token_bytes))
    assert taken[0][:2] == (3, 0)
    if blocks == 8:
        assert taken == [(3, 0, 10)]
        assert tokens_of(one.queue.take(20)) == [(3, 0, 11), (3, 1, 3)]
    everything = taken + tokens_of(one.drain())
    assert len(everything) == len(set(everything))
    assert one.queue.pending_tokens == 0


def test_a_ranking_before_tokens_are_ready_holds_for_them() -> None:
    early, late = (Source(RANKED, (16, 10), ranked_policy(some_profile())) for _ in range(2))
    shares = np.random.default_rng(4).random((2, 8)).astype(np.float32)
    early.queue.rank(2, shares, 2 / 3)
    early.ready(2, None, 0, 16)
    late.ready(2, None, 0, 16)
    late.queue.rank(2, shares, 2 / 3)
    assert early.drain(10) == late.drain(10)


def test_a_ranked_layer_takes_its_place_among_the_others() -> None:
    """What the queries want goes before other layers' blocks, and what they don't want behind."""
    one = Source(RANKED, (16, 10), ranked_policy(some_profile()))
    for layer in (2, 3, 4):
        one.ready(layer, None, 0, 16)
    shares = np.zeros((2, 8), np.float32)
    shares[:, 0] = 1.0
    assert one.queue.rank(4, shares, 1.0)
    order = tokens_of(one.drain(10))
    wanted = [at for at, (layer, _, token) in enumerate(order) if layer == 4 and token < 2]
    unwanted = [at for at, (layer, _, token) in enumerate(order) if layer == 4 and token >= 2]
    # With what is wanted of layer 4 goes what is in the first class of the others, and nothing else before it.
    first = (one.queue.policy.classes[2:4] == one.queue.policy.classes[2:].min()).sum()
    assert max(wanted) < len(wanted) + 2 * 2 * first
    assert min(unwanted) > len(order) / 2


@pytest.mark.parametrize(
    ("policy", "layer"),
    [
        (Policy(), 3),
        (ranked_policy(some_profile(), budget="fixed"), 3),
        (ranked_policy(some_profile(), mode="partial"), 3),
        (ranked_policy(some_profile()), 1),
    ],
)
def test_where_the_order_is_not_importances_a_ranking_changes_nothing(policy: Policy, layer: int) -> None:
    plain, one = (Source(RANKED, (16, 10), policy) for _ in range(2))
    for source in (plain, one):
        source.ready(layer, None, 0, 16)
    assert not one.queue.rank(layer, np.random.default_rng(4).random((2, 8)).astype(np.float32), 1.0)
    assert one.drain(10) == plain.drain(10)


def test_tokens_out_of_every_window_stay_last() -> None:
    one = Source(RANKED, (16, 10), ranked_policy(some_profile()), windows=(0, 0, 0, 4, 0))
    one.ready(3, None, 0, 16)
    one.queue.rank(3, np.eye(2, 8, dtype=np.float32), 1.0)
    order = [(row, token) for _, row, token in tokens_of(one.drain(10))]
    visible = {(0, token) for token in range(12, 16)} | {(1, token) for token in range(6, 10)}
    assert set(order[:8]) == visible


def test_a_batch_is_sorted_a_few_rows_at_a_time_and_only_when_their_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 3 * ROWS + 1
    layout = PartLayout(layers=5, heads=1, entry_bytes=10, rows=rows, capacity=16)
    one = Source(layout, (16,) * rows, ranked_policy(some_profile()))
    cuts: list[tuple[int, int]] = []
    cut = Order.cut

    def watched(self: Order, layer: int, group: int, ranges: list[Range]) -> list[Piece]:
        cuts.append((layer, group))
        return cut(self, layer, group, ranges)

    monkeypatch.setattr(Order, "cut", watched)
    for layer in range(5):
        one.ready(layer, None, 0, 16)
    best = np.arange(rows) % 8
    assert one.queue.rank(3, np.eye(8, dtype=np.float32)[best], 1.0)
    assert cuts == []
    sent = tokens_of(one.queue.take(10))
    assert cuts == [(0, 0)]
    sent += tokens_of(one.drain(10 * 16 * rows))
    assert sorted(cuts) == [(layer, group) for layer in range(5) for group in range(4)], "each once"
    wanted = [(3, row, 2 * int(block) + i) for row, block in enumerate(best) for i in range(2)]
    assert [token for token in sent if token[0] == 3][: len(wanted)] == wanted
    assert len(sent) == len(set(sent)) == 5 * 16 * rows
    assert one.queue.pending_tokens == 0


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_goes_next_is_the_first_by_class_layer_and_position(data: st.DataObject) -> None:
    """At any time, whatever became ready or was ranked when, and however many rows are cut together."""
    lengths = tuple(data.draw(st.lists(st.integers(1, 16), min_size=2, max_size=2)))
    profile = some_profile(data.draw(st.integers(1, 20)))
    blocks = min(profile.blocks, max(lengths))
    policy = choose_policy("profile", Selective(), Profiled(profile), layers=5, lengths=lengths, token_bytes=1 << 20)
    assert policy.classes is not None
    assert policy.importance is not None
    scale = Scale.of_classes(policy.importance, policy.classes)
    classes = {(layer, row): policy.classes[layer] for layer in range(5) for row in range(2)}
    windows = data.draw(st.sampled_from([(), (0, 0, 4, 9, 0)]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "ROWS", data.draw(st.sampled_from([1, 8])))
        one = Source(RANKED, lengths, policy, windows=windows)

        def place(token: tuple[int, int, int]) -> tuple[int, int, int, int]:
            layer, row, at = token
            hidden = windows and windows[layer] and at < lengths[row] - windows[layer]
            block = int(block_of(lengths[row], blocks, at))
            return 1 << 14 if hidden else int(classes[layer, row][block]), *token

        waits: set[tuple[int, int, int]] = set()
        for what in data.draw(st.lists(st.sampled_from(["ready", "rank", "take"]), max_size=25)):
            layer = data.draw(st.integers(0, 4))
            if what == "ready":
                start, stop = sorted(data.draw(st.tuples(*[st.integers(0, max(lengths))] * 2)))
                new = one.tokens.add(layer, None, start, stop)
                one.queue.add(new)
                waits |= set(tokens_of([(at, (piece,)) for at, piece in new]))
            elif what == "rank":
                shares = np.random.default_rng(data.draw(st.integers(0, 99))).random((2, blocks)).astype(np.float32)
                if one.queue.rank(layer, shares, 0.75):
                    found = scale.classes(combined(policy.importance[layer], shares, 0.75))
                    classes |= {(layer, row): found[row] for row in range(2)}
            else:
                count = data.draw(st.integers(1, 40))
                taken = tokens_of(one.queue.take(10 * count))
                # Of one write's tokens those of a layer are together.
                assert sorted(taken, key=place) == sorted(waits, key=place)[:count]
                for layer in range(5):
                    mine = [token for token in taken if token[0] == layer]
                    assert mine == sorted(mine, key=place)
                waits -= set(taken)


@given(
    st.lists(st.tuples(st.sampled_from(["ready", "rank", "take", "finish", "window"]), st.integers(0, 2**32 - 1))),
    st.sampled_from([1, 4]),
)
@settings(max_examples=200, deadline=None)
def test_rankings_lose_and_repeat_nothing(script: list[tuple[str, int]], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "ROWS", at_once)
        rankings_lose_and_repeat_nothing(script)


def rankings_lose_and_repeat_nothing(script: list[tuple[str, int]]) -> None:
    policy = ranked_policy(some_profile(), mode="speculative")
    one = Source(RANKED, (16, 10), policy, held=(TokenRange(0, 3, 5),))
    rung: set[tuple[int, int, int]] = set()
    sent: list[tuple[int, int, int]] = []
    for what, seed in [*script, ("finish", 0), ("window", 0)]:
        rng = np.random.default_rng(seed)
        layer = int(rng.integers(5))
        path = one.queue.path
        if what == "ready":
            start, stop = sorted(rng.integers(0, 17, 2).tolist())
            one.ready(layer, None, start, stop)
            rung |= {(layer, r, t) for r, n in enumerate((16, 10)) for t in range(start, min(stop, n))}
        elif what == "rank":
            one.queue.rank(layer, rng.random((2, int(rng.integers(1, 20)))).astype(np.float32), float(rng.random()))
            assert one.queue.path is path
        elif what == "take":
            sent += tokens_of(one.queue.take(int(rng.integers(1, 100))))
        elif what == "finish":
            one.queue.finish()
        else:
            one.queue.window()
    sent += tokens_of(one.drain())
    assert len(sent) == len(set(sent))
    assert set(sent) == {(layer, row, token) for layer, row, token in rung if row or not 3 <= token < 5}
