"""Number formats: plain ones, whose elements move as bytes, and Tenstorrent's block formats, which are computed.

A block format has one exponent for the 16 elements of a face row: a page of n elements is n / 16 exponents, zeros up to
a multiple of 16 bytes (in tiles of less than 256 elements), and then n elements of sign and magnitude, 8 bits each
(``bfp8_b``) or 4 (``bfp4_b``, the first element in the low nibble). The rounding is the vendor's, derived from its
encoded tensors and checked against ttnn 0.81 over all exponents:

- the shared exponent is the largest of the row; denormals count as zero;
- the 24-bit mantissa, hidden bit included, is cut at the shared exponent, then rounded half to even, and saturates;
- a magnitude of zero has no sign; infinity and NaN are numbers like any others, with exponent 255;
- decoding normalises; what would need an exponent below zero becomes zero.
"""

from __future__ import annotations

import dataclasses
import re
from types import MappingProxyType
from typing import TypeAlias

import kvd_kernels
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
        nbytes: int = kvd_kernels.block_page_bytes(elements, self.magnitude_bits)
        return nbytes


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
    if plain.name == "f16":  # exact in f32, and rare
        values, plain = np.ascontiguousarray(values).view(np.float16).astype(np.float32), CODECS["f32"]
    kvd_kernels.encode_bfp(values, plain.name, block.magnitude_bits, elements, out, stride)


def decode(
    memory: Bytes, offsets: npt.NDArray[np.int64], block: Codec, plain: Codec, elements: int, out: Bytes
) -> None:
    """The block pages at ``offsets`` of ``memory`` as plain elements (bf16 or f32), one behind the other in ``out``.

    Raises :class:`IndexError` where a page leaves the memory.
    """
    kvd_kernels.decode_bfp(memory, offsets, block.magnitude_bits, elements, out, plain.name)
