"""Block formats: every implementation against a definition in plain Python, bit for bit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.kernel_helpers import IMPLEMENTATIONS, using

CASES = settings(deadline=None, max_examples=60)
FORMS = [(magnitude, plain) for magnitude in (7, 3) for plain in ("bf16", "f32")]


def encoded_row(row: list[int], magnitude: int) -> tuple[int, list[int]]:
    """f32 bits of sixteen elements: their exponent, and sign and magnitude of each, by exact arithmetic."""
    exponents = [bits >> 23 & 0xFF for bits in row]
    shared, small = max(exponents), []
    for bits, exponent in zip(row, exponents, strict=True):
        mantissa = (bits & 0x7FFFFF | 0x800000) if exponent else 0
        cut = mantissa >> (shared - exponent)
        exact = Fraction(cut, 1 << (24 - magnitude))
        kept = min(round(exact), (1 << magnitude) - 1)  # Python rounds half to even
        small.append(kept | (bits >> 31) << magnitude if kept else 0)
    return shared, small


def decoded(shared: int, number: int, magnitude: int) -> int:
    """f32 bits: the value normalised, where the exponent 255 is one like any other."""
    kept, sign = number & ((1 << magnitude) - 1), number >> magnitude
    if not kept:
        return sign << 31
    exponent = shared - (magnitude - kept.bit_length())
    fraction = kept << (24 - kept.bit_length()) & 0x7FFFFF
    return sign << 31 | exponent << 23 | fraction if exponent >= 0 else 0


def page_of(rows: list[tuple[int, list[int]]], magnitude: int) -> bytes:
    exponents, numbers = bytes(shared for shared, _ in rows), [n for _, small in rows for n in small]
    if magnitude == 3:
        numbers = [low | high << 4 for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return exponents + bytes(-len(exponents) % 16) + bytes(numbers)


@st.composite
def pages(draw: Any) -> Any:
    """f32 bits, (pages, elements): numbers of one size, of all sizes, and every kind of special one."""
    n, elements, seed = (
        draw(st.integers(0, 3)),
        16 * draw(st.sampled_from((1, 2, 5, 15, 16, 17))),
        draw(st.integers(0, 2**32 - 1)),
    )
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (n, elements), np.uint32)
    match draw(st.sampled_from(("any", "near", "ties"))):
        case "near":
            bits = rng.standard_normal((n, elements)).astype(np.float32).view(np.uint32)
        case "ties":  # what is cut off is a half, or next to it
            bits = bits & 0x807E0000 | 0x3F800000 - (rng.integers(0, 5, bits.shape, np.uint32) << 23)
            bits += rng.integers(-1, 2, bits.shape).astype(np.int32).view(np.uint32)
    special = np.array(
        [0, 1 << 31, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x00800000, 0x7F7FFFFF], np.uint32
    )
    where = rng.random(bits.shape) < draw(st.sampled_from((0.0, 0.2, 1.0)))
    return np.where(where, special[rng.integers(0, len(special), bits.shape)], bits)


@pytest.mark.parametrize(("magnitude", "plain"), FORMS)
@CASES
@given(pages(), st.integers(0, 40))
def test_encoding_is_the_definition(magnitude: int, plain: Any, bits: Any, gap: int) -> None:
    if plain == "bf16":
        bits = bits & 0xFFFF0000
    n, elements = bits.shape
    values = (bits >> 16).astype(np.uint16) if plain == "bf16" else bits
    page = kernels.block_page_bytes(elements, magnitude)
    expected = b"".join(
        page_of([encoded_row(row, magnitude) for row in one], magnitude) + bytes(gap)
        for one in bits.reshape(n, elements // 16, 16).tolist()
    )
    for name in IMPLEMENTATIONS:
        whole = np.full(n * (page + gap) + 65, 0x5A, np.uint8)
        with using(name):
            kernels.encode_bfp(values, plain, magnitude, elements, whole[33 : 33 + n * (page + gap)], page + gap)
        assert whole[33:-32].tobytes() == expected, name
        assert (whole[:33] == 0x5A).all(), name
        assert (whole[-32:] == 0x5A).all(), name


@pytest.mark.parametrize(("magnitude", "plain"), FORMS)
def test_decoding_is_the_definition(magnitude: int, plain: Any) -> None:
    """Every exponent with every element."""
    count = 1 << (magnitude + 1)
    numbers = np.arange(count, dtype=np.uint8)
    body = numbers if magnitude == 7 else numbers[::2] | numbers[1::2] << 4
    rows = count // 16
    one = [bytes([shared]) * rows + bytes(-rows % 16) + body.tobytes() for shared in range(256)]
    source, page = b"??".join(one), len(one[0])
    order = np.random.default_rng(0).permutation(256)
    expected = np.array([[decoded(int(shared), n, magnitude) for n in range(count)] for shared in order], np.uint32)
    for name in IMPLEMENTATIONS:
        out = np.empty(expected.shape, np.uint16 if plain == "bf16" else np.uint32)
        with using(name):
            kernels.decode_bfp(source, order * (page + 2), magnitude, count, out, plain)
        assert (out == (expected >> 16 if plain == "bf16" else expected)).all(), name


@pytest.mark.parametrize(("magnitude", "plain"), FORMS)
def test_what_has_been_encoded_once_stays(magnitude: int, plain: Any) -> None:
    """Whole tiles; long enough for the GIL to be given back."""
    n, page = 64, kernels.block_page_bytes(1024, magnitude)
    values = np.random.default_rng(1).standard_normal(n * 1024).astype(np.float32)
    given_ = values if plain == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    offsets = np.arange(n) * page
    for name in IMPLEMENTATIONS:
        first, second = np.empty(n * page, np.uint8), np.empty(n * page, np.uint8)
        back = np.empty_like(given_)
        with using(name):
            kernels.encode_bfp(given_, plain, magnitude, 1024, first, page)
            kernels.decode_bfp(first, offsets, magnitude, 1024, back, plain)
            kernels.encode_bfp(back, plain, magnitude, 1024, second, page)
        assert (first == second).all(), name
        floats = back if plain == "f32" else (back.astype(np.uint32) << 16).view(np.float32)
        assert np.abs(floats - values).max() < 4 * 2.0 ** (1 - magnitude), name


@pytest.mark.parametrize("bad", [-1, 2**62, -(2**63), 2**63 - 1, 130])
def test_pages_outside_are_refused_before_anything_is_written(bad: int) -> None:
    """A page of 16 elements of bfp8_b has 32 bytes."""
    offsets = np.array([0, bad, 3])
    for name in IMPLEMENTATIONS:
        out = np.full(48, 0x5A5A, np.uint16)
        with using(name), pytest.raises(IndexError, match=rf"offsets\[1\] is {bad}, where a page of 32 bytes"):
            kernels.decode_bfp(bytes(161), offsets, 7, 16, out, "bf16")
        assert (out == 0x5A5A).all(), name
        with using(name), pytest.raises(IndexError, match=r"offsets\[0\] is 0"):
            kernels.decode_bfp(bytes(16), offsets[:1], 7, 16, out[:16], "bf16")


ROW = np.zeros(16, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kernels.encode_bfp(ROW, "f16", 7, 16, bytearray(32), 32), ValueError, "plain is 'f16'; pass 'bf16'"),
        (lambda: kernels.encode_bfp(ROW, "f32", 5, 16, bytearray(32), 32), ValueError, "5 bits of magnitude is none"),
        (lambda: kernels.encode_bfp(ROW, "f32", 7, 8, bytearray(32), 32), ValueError, "a page of 8 elements"),
        (lambda: kernels.encode_bfp(ROW, "f32", 7, 16, bytearray(31), 31), ValueError, "pages of 32 bytes that are 31"),
        (lambda: kernels.encode_bfp(ROW, "f32", 7, 16, bytearray(64), 32), ValueError, "1 pages of 16 elements"),
        (lambda: kernels.encode_bfp(ROW[:8], "f32", 7, 16, bytearray(32), 32), ValueError, "0.5 pages"),
        (lambda: kernels.encode_bfp(ROW, "f32", 7, 16, bytes(32), 32), ValueError, "out is read-only"),
        (lambda: kernels.encode_bfp(ROW, "f32", 7, 16, ROW.view(np.uint8)[:32], 32), ValueError, "out overlaps values"),
        (lambda: kernels.decode_bfp(bytes(32), np.zeros(1, np.int32), 7, 16, ROW, "f32"), TypeError, "int32 array"),
        (lambda: kernels.decode_bfp(bytes(32), np.zeros(2, np.int64), 7, 16, ROW, "f32"), ValueError, "need 128"),
        (lambda: kernels.decode_bfp(bytes(32), np.zeros(1, np.int64), 7, 16, ROW, "i8"), ValueError, "plain is 'i8'"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
