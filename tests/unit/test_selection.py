"""The two lanes: what a select returns, fetches, keeps, counts and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_client import lanes
from kvd_client.errors import (
    Busy,
    DeadlineExceeded,
    InvalidArgument,
    LeaseExpired,
    NotFound,
    PeerLost,
)
from kvd_client.spec import MASK_LOCAL, MASKS
from tests.unit.selection_fakes import GARBAGE, FakeDaemon, index_of


class Chaos:
    """Pushes the next of ``pushes`` wherever the code under test takes a step."""

    def __init__(self, daemon: FakeDaemon, pushes: list[tuple[int, int, int, int] | None]) -> None:
        self.daemon, self.pushes = daemon, pushes

    def tick(self) -> None:
        if self.pushes:
            push = self.pushes.pop()
            if push is not None:
                self.daemon.push(*push)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            self.tick()
            result = function(*args, **how)
            self.tick()
            return result

        return call


@st.composite
def scenes(draw: Any) -> tuple[list[int], int, int, list[Any], list[Any]]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    heads, size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 32, 64]))
    k = draw(st.integers(1, 8))
    selects = []
    for _ in range(draw(st.integers(1, 5))):
        rows = [
            draw(st.lists(st.integers(0, length - 1), min_size=min(1, k), max_size=min(k, length), unique=True))
            for length in lengths
            for _ in range(heads)
        ]
        selects.append((draw(st.integers(0, 1)), draw(st.integers(0, 1)), draw(st.booleans()), index_of(*rows)))
    push = st.tuples(st.integers(0, 1), st.integers(0, len(lengths) - 1), st.integers(0, 12), st.integers(0, 12))
    pushes = draw(st.lists(st.none() | push, max_size=60))
    return lengths, heads, size, draw(st.sampled_from(MASKS)), selects, pushes


@settings(max_examples=150, deadline=None)
@given(scenes())
def test_a_select_returns_the_sources_bytes_whatever_arrives_meanwhile(scene: Any) -> None:
    lengths, heads, size, mask, selects, pushes = scene
    daemon = FakeDaemon(lengths, layers=2, heads=heads, entry_bytes=size, capacity=max(lengths) + 1, mask=mask)
    chaos = Chaos(daemon, pushes)
    had: set[tuple[int, int, int]] = set()
    connection = daemon.connection

    def block() -> bool:
        chaos.tick()
        return connection.answer_next()

    connection.on_block = block
    with pytest.MonkeyPatch.context() as patch:
        for name in ("partition", "gather"):
            patch.setattr(lanes, name, chaos.around(getattr(lanes, name)))
        for layer, slot, parallel, index in selects:
            order = np.zeros_like(index)
            before = len(connection.fetches)
            entries = daemon.transfer.select(layer, index, slot=slot, parallel=parallel, order=order)
            assert entries.shape == (*index.shape, size)
            assert np.array_equal(np.sort(order, axis=1), np.sort(index, axis=1))
            assert np.array_equal(entries, daemon.expected(layer, order))
            assert ((order == -1) == (index == -1)).all()
            for fetch in connection.fetches[before:]:
                counts, wanted = np.frombuffer(fetch.counts, np.int32), np.frombuffer(fetch.index, np.int32)
                places = [(layer, i, t) for i, t in zip(np.repeat(np.arange(len(counts)), counts), wanted, strict=True)]
                assert not had.intersection(places), "an entry fetched twice"
                had.update(places)
                for i, n in enumerate(counts):
                    assert np.array_equal(order[i, :n], wanted[counts[:i].sum() :][:n])
            # What was put into the lease is the source's, and nothing else was touched.
            lease = daemon.transfer._layer(layer)
            same = (lease == daemon.source[layer]).all(-1)
            local = (daemon.mask_by_head(layer) == MASK_LOCAL).copy()
            for at, i, t in had:
                if at == layer:
                    assert local[i // heads, t, i % heads] or not daemon.layout.keeps_fetched
                    local[i // heads, t, i % heads] = True
            assert same[local].all()
            assert (lease[~local] == GARBAGE).all()


def test_the_remote_lane_comes_first_and_both_keep_their_order() -> None:
    daemon = FakeDaemon([10], heads=1)
    daemon.push(2, 0, 0, 5)
    order = np.zeros((1, 6), np.int32)
    daemon.transfer.select(2, index_of([7, 1, 9, 0, 4, 6]), order=order)
    assert order.tolist() == [[7, 9, 6, 1, 0, 4]]
    (fetch,) = daemon.connection.fetches
    assert (fetch.layer, fetch.slot, fetch.counts, fetch.index) == (
        2,
        0,
        np.array([3], np.int32).tobytes(),
        np.array([7, 9, 6], np.int32).tobytes(),
    )


def test_nothing_is_asked_for_when_everything_is_local() -> None:
    daemon = FakeDaemon([6, 4])
    for row in range(2):
        daemon.push(0, row, 0, 6)
    index = index_of([0, 5], [1, 2], [3, 0], [2, 1])
    assert np.array_equal(daemon.transfer.select(0, index), daemon.expected(0, index))
    assert daemon.connection.sent == []


def test_fetched_entries_are_kept_for_their_head_only() -> None:
    daemon = FakeDaemon([8])
    daemon.transfer.select(1, index_of([3, 4], [5, 6]))
    entries = daemon.transfer.select(1, index_of([4, 3], [6, 5]))
    assert np.array_equal(entries, daemon.expected(1, index_of([4, 3], [6, 5])))
    assert len(daemon.connection.fetches) == 1
    daemon.transfer.select(1, index_of([5, 4], [5, 3]))  # token 5 for head 0, token 3 for head 1 are new
    assert np.frombuffer(daemon.connection.fetches[1].index, np.int32).tolist() == [5, 3]
    assert np.frombuffer(daemon.connection.fetches[1].counts, np.int32).tolist() == [1, 1]
    assert (daemon.mask(1)[0] == 2).all(), "the shared mask is the source's to write"
    daemon.transfer.select(2, index_of([3, 4], [5, 6]))  # another layer knows nothing of it
    assert len(daemon.connection.fetches) == 3


def test_the_local_lane_is_loaded_before_the_answer_in_parallel_and_after_it_otherwise() -> None:
    for parallel in (True, False):
        daemon = FakeDaemon([8], heads=1)
        daemon.push(2, 0, 0, 4)
        seen: list[bool] = []

        def block(daemon: FakeDaemon = daemon, seen: list[bool] = seen) -> bool:
            local = daemon.transfer.lanes.landing_rows(0, 4)[0, 2:]
            seen.append(bool(np.array_equal(local, daemon.expected(2, index_of([0, 1]))[0])))
            return daemon.connection.answer_next()

        daemon.connection.on_block = block
        index = index_of([0, 6, 1, 7])
        order = np.zeros_like(index)
        entries = daemon.transfer.select(2, index, parallel=parallel, order=order)
        assert seen == [parallel]
        assert np.array_equal(entries, daemon.expected(2, order))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (index_of([0], [10]), "index"),
        (index_of([0], [-2]), "index"),
        (index_of([0], [7]), "padded tokens"),
        (index_of([0, 1], [10, -1]), "token 10"),
        (np.array([[-1, 0], [0, 1]], np.int32), "-1 stands before"),
        (np.zeros((2, 1), np.int64), "int32"),
        (np.zeros((3, 1), np.int32), r"\(2, k\)"),
        (np.zeros(2, np.int32), r"\(2, k\)"),
        (np.zeros((2, 9), np.int32), "landing_entries"),
    ],
)
def test_a_bad_index_is_refused_before_anything_is_touched(index: Any, says: str) -> None:
    daemon = FakeDaemon([7], capacity=9)
    before = daemon.memory.bytes.copy()
    with pytest.raises(InvalidArgument, match=says):
        daemon.transfer.select(0, index)
    assert np.array_equal(daemon.memory.bytes, before)
    assert daemon.connection.sent == []
    good = index_of([6], [0])
    assert np.array_equal(daemon.transfer.select(0, good), daemon.expected(0, good))


@pytest.mark.parametrize(
    "order", [np.zeros((2, 1), np.int8), np.zeros((1, 2), np.int32), np.broadcast_to(np.int32(0), (2, 1)), [[0], [0]]]
)
def test_an_order_that_could_not_take_positions_is_refused_before_anything_is_sent(order: Any) -> None:
    daemon = FakeDaemon([300])
    with pytest.raises(InvalidArgument, match=r"order must be an int32 array of shape \(2, 1\)"):
        daemon.transfer.select(0, index_of([299], [0]), order=order)
    assert daemon.connection.sent == []


def test_layers_and_slots_that_do_not_exist() -> None:
    daemon = FakeDaemon([7])
    for layer, slot in ((3, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(InvalidArgument):
            daemon.transfer.select(layer, index_of([0], [0]), slot=slot)
    without = FakeDaemon([7], landing_entries=0, slots=0)
    with pytest.raises(InvalidArgument, match="landing_entries"):
        without.transfer.select(0, index_of([0], [0]))


def test_a_fetch_that_fails_raises_the_daemons_error_and_disturbs_nothing() -> None:
    daemon = FakeDaemon([7])
    connection = daemon.connection
    connection.on_block = lambda: connection.serve(connection.unanswered.popleft(), NotFound("no such transfer"))
    with pytest.raises(NotFound, match="no such transfer"):
        daemon.transfer.select(0, index_of([1], [2]))
    connection.on_block = connection.answer_next
    assert np.array_equal(daemon.transfer.select(0, index_of([1], [2])), daemon.expected(0, index_of([1], [2])))
    counters = daemon.transfer.selection_counters()
    assert (counters.selects[0], counters.fetched[0]) == (1, 2)


def test_a_source_that_has_delivered_everything_need_not_answer() -> None:
    daemon = FakeDaemon([7])
    connection = daemon.connection

    def block() -> None:
        daemon.push(0, 0, 0, 7)
        connection.serve(connection.unanswered.popleft(), NotFound("the source has released it"))

    connection.on_block = block
    assert np.array_equal(daemon.transfer.select(0, index_of([1], [2])), daemon.expected(0, index_of([1], [2])))
    assert daemon.transfer.selection_counters().fetched[0] == 0


def test_a_transfer_that_ends_while_a_fetch_is_under_way() -> None:
    daemon = FakeDaemon([7])
    daemon.connection.on_block = lambda: daemon.fail(PeerLost("the peer is gone"))
    with pytest.raises(PeerLost):
        daemon.transfer.select(0, index_of([1], [2]))
    assert daemon.connection.replies == {}, "nobody waits for the answer any more"
    other = FakeDaemon([7])
    other.connection.on_block = other.transfer.release
    with pytest.raises(LeaseExpired):
        other.transfer.select(0, index_of([1], [2]))
    with pytest.raises(LeaseExpired):
        other.transfer.select(0, index_of([1], [2]))


def test_memory_that_is_taken_away_meanwhile_is_not_returned() -> None:
    daemon = FakeDaemon([7])
    daemon.push(0, 0, 0, 7)
    pending = daemon.transfer.prepare_select(0, index_of([1], [2]))
    pending.submit()
    daemon.memory.retire()
    with pytest.raises(LeaseExpired):
        pending.wait()


def test_a_slot_is_busy_until_its_answer_has_come() -> None:
    daemon = FakeDaemon([7])
    connection = daemon.connection
    connection.on_block = None
    with pytest.raises(DeadlineExceeded):
        daemon.transfer.select(0, index_of([1], [2]), timeout_s=0.0)
    daemon.push(0, 0, 3, 5)  # even what needs no fetch would get into its way
    for again in (index_of([1], [2]), index_of([3], [4])):
        with pytest.raises(Busy, match="slot 0"):
            daemon.transfer.select(0, again)
    assert len(connection.fetches) == 1
    connection.on_block = lambda: connection.serve(connection.unanswered.pop())
    other = index_of([5], [6])
    assert np.array_equal(daemon.transfer.select(0, other, slot=1), daemon.expected(0, other))
    connection.on_block = None
    connection.answer_next()
    assert np.array_equal(daemon.transfer.select(0, other), daemon.expected(0, other))


def test_waiting_again_after_a_timeout_goes_on() -> None:
    daemon = FakeDaemon([7])
    connection = daemon.connection
    connection.on_block = None
    pending = daemon.transfer.prepare_select(0, index_of([1], [2]))
    pending.submit()
    assert not pending.done
    with pytest.raises(DeadlineExceeded):
        pending.wait(0.0)
    connection.answer_next()
    assert pending.done
    for _ in range(2):
        assert np.array_equal(pending.wait(), daemon.expected(0, index_of([1], [2])))
    assert daemon.transfer.selection_counters().selects[0] == 1


def test_a_selection_does_not_take_what_came_into_its_slot_later() -> None:
    daemon = FakeDaemon([7])
    daemon.connection.on_block = None
    late = daemon.transfer.prepare_select(0, index_of([1], [2]))
    late.submit()
    with pytest.raises(DeadlineExceeded):
        late.wait(0.0)
    daemon.connection.answer_next()
    daemon.push(0, 0, 3, 5)
    entries = daemon.transfer.select(0, index_of([3], [4]))
    with pytest.raises(InvalidArgument, match="slot 0"):
        late.wait()
    assert np.array_equal(entries, daemon.expected(0, index_of([3], [4])))
    assert (daemon.transfer._layer(0)[0, :3] == GARBAGE).all(), "nothing was kept under a wrong name"


def test_fetches_are_answered_in_any_order() -> None:
    daemon = FakeDaemon([7], heads=1, slots=3)
    transfer, connection = daemon.transfer, daemon.connection
    one = np.array([1], np.int32)
    handles = [transfer.begin_fetch(layer, layer, one, np.array([layer + 3], np.int32)) for layer in range(3)]
    assert len(connection.fetches) == 3
    for layer in (2, 0, 1):
        assert not handles[layer].done
        connection.serve(connection.fetches[layer])
        handles[layer].wait()
        got = transfer.lanes.landing_rows(layer, 1)
        assert np.array_equal(got, daemon.expected(layer, index_of([layer + 3])))
        handles[layer].wait()
    assert connection.replies == {}


@pytest.mark.parametrize(
    ("counts", "index", "says"),
    [
        ([1, 1], [0, 7], "token 7"),
        ([1, 1], [0, -1], "token -1"),
        ([1, 1, 1, 1], [0, 0, 0, 3], "of a row that has 3"),
        ([1], [0], "4 counts"),
        ([1, 0, 0, 1], [0], "sum"),
        ([2, -1, 0, 0], [0], "sum"),
        ([8, 0, 0, 0], [0] * 8, "opened for 7"),
    ],
)
def test_begin_fetch_refuses_what_does_not_fit(counts: list[int], index: list[int], says: str) -> None:
    daemon = FakeDaemon([7, 3])
    if len(counts) == 2:
        counts = [*counts, 0, 0]
    with pytest.raises(InvalidArgument, match=says):
        daemon.transfer.begin_fetch(0, 0, np.array(counts, np.int32), np.array(index, np.int32))
    with pytest.raises(InvalidArgument, match="int32"):
        daemon.transfer.begin_fetch(0, 0, np.array(counts), np.array(index))
    assert daemon.connection.sent == []


def test_a_fetch_too_large_for_a_message_is_refused() -> None:
    daemon = FakeDaemon([300_000], layers=1, heads=1, entry_bytes=1, landing_entries=300_000, slots=1)
    with pytest.raises(InvalidArgument, match="too large"):
        daemon.transfer.begin_fetch(0, 0, np.array([300_000], np.int32), np.arange(300_000, dtype=np.int32))
