"""A device whose memory is channels: one buffer, one region and so one key for each of them (HAWK, section 4.2).

What the channels' bytes are is the business of a :class:`Backing`: shared memory of this host, or windows onto a card.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from kvd.errors import InvalidArgument, OutOfMemory, ShuttingDown
from kvd.fabric.base import Region
from kvd.memory.arena import Arena, create_arena
from kvd.memory.channels import ChannelSpace
from kvd.memory.holdings import Holdings
from kvd.memory.leases import Lifetime
from kvd.memory.registrar import Registrar
from kvd_client.statuses import DeviceStatus


class Backing(Protocol):
    """Where a device's channels are. All of them have ``channel_bytes`` bytes."""

    @property
    def kind(self) -> str:
        """The word of the configuration: ``host``, ``tenstorrent``."""

    @property
    def origin(self) -> int:
        """What the device itself calls the first byte of each channel."""

    @property
    def lead(self) -> int:
        """Where the first byte of each channel lies in its descriptor."""

    def memory(self, channel: int) -> memoryview:
        """The channel's bytes, writable, format ``B``."""

    def fd(self, channel: int) -> int:
        """A descriptor of the channel's memory that a process can map; owned by the backing."""

    def register(self, fabric: Registrar, channel: int) -> Region:
        """The channel's region with a fabric; raises :class:`~kvd.errors.FabricError`."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class HostBacking:
    """One sealed memfd a channel, every page of it there from the start (:mod:`kvd.memory.arena`)."""

    kind = "host"
    origin = 0
    lead = 0

    def __init__(self, channels: int, channel_bytes: int, *, make_arena: Callable[[int], Arena] = create_arena) -> None:
        """Raises :class:`~kvd.errors.OutOfMemory` as :func:`~kvd.memory.arena.create_arena`; nothing is left then."""
        self._arenas: list[Arena] = []
        with contextlib.ExitStack() as undo:
            for _ in range(channels):
                self._arenas.append(make_arena(channel_bytes))
                undo.callback(self._arenas[-1].close)
            undo.pop_all()
        self._nbytes = channel_bytes

    def memory(self, channel: int) -> memoryview:
        return self._arenas[channel].memory[: self._nbytes]

    def fd(self, channel: int) -> int:
        return self._arenas[channel].fd

    def register(self, fabric: Registrar, channel: int) -> Region:
        return fabric.register(self.memory(channel))

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


class ChannelLease(Lifetime):
    """Tensors that lie in the same ``channels``, each at one base in all of them; made by :class:`NpuDevice`.

    ``nbytes`` is the sum of :attr:`sizes`: what the lease has in each channel.
    """

    __slots__ = ("_device", "bases", "channels", "sizes")

    def __init__(
        self,
        device: NpuDevice,
        *,
        channels: tuple[int, ...],
        sizes: tuple[int, ...],
        bases: tuple[int, ...],
        generation: int,
        owner: Hashable,
    ) -> None:
        super().__init__(nbytes=sum(sizes), generation=generation, owner=owner)
        self._device = device
        self.channels = channels
        self.sizes = sizes
        """Bytes of each tensor in each channel."""
        self.bases = bases
        """Where each tensor begins in each channel's memory and region: multiples of the device's alignment."""

    @property
    def base(self) -> int:
        """The first tensor's base."""
        return self.bases[0]

    @property
    def address(self) -> int:
        """What the device's own runtime calls the first tensor's base."""
        return self._device.origin + self.bases[0]

    @property
    def extents(self) -> list[tuple[int, int]]:
        """``(offset, length)`` of the lease's bytes in each channel, tensors that touch taken together, in order."""
        found: list[tuple[int, int]] = []
        for base, nbytes in zip(self.bases, self.sizes, strict=True):
            if found and sum(found[-1]) == base:
                found[-1] = (found[-1][0], found[-1][1] + nbytes)
            else:
                found.append((base, nbytes))
        return found

    def memory(self, channel: int, tensor: int = 0) -> memoryview:
        """A tensor's bytes in a channel, writable, format ``B``. Raises :class:`~kvd.errors.LeaseExpired` once they
        have gone back to the device."""
        self._check(channel)
        base = self.bases[tensor]
        return self._device.memory(channel)[base : base + self.sizes[tensor]]

    def region(self, channel: int, fabric: str) -> Region:
        """The whole channel's region with the named fabric, in which tensors begin at :attr:`bases`. Raises as
        :meth:`memory`, and :class:`~kvd.errors.InvalidArgument` for a fabric that the device was not given."""
        self._check(channel)
        return self._device.region(channel, fabric)

    def fd(self, channel: int) -> int:
        """A descriptor of the whole channel's memory to pass to a process, in which channels begin at the device's
        ``lead``; owned by the device. Raises as :meth:`memory`."""
        self._check(channel)
        return self._device.fd(channel)

    def _check(self, channel: int) -> None:
        self._check_not_free()
        if channel not in self.channels:
            raise InvalidArgument(
                f"lease {self.generation} has nothing in channel {channel} of {self._device.name!r}, only in "
                f"{', '.join(map(str, self.channels))}",
                channel=channel,
                generation=self.generation,
            )

    def _give_back(self) -> None:
        self._device._reclaim(self)


class NpuDevice:
    """A device's channels, lent out. Everything runs on the event loop's thread, without locks.

    ``backing`` has ``channels`` channels of ``channel_bytes`` bytes; the device owns it from here on, also when this
    fails. Bases are multiples of ``alignment`` (Tenstorrent's p150: 64 bytes, Wormhole: 32).
    """

    def __init__(
        self,
        name: str,
        backing: Backing,
        *,
        channels: int,
        channel_bytes: int,
        alignment: int,
        fabrics: Iterable[Registrar] = (),
    ) -> None:
        self.name = name
        self.backing = backing.kind
        self.origin = backing.origin
        self.lead = backing.lead
        self._backing = backing
        self._fabrics: list[Registrar] = []
        self._regions: dict[str, list[Region]] = {}
        self._holdings: Holdings[ChannelLease] = Holdings()
        self._generations = itertools.count(1)
        self._closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._space = ChannelSpace(channels, channel_bytes, alignment)
            for fabric in fabrics:
                self.add_fabric(fabric)
            undo.pop_all()

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def channels(self) -> int:
        return self._space.channels

    @property
    def channel_bytes(self) -> int:
        return self._space.channel_bytes

    @property
    def alignment(self) -> int:
        return self._space.alignment

    def memory(self, channel: int) -> memoryview:
        """All bytes of a channel; :meth:`ChannelLease.memory` has those of a tensor."""
        return self._backing.memory(channel)

    def fd(self, channel: int) -> int:
        """A descriptor of a channel's memory that a process can map; owned by the device."""
        return self._backing.fd(channel)

    def region(self, channel: int, fabric: str) -> Region:
        """A channel's region with the named fabric. Raises :class:`~kvd.errors.InvalidArgument` if there is none."""
        regions = self._regions.get(fabric, [])
        if not 0 <= channel < len(regions):
            raise InvalidArgument(
                f"channel {channel} of device {self.name!r} is not registered with fabric {fabric!r}; it has "
                f"{self.channels} channels, registered with {', '.join(sorted(self._regions)) or 'no fabric'}",
                channel=channel,
                device=self.name,
                fabric=fabric,
            )
        return regions[channel]

    def leases(self, owner: Hashable) -> list[ChannelLease]:
        """The owner's leases whose memory has not gone back yet, oldest first."""
        return self._holdings.of(owner)

    def status(self) -> DeviceStatus:
        space, every = self._space, range(self.channels)
        return DeviceStatus(
            name=self.name,
            backing=self.backing,
            channel_bytes=space.channel_bytes,
            alignment=space.alignment,
            leases=len(self._holdings),
            used=[space.used(channel) for channel in every],
            largest_free=[space.largest([channel]) for channel in every],
            largest_common=space.largest(),
        )

    # --- leases ---------------------------------------------------------------------------------------------------

    def lease(self, nbytes: int, owner: Hashable, *, channels: Sequence[int] | None = None) -> ChannelLease:
        """A tensor of ``nbytes`` bytes *in each* of ``channels`` (``None``: all), at the same base in all of them.

        An interleaved tensor takes pages by channels, rounded up, times the aligned page; a sharded one takes a shard
        in each of the first channels. The content is whatever was there before.

        Raises :class:`OutOfMemory` with ``device``, ``channel``, ``need``, ``free``, ``largest_free`` when a channel
        has no room, :class:`InvalidArgument` for sizes or channels that make no sense, and :class:`ShuttingDown`.
        """
        return self.lease_tensors([nbytes], owner, channels=channels)

    def lease_tensors(
        self, sizes: Sequence[int], owner: Hashable, *, channels: Sequence[int] | None = None
    ) -> ChannelLease:
        """Several tensors under one lease, all or none, end to end where there is room and else in as few extents as
        go. What a request's layers should use: see :meth:`kvd.memory.channels.ChannelSpace.take_all`. ``sizes`` are
        bytes in each channel. Errors as in :meth:`lease`."""
        if self._closed:
            raise ShuttingDown(f"device {self.name!r} is closed; no new tensor can be placed on it")
        named = tuple(range(self.channels)) if channels is None else tuple(channels)
        try:
            bases = self._space.take_all(sizes, channels)
        except OutOfMemory as error:
            raise OutOfMemory(f"device {self.name!r}: {error.message}", device=self.name, **error.fields) from None
        lease = ChannelLease(
            self,
            channels=named,
            sizes=tuple(sizes),
            bases=tuple(bases),
            generation=next(self._generations),
            owner=owner,
        )
        self._holdings.add(lease)
        return lease

    # --- fabrics and end ------------------------------------------------------------------------------------------

    def add_fabric(self, fabric: Registrar) -> None:
        """Register each channel with one more fabric; on its error nothing has changed."""
        done: list[Region] = []
        try:
            done.extend(self._backing.register(fabric, channel) for channel in range(self.channels))
        except BaseException:
            for region in done:
                fabric.deregister(region)
            raise
        self._regions[fabric.name] = done
        self._fabrics.append(fabric)

    def close(self) -> None:
        """Release all leases and give the channels back, held or not; close the fabrics first. Idempotent."""
        self._closed = True
        for lease in self._holdings:
            lease.release()
        for fabric in self._fabrics:
            for region in self._regions.pop(fabric.name):
                fabric.deregister(region)
        self._fabrics.clear()
        self._backing.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _reclaim(self, lease: ChannelLease) -> None:
        self._holdings.remove(lease)
        for base, nbytes in zip(lease.bases, lease.sizes, strict=True):
            self._space.give(base, nbytes, lease.channels)
