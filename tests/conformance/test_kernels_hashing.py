"""Hash codes in every implementation against their definition, bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.kernel_helpers import IMPLEMENTATIONS, Guarded, using

SETTINGS = settings(deadline=None, max_examples=60)


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@st.composite
def hashed(draw: Any) -> tuple[Any, Any]:
    n, dim, words = draw(st.integers(0, 9)), draw(st.integers(1, 40)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x, w = (rng.standard_normal(form).astype(np.float32) for form in ((n, dim), (dim, 64 * words)))
    if draw(st.booleans()):  # sums that cancel out, where an order of summation or a fused product would show
        x = np.round(x, 1)
        w[:] = np.round(w * np.float32(draw(st.sampled_from((1.0, 1e-3, 1e7)))), 1)
    return x, w


def code_by_definition(x: Any, column: Any) -> bool:
    total = 0.0
    for a, b in zip(x.tolist(), column.tolist(), strict=True):
        total = float32(total + float32(a * b))
    return total > 0


@SETTINGS
@given(hashed(), st.sampled_from((0, 1, 8)))
def test_codes_are_the_definition(case: tuple[Any, Any], offset: int) -> None:
    x, w = case
    for name in IMPLEMENTATIONS:
        guarded = Guarded(len(x) * w.shape[1] // 8, offset)
        out = guarded.memory.reshape(len(x), -1) if len(x) else None
        with using(name):
            found = kernels.sign_codes(x, w, out)
        assert found.shape == (len(x), w.shape[1] // 8)
        assert guarded.intact(), name
        for vector, code in zip(x, found, strict=True):
            for bit in {0, 7, 8, 63, w.shape[1] - 1, int(abs(vector[0]) * 1000) % w.shape[1]}:
                assert bool(code[bit // 8] >> (bit % 8) & 1) == code_by_definition(vector, w[:, bit]), (name, bit)


@SETTINGS
@given(hashed(), st.data())
def test_all_implementations_hash_alike_and_one_vector_at_a_time(case: tuple[Any, Any], data: Any) -> None:
    x, w = case
    if x.size:
        for _ in range(data.draw(st.integers(0, 3))):
            special = data.draw(st.sampled_from((np.nan, np.inf, -np.inf, 1e38, 1e-45, -0.0)))
            x.flat[data.draw(st.integers(0, x.size - 1))] = special
    whole = []
    for name in IMPLEMENTATIONS:
        with using(name):
            whole.append(kernels.sign_codes(x, w))
            alone = [kernels.sign_codes(x[i : i + 1], w)[0] for i in range(len(x))]
        assert all((a == b).all() for a, b in zip(whole[-1], alone, strict=True)), name
    assert all((found == whole[0]).all() for found in whole)


@SETTINGS
@given(st.integers(0, 3), st.integers(1, 40), st.integers(0, 20), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_distances_are_the_definition(rows: int, group: int, tokens: int, words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fill = rng.choice((0, 255, None))  # codes that differ everywhere are where counters would overflow
    q = rng.integers(0, 256, (rows, group, 8 * words), np.uint8)
    k = rng.integers(0, 256, (rows, tokens, 8 * words), np.uint8)
    if fill is not None:
        q[:], k[:] = fill, 255 - fill
    expected = [
        [sum(int.from_bytes((a ^ b).tobytes(), "little").bit_count() for a in q[r]) for b in k[r]] for r in range(rows)
    ]
    for name in IMPLEMENTATIONS:
        guarded = Guarded(4 * rows * tokens)
        with using(name):
            found = kernels.hamming(q, k, guarded.memory.view(np.int32).reshape(rows, tokens))
        assert found.tolist() == expected, name
        assert guarded.intact(), name


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_large_work_without_the_gil(name: Any) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((700, 64)).astype(np.float32), rng.standard_normal((64, 256)).astype(np.float32)
    with using(name):
        codes = kernels.sign_codes(x, w)
        far = kernels.hamming(codes[None, :3], np.repeat(codes, 40, axis=0)[None])
    # Far from rounding: NumPy's own product, whose order of summation is its own, agrees but for sums near 0.
    differ = np.unpackbits(codes ^ np.packbits(x @ w > 0, axis=1, bitorder="little")).sum()
    assert differ <= codes.size * 8 // 1000
    bits = np.unpackbits(codes, axis=1).astype(int)
    assert (far[0, ::40] == np.abs(bits[:3, None] - bits).sum(axis=(0, 2))).all()


def test_what_does_not_fit_is_refused() -> None:
    x, w = np.zeros((3, 8), np.float32), np.zeros((8, 64), np.float32)
    q, k = np.zeros((2, 3, 16), np.uint8), np.zeros((2, 5, 16), np.uint8)
    overlapping = np.zeros(4096, np.uint8)
    for error, call in (
        (TypeError, lambda: kernels.sign_codes(x.astype(np.float64), w)),
        (ValueError, lambda: kernels.sign_codes(x.T, w)),
        (ValueError, lambda: kernels.sign_codes(x[:, :4].copy(), w)),
        (ValueError, lambda: kernels.sign_codes(x, w[:, :60].copy())),
        (ValueError, lambda: kernels.sign_codes(x, w[:, :0].copy())),
        (ValueError, lambda: kernels.sign_codes(x, w, np.zeros((3, 4), np.uint8))),
        (ValueError, lambda: kernels.sign_codes(x, w, x.view(np.uint8).reshape(-1)[:24].reshape(3, 8))),
        (TypeError, lambda: kernels.hamming(q.view(np.int8), k)),
        (ValueError, lambda: kernels.hamming(q[:, :0].copy(), k)),
        (ValueError, lambda: kernels.hamming(q[:, :, :12].copy(), k[:, :, :12].copy())),
        (ValueError, lambda: kernels.hamming(q[:1].copy(), k)),
        (ValueError, lambda: kernels.hamming(q, k[:, :, :8].copy())),
        (ValueError, lambda: kernels.hamming(q, k, np.zeros((2, 4), np.int32))),
        (
            ValueError,
            lambda: kernels.hamming(
                overlapping[:48].reshape(1, 3, 16),
                overlapping[48:128].reshape(1, 5, 16),
                overlapping[60:80].view(np.int32).reshape(1, 5),
            ),
        ),
    ):
        with pytest.raises(error):
            call()
