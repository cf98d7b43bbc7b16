"""The fabric over RDMA verbs: its device, its registered regions and its grants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from typing import Any

from kvd.errors import FabricError, KvdError
from kvd.fabric.base import Bringup, Capabilities, Endpoint, Fabric, Grant, Region
from kvd.fabric.regions import RegionTable
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.advice import check_memlock
from kvd.fabric.verbs.device import Device
from kvd.fabric.verbs.endpoint import MAX_MESSAGE, VerbsEndpoint
from kvd.fabric.verbs.wire import ID_BYTES, KEY_BYTES, Token

CHAIN_LINKS = 32
"""Work requests posted at once."""
TRIES = 2
"""How often a path is tried before it counts as broken. Both ends find the same, so that both try again."""
REVOKE_PATIENCE_S = 10.0
"""How long a revocation waits for the peers. Then the device refuses them, which ends their connections. More than a
window of outstanding bytes takes; a peer that hangs loses its session before."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A grant that is open: what the table has for it, its id for the peers, and its registration (none if empty)."""

    listed: Grant
    id: bytes
    registration: Any


class VerbsFabric(Fabric):
    """See the module. Raises :class:`~kvd.errors.FabricError` where there is no usable device.

    ``device``: its name; "": the first one with an active port. ``gid_index``: the local address; -1: the first RoCE v2
    one with an IPv4 address, or else a global IPv6 one. ``rate`` limits what each endpoint moves, in bytes per
    second; 0 means no limit. ``memory``: bytes that are going to be registered, which this process must be allowed to
    lock.
    """

    name = "verbs"
    capabilities = Capabilities(one_sided=True, max_message=MAX_MESSAGE, max_scatter=1)

    def __init__(
        self, *, device: str = "", port: int = 1, gid_index: int = -1, rate: float = 0.0, memory: int = 0
    ) -> None:
        self.rate = rate
        self.key = secrets.token_bytes(KEY_BYTES)
        self.device = Device(device, port, gid_index)
        try:
            check_memlock(self.device.name, memory)
        except FabricError:
            self.device.close()
            raise
        self.details = self.device.details
        self.chain = ib.Chain(CHAIN_LINKS)
        self.endpoints: set[VerbsEndpoint] = set()
        self._table = RegionTable()
        self._registrations: dict[int, list[Any]] = {}
        """A region's, each over the next ``device.max_region`` bytes."""
        self.exports: dict[int, int] = {}
        """The dma-buf of each region that is one. Its addresses are offsets in it, which no CPU can read from."""
        self._watching: asyncio.AbstractEventLoop | None = None
        self._open: dict[bytes, _Open] = {}
        self._closed = False

    def register(self, memory: memoryview) -> Region:
        return self._register(memory)

    def register_dmabuf(self, memory: memoryview, fd: int, offset: int) -> Region:
        """Memory of another device, which begins at ``offset`` of the dma-buf ``fd`` that its driver has exported;
        ``memory`` is what this process sees of it. The device reads and writes it without this host's memory. ``fd``
        stays open as long as the region is registered.

        Raises as :meth:`register`, also where the RDMA device or its driver takes no dma-bufs, with what does.
        """
        return self._register(memory, fd, offset)

    def _register(self, memory: memoryview, fd: int = -1, offset: int | None = None) -> Region:
        region = self._table.register(memory, offset)
        try:
            made = self.device.register_pieces(self._table.address(region), region.nbytes, fd)
        except KvdError:
            self._table.deregister(region)
            raise
        self._registrations[region.id] = made
        if fd >= 0:
            self.exports[region.id] = fd
        return region

    def deregister(self, region: Region) -> None:
        self._table.deregister(region)
        self.exports.pop(region.id, None)
        for registration in self._registrations.pop(region.id, ()):
            registration.close()

    def local(self, region: Region) -> tuple[int, list[int]]:
        """Address of a region, and the lkey of each next ``device.max_region`` bytes; raises
        :class:`~kvd.errors.InvalidArgument` if it is not registered here."""
        return self._table.address(region), [registration.lkey for registration in self._registrations[region.id]]

    def grant(
        self, region: Region, offset: int, length: int, *, writable: bool = True, readable: bool = False
    ) -> Grant:
        listed = self._table.grant(region, offset, length, writable=writable, readable=readable)
        address = self._table.address(region) + offset
        registration = None
        if length:
            # A registration of its own, so that the device itself holds the peer to the grant's bounds and rights.
            rights = {"remote_write": writable, "remote_read": readable}
            try:
                if region.id in self.exports:
                    registration = self.device.register_dmabuf(self.exports[region.id], address, length, **rights)
                else:
                    registration = self.device.register(address, length, **rights)
            except FabricError:
                self._table.revoke(listed)
                raise
        name = listed.token[:ID_BYTES]
        token = Token(name, address, length, registration.rkey if registration else 0, writable, readable)
        grant = dataclasses.replace(listed, token=token.pack(self.key))
        self._open[grant.token] = _Open(listed, name, registration)
        return grant

    async def revoke(self, grant: Grant) -> None:
        entry = self._open.pop(grant.token, None)
        if entry is None:
            return
        try:
            told = [endpoint.revoke(entry.id) for endpoint in self.endpoints]
            if told:
                await asyncio.wait(told, timeout=REVOKE_PATIENCE_S)
        finally:
            self._withdraw(entry)

    def _withdraw(self, entry: _Open) -> None:
        self._table.revoke(entry.listed)
        if entry.registration is not None:
            entry.registration.close()
            entry.registration = None

    async def connect(self, bringup: Bringup) -> Endpoint:
        for _ in range(TRIES - 1):
            try:
                return await self._connect(bringup)
            except FabricError as error:
                if "path" not in error.fields:
                    raise
        return await self._connect(bringup)

    async def _connect(self, bringup: Bringup) -> Endpoint:
        try:
            endpoint = VerbsEndpoint(self, asyncio.get_running_loop())
        except ib.PyverbsError as error:
            raise FabricError(
                f"the RDMA device {self.device.name!r} has no completion queue left: {error}; connect fewer peers",
                device=self.device.name,
            ) from None
        self.endpoints.add(endpoint)
        self._watch()
        try:
            await endpoint.connect(bringup)
        except BaseException:
            endpoint.close()
            await endpoint.wait_closed()
            raise
        return endpoint

    def _watch(self) -> None:
        """Look for the device's events from now on."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self.device.events, self._on_event)

    def _on_event(self) -> None:
        if ib.device_lost(self.device.context):
            for endpoint in list(self.endpoints):
                endpoint.device_lost()

    async def close(self) -> None:
        endpoints = list(self.endpoints)
        for endpoint in endpoints:
            endpoint.close()
        for endpoint in endpoints:
            await endpoint.wait_closed()
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.remove_reader(self.device.events)
        with contextlib.ExitStack() as stack:
            stack.callback(self.device.close)
            stack.callback(self.chain.close)
            for entry in self._open.values():
                stack.callback(self._withdraw, entry)
            for registrations in self._registrations.values():
                for registration in registrations:
                    stack.callback(registration.close)
        self._open.clear()
        self._registrations.clear()
        self.exports.clear()
        self._table.clear()
