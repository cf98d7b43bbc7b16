"""KV indices in every implementation of the kernels against a definition in plain Python, byte for byte."""

from __future__ import annotations

from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.kernel_helpers import IMPLEMENTATIONS, Guarded, using

SETTINGS = settings(deadline=None, max_examples=80)


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
