"""Windows onto a Tenstorrent card's banks: their size, the pages of a slab, the names of tiles. Pure arithmetic."""

from __future__ import annotations

import mmap
import re

from kvd.errors import InvalidArgument

WINDOW = 4 << 30
"""Bytes of the windows that hold a bank; Blackhole has up to eight."""
PAGE = mmap.PAGESIZE

_NOC = re.compile(r"(\d{1,2})-(\d{1,2})", re.ASCII)


def parse_noc(text: str) -> tuple[int, int]:
    """``"17-14"`` to the coordinates of a tile; raises :class:`ValueError` with a sentence."""
    match = _NOC.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not a tile\'s coordinates, such as "17-14"')
    return int(match[1]), int(match[2])


def slab(origin: int, nbytes: int) -> tuple[int, int, int]:
    """The whole pages around ``nbytes`` bytes from ``origin`` on: where they begin, their length, and where the bytes
    begin in them. Raises :class:`InvalidArgument` where they don't lie in one window."""
    if origin < 0 or nbytes <= 0 or origin + nbytes > WINDOW:
        raise InvalidArgument(
            f"{nbytes} bytes from {origin} on don't lie in a window of {WINDOW} bytes; lower origin or channel_bytes",
            origin=origin,
            nbytes=nbytes,
        )
    start = origin // PAGE * PAGE
    return start, -(-(origin + nbytes) // PAGE) * PAGE - start, origin - start
