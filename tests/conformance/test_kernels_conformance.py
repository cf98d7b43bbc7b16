"""Copies in every implementation of the kernels against a definition in plain Python, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvd_kernels import native

from tests.conformance.kernel_helpers import (
    COMPILED,
    IMPLEMENTATIONS,
    Guarded,
    another_runs_during,
    changing,
    random_bytes,
    using,
)

SETTINGS = settings(deadline=None, max_examples=80)


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


# ---------------------------------------------------------------- nothing, and other threads


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
@pytest.mark.parametrize("name", COMPILED)
def test_another_thread_runs_during_long_work(name: Any, op: str) -> None:
    """Below kvd_kernels.ops, since NumPy lets others run now and then, too."""
    assert another_runs_during(getattr(native.load(name), op), *LONG_WORK[op])


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

    def change() -> None:
        index[-1], runs[-1, 1] = entries + 1, (entries + 1) * size  # would land behind the target
        index[-1], runs[-1, 1] = entries - 1, (entries - 1) * size

    with changing(change), using(name):
        for _ in range(10 if name == "numpy" else 50):  # a loop in Python hands over thousands of times in each
            with suppress(IndexError):
                calls[op]()
    assert (memory[entries * size :] == 0x5A).all()
