"""What a plan consists of: the calls of the kernels that are its first step, and the requests that are its second."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.layout.codec import Codec
from kvd.layout.ranges import Ints
from kvd.types import Descriptors

Requests: TypeAlias = npt.NDArray[np.int64]
"""Shape (n, 4): source (or staging) offset, channel, offset in that channel, length; sorted by channel and offset."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One call of ``kvd_kernels.regroup``: boxes of one shape, each from one place to another.

    Box ``i``: for every index ``(a, b, …)`` below ``shape``, ``item_bytes`` bytes go from
    ``places[i, 0] + a * source_strides[0] + b * source_strides[1] + …`` of source channel ``channel`` to
    ``places[i, 1] + a * target_strides[0] + …`` of the staging memory. Dims are collapsed as far as they go in both;
    the outermost target stride comes first. All in bytes.
    """

    channel: int
    """0 where the plan decodes: the copies read the decoded pages."""
    places: npt.NDArray[np.int64]
    """Shape (n, 2): source offset, staging offset."""
    shape: tuple[int, ...]
    """() for plain runs of ``item_bytes``."""
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return len(self.places) * math.prod(self.shape) * self.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """Before the copies: pages of a block format become plain, one behind the other, in memory of ``nbytes``."""

    block: Codec
    plain: Codec
    elements: int
    """Of a page."""
    places: tuple[tuple[int, Ints], ...]
    """(source channel, page offsets); decoded pages are in this order."""

    @property
    def nbytes(self) -> int:
        return sum(len(offsets) for _, offsets in self.places) * self.elements * self.plain.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """After the copies, which go to memory of ``nbytes`` instead of staging: its pages are encoded into staging."""

    block: Codec
    plain: Codec
    elements: int
    pages: int
    stride: int
    """From one encoded page to the next, in staging."""

    @property
    def nbytes(self) -> int:
        return self.pages * self.elements * self.plain.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RegroupPlan:
    """Both steps. Staging memory has ``staging_bytes``; the requests' source offsets count from its start."""

    copies: tuple[Copy, ...]
    """Step 1. They write disjoint bytes, in any order, after ``zero``."""
    zero: Ints
    """Staging offsets of pages that padding is in: ``zero_bytes`` each are zeroed before the copies."""
    zero_bytes: int
    staging_bytes: int
    requests: Requests
    """Step 2."""
    payload_bytes: int
    """Bytes of the elements alone; what ``staging_bytes`` has more is padding."""
    decode: Decode | None = None
    encode: Encode | None = None
    shift: int = 0
    """What every offset in the source counts from, in all channels: where a plan has been moved to."""

    def by_channel(self) -> dict[int, Descriptors]:
        """Channel to (n, 3): staging offset, offset in the channel, length; only channels that get something."""
        return {
            int(channel): self.requests[self.requests[:, 1] == channel][:, [0, 2, 3]]
            for channel in np.unique(self.requests[:, 1])
        }
