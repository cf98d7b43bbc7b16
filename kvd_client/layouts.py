"""Tensors that lie in a device's memory, in the device's own layout, as the local API and the wire name them.

A :class:`Placement` says which layout and which device. The descriptor of the layout itself is opaque here: the daemons
read it (``kvd.layout``) and plan by it, and a process that wants to read its tensors by address gets it back in the
same form. Pure data: no NumPy.
"""

from __future__ import annotations

import msgspec

from kvd_client.arguments import whole
from kvd_client.errors import InvalidArgument

UNITS = ("chunk", "layer", "whole")
"""What is regrouped and written at once. ``chunk``: as much as the link's bound on delay allows, in whole KV blocks;
``layer``: each layer as it becomes ready, so that one is regrouped while another is on the wire; ``whole``: everything,
in the fewest requests, once the last layer is ready (HAWK, section 4.4)."""

MAX_BLOCK_TOKENS, MAX_CHANNELS, MAX_LAYOUT = 1 << 20, 32, 4096


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the KV tensors of a part lie if not in its lease, and in which layout.

    Each layer has ``tensors`` of them (K and V, or a single one: MLA's latent, an activation), of logical shape
    (blocks, heads, ``block_tokens``, dim): row ``r`` of the batch has the blocks that follow those of row ``r - 1``, or
    those that a block table names.
    """

    layout: str
    """A layout that the daemons know by name (``kvd plan layouts`` lists them), or a descriptor in TOML."""
    device: str = ""
    """The ``[npu.NAME]`` of this node's daemon; empty: host memory, one channel."""
    block_tokens: int = 32
    """Tokens of a block: what is moved is moved in whole blocks."""
    tensors: int = 2
    """2: K and V apart, each half an entry. 1: an entry is one vector."""
    dtype: str = "bf16"
    """Of the elements, as the other end's process has them: ``bf16``, ``f16``, ``f32`` …, or ``raw:N`` for N
    bytes of anything."""
    codec: str = ""
    """Of the elements in this layout, where it is another one, such as ``bfp8_b``."""

    def check(self) -> Placement:
        """Return ``self``, or raise :class:`InvalidArgument` naming the first field that makes no sense."""
        if not isinstance(self.layout, str) or not 1 <= len(self.layout) <= MAX_LAYOUT:
            raise InvalidArgument(f"a layout is a name or a descriptor of 1 to {MAX_LAYOUT} characters")
        if not 1 <= whole("block_tokens", self.block_tokens) <= MAX_BLOCK_TOKENS:
            raise InvalidArgument(
                f"block_tokens is {self.block_tokens}; it must be between 1 and {MAX_BLOCK_TOKENS}",
                block_tokens=self.block_tokens,
            )
        if self.tensors not in (1, 2):
            raise InvalidArgument(f"a layer has 1 or 2 tensors, not {self.tensors}", tensors=self.tensors)
        return self


class DigitMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One digit of an axis: a coordinate ``x`` has the digit ``x // divisor % radix`` (radix 0: not reduced), and it
    counts ``tensor`` tensors, ``page`` pages and ``inner`` elements."""

    axis: str
    divisor: int
    radix: int
    tensor: int
    page: int
    inner: int
    looked_up: bool = False
    """Through the block table."""


class TensorMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process needs to find the elements of its tensors in the device's channels.

    A page's channel and slot in it follow from its number by ``kind``; in its channel it begins at the tensor's base
    plus ``slot * page_stride``.
    """

    axes: dict[str, int]
    """Size of each axis: ``l`` layers, ``kv``, ``h`` heads, ``t`` tokens of a row, ``d`` elements."""
    digits: list[DigitMap]
    codec: str
    item_bytes: int
    """Of an element; 0 in block formats, where a single one has no bytes of its own."""
    page_elements: int
    pages: int
    """Of a tensor."""
    page_stride: int
    """From one page of a channel to the next."""
    tensor_stride: int
    """Bytes of a tensor in each channel."""
    kind: str
    """``flat``; ``round-robin``; ``striped``, where ``shard_pages`` pages at a time go round; or another, by which each
    channel has ``shard_pages`` pages in a row."""
    channels: int
    shard_pages: int
    blocks: int
    """Of each tensor."""
    bases: bytes
    """int64: where each tensor begins in every channel, from ``offset`` on."""
    address: int
    """What the device itself adds to a base."""
    offset: int
    """Where the window begins in each channel's descriptor; a multiple of its page size."""
    nbytes: int
    """Of the window."""


class ChannelGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a channel that the other side may write: the addresses from ``start`` on."""

    channel: int
    start: int
    nbytes: int
    token: bytes


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sink to source: how the tensors lie at the sink, and the way into them."""

    placement: Placement
    channels: int
    alignment: int
    """Pages of each channel begin at multiples of this many bytes."""
    blocks: int
    """Of each tensor."""
    table: bytes = b""
    """int32: the block of each (row, logical block), row after row; empty: they follow each other."""
    unit: str = "layer"
    """One of :data:`UNITS`."""
    pull: bool = False
    """The sink reads what the source has regrouped; else the source writes."""
    heads: int = 0
    """Of each tensor, where the part has only some of them; 0: the part's."""
    first_head: int = 0
    """The part's first, among those."""
    bases: bytes = b""
    """int64: where each tensor begins, in every channel."""
    grants: list[ChannelGrant] = []
    """None where the sink pulls."""
