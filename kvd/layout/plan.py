"""From one layout to another in two steps (HAWK, section 4.3).

Step 1, on the source's device: a *regroup* puts the elements into staging memory, so that each channel of the target
gets one contiguous piece whose inner order is already the target's. It is a few batched strided copies, one kernel
call each. Step 2: a request list, (n, 4) int64: staging offset, channel, target offset, length; its runs are maximal,
so that there are as few requests as the target has contiguous pieces.

Pure: arrays in, arrays out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.layout.descriptor import Placed
from kvd.types import Descriptors

Requests: TypeAlias = npt.NDArray[np.int64]
"""Shape (n, 4): source (or staging) offset, channel, offset in that channel, length; sorted by channel and offset."""

Ranges: TypeAlias = Mapping[str, "tuple[int, int] | npt.NDArray[np.int64]"]
"""Parts of a tensor: axis to (start, stop), or to an (n, 2) array of several disjoint ranges. Axes not named: all."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One call of ``kvd_kernels.regroup``: boxes of one shape, each from one place to another.

    Box ``i``: for every index ``(a, b, …)`` below ``shape``, ``item_bytes`` bytes go from
    ``places[i, 0] + a * source_strides[0] + b * source_strides[1] + …`` of source channel ``channel`` to
    ``places[i, 1] + a * target_strides[0] + …`` of the staging memory. Dims are collapsed as far as they go in both;
    the outermost target stride comes first. All in bytes.
    """

    channel: int
    places: npt.NDArray[np.int64]
    """Shape (n, 2): source offset, staging offset."""
    shape: tuple[int, ...]
    """() for plain runs of ``item_bytes``."""
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RegroupPlan:
    """Both steps. Staging memory has ``staging_bytes``; the requests' source offsets count from its start."""

    copies: tuple[Copy, ...]
    """Step 1. They write disjoint bytes, in any order, after ``zero``."""
    zero: npt.NDArray[np.int64]
    """Staging offsets of pages that padding is in: ``zero_bytes`` each are zeroed before the copies."""
    zero_bytes: int
    staging_bytes: int
    requests: Requests
    """Step 2."""
    payload_bytes: int
    """Bytes of the elements alone; ``staging_bytes`` minus this is padding."""

    def by_channel(self) -> dict[int, Descriptors]:
        """Channel to (n, 3): staging offset, offset in the channel, length; only channels that get something."""
        raise NotImplementedError


def plan_regroup(source: Placed, target: Placed, within: Ranges | None = None) -> RegroupPlan:
    """What brings the part ``within`` of the tensor, as far as both sides hold it, from one layout to the other.

    With ``layout.padding`` in the target, ranges must begin and end at page boundaries or at the tensor's end (tokens:
    at multiples of the tile's rows), since whole pages are written.

    Raises :class:`UnsupportedLayout` where the layouts can't be converted, and :class:`InvalidArgument` for ranges that
    neither holds or that cut pages.
    """
    raise NotImplementedError


def plan_direct(source: Placed, target: Placed, within: Ranges | None = None) -> Requests:
    """The requests without step 1: maximal runs that are contiguous on both sides. For sources of one channel."""
    raise NotImplementedError
