"""Two fabrics and a connection between them, with all that their owners were told: what the suite's tests run on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.fabric.base import Endpoint, Fabric, Grant, Operation, Region
from kvd.types import Descriptors, Lane

MIB = 1 << 20

Bytes = npt.NDArray[np.uint8]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over 127.0.0.1, non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


class Mailbox:
    """Blobs on their way in one direction: kept until somebody waits for them or listens."""

    def __init__(self) -> None:
        self._blobs: asyncio.Queue[bytes] = asyncio.Queue()
        self._told: Callable[[bytes], None] | None = None

    def put(self, blob: bytes) -> None:
        assert len(blob) <= 4096
        if self._told is None:
            self._blobs.put_nowait(blob)
        else:
            asyncio.get_running_loop().call_soon(self._told, blob)

    async def get(self) -> bytes:
        return await self._blobs.get()

    def listen(self, told: Callable[[bytes], None]) -> None:
        self._told = told
        while not self._blobs.empty():
            self.put(self._blobs.get_nowait())


class MemoryBringup:
    """A :class:`~kvd.fabric.base.Bringup` whose blobs cross memory."""

    def __init__(
        self,
        streams: Mapping[Lane, socket.socket],
        inbox: Mailbox,
        outbox: Mailbox,
        *,
        secret: bytes = b"",
        dialled: bool = False,
    ) -> None:
        self.streams = streams
        self.secret = secret
        self.dialled = dialled
        self.inbox = inbox
        self.outbox = outbox

    async def exchange(self, blob: bytes) -> bytes:
        self.outbox.put(blob)
        return await self.inbox.get()

    def tell(self, blob: bytes) -> None:
        self.outbox.put(blob)

    def listen(self, told: Callable[[bytes], None]) -> None:
        self.inbox.listen(told)


def memory_bringups(lanes: tuple[Lane, ...]) -> tuple[MemoryBringup, MemoryBringup]:
    """Both ends of a bringup, with TCP streams for ``lanes``."""
    streams = {lane: tcp_pair() for lane in lanes}
    there, back = Mailbox(), Mailbox()
    secret = os.urandom(32)
    near = {lane: pair[0] for lane, pair in streams.items()}
    far = {lane: pair[1] for lane, pair in streams.items()}
    return (
        MemoryBringup(near, back, there, secret=secret, dialled=True),
        MemoryBringup(far, there, back, secret=secret, dialled=False),
    )


@dataclasses.dataclass
class Side:
    """One end of a connection, with all that its owner was told."""

    fabric: Fabric
    endpoint: Endpoint
    messages: list[tuple[Lane, bytes]] = dataclasses.field(default_factory=list)
    lost: list[KvdError] = dataclasses.field(default_factory=list)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.endpoint.on_lost = self.on_lost
        self.endpoint.on_message = self.on_message

    def on_lost(self, error: KvdError) -> None:
        self.lost.append(error)
        self.changed.set()

    def on_message(self, lane: Lane, message: bytes) -> None:
        self.messages.append((lane, message))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for messages or the loss until ``condition`` holds."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def memory(self, nbytes: int, fill: int | None = None) -> tuple[Bytes, Region]:
        """Registered memory: random, or filled with one value."""
        array = np.full(nbytes, fill, np.uint8) if fill is not None else _random(nbytes, nbytes)
        return array, self.fabric.register(array.data)

    def granted(
        self, nbytes: int, *, writable: bool = True, readable: bool = True, margin: int = 0, fill: int | None = 0
    ) -> tuple[Bytes, Grant]:
        """Memory of which all but ``margin`` bytes at each end is granted; the array is the whole memory."""
        array, region = self.memory(nbytes + 2 * margin, fill)
        return array, self.fabric.grant(region, margin, nbytes, writable=writable, readable=readable)


@dataclasses.dataclass
class Pair:
    """Both ends of a connection."""

    left: Side
    right: Side

    async def both_live(self) -> None:
        """Each side can still write to the other on both lanes."""
        for near, far in ((self.left, self.right), (self.right, self.left)):
            for lane in Lane:
                source, region = near.memory(1000)
                target, grant = far.granted(1000)
                await near.endpoint.write(lane, region, grant.token, one(0, 0, 1000)).done
                assert (source == target).all()


def one(local: int, remote: int, length: int) -> Descriptors:
    """A descriptor list of one row."""
    return np.array([[local, remote, length]], np.int64)


async def failure(operation: Operation) -> BaseException | None:
    """What the operation failed with, once it is done."""
    await asyncio.wait([operation.done])
    return operation.done.exception()


@contextlib.asynccontextmanager
async def connected(make_fabric: Callable[[], Fabric]) -> AsyncIterator[Pair]:
    """Two fabrics of ``make_fabric`` and a connection between them; all closed at the end."""
    fabrics = make_fabric(), make_fabric()
    bringups = memory_bringups(fabrics[0].capabilities.lanes_need_streams)
    try:
        endpoints = await asyncio.gather(fabrics[0].connect(bringups[0]), fabrics[1].connect(bringups[1]))
        yield Pair(Side(fabrics[0], endpoints[0]), Side(fabrics[1], endpoints[1]))
        for endpoint in endpoints:
            endpoint.close()
            await endpoint.wait_closed()
    finally:
        for fabric in fabrics:
            await fabric.close()


def _random(nbytes: int, seed: int) -> Bytes:
    # Without zeros, so that a byte that was not written shows.
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
