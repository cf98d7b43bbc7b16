"""What the kernels refuse, in which words, and how an implementation is picked."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest

INDEX = np.zeros((4, 3), np.int32)
MASK = np.ones((2, 8), np.int8)
FLAT = np.zeros(3, np.int64)
RUNS = np.array([[0, 0, 4]], np.int64)


def unaligned(dtype: Any, n: int) -> Any:
    return np.zeros(n * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kernels.partition(INDEX.astype(np.int64), MASK, 2), TypeError, "index is a int64 array"),
        (lambda: kernels.partition(INDEX.tolist(), MASK, 2), TypeError, "index is a list"),
        (lambda: kernels.partition(INDEX.astype(">i4"), MASK, 2), TypeError, "index is a >i4 array"),
        (lambda: kernels.partition(INDEX, MASK.astype(np.uint8), 2), TypeError, "mask is a uint8 array"),
        (lambda: kernels.partition(INDEX[0], MASK, 2), ValueError, r"index has shape \(3,\)"),
        (lambda: kernels.partition(INDEX, MASK, 3), ValueError, "makes 6 rows with 3 heads"),
        (lambda: kernels.partition(INDEX, MASK, 0), ValueError, "heads is 0"),
        (lambda: kernels.partition(INDEX, MASK, 2.0), TypeError, "heads is a float"),
        (lambda: kernels.partition(INDEX[:, ::2], MASK, 2), ValueError, "index is not contiguous"),
        (lambda: kernels.partition(INDEX, MASK[:, ::2], 2), ValueError, "mask is not contiguous"),
        (lambda: kernels.partition(unaligned(np.int32, 12).reshape(4, 3), MASK, 2), ValueError, "aligned"),
        (lambda: kernels.partition(INDEX, MASK, 2, INDEX[:, :2].copy()), ValueError, r"must be \(4, 3\)"),
        (lambda: kernels.partition(INDEX, MASK, 2, read_only(INDEX)), ValueError, "out is read-only"),
        (lambda: kernels.partition(INDEX, MASK, 2, None, FLAT), TypeError, "counts is a int64 array"),
        (lambda: kernels.token_entries(INDEX, 8, 3), ValueError, "not a multiple of 3 heads"),
        (lambda: kernels.token_entries(INDEX, 0, 2), ValueError, "tokens is 0"),
        (lambda: kernels.token_entries(INDEX, 8, 2, INDEX.copy()), TypeError, "out is a int32 array"),
        (lambda: kernels.gather(b"abcd", 3, FLAT, bytearray(9)), ValueError, "source has 4 bytes, no whole"),
        (lambda: kernels.gather(b"abcd", 4, FLAT, bytearray(8)), ValueError, "room for 2 entries"),
        (lambda: kernels.gather(b"abcd", 4, FLAT, bytearray(16)), ValueError, "room for 4 entries"),
        (lambda: kernels.gather(b"abcd", 4, FLAT, b"x" * 12), ValueError, "out is read-only"),
        (lambda: kernels.gather(b"abcd", 0, FLAT, bytearray(12)), ValueError, "entry_bytes is 0"),
        (lambda: kernels.gather(b"abcd", -4, FLAT, bytearray(12)), ValueError, "entry_bytes is -4"),
        (lambda: kernels.gather(b"abcd", True, FLAT, bytearray(3)), TypeError, "entry_bytes is a bool"),
        (lambda: kernels.gather([1, 2], 1, FLAT, bytearray(3)), TypeError, "source is a list without"),
        (lambda: kernels.gather(b"abcd", 4, FLAT, bytearray(12), FLAT[:2]), ValueError, "they go in pairs"),
        (lambda: kernels.gather(b"abcd", 4, FLAT.astype(np.uint64), bytearray(12)), TypeError, "uint64"),
        (lambda: kernels.gather(b"abcd", 4, unaligned(np.int64, 3), bytearray(12)), ValueError, "aligned"),
        (lambda: kernels.gather(np.zeros((4, 4))[:, :2], 8, FLAT, bytearray(24)), ValueError, "view of"),
        (lambda: kernels.gather(memoryview(b"abcdefgh")[::2], 4, FLAT, bytearray(12)), ValueError, "view of"),
        (lambda: kernels.gather(np.array([None]), 8, FLAT, bytearray(24)), TypeError, "Python objects"),
        (lambda: kernels.scatter(b"abcd", 4, FLAT, bytearray(12)), ValueError, "values has 1 entries"),
        (lambda: kernels.scatter(b"abcdefghijkl", 4, FLAT, bytearray(13)), ValueError, "no whole number"),
        (lambda: kernels.scatter(b"abcdefghijkl", 4, FLAT, b"x" * 12), ValueError, "target is read-only"),
        (lambda: kernels.copy_runs(b"abcd", bytearray(4), RUNS[:, :2].copy()), ValueError, r"\(runs, 3\)"),
        (lambda: kernels.copy_runs(b"abcd", bytearray(4), RUNS.astype(np.int32)), TypeError, "int32 array"),
        (lambda: kernels.copy_runs(b"abcd", b"abcd", RUNS), ValueError, "target is read-only"),
        (lambda: kernels.accumulate(INDEX, np.zeros(8, np.float32)), TypeError, "counts is a float32 array"),
        (lambda: kernels.accumulate(INDEX, np.zeros((3, 8))), ValueError, "among 3 sequences"),
        (lambda: kernels.accumulate(INDEX, np.zeros((2, 0))), ValueError, "no cells"),
        (lambda: kernels.accumulate(INDEX, read_only(np.zeros(8))), ValueError, "counts is read-only"),
        (lambda: kernels.accumulate_blocks(INDEX, np.zeros(8), 0), ValueError, "lengths must be from 1"),
        (lambda: kernels.accumulate_blocks(INDEX, np.zeros(8), 2**70), ValueError, "lengths must be from 1"),
        (lambda: kernels.accumulate_blocks(INDEX, np.zeros(8), 8, -1), ValueError, "starts must be from 0"),
        (lambda: kernels.accumulate_blocks(INDEX, np.zeros(8), [8, 8]), TypeError, "lengths is a list"),
        (lambda: kernels.accumulate_blocks(INDEX, np.zeros((2, 8)), FLAT + 1), ValueError, "3 values for 2"),
        (lambda: kernels.accumulate_blocks(INDEX, np.zeros(8), 8, 0, "drop"), ValueError, "beyond is 'drop'"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        call()
    assert type(caught.value) is error


def test_results_that_overlap_their_inputs_are_refused() -> None:
    memory = np.zeros(96, np.uint8)
    index = np.zeros((4, 3), np.int32)
    mask = index.view(np.int8)[:2]
    for call in (
        lambda: kernels.partition(index, mask, 2, index),
        lambda: kernels.partition(index, MASK, 2, None, index.reshape(-1)[:4]),
        lambda: kernels.partition(index[:2], MASK, 1, index[:2].copy(), index.reshape(-1)[4:6]),
        lambda: kernels.partition(index[:2], MASK, 1, index.reshape(-1)[3:9].reshape(2, 3)),
        lambda: kernels.token_entries(
            memory[:48].view(np.int32).reshape(4, 3), 8, 2, memory.view(np.int64).reshape(4, 3)
        ),
        lambda: kernels.gather(memory, 8, FLAT, memory[8:32]),
        lambda: kernels.gather(bytes(96), 8, memory[:24].view(np.int64), memory[16:40]),
        lambda: kernels.gather(bytes(96), 8, FLAT, memory, memory[:24].view(np.int64)),
        lambda: kernels.scatter(memory[:24], 8, FLAT, memory[16:]),
        lambda: kernels.scatter(bytes(24), 8, memory[:24].view(np.int64), memory),
        lambda: kernels.copy_runs(bytes(96), memory, memory[:24].view(np.int64).reshape(1, 3)),
        lambda: kernels.accumulate(memory[:48].view(np.int32).reshape(4, 3), memory[40:].view(np.int64)),
    ):
        with pytest.raises(ValueError, match="overlaps"):
            call()


def test_memory_of_any_kind_is_taken_as_bytes() -> None:
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    index = np.array([2, 0], np.int32)
    expected = values[[2, 0]].tobytes()
    out = bytearray(16)
    for source in (
        values,
        values.tobytes(),
        bytearray(values.tobytes()),
        memoryview(values),
        values.view("V2"),
    ):
        out[:] = bytes(16)
        kernels.gather(source, 8, index, out)
        assert out == expected
    as_array = np.zeros((2, 4), np.float16)
    kernels.gather(values, 8, index, memoryview(as_array))
    assert as_array.tobytes() == expected


def test_the_local_lane_lands_behind_the_remote_one() -> None:
    """The way of an on-demand fetch: partition, gather the local entries, receive the remote ones at the row heads."""
    batch, tokens, heads, k, size = 2, 16, 3, 7, 32
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (batch * tokens * heads, size), np.uint8)
    mask = rng.integers(1, 3, (batch, tokens), np.int8)
    index = np.stack([rng.permutation(tokens)[:k] for _ in range(batch * heads)]).astype(np.int32)
    wanted, counts = kernels.partition(index, mask, heads)
    entries = kernels.token_entries(wanted, tokens, heads)
    local = np.arange(k) >= counts[:, None]
    selected = np.zeros((batch * heads, k, size), np.uint8)
    kernels.gather(pool, size, entries[local], selected, np.flatnonzero(local))
    assert not selected[~local].any()
    kernels.gather(pool, size, entries[~local], selected, np.flatnonzero(~local))
    by_hand = pool.reshape(batch, tokens, heads, size)
    for r in range(batch * heads):
        assert (selected[r] == by_hand[r // heads, wanted[r], r % heads]).all()
        assert sorted(wanted[r]) == sorted(index[r])


def test_select_changes_the_implementation_and_says_so() -> None:
    before = kernels.select("numpy")
    try:
        assert kernels.implementation() == "numpy"
        assert "select" in (kernels.why_not_native() or "")
        with pytest.raises(ValueError, match="choose one of avx2, baseline, numpy"):
            kernels.select("sse9")  # type: ignore[arg-type]
        assert kernels.implementation() == "numpy"
    finally:
        kernels.select(before)
    assert kernels.implementation() == before


SAY = "import kvd_kernels as k; print(k.implementation(), k.available(), k.why_not_native(), sep='|')"
HIDE = "import sys; sys.modules['kvd_kernels._native'] = None; "


def python(code: str, kernels_variable: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVD_KERNELS": kernels_variable}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_numpy_stands_in_for_a_missing_extension_and_says_why() -> None:
    name, names, why = python(HIDE + SAY).stdout.strip().split("|")
    assert (name, names) == ("numpy", "('numpy',)")
    assert why.startswith("kernels run in NumPy, several times slower: the extension kvd_kernels._native cannot")


def test_the_best_available_is_taken_by_default() -> None:
    assert python(SAY).stdout.split("|")[0] == kernels.available()[0]


@pytest.mark.parametrize("name", kernels.available())
def test_the_environment_demands_an_implementation(name: str) -> None:
    got, _, why = python(SAY, name).stdout.strip().split("|")
    assert got == name
    assert why == ("kernels run in NumPy because KVD_KERNELS=numpy" if name == "numpy" else "None")


@pytest.mark.parametrize(
    ("code", "variable", "words"),
    [
        (SAY, "fast", "ImportError: KVD_KERNELS=fast: no kernels are called 'fast'; choose one of"),
        (
            HIDE + SAY,
            "avx2",
            "ImportError: KVD_KERNELS=avx2: the kernels 'avx2' are not available: the extension",
        ),
        (
            HIDE + SAY,
            "baseline",
            "ImportError: KVD_KERNELS=baseline: the kernels 'baseline' are not available",
        ),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused_at_import(code: str, variable: str, words: str) -> None:
    done = python(code, variable)
    assert done.returncode == 1
    assert words in done.stderr
    assert "unset KVD_KERNELS" in done.stderr


def test_the_package_imports_numpy_only() -> None:
    done = python(
        "import sys, numpy; before = set(sys.modules); import kvd_kernels; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; print(sorted(new - sys.stdlib_module_names))"
    )
    assert done.stdout.strip() in ("['kvd_kernels', 'numpy']", "['kvd_kernels']")
