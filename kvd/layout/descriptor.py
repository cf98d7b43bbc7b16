"""The layout descriptor: axes in digits, digits in an order, pages on channels.

A tensor has named axes (a KV cache: ``l`` layers, ``kv`` K and V, ``h`` KV heads, ``t`` tokens, ``d`` head dimension;
any other names do as well). A :class:`Layout` factors each axis into *digits*, as a number in a mixed radix, and puts
all digits into one order, outermost first, with two cuts::

    l kv || B h T D | F G r c            t = B:* T:2 F:2 r:16      d = D:* G:2 c:16
    tensors   pages   in a page

Digits before ``||`` number separate tensors, those up to ``|`` number a tensor's pages, the rest a page's elements.
:class:`Placement` puts pages on the device's memory channels. One digit may go through a block table.

A :class:`Layout` knows no sizes but those of its own digits. A :class:`Placed` is a layout with the numbers of one side
of a transfer: which part of the tensor it holds, how much room its memory has, its block table, its tensors' bases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[np.int64]

Kind: TypeAlias = Literal["flat", "round-robin", "sharded"]


@dataclasses.dataclass(frozen=True, slots=True)
class Digit:
    """A digit of an axis. ``radix`` 0 (written ``*``): as many as the axis needs; only an axis's first digit has it."""

    name: str
    radix: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor's page ``p`` of ``P`` goes; every page takes ``page_bytes`` rounded up to ``alignment``.

    ``flat``: one channel, page after page. ``round-robin``: channel ``p % channels``, slot ``p // channels``.
    ``sharded``: channel ``p // shard_pages``, slot ``p % shard_pages``; ``shard_pages`` 0 is ``ceil(P / channels)``.
    Height-sharded is that with row-major pages; for width-sharded the order's first page digit is the shard.
    A tensor begins at the same base in each channel, and at channel 0.
    """

    kind: Kind = "flat"
    channels: int = 1
    alignment: int = 1
    """In bytes."""
    shard_pages: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Immutable and hashable. ``kvd.layout.notation`` reads and writes it, and checks it."""

    name: str
    axes: tuple[tuple[str, tuple[Digit, ...]], ...]
    """Each axis with its digits, most significant first."""
    tensors: tuple[str, ...]
    """Digits before ``||``."""
    pages: tuple[str, ...]
    """Digits between ``||`` and ``|``."""
    inner: tuple[str, ...]
    """Digits of a page's elements. All digits, where there is no ``|``: a tensor is one page then."""
    codec: str
    """A name of ``kvd.layout.codec.CODECS``: ``bf16``, ``f32``, ``bfp8_b`` …"""
    placement: Placement = Placement()
    table: str = ""
    """The digit whose values are looked up in a block table; empty: none."""
    padding: bool = False
    """Elements of a page beyond the end of the tensor are part of it, and zero (tiles). Otherwise they are never
    written (paged caches)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A layout with the numbers of one side.

    ``held`` maps every axis to the range of the whole tensor that lies here, ``(start, stop)``: tensor-parallel rank 1
    of 4 holds heads ``(2, 4)`` of 8. All addresses are counted from the range's start.
    """

    layout: Layout
    held: Mapping[str, tuple[int, int]]
    room: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Values that a ``*`` digit has memory for, where ``held`` needs fewer: the blocks of a paged cache."""
    table: Table | None = None
    """Shape (n,): where value ``i`` of the digit ``layout.table`` really is. ``n`` covers ``held``."""
    bases: Table | None = None
    """Shape (tensors,): byte offset of each tensor in each channel. ``None``: one behind the other from 0."""
