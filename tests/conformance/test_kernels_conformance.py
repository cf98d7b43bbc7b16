"""Every implementation of the kernels against a definition in plain Python, byte for byte."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvd_kernels import native

IMPLEMENTATIONS = kernels.available()
GUARD = 64  # bytes on each side of an output, which nobody may touch
settings.register_profile("kernels", deadline=None, max_examples=80)
SETTINGS = settings(settings.get_profile("kernels"))


@contextmanager
def using(name: Any) -> Iterator[None]:
    before = kernels.select(name)
    try:
        yield
    finally:
        kernels.select(before)


class Guarded:
    """Output memory at a chosen distance from a 64-byte boundary, with guard bytes around."""

    def __init__(self, nbytes: int, offset: int = 0, fill: int = 0x5A) -> None:
        raw = np.full(nbytes + offset + 2 * GUARD + 64, fill, np.uint8)
        begin = -raw.ctypes.data % 64 + GUARD + offset
        self._raw, self._begin, self._end, self._fill = raw, begin, begin + nbytes, fill
        self.memory = raw[begin : begin + nbytes]
        assert nbytes == 0 or self.memory.ctypes.data % 64 == offset % 64

    def intact(self) -> bool:
        around = np.concatenate((self._raw[: self._begin], self._raw[self._end :]))
        return bool((around == self._fill).all())

    def untouched(self) -> bool:
        return self.intact() and bool((self.memory == self._fill).all())


def random_bytes(seed: int, n: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


# ---------------------------------------------------------------- partition


@st.composite
def kv_indices(draw: Any) -> tuple[Any, Any, int]:
    batch, heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 70))
    k, seed = draw(st.integers(0, 45)), draw(st.integers(0, 2**32 - 1))
    remote = draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)))
    rng = np.random.default_rng(seed)
    mask = np.where(rng.random((batch, tokens)) < remote, 2, 1).astype(np.int8)
    index = rng.integers(0, tokens, (batch * heads, k), np.int32)
    return index, mask, heads


def partition_by_definition(index: Any, mask: Any, heads: int) -> tuple[list[list[int]], list[int]]:
    rows, counts = [], []
    for r, row in enumerate(index.tolist()):
        remote = [t for t in row if mask[r // heads, t] == 2]
        rows.append(remote + [t for t in row if mask[r // heads, t] == 1])
        counts.append(len(remote))
    return rows, counts


@SETTINGS
@given(kv_indices(), st.booleans())
def test_partition_is_the_definition(case: tuple[Any, Any, int], in_place: bool) -> None:
    index, mask, heads = case
    rows, expected_counts = partition_by_definition(index, mask, heads)
    for name in IMPLEMENTATIONS:
        given_index = index.copy()
        guarded = Guarded(index.nbytes)
        out = given_index if in_place else guarded.memory.view(np.int32).reshape(index.shape)
        with using(name):
            result, counts = kernels.partition(given_index, mask, heads, out=out)
        assert result is out
        assert result.tolist() == rows, name
        assert counts.tolist() == expected_counts, name
        assert guarded.intact(), name


@SETTINGS
@given(kv_indices(), st.data())
def test_partition_refuses_before_it_writes(case: tuple[Any, Any, int], data: Any) -> None:
    index, mask, heads = case
    tokens = mask.shape[1]
    if index.size == 0:
        index = np.zeros((index.shape[0], 1), np.int32)
    at = data.draw(st.integers(0, index.size - 1))
    row, column = divmod(at, index.shape[1])
    kind = data.draw(st.sampled_from((0, 3, -1, 127, -128, "outside")))
    if kind == "outside":
        index.flat[at] = data.draw(st.sampled_from((-1, tokens, tokens + 1, 2**31 - 1, -(2**31))))
    else:
        # Only this entry may name the token, or an earlier one would be the first to be refused.
        padded = np.concatenate((mask, np.full((mask.shape[0], 1), kind, np.int8)), axis=1)
        mask, index.flat[at] = padded, tokens
    for name in IMPLEMENTATIONS:
        out, counts = Guarded(index.nbytes), Guarded(4 * index.shape[0])
        with using(name), pytest.raises(IndexError, match=rf"index\[{row}, {column}\] is {index.flat[at]}\b"):
            kernels.partition(
                index,
                mask,
                heads,
                out.memory.view(np.int32).reshape(index.shape),
                counts.memory.view(np.int32),
            )
        assert out.untouched(), name
        assert counts.untouched(), name
        before = index.copy()
        with using(name), pytest.raises(IndexError):
            kernels.partition(index, mask, heads, out=index)
        assert (index == before).all(), name


# ---------------------------------------------------------------- token_entries


@SETTINGS
@given(kv_indices(), st.integers(0, 100))
def test_token_entries_is_the_definition(case: tuple[Any, Any, int], room: int) -> None:
    index, mask, heads = case
    tokens = mask.shape[1] + room
    expected = [[(r // heads * tokens + t) * heads + r % heads for t in row] for r, row in enumerate(index.tolist())]
    for name in IMPLEMENTATIONS:
        with using(name):
            assert kernels.token_entries(index, tokens, heads).tolist() == expected, name


def test_token_entries_do_not_overflow_32_bits() -> None:
    index = np.full((6, 1), 2**31 - 2, np.int32)
    for name in IMPLEMENTATIONS:
        with using(name):
            entries = kernels.token_entries(index, 2**31 - 1, 2)
        assert entries[5, 0] == (2 * (2**31 - 1) + 2**31 - 2) * 2 + 1, name


@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
def test_token_entries_refuses_before_it_writes(bad: int) -> None:
    index = np.zeros((4, 9), np.int32)
    index[3, 8] = bad
    for name in IMPLEMENTATIONS:
        out = Guarded(8 * index.size)
        with using(name), pytest.raises(IndexError, match=r"index\[3, 8\]"):
            kernels.token_entries(index, 7, 2, out.memory.view(np.int64).reshape(index.shape))
        assert out.untouched(), name


# ---------------------------------------------------------------- gather, scatter


@st.composite
def moves(draw: Any) -> dict[str, Any]:
    entry_bytes = draw(st.one_of(st.integers(1, 200), st.sampled_from((32, 64, 256, 1152))))
    return {
        "entry_bytes": entry_bytes,
        "entries": draw(st.integers(1, 60)),
        "n": draw(st.integers(0, 90)),
        "dtype": draw(st.sampled_from((np.int32, np.int64))),
        "offset": draw(st.sampled_from((0, 1, 16, 32, 63))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@SETTINGS
@given(moves(), st.booleans())
def test_gather_is_the_definition(case: dict[str, Any], placed: bool) -> None:
    size, entries, n = case["entry_bytes"], case["entries"], case["n"]
    rng = np.random.default_rng(case["seed"])
    source = rng.integers(0, 256, entries * size, np.uint8)
    index = rng.integers(0, entries, n).astype(case["dtype"])
    room = n + 5 if placed else n
    to = rng.integers(0, room, n).astype(np.int64 if case["dtype"] is np.int32 else np.int32)
    expected = np.full((room, size), 0x5A, np.uint8)
    for i in range(n):
        expected[to[i] if placed else i] = source.reshape(entries, size)[index[i]]
    for name in IMPLEMENTATIONS:
        out = Guarded(room * size, case["offset"])
        with using(name):
            kernels.gather(source, size, index, out.memory, to if placed else None)
        assert out.memory.tobytes() == expected.tobytes(), name
        assert out.intact(), name


@SETTINGS
@given(moves())
def test_scatter_is_the_definition(case: dict[str, Any]) -> None:
    size, entries, n = case["entry_bytes"], case["entries"], case["n"]
    rng = np.random.default_rng(case["seed"])
    values = rng.integers(0, 256, n * size, np.uint8)
    index = rng.integers(0, entries, n).astype(case["dtype"])  # repeats included: the last value stays
    expected = np.full((entries, size), 0x5A, np.uint8)
    for i in range(n):
        expected[index[i]] = values.reshape(n, size)[i]
    for name in IMPLEMENTATIONS:
        target = Guarded(entries * size, case["offset"])
        with using(name):
            kernels.scatter(values, size, index, target.memory)
        assert target.memory.tobytes() == expected.tobytes(), name
        assert target.intact(), name


@pytest.mark.parametrize("offset", [0, 32, 1])
@pytest.mark.parametrize("entry_bytes", [96, 100, 256, 1152])
def test_large_moves_are_the_definition(entry_bytes: int, offset: int) -> None:
    """Above 8 MiB the C code streams past the caches, where alignment allows."""
    n = (9 << 20) // entry_bytes + 3
    rng = np.random.default_rng(entry_bytes)
    source = random_bytes(1, n * entry_bytes)
    index, to = rng.integers(0, n, n), rng.permutation(n).astype(np.int32)
    rows = source.reshape(n, entry_bytes)
    gathered, placed, scattered = rows[index], np.empty_like(rows), np.empty_like(rows)
    placed[to] = gathered
    scattered[to] = rows
    for name in IMPLEMENTATIONS:
        out = Guarded(n * entry_bytes, offset)
        with using(name):
            kernels.gather(source, entry_bytes, index, out.memory)
            assert (out.memory == gathered.reshape(-1)).all(), name
            kernels.gather(source, entry_bytes, index, out.memory, to)
            assert (out.memory == placed.reshape(-1)).all(), name
            kernels.scatter(source, entry_bytes, to, out.memory)
            assert (out.memory == scattered.reshape(-1)).all(), name
        assert out.intact(), name


@SETTINGS
@given(moves(), st.data())
def test_moves_refuse_before_they_write(case: dict[str, Any], data: Any) -> None:
    size, entries, n, dtype = case["entry_bytes"], case["entries"], max(case["n"], 1), case["dtype"]
    wide = () if dtype is np.int32 else (2**32, 2**62, -(2**63), 2**63 - 1)
    bad = data.draw(st.sampled_from((-1, entries, entries + 1, 2**31 - 1, -(2**31), *wide)))
    index = np.random.default_rng(case["seed"]).integers(0, entries, n).astype(dtype)
    at = data.draw(st.integers(0, n - 1))
    index[at] = bad
    source, good = np.zeros(entries * size, np.uint8), np.zeros(n, np.int64)
    for name in IMPLEMENTATIONS:
        rows, target = Guarded(n * size), Guarded(entries * size)
        with using(name):
            with pytest.raises(IndexError, match=rf"gather: index\[{at}\] is {bad}\b"):
                kernels.gather(source, size, index, rows.memory)
            with pytest.raises(IndexError, match=rf"gather: index\[{at}\] is {bad}\b"):
                kernels.gather(source, size, index, rows.memory, good)
            with pytest.raises(IndexError, match=rf"gather: to\[{at}\] is {bad}\b"):
                kernels.gather(source, size, good, target.memory, index)
            with pytest.raises(IndexError, match=rf"scatter: index\[{at}\] is {bad}\b"):
                kernels.scatter(np.zeros(n * size, np.uint8), size, index, target.memory)
        assert rows.untouched(), name
        assert target.untouched(), name


# ---------------------------------------------------------------- copy_runs


@st.composite
def run_lists(draw: Any, source_bytes: int, target_bytes: int) -> Any:
    runs = []
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(0, min(source_bytes, target_bytes)))
        s, t = draw(st.integers(0, source_bytes - length)), draw(st.integers(0, target_bytes - length))
        runs.append((s, t, length))
    return np.array(runs, np.int64).reshape(-1, 3)


@SETTINGS
@given(run_lists(300, 200), st.integers(0, 63))
def test_copy_runs_is_the_definition(runs: Any, offset: int) -> None:
    source = random_bytes(2, 300)
    expected = bytearray(b"\x5a" * 200)
    for s, t, n in runs.tolist():
        expected[t : t + n] = source[s : s + n].tobytes()
    for name in IMPLEMENTATIONS:
        target = Guarded(200, offset)
        with using(name):
            kernels.copy_runs(source, target.memory, runs)
        assert target.memory.tobytes() == expected, name
        assert target.intact(), name


@SETTINGS
@given(run_lists(200, 200), st.integers(0, 40))
def test_copy_runs_within_one_memory_moves_each_run_in_turn(runs: Any, shift: int) -> None:
    start = random_bytes(3, 200 + shift)
    expected = bytearray(start.tobytes())
    for s, t, n in runs.tolist():
        expected[shift + t : shift + t + n] = expected[s : s + n]
    for name in IMPLEMENTATIONS:
        memory = start.copy()
        with using(name):
            kernels.copy_runs(memory[:200], memory[shift:], runs)
        assert memory.tobytes() == expected, name


def test_large_copy_runs_are_the_definition() -> None:
    rng = np.random.default_rng(4)
    source = random_bytes(5, 10 << 20)
    runs, at = [], 0
    for length in (*rng.integers(1, 40_000, 60).tolist(), 1023, 1024, 1025, 9 << 20):
        runs.append((int(rng.integers(0, source.size - length)), at, length))
        at += length + int(rng.integers(0, 3))
    expected = np.full(at, 0x5A, np.uint8)
    for s, t, n in runs:
        expected[t : t + n] = source[s : s + n]
    for name in IMPLEMENTATIONS:
        for offset in (0, 1):
            target = Guarded(at, offset)
            with using(name):
                kernels.copy_runs(source, target.memory, np.array(runs, np.int64))
            assert (target.memory == expected).all(), name
            assert target.intact(), name


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    "bad",
    [
        *[(0, 0, 101), (0, 0, -1), (-1, 0, 1), (0, -1, 1), (101, 0, 0), (0, 201, 0), (100, 0, 1), (0, 200, 1)],
        *[(HUGE, 0, 1), (0, HUGE, 1), (1, 1, HUGE), (HUGE, HUGE, HUGE), (-HUGE - 1, 0, HUGE), (60, 0, 41)],
    ],
)
def test_copy_runs_refuses_before_it_writes(bad: tuple[int, int, int]) -> None:
    runs = np.array([(0, 0, 50), (100, 200, 0), bad, (1, 1, 1)], np.int64)
    for name in IMPLEMENTATIONS:
        target = Guarded(200)
        with (
            using(name),
            pytest.raises(IndexError, match=rf"run 2 copies {bad[2]} bytes from {bad[0]} to {bad[1]},"),
        ):
            kernels.copy_runs(np.zeros(100, np.uint8), target.memory, runs)
        assert target.untouched(), name


# ---------------------------------------------------------------- accumulate


def edges(rng: Any, length: int, blocks: int) -> list[int]:
    """A block's first token and the one before it: where an inexact division would show."""
    first = -(-int(rng.integers(0, blocks)) * length // blocks)
    return [min(first, length - 1), max(first - 1, 0)]


@st.composite
def countings(draw: Any) -> dict[str, Any]:
    sequences, heads, k = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 30))
    lengths = [
        draw(st.one_of(st.integers(1, 50), st.integers(1, 200_000), st.integers(2**31 - 9, 2**31 - 1)))
        for _ in range(sequences)
    ]
    starts = [draw(st.integers(0, min(20, 2**31 - 1 - n))) for n in lengths]
    blocks = draw(st.one_of(st.integers(1, 40), st.sampled_from((1000, lengths[0] % 3000 + 1))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [
        np.concatenate((rng.integers(0, n, k), [n - 1, *edges(rng, n, blocks)])) + s
        for s, n in zip(starts, lengths, strict=True)
        for _ in range(heads)
    ]
    return {
        "index": np.array(rows).astype(np.int32),
        "lengths": np.array(lengths, np.int64),
        "starts": np.array(starts, np.int64),
        "blocks": blocks,
        "dtype": draw(st.sampled_from((np.int64, np.float64))),
        "shared": draw(st.booleans()),
    }


@SETTINGS
@given(countings())
def test_accumulate_blocks_is_the_definition(case: dict[str, Any]) -> None:
    index, lengths, starts, blocks = case["index"], case["lengths"], case["starts"], case["blocks"]
    heads = len(index) // len(lengths)
    # Counts that are not whole, as after a decay: additions must come in the same order to give the same bits.
    begin = np.full((1 if case["shared"] else len(lengths), blocks), 0.1 if case["dtype"] is np.float64 else 7)
    begin = begin.astype(case["dtype"])
    expected = begin.copy()
    for r, row in enumerate(index.tolist()):
        s = r // heads
        for t in row:
            block = (t - int(starts[s])) * blocks // int(lengths[s])
            expected[0 if case["shared"] else s, block] += 1
    for name in IMPLEMENTATIONS:
        counts = begin[0].copy() if case["shared"] else begin.copy()
        with using(name):
            kernels.accumulate_blocks(index, counts, lengths, starts)
        assert counts.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("length", [2, 3, 4096, 65_537, 999_983, 2**27 - 39, 2**31 - 1])
@pytest.mark.parametrize("blocks", [5, 997, 100_003])
def test_accumulate_blocks_divides_exactly(length: int, blocks: int) -> None:
    """t * blocks is one less than a multiple of length: the quotient that a rounded reciprocal gets wrong first."""
    t = -pow(blocks, -1, length) % length
    for name in IMPLEMENTATIONS:
        counts = np.zeros(blocks, np.int64)
        with using(name):
            kernels.accumulate_blocks(np.array([[t]], np.int32), counts, length)
        assert np.flatnonzero(counts).tolist() == [t * blocks // length], name


@SETTINGS
@given(countings(), st.data())
def test_accumulate_blocks_refuses_before_it_counts(case: dict[str, Any], data: Any) -> None:
    index, lengths, starts = case["index"], case["lengths"], case["starts"]
    at = data.draw(st.integers(0, index.size - 1))
    s = at // index.shape[1] // (len(index) // len(lengths))
    end = int(starts[s] + lengths[s])
    bad = data.draw(st.sampled_from([-1, -(2**31), int(starts[s]) - 1, min(end, 2**31 - 1)]))
    if bad < end and bad >= starts[s]:
        return  # nothing is beyond 2^31 - 1 tokens
    index.flat[at] = bad
    counts = np.full((len(lengths), case["blocks"]), 3, case["dtype"])
    for name in IMPLEMENTATIONS:
        with using(name), pytest.raises(IndexError, match=rf"is {bad}, but sequence {s} has tokens"):
            kernels.accumulate_blocks(index, counts, lengths, starts)
        assert (counts == 3).all(), name


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_accumulate_blocks_skips_what_was_generated_after_the_prompt(dtype: Any) -> None:
    index = np.array([[2, 5, 11, 12, 40], [4, 4, 13, 3, 2**31 - 1]], np.int32)
    for name in IMPLEMENTATIONS:
        counts = np.zeros((2, 2), dtype)
        with using(name):
            kernels.accumulate_blocks(index, counts, 10, np.array([2, 3], np.int64), beyond="skip")
        assert counts.tolist() == [[2, 1], [3, 0]], name


def test_accumulate_counts_tokens_per_sequence_or_together() -> None:
    index = np.array([[0, 3, 3], [3, 1, 0], [2, 2, 2], [2, 0, 1]], np.int32)
    for name in IMPLEMENTATIONS:
        each, together = np.zeros((2, 4), np.int64), np.zeros(4)
        with using(name):
            kernels.accumulate(index, each)
            kernels.accumulate(index, together)
            with pytest.raises(IndexError, match=r"index\[0, 1\] is 3"):
                kernels.accumulate(index, each[:, :3].copy())
        assert each.tolist() == [[2, 1, 0, 3], [1, 1, 4, 0]], name
        assert together.tolist() == [3, 2, 4, 3], name


# ---------------------------------------------------------------- nothing, threads


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_empty_inputs_are_no_work(name: Any) -> None:
    none = np.empty(0, np.int64)
    with using(name):
        out, counts = kernels.partition(np.empty((0, 5), np.int32), np.empty((0, 9), np.int8), 2)
        assert (out.shape, counts.shape) == ((0, 5), (0,))
        out, counts = kernels.partition(np.empty((2, 0), np.int32), np.empty((1, 0), np.int8), 2)
        assert (out.shape, counts.tolist()) == ((2, 0), [0, 0])
        assert kernels.token_entries(np.empty((0, 5), np.int32), 9, 2).shape == (0, 5)
        assert kernels.token_entries(np.empty((2, 0), np.int32), 9, 2).shape == (2, 0)
        kernels.gather(b"", 4, none, bytearray())
        kernels.gather(b"abcd", 4, none, bytearray(4), none)
        kernels.scatter(b"", 4, none, bytearray(8))
        kernels.copy_runs(b"", bytearray(), np.empty((0, 3), np.int64))
        kernels.copy_runs(b"", bytearray(), np.zeros((2, 3), np.int64))
        kernels.accumulate(np.empty((2, 0), np.int32), np.zeros(3))
        kernels.accumulate_blocks(np.empty((0, 3), np.int32), np.zeros((2, 3)), 5)
        with pytest.raises(IndexError, match="source has 0 entries"):
            kernels.gather(b"", 4, np.zeros(1, np.int64), bytearray(4))
        with pytest.raises(IndexError, match="mask has 0 tokens"):
            kernels.partition(np.zeros((1, 1), np.int32), np.empty((1, 0), np.int8), 1)


ROWS = np.zeros((8, 1 << 17), np.int32)
BYTES = np.zeros(4 << 20, np.uint8)
ENTRIES = np.arange(BYTES.size // 4096)
ROOM = np.zeros((8, 1 << 17), np.int64)  # for results of all kinds
LONG_WORK: dict[str, tuple[Any, ...]] = {
    "partition": (ROWS, np.ones((1, 8), np.int8), 8, ROOM.view(np.int32)[:, : 1 << 17].copy(), np.zeros(8, np.int32)),
    "token_entries": (ROWS, 8, 8, ROOM),
    "gather": (BYTES, 4096, ENTRIES, ROOM.reshape(-1).view(np.uint8)[: BYTES.size], None),
    "scatter": (BYTES, 4096, ENTRIES, ROOM.reshape(-1).view(np.uint8)[: BYTES.size]),
    "copy_runs": (BYTES, ROOM.reshape(-1).view(np.uint8), np.array([[0, 0, BYTES.size]])),
    "accumulate": (ROWS, np.zeros(8), np.array([0]), np.array([8]), False),
}


@pytest.mark.parametrize("op", LONG_WORK)
@pytest.mark.parametrize("name", [n for n in IMPLEMENTATIONS if n != "numpy"])
def test_another_thread_runs_during_long_work(name: Any, op: str) -> None:
    """Nobody is made to give the GIL up here (the switch interval is an hour), so only the kernel lets others run.

    Below kvd_kernels.ops, since NumPy lets others run now and then, too.
    """
    kernel, arguments = getattr(native.load(name), op), LONG_WORK[op]
    gate, ran = threading.Lock(), []

    def other() -> None:
        with gate:
            ran.append(True)

    gate.acquire()
    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()  # returns when the other waits at the gate, for before that nothing takes the GIL from it
        gate.release()
        for _ in range(500):
            assert kernel(*arguments) == -1
            if ran:
                break
        ran_meanwhile = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert ran_meanwhile


@pytest.mark.parametrize("op", ["scatter", "gather", "copy_runs"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_index_that_changes_meanwhile_never_leaves_the_target(name: Any, op: str) -> None:
    """Another process may write to a shared index between our check and our use of it."""
    entries, size = 1 << 14, 256
    index = np.arange(entries)
    runs = np.stack((index * size, index * size, np.full(entries, size)), axis=1)
    values = np.ones(entries * size, np.uint8)
    memory = np.full((entries + 2) * size, 0x5A, np.uint8)
    target = memory[: entries * size]
    calls: dict[str, Callable[[], None]] = {
        "scatter": lambda: kernels.scatter(values, size, index, target),
        "gather": lambda: kernels.gather(values, size, np.arange(entries), target, index),
        "copy_runs": lambda: kernels.copy_runs(values, target, runs),
    }
    running, stop = threading.Event(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            index[-1], runs[-1, 1] = entries + 1, (entries + 1) * size  # would land behind the target
            running.set()
            index[-1], runs[-1, 1] = entries - 1, (entries - 1) * size

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert running.wait(60)
        with using(name):
            for _ in range(10 if name == "numpy" else 50):  # a loop in Python hands over thousands of times in each
                with suppress(IndexError):
                    calls[op]()
    finally:
        stop.set()
        thread.join()
    assert (memory[entries * size :] == 0x5A).all()
