"""The order of sending where a profile tells KV heads apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.blocks import block_bounds
from kvd.importance.heads import HeadImportance, by_head
from kvd.importance.matrix import ImportanceMatrix
from kvd.transfer.order import Policy
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import SendQueue
from kvd_client.spec import KVSpec, TokenRange, part_layout
from tests.unit.head_profiles import BLOCKS, LAYERS, LENGTH, matrix_of, split


def policy(heads: tuple[int, int] | None, known: HeadImportance | None, mode: str = "profile", **how: Any) -> Policy:
    rows = 1 if heads is None else heads[1]
    profiled = Profiled(matrix_of(known), **how)
    settings_ = Selective(mode, budget="fixed" if how else "deadline")
    return choose_policy(
        mode, settings_, profiled, layers=LAYERS, lengths=(LENGTH,) * rows, token_bytes=1 << 16, heads=heads
    )


def taken(chosen: Policy, rows: int, shares: Any = None) -> list[tuple[int, int, int]]:
    """(layer, row, token) in the order in which they are sent."""
    spec = KVSpec(layers=LAYERS, kv_heads=max(rows, 1), entry_bytes=1 << 16, dtype="float16", model="m")
    layout = part_layout(spec, heads=rows, rows=1, capacity=LENGTH, mask="head")
    queue = SendQueue(layout, (LENGTH,) * rows, chosen)
    queue.add([(layer, TokenRange(row, 0, LENGTH)) for layer in range(LAYERS) for row in range(rows)])
    if shares is not None:
        for layer in range(2, LAYERS):
            assert queue.rank(layer, shares, 0.5)
    found = []
    while some := handed(queue, 1 << 16):
        found += some
    return found


def test_each_head_is_sent_in_its_own_order() -> None:
    order = taken(policy((0, 2), split()), 2)
    assert len(set(order)) == LAYERS * 2 * LENGTH == len(order)
    always = 2 * 2 * LENGTH
    assert all(layer < 2 for layer, _, _ in order[:always]), "layers 0 and 1 come first"
    half = always + 6 * LENGTH  # of the rest
    first = order[always:half]
    own = [(row == 0) == (token < LENGTH // 2) for _, row, token in first]
    assert np.mean(own) > 0.95
    plain = taken(policy((0, 2), None), 2)
    own = [(row == 0) == (token < LENGTH // 2) for _, row, token in plain[always:half]]
    assert np.mean(own) < 0.7, "what tells nothing apart sorts all heads alike"
    assert taken(policy((1, 1), split()), 1) != taken(policy((0, 1), split()), 1), "a rank has its own heads"


def test_classes_never_come_before_the_least() -> None:
    chosen = policy((0, 2), split())
    order = taken(chosen, 2)
    assert chosen.head_factors is not None
    values = {
        layer: by_head(chosen.importance[layer], chosen.head_factors[layer])  # type: ignore[index]
        for layer in range(2, LAYERS)
    }
    bounds = block_bounds(LENGTH, BLOCKS)
    worth = [
        float(values[layer][row, np.searchsorted(bounds, token, side="right") - 1])
        for layer, row, token in order[2 * 2 * LENGTH :]
    ]
    # Within a class the order is by address; over classes it is by worth.
    step = len(worth) // 8
    means = [np.mean(worth[at : at + step]) for at in range(0, len(worth), step)]
    assert means == sorted(means, reverse=True)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_token_goes_once_whatever_is_ranked_meanwhile(data: st.DataObject) -> None:
    lengths = (37, 37, 90, 90)  # two sequences of two heads
    known = Profiled(ImportanceMatrix(np.random.default_rng(2).random((4, 50)), HeadImportance(split().values[:4])))
    chosen = choose_policy("speculative", Selective(), known, layers=4, lengths=lengths, token_bytes=8, heads=(0, 2))
    spec = KVSpec(layers=4, kv_heads=2, entry_bytes=8, dtype="float16", model="m")
    queue = SendQueue(part_layout(spec, heads=2, rows=2, capacity=90, mask="head"), lengths, chosen)
    ready = [(layer, row, at) for layer in range(4) for row in range(4) for at in range(0, lengths[row], 13)]
    data.draw(st.randoms(use_true_random=False)).shuffle(ready)
    gone: list[tuple[int, int, int]] = []
    for number, (layer, row, at) in enumerate(ready):
        queue.add([(layer, TokenRange(row, at, min(at + 13, lengths[row])))])
        if number % 5 == 0:
            shares = np.random.default_rng(number).random((4, 7), np.float32)
            queue.rank(data.draw(st.integers(0, 3)), shares, 0.85)
        if data.draw(st.booleans()):
            gone += handed(queue, data.draw(st.integers(1, 400)))
    queue.finish()
    queue.window()
    while some := handed(queue, 200):
        gone += some
    assert sorted(gone) == [(layer, row, t) for layer in range(4) for row in range(4) for t in range(lengths[row])]
    assert queue.pending_tokens == 0


def handed(queue: SendQueue, room: int) -> list[tuple[int, int, int]]:
    """(layer, row, token) of the next turn."""
    return [
        (layer, each.row, token)
        for layer, ranges in queue.take(room)
        for each in ranges
        for token in range(each.start, each.stop)
    ]


def test_what_the_prompt_selects_counts_against_what_each_head_does() -> None:
    flat = np.full((2, BLOCKS), 0.5, np.float32)
    order = taken(policy((0, 2), split()), 2, flat)[2 * 2 * LENGTH :]
    own = [(row == 0) == (token < LENGTH // 2) for _, row, token in order[: 6 * LENGTH]]
    assert np.mean(own) > 0.85, "queries that prefer nothing leave it to the profile"
    eager = np.full((2, BLOCKS), 0.01, np.float32)
    eager[0, -8:] = 1
    (_, row, token) = taken(policy((0, 2), split()), 2, eager)[2 * 2 * LENGTH]
    assert (row, token >= LENGTH - 16) == (0, True)


def test_where_heads_do_not_count() -> None:
    assert policy(None, split()).head_factors is None, "by token"
    assert policy((0, 2), None).head_factors is None
    assert policy((1, 2), split()).head_factors is None, "heads that the profile does not know"
    assert policy((0, 2), split(), "partial").head_factors is None
    assert policy((0, 2), split(), prefill_s=1.0, transfer_s=4.0).head_factors is None, "equation 2 counts blocks"
