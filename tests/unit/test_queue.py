"""Which ready tokens are sent next: full transfer, ranked blocks, budgets and idle windows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.blocks import block_of
from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget
from kvd.importance.matrix import ImportanceMatrix
from kvd.importance.prompt import Scale, combined
from kvd.transfer import order
from kvd.transfer.order import ROWS, Order, Piece, Policy, Range
from kvd.transfer.policy import RUN_BYTES, Profiled, Selective, choose_policy
from kvd.transfer.queue import MAX_RANGES, ReadyTokens, SendQueue
from kvd.types import Path
from kvd_client.spec import PartLayout, TokenRange

LAYOUT = PartLayout(layers=2, heads=1, entry_bytes=10, rows=3, capacity=8)
LENGTHS = (8, 3, 5)


class Source:
    """What a source part has: what is ready, and the queue of what is to be sent."""

    def __init__(
        self,
        layout: PartLayout = LAYOUT,
        lengths: tuple[int, ...] = LENGTHS,
        policy: Policy | None = None,
        held: tuple[TokenRange, ...] = (),
        windows: tuple[int, ...] = (),
    ) -> None:
        self.tokens = ReadyTokens(layout, lengths)
        self.queue = SendQueue(layout, lengths, policy or Policy(), held=held, windows=windows)

    def ready(self, layer: int, row: int | None, start: int, stop: int) -> None:
        self.queue.add(self.tokens.add(layer, row, start, stop))

    def drain(self, max_bytes: int = 1 << 20) -> list[tuple[int, tuple[TokenRange, ...]]]:
        found = []
        while taken := self.queue.take(max_bytes):
            found += taken
        return found


def test_no_row_means_every_row_clipped_to_its_length() -> None:
    one = Source()
    one.ready(1, None, 2, 6)
    assert one.queue.pending_tokens == 4 + 1 + 3
    assert one.drain() == [(1, (TokenRange(0, 2, 6), TokenRange(1, 2, 3), TokenRange(2, 2, 5)))]
    assert one.queue.pending_tokens == 0


def test_full_transfer_goes_layer_by_layer() -> None:
    one = Source()
    one.ready(1, 0, 0, 2)
    one.ready(0, 0, 0, 2)
    one.ready(1, 0, 2, 4)
    assert one.drain() == [(0, (TokenRange(0, 0, 2),)), (1, (TokenRange(0, 0, 4),))]


def test_a_take_has_at_most_so_many_bytes_and_at_least_a_token() -> None:
    one = Source()
    one.ready(0, None, 0, 8)
    assert one.queue.take(35) == [(0, (TokenRange(0, 0, 3),))]
    assert one.queue.take(1) == [(0, (TokenRange(0, 3, 4),))]
    assert one.queue.take(60) == [(0, (TokenRange(0, 4, 8), TokenRange(1, 0, 2)))]
    assert one.queue.pending_tokens == 1 + 5


def test_neighbours_become_one_range() -> None:
    one = Source()
    for token in range(8):
        one.ready(0, 0, token, token + 1)
    assert one.drain() == [(0, (TokenRange(0, 0, 8),))]


def test_what_was_ready_before_is_not_pushed_again() -> None:
    one = Source()
    one.ready(0, 0, 2, 5)
    one.drain()
    one.ready(0, 0, 0, 8)
    one.ready(0, 0, 0, 8)
    assert one.drain() == [(0, (TokenRange(0, 0, 2), TokenRange(0, 5, 8)))]


def test_what_the_sink_holds_is_not_pushed() -> None:
    one = Source(held=(TokenRange(0, 1, 3), TokenRange(0, 2, 6), TokenRange(1, 0, 3)))
    one.ready(0, 0, 0, 4)
    assert one.queue.pending_tokens == 1
    one.ready(0, None, 0, 8)
    assert one.drain() == [(0, (TokenRange(0, 0, 1), TokenRange(0, 6, 8), TokenRange(2, 0, 5)))]


def test_a_take_has_a_bounded_number_of_ranges() -> None:
    one = Source(PartLayout(layers=1, heads=1, entry_bytes=1, rows=1, capacity=1 << 14), (1 << 14,))
    for token in range(0, 1 << 14, 2):
        one.ready(0, 0, token, token + 1)
    assert [len(ranges) for _, ranges in one.drain()] == [MAX_RANGES] * (8192 // MAX_RANGES)


def test_the_first_token_that_was_never_ready() -> None:
    one = Source()
    assert one.tokens.first_unready() == (0, 0, 0)
    one.ready(0, None, 0, 8)
    one.ready(1, None, 0, 2)
    assert one.tokens.first_unready() == (1, 0, 2)
    one.ready(1, 0, 2, 8)
    assert one.tokens.first_unready() == (1, 1, 2)
    one.ready(1, None, 0, 8)
    assert one.tokens.first_unready() is None


@pytest.mark.parametrize(
    ("ring", "fields"),
    [
        ((2, None, 0, 1), {"layer": 2}),
        ((-1, None, 0, 1), {"layer": -1}),
        ((0, 3, 0, 1), {"layer": 0, "row": 3}),
        ((0, -1, 0, 1), {"layer": 0, "row": -1}),
        ((0, None, 0, 9), {"layer": 0, "start": 0, "stop": 9}),
        ((0, 1, 0, 4), {"layer": 0, "start": 0, "stop": 4}),
        ((1, 1, -1, 2), {"layer": 1, "start": -1, "stop": 2}),
        ((1, 1, 2, 1), {"layer": 1, "start": 2, "stop": 1}),
    ],
)
def test_what_does_not_exist_is_refused_and_nothing_added(
    ring: tuple[int, int | None, int, int], fields: dict[str, int]
) -> None:
    one = Source()
    with pytest.raises(InvalidArgument) as caught:
        one.ready(*ring)
    assert caught.value.fields == fields
    assert one.queue.pending_tokens == 0
    assert one.queue.take(100) == []


# --- ranked blocks ---------------------------------------------------------------------------------------------------

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


def tokens_of(taken: list[tuple[int, tuple[TokenRange, ...]]]) -> list[tuple[int, int, int]]:
    return [(layer, r.row, token) for layer, ranges in taken for r in ranges for token in range(r.start, r.stop)]


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
