"""Tensors that lie in a device's memory, in the device's own layout, as the local API and the wire name them.

A :class:`Placement` says which layout and which device. The descriptor of the layout itself is opaque here: the daemons
read it (``kvd.layout``) and plan by it, and a process that wants to read its tensors by address gets it back in the
same form. Pure data: no NumPy.
"""

from __future__ import annotations

import msgspec

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
    dtype: str = "bfloat16"
    """Of the elements, as the process has them."""

    def check(self) -> Placement:
        """Return ``self``, or raise :class:`InvalidArgument` naming the first field that makes no sense."""
        if not 1 <= len(self.layout) <= MAX_LAYOUT:
            raise InvalidArgument(f"a layout is a name or a descriptor of 1 to {MAX_LAYOUT} characters")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidArgument(
                f"block_tokens is {self.block_tokens}; it must be between 1 and {MAX_BLOCK_TOKENS}",
                block_tokens=self.block_tokens,
            )
        if self.tensors not in (1, 2):
            raise InvalidArgument(f"a layer has 1 or 2 tensors, not {self.tensors}", tensors=self.tensors)
        return self


class ChannelBuffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part's share of one channel, as the daemon opens it for a process."""

    offset: int
    """In the channel's descriptor: a multiple of the page size."""
    start: int
    """Where the buffer begins, from ``offset``."""
    nbytes: int


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
    channel_bytes: int = 0
    """Of the buffer in each channel."""
    grants: list[bytes] = []
    """Token of each channel's buffer; none where the sink pulls."""
