"""What a process gives to open a transfer, checked and in the form in which it crosses the API.

Raises :class:`~kvd_client.errors.InvalidArgument`, which names the argument, for whatever makes no sense.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvd_client.arguments import whole, whole_numbers
from kvd_client.errors import InvalidArgument
from kvd_client.layouts import Placement
from kvd_client.protocol import MODES
from kvd_client.spec import KVSpec, MetadataSpec, PartLayout, TokenRange, mask_of, part_layout

if TYPE_CHECKING:
    from kvd_client.cache import Cache


def layout_of(
    spec: KVSpec,
    lengths: Sequence[int],
    capacity: int | None,
    heads: tuple[int, int] | None,
    metadata: Sequence[MetadataSpec],
    landing_entries: int = 0,
    landing_slots: int = 0,
    placed: bool = False,
    mask: str = "token",
) -> tuple[PartLayout, int]:
    """The layout of a part, and the first of its KV heads; ``mask`` may be left to :func:`kvd_client.spec.mask_of`."""
    if not isinstance(spec, KVSpec):
        raise InvalidArgument(f"spec is a {type(spec).__name__}; it must be a KVSpec")
    spec.check()
    longest = max(lengths, default=0)
    if longest < 1 or min(lengths) < 0:
        raise InvalidArgument("lengths must have a row, and a row with a token", lengths=list(lengths))
    room = longest if capacity is None else whole("capacity", capacity)
    if room < longest:
        raise InvalidArgument(
            f"capacity {room} is less than the longest row, {longest}", capacity=room, longest=longest
        )
    pair = (0, spec.kv_heads) if heads is None else whole_numbers("heads", heads)
    if len(pair) != 2:
        raise InvalidArgument(f"heads is {heads!r}; it must be (first, count)")
    start, count = pair
    if not isinstance(metadata, Sequence) or not all(isinstance(array, MetadataSpec) for array in metadata):
        raise InvalidArgument(f"metadata is {metadata!r}; it must be a sequence of MetadataSpec, empty for none")
    if start < 0 or count < 1 or start + count > spec.kv_heads:
        raise InvalidArgument(
            f"heads ({start}, {count}) are not within the spec's {spec.kv_heads} KV heads",
            heads=[start, count],
        )
    layout = part_layout(
        spec,
        heads=count,
        rows=len(lengths),
        capacity=room,
        metadata=tuple(metadata),
        landing_entries=landing_entries,
        landing_slots=landing_slots,
        placed=placed,
        mask=mask_of(mask, heads=count, rows=len(lengths), metadata=metadata, placed=placed),
    )
    return layout, start


def checked_blocks(
    placement: Placement | None, cache: Cache | None, blocks: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The block table as lists, whatever it came as; raises what is wrong with where a part is to lie."""
    if placement is not None and not isinstance(placement, Placement):
        raise InvalidArgument(f"placement is a {type(placement).__name__}; it must be a Placement")
    if cache is not None:
        from kvd_client.cache import Cache

        if not isinstance(cache, Cache):
            raise InvalidArgument(f"cache is a {type(cache).__name__}; it must be what Client.open_cache returned")
        if placement is not None:
            raise InvalidArgument("a transfer into a cache has the cache's placement; leave its own out")
    if not isinstance(blocks, Iterable):
        raise InvalidArgument(f"blocks is {blocks!r}; it must have a list of block numbers for each row")
    return [whole_numbers(f"blocks[{at}]", row) for at, row in enumerate(blocks)]


def table_of(blocks: list[list[int]]) -> bytes:
    """A block table as it crosses the API: int32, row after row."""
    flat = [block for row in blocks for block in row]
    try:
        return struct.pack(f"<{len(flat)}i", *flat)
    except struct.error:
        raise InvalidArgument(f"blocks names block {max(flat, key=abs)}; block numbers have 32 bits") from None


def ranges_of(held: Sequence[TokenRange | tuple[int, int, int]]) -> list[TokenRange]:
    """Ranges of tokens, whatever they came as."""
    if not isinstance(held, Iterable):
        raise InvalidArgument(f"held is {held!r}; it must be a list of (row, start, stop), empty for none")
    found = []
    for at, one in enumerate(held):
        numbers = one if isinstance(one, TokenRange) else whole_numbers(f"held[{at}]", one)
        if isinstance(numbers, list):
            if len(numbers) != 3:
                raise InvalidArgument(f"held[{at}] is {one!r}; it must be (row, start, stop)")
            numbers = TokenRange(*numbers)
        found.append(numbers)
    return found


def head_of(cache_head: int | None) -> int:
    """Which of a cache's heads is a part's first; -1 where it has all of them."""
    if cache_head is None:
        return -1
    head = whole("cache_head", cache_head)
    if head < 0:
        raise InvalidArgument(f"cache_head is {head}; it must not be negative", cache_head=head)
    return head


def mode_of(mode: str) -> str:
    """A mode by its name, empty for the daemon's choice."""
    if mode and mode not in MODES:
        raise InvalidArgument(f"there is no mode {mode!r}; give one of {', '.join(MODES)}", mode=mode)
    return mode
