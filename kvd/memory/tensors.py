"""Memory in which a part's or a cache's tensors lie: channels of a device, or one channel of host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from kvd.fabric.base import Fabric, Grant, Region
from kvd.memory.device import ChannelLease, NpuDevice
from kvd.memory.leases import Lease
from kvd.memory.pool import Pool
from kvd.types import Descriptors


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelSlice:
    """A granted piece of a channel: offsets of requests count from ``start``."""

    channel: int
    start: int
    nbytes: int
    fabric: Fabric
    grant: Grant


class TensorMemory:
    """Tensors at :attr:`bases`, which count from the beginning of each of :attr:`channels` buffers."""

    def __init__(self, lease: ChannelLease | Lease, bases: Sequence[int], device: NpuDevice | None) -> None:
        self.lease = lease
        self.device = device
        self.bases: npt.NDArray[np.int64] = np.array(bases, np.int64)
        self.channels = device.channels if device is not None else 1

    @property
    def alignment(self) -> int:
        """Of pages, in bytes."""
        return self.device.alignment if self.device is not None else 1

    @property
    def origin(self) -> int:
        """What the device itself adds to a base."""
        return self.device.origin if self.device is not None else 0

    @property
    def offset(self) -> int:
        """Where the buffers begin in their descriptors."""
        return 0 if isinstance(self.lease, ChannelLease) else self.lease.offset

    @property
    def nbytes(self) -> int:
        """Of each buffer."""
        return self.device.channel_bytes if self.device is not None else self.lease.nbytes

    @property
    def descriptors(self) -> list[int]:
        """A descriptor for each channel; none where processes can't map the device's memory."""
        if isinstance(self.lease, Lease):
            return [self.lease.fd]
        assert self.device is not None
        if self.device.backing != "host":
            return []  # a card's banks are mapped by its own runtime
        return [self.device.fd(channel) for channel in range(self.channels)]

    def buffers(self) -> list[memoryview]:
        """Each channel's bytes, of which only the tensors' are this memory's."""
        if isinstance(self.lease, Lease):
            return [self.lease.memory]
        assert self.device is not None
        return [self.device.memory(channel) for channel in range(self.channels)]

    def region(self, channel: int, fabric: str) -> tuple[Region, int]:
        """A channel's region, and where its buffer begins in it."""
        if isinstance(self.lease, Lease):
            return self.lease.region(fabric), self.lease.offset
        return self.lease.region(channel, fabric), 0

    def extents(self) -> list[tuple[int, int]]:
        """``(start, bytes)`` of the tensors' memory in each buffer, what touches taken together."""
        return [(0, self.lease.nbytes)] if isinstance(self.lease, Lease) else self.lease.extents

    def grant(self, fabric: Fabric) -> list[ChannelSlice]:
        """Let a peer write into the tensors, and nothing else of the device."""
        found, extents = [], self.extents()
        for channel in range(self.channels):
            region, begin = self.region(channel, fabric.name)
            for start, nbytes in extents:
                grant = fabric.grant(region, begin + start, nbytes, writable=True)
                found.append(ChannelSlice(channel, start, nbytes, fabric, grant))
        return found

    def hold(self) -> None:
        self.lease.hold()

    def unhold(self) -> None:
        self.lease.unhold()

    def release(self) -> None:
        self.lease.release()


async def lease_tensors(pool: Pool, device: NpuDevice | None, sizes: Sequence[int], owner: Hashable) -> TensorMemory:
    """Memory for tensors of these sizes, in bytes of each channel; raises as the pool's and the device's leases."""
    if device is not None:
        lease = device.lease_tensors(sizes, owner)
        return TensorMemory(lease, lease.bases, device)
    bases = [int(x) for x in np.cumsum([0, *sizes])[:-1]]
    return TensorMemory(await pool.lease_soon(sum(sizes), owner), bases, None)


def within(descriptors: Descriptors, start: int, nbytes: int) -> Descriptors:
    """Of (n, 3) rows (local offset, offset in the channel, length), those that lie in a granted slice, with the second
    column counted from it."""
    begins, ends = descriptors[:, 1], descriptors[:, 1] + descriptors[:, 2]
    if int(begins.min()) >= start and int(ends.max()) <= start + nbytes:
        found = descriptors.copy()
    else:
        found = descriptors[(begins >= start) & (ends <= start + nbytes)]
    found[:, 1] -= start
    return found
