"""Public operations on Tenstorrent's block formats; what holds for all is in `kvd_kernels.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import checks, native
from .reference import BLOCK_ROW, block_lead_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on

PLAIN_BYTES = {"bf16": 2, "f32": 4}
BITS = (7, 3)
Plain = Literal["bf16", "f32"]


def block_page_bytes(elements: int, magnitude: int) -> int:
    """Bytes of a block page: an exponent for sixteen elements, zeros up to a multiple of 16 bytes, then the elements, a
    sign and `magnitude` bits each. Raises ValueError for numbers that are none of a page."""
    if elements <= 0 or elements % BLOCK_ROW or magnitude not in BITS:
        raise ValueError(
            f"a page of {elements} elements with {magnitude} bits of magnitude is none of a block format; pass a "
            f"multiple of {BLOCK_ROW}, and 7 (bfp8_b) or 3 (bfp4_b)"
        )
    return block_lead_bytes(elements) + elements * (magnitude + 1) // 8


def encode_bfp(
    values: NDArray[Any] | Buffer,
    plain: Plain,
    magnitude: int,
    elements: int,
    out: NDArray[Any] | Buffer,
    stride: int,
) -> None:
    """Plain pages, one behind the other, as pages of bfp8_b or bfp4_b, `stride` bytes apart.

    The rounding is that of `kvd_kernels.reference.encode_bfp`. What `out` has between pages becomes zero.

    Args:
        values: memory of a whole number of pages of `elements` elements.
        plain: "bf16" or "f32".
        magnitude: bits of an element without its sign: 7 for bfp8_b, 3 for bfp4_b.
        elements: of a page, in the order of the block page; a multiple of 16.
        out: memory of `stride` bytes a page.
        stride: at least a block page (:func:`block_page_bytes`).

    Raises:
        TypeError, ValueError: see `kvd_kernels.ops`.
    """
    op = "encode_bfp"
    item, elements, page = _form(op, plain, magnitude, elements)
    stride = checks.positive(op, "stride", stride)
    src, result = checks.memory_of(op, "values", values), checks.memory_of(op, "out", out, writable=True)
    pages, rest = divmod(src.size, elements * item)
    if rest or stride < page or result.size != pages * stride:
        raise ValueError(
            f"{op}: {src.size} bytes of {plain} are {src.size / (elements * item):g} pages of {elements} elements, and "
            f"out has {result.size} bytes for pages of {page} bytes that are {stride} apart; pass whole pages, and as "
            "many on both sides"
        )
    checks.apart(op, "out", result, ("values", src))
    if pages:
        native.active.encode_bfp(src, item, magnitude, elements, result, stride)


def decode_bfp(
    source: NDArray[Any] | Buffer,
    offsets: NDArray[np.int64],
    magnitude: int,
    elements: int,
    out: NDArray[Any] | Buffer,
    plain: Plain,
) -> None:
    """Pages of bfp8_b or bfp4_b at `offsets` as plain pages, one behind the other, exactly.

    Args:
        source: memory.
        offsets: int64 (n,): where the block pages begin in `source`, in bytes.
        magnitude, elements, plain: as for :func:`encode_bfp`.
        out: memory of n pages of `elements` elements.

    Raises:
        IndexError: a page leaves `source`; then nothing has been written.
        TypeError, ValueError: see `kvd_kernels.ops`.
    """
    op = "decode_bfp"
    item, elements, page = _form(op, plain, magnitude, elements)
    checks.array(op, "offsets", offsets, checks.INT64, (1,))
    src, result = checks.memory_of(op, "source", source), checks.memory_of(op, "out", out, writable=True)
    if result.size != len(offsets) * elements * item:
        raise ValueError(
            f"{op}: out has {result.size} bytes, but {len(offsets)} pages of {elements} elements of {plain} need "
            f"{len(offsets) * elements * item}"
        )
    checks.apart(op, "out", result, ("source", src), ("offsets", offsets))
    if len(offsets) == 0:
        return
    bad = native.active.decode_bfp(src, offsets, magnitude, elements, result, item) if page <= src.size else 0
    if bad >= 0:
        raise IndexError(
            f"{op}: offsets[{bad}] is {offsets[bad]}, where a page of {page} bytes does not fit into a source of "
            f"{src.size}; check it against the layout"
        )


def _form(op: str, plain: str, magnitude: int, elements: int) -> tuple[int, int, int]:
    if plain not in PLAIN_BYTES:
        raise ValueError(f"{op}: plain is {plain!r}; pass {' or '.join(map(repr, PLAIN_BYTES))}")
    elements = checks.positive(op, "elements", elements)
    try:
        return PLAIN_BYTES[plain], elements, block_page_bytes(elements, magnitude)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
