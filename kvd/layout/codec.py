"""Number formats: plain ones, whose elements move as bytes, and Tenstorrent's block formats, which are computed.

A block format has one exponent for the 16 elements of a face row: a page of n elements is n / 16 exponents and then n
elements of sign and magnitude, 8 bits each (``bfp8_b``) or 4 (``bfp4_b``, the first element in the low nibble). The
rounding is the vendor's, derived from its encoded tensors and checked against ttnn 0.81 over all exponents:

- the shared exponent is the largest of the row; denormals count as zero;
- the 24-bit mantissa, hidden bit included, is cut at the shared exponent, then rounded half to even, and saturates;
- a magnitude of zero has no sign; infinity and NaN are numbers like any others, with exponent 255;
- decoding normalises; what would need an exponent below zero becomes zero.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument, UnsupportedLayout

Bytes: TypeAlias = npt.NDArray[np.uint8]

ROW = 16
"""Elements that share an exponent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """A number format."""

    name: str
    item_bytes: int
    """Bytes of an element; 0 for a block format."""
    magnitude_bits: int = 0
    """Block formats: bits of an element without its sign."""

    @property
    def is_block(self) -> bool:
        return self.magnitude_bits > 0

    def page_bytes(self, elements: int) -> int:
        """Bytes of a page; raises :class:`InvalidArgument` where a block format can't hold that many elements."""
        if not self.is_block:
            return elements * self.item_bytes
        if elements % ROW:
            raise InvalidArgument(
                f"a page of {elements} elements can't be {self.name}; it must be a multiple of {ROW}",
                codec=self.name,
                elements=elements,
            )
        return elements // ROW + elements * (self.magnitude_bits + 1) // 8


CODECS = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            Codec("bf16", 2),
            Codec("f16", 2),
            Codec("f32", 4),
            Codec("f8_e4m3", 1),
            Codec("f8_e5m2", 1),
            Codec("i8", 1),
            Codec("u8", 1),
            Codec("i32", 4),
            Codec("u16", 2),
            Codec("u32", 4),
            Codec("bfp8_b", 0, 7),
            Codec("bfp4_b", 0, 3),
        )
    }
)

FLOATS = ("bf16", "f16", "f32")
"""What block formats are encoded from. They decode exactly into bf16 and f32."""
DECODED = ("bf16", "f32")


_RAW = re.compile(r"raw:([1-9][0-9]{0,8})")


def codec(name: str) -> Codec:
    """The codec of that name, or of ``raw:N`` for opaque elements of N bytes; raises :class:`InvalidArgument` with
    those there are."""
    if name in CODECS:
        return CODECS[name]
    if raw := _RAW.fullmatch(name):
        return Codec(name, int(raw[1]))
    raise InvalidArgument(f"there is no codec {name!r}; known are {', '.join(CODECS)} and raw:BYTES", codec=name)


def check_conversion(source: Codec, target: Codec) -> None:
    """Raise :class:`UnsupportedLayout` unless the target's elements are the source's, or a block format is involved.

    A transfer moves numbers; it does not convert them between plain formats.
    """
    if source.name == target.name or (source.is_block and target.is_block):
        return
    if target.is_block and source.name in FLOATS:
        return
    if source.is_block and target.name in DECODED:
        return
    raise UnsupportedLayout(
        f"the source's elements are {source.name} and the target's are {target.name}; use the same number format on "
        f"both sides (block formats are made from {', '.join(FLOATS)} and become {' or '.join(DECODED)})",
        codec=[source.name, target.name],
    )


def encode(values: Bytes, plain: Codec, block: Codec, elements: int, out: Bytes, stride: int) -> None:
    """Pages of ``elements`` plain elements, one behind the other in ``values``, as block pages ``stride`` apart.

    What ``out`` has between pages becomes zero.
    """
    page, rows = block.page_bytes(elements), elements // ROW
    result, given = out.reshape(-1, stride), values.reshape(-1, elements * plain.item_bytes)
    result[:, page:] = 0
    for at in range(0, len(given), _STEP):
        bits = _as_f32_bits(given[at : at + _STEP], plain).reshape(-1, rows, ROW)
        shared, small = _encoded(bits, block.magnitude_bits)
        target = result[at : at + _STEP]
        target[:, :rows] = shared
        small = small.reshape(-1, elements)
        target[:, rows:page] = small if block.magnitude_bits == 7 else small[:, 0::2] | small[:, 1::2] << 4


def decode(pages: Bytes, block: Codec, plain: Codec, elements: int, out: Bytes) -> None:
    """Block pages, shape (n, page bytes), as plain elements (bf16 or f32) one behind the other in ``out``."""
    rows = elements // ROW
    result = out.reshape(len(pages), -1)
    for at in range(0, len(pages), _STEP):
        part = pages[at : at + _STEP]
        body = part[:, rows:]
        if block.magnitude_bits == 3:
            body = np.stack((body & 15, body >> 4), axis=-1)
        body = body.reshape(-1, rows, ROW)
        bits = _decoding_table(block.magnitude_bits)[part[:, :rows, None], body]
        exact = bits if plain.item_bytes == 4 else (bits >> 16).astype(np.uint16)
        result[at : at + _STEP] = exact.reshape(-1, elements).view(np.uint8)


_STEP = 256
"""Pages at a time: a dozen passes go over them, which had better stay in a cache."""


def _as_f32_bits(values: Bytes, plain: Codec) -> npt.NDArray[np.uint32]:
    values = np.ascontiguousarray(values)
    if plain.name == "bf16":
        return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return values.view(np.float16).astype(np.float32).view(np.uint32) if plain.name == "f16" else values.view(np.uint32)


def _encoded(bits: npt.NDArray[np.uint32], magnitude: int) -> tuple[Bytes, Bytes]:
    exponent = (bits >> 23 & 0xFF).astype(np.int32)
    shared = exponent.max(axis=-1)
    mantissa = np.where(exponent > 0, (bits & 0x7FFFFF | 0x800000).astype(np.int32), np.int32(0))
    mantissa >>= np.minimum(shared[..., None] - exponent, 24)
    shift = 24 - magnitude
    # half to even: add a half, or just less than it where the number that stays is even
    odd = mantissa >> shift & 1
    kept = np.minimum((mantissa + ((1 << (shift - 1)) - 1) + odd) >> shift, (1 << magnitude) - 1)
    sign = np.where(kept > 0, (bits >> 31 << magnitude).astype(np.int32), np.int32(0))
    return shared.astype(np.uint8), (kept | sign).astype(np.uint8)


@functools.cache
def _decoding_table(magnitude: int) -> npt.NDArray[np.uint32]:
    """Shape (256, 2 ** (magnitude + 1)): f32 bits of each exponent and each byte or nibble."""
    number = np.arange(1 << (magnitude + 1))
    kept, sign = number & ((1 << magnitude) - 1), number >> magnitude
    up = magnitude - 1 - np.floor(np.log2(np.maximum(kept, 1))).astype(np.int64)
    exponent = np.arange(256)[:, None] - np.where(kept > 0, up, 0)
    fraction = (kept << up) & ((1 << (magnitude - 1)) - 1)
    bits = sign << 31 | np.maximum(exponent, 0) << 23 | fraction << (24 - magnitude)
    decoded: npt.NDArray[np.int64] = np.where(kept == 0, sign << 31, np.where(exponent < 0, 0, bits))
    return decoded.astype(np.uint32)
