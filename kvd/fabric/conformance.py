"""The conformance suite of :mod:`kvd.fabric.base`, for every fabric, third parties' included. Needs pytest and NumPy.

Subclass it in a test module and say how the fabric is made::

    pytest.register_assert_rewrite("kvd.fabric.conformance")  # before the import, for pytest's explanations

    class TestMyFabric(FabricConformance):
        @pytest.fixture
        def make_fabric(self):
            return MyFabric

``make_fabric`` is called twice a test, once for each end. Where the fabric needs streams it gets TCP connections over
127.0.0.1. Set ``loop_factory`` to run the tests on another event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from kvd.errors import Aborted, FabricError, InvalidArgument, KvdError, RemoteAccessError
from kvd.fabric.base import Endpoint, Fabric, Grant, Operation, Region
from kvd.types import Descriptors, Lane

MIB = 1 << 20
LIMIT_S = 60
"""A test that takes longer hangs."""

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


class _Test(Protocol):
    __name__: str
    __doc__: str | None

    def __call__(self, suite: Any, pair: Pair, /) -> Awaitable[None]: ...


def _on_pair(test: _Test) -> Callable[[Any, Callable[[], Fabric]], None]:
    """Run ``test`` on an event loop of its own; afterwards no task, descriptor or swallowed exception may be left."""

    def run(self: Any, make_fabric: Callable[[], Fabric]) -> None:
        async def body() -> None:
            trouble: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: trouble.append(context))
            before = open_descriptors()
            async with asyncio.timeout(LIMIT_S), connected(make_fabric) as pair:
                await test(self, pair)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert open_descriptors() == before
            assert not trouble

        with asyncio.Runner(loop_factory=type(self).loop_factory) as runner:
            runner.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class FabricConformance:
    """What the contract promises, test by test. A subclass has the fixture ``make_fabric``; see the module."""

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)
    urgent_bound = 24 * MIB
    """Most bulk bytes that may be placed between the submission of an urgent message and its delivery."""
    large = 64 * MIB
    """Bytes of what is ended while it is under way, well above what the fabric keeps outstanding."""
    piece = 36 << 10
    """Bytes of each of a thousand scattered pieces. A fabric that is tested on a slow device may take less of both."""

    # --- bytes and messages ---------------------------------------------------------------------------------------

    @_on_pair
    async def test_write_and_read(self, pair: Pair) -> None:
        for lane in Lane:
            for size in (1, 4096, 3 * MIB + 7):
                source, region = pair.left.memory(size)
                target, grant = pair.right.granted(size, margin=64)
                await pair.left.endpoint.write(lane, region, grant.token, one(0, 0, size)).done
                assert (target[64:-64] == source).all()
                assert not target[:64].any()
                assert not target[-64:].any()
                back, back_region = pair.left.memory(size, fill=0)
                await pair.left.endpoint.read(lane, back_region, grant.token, one(0, 0, size)).done
                assert (back == source).all()

    @_on_pair
    async def test_scattered_write_and_read(self, pair: Pair) -> None:
        """1,000 pieces to other places, each with 9 mask bytes."""
        count, size = 1000, self.piece
        order = np.random.default_rng(1).permutation(count)
        source, region = pair.left.memory(count * size + count * 9)
        source[count * size :] = 1
        target, grant = pair.right.granted(len(source))
        index = np.arange(count)
        rows = np.stack([index * size, order * size, np.full(count, size)], axis=1)
        masks = np.stack([count * size + index * 9, count * size + order * 9, np.full(count, 9)], axis=1)
        await pair.left.endpoint.write(Lane.BULK, region, grant.token, rows, then=masks).done
        data = slice(0, count * size)
        assert (target[data].reshape(count, size)[order] == source[data].reshape(count, size)).all()
        assert (target[count * size :] == 1).all()
        back, back_region = pair.left.memory(count * size, fill=0)
        await pair.left.endpoint.read(Lane.URGENT, back_region, grant.token, rows).done
        assert (back == source[data]).all()

    @_on_pair
    async def test_mixed_sizes_both_ways(self, pair: Pair) -> None:
        """Writes and reads of all sizes at once, on both lanes and from both sides, every byte compared."""
        rng = np.random.default_rng(2)
        checks: list[tuple[Operation, Bytes, Bytes]] = []
        for number in range(120):
            near, far = (pair.left, pair.right) if number % 2 else (pair.right, pair.left)
            size = int(2 ** rng.uniform(0, 21))
            lane = Lane(int(rng.integers(2)))
            local, region = near.memory(size, fill=None if number % 3 else 0)
            remote, grant = far.granted(size, fill=0 if number % 3 else None)
            cuts = np.unique(np.concatenate([[0, size], rng.integers(0, size + 1, 5)]))
            rows = np.stack([cuts[:-1], cuts[:-1], np.diff(cuts)], axis=1)
            if number % 3:
                operation = near.endpoint.write(lane, region, grant.token, rows)
            else:
                operation = near.endpoint.read(lane, region, grant.token, rows)
            checks.append((operation, local, remote))
        for operation, local, remote in checks:
            await operation.done
            assert local.any() or len(local) < 16
            assert (local == remote).all()
        # Where no CPU takes part at the far side, its counters follow when it is told.
        counters, total = (pair.left.endpoint.counters, pair.right.endpoint.counters), sum(len(x) for _, x, _ in checks)
        await _until(lambda: sum(side.bytes_sent for side in counters) >= total)
        await _until(lambda: sum(side.bytes_received for side in counters) >= total)
        assert [sum(side.bytes_sent for side in counters), sum(side.bytes_received for side in counters)] == [total] * 2

    @_on_pair
    async def test_many_small_operations(self, pair: Pair) -> None:
        """5,000 writes and messages in a row take no further descriptor."""
        count = 5000
        source, region = pair.left.memory(count * 64)
        target, grant = pair.right.granted(count * 64)
        before = open_descriptors()
        operations = [
            pair.left.endpoint.write(
                Lane(n % 2), region, grant.token, one(64 * n, 64 * n, 64), notify=n.to_bytes(2) if n % 10 == 0 else None
            )
            for n in range(count)
        ]
        assert open_descriptors() == before
        await asyncio.gather(*(operation.done for operation in operations))
        assert open_descriptors() == before
        assert (source == target).all()
        await pair.right.until(lambda: len(pair.right.messages) == count // 10)
        assert pair.left.endpoint.counters.writes == count
        assert pair.left.endpoint.counters.bytes_in_flight == {Lane.URGENT: 0, Lane.BULK: 0}

    @_on_pair
    async def test_messages_arrive_in_order(self, pair: Pair) -> None:
        largest = pair.left.fabric.capabilities.max_message
        bodies = [b"", b"x", *(n.to_bytes(2) * 50 for n in range(300)), b"y" * largest]
        for near in (pair.left, pair.right):
            for body in bodies:
                for lane in Lane:
                    operation = near.endpoint.send(lane, body)
            await operation.done
        for far in (pair.left, pair.right):
            await far.until(lambda far=far: len(far.messages) == 2 * len(bodies))  # type: ignore[misc]
            for lane in Lane:
                assert [body for where, body in far.messages if where is lane] == bodies
            assert far.endpoint.counters.messages_received == 2 * len(bodies)

    @_on_pair
    async def test_message_after_earlier_writes(self, pair: Pair) -> None:
        """A message finds the bytes of every write that was submitted before it on its lane."""
        size, seen = 5 * MIB, []
        source, region = pair.left.memory(size)
        target, grant = pair.right.granted(size)
        pair.right.endpoint.on_message = lambda lane, message: seen.append((message, bool((source == target).all())))
        pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, size), notify=b"notify")
        await pair.left.endpoint.send(Lane.BULK, b"send").done
        assert seen == [(b"notify", True), (b"send", True)]

    @_on_pair
    async def test_empty_operations(self, pair: Pair) -> None:
        """Nothing to move: still checked, still in order, still done."""
        _, region = pair.left.memory(100)
        target, grant = pair.right.granted(100)
        nothing = np.empty((0, 3), np.int64)
        write, read = pair.left.endpoint.write, pair.left.endpoint.read
        for rows in (nothing, one(100, 0, 0), one(0, 100, 0)):
            await write(Lane.BULK, region, grant.token, rows, notify=b"empty").done
            await write(Lane.BULK, region, grant.token, rows, then=nothing).done
            await read(Lane.URGENT, region, grant.token, rows).done
        await write(Lane.BULK, region, grant.token, nothing, then=one(5, 7, 1)).done
        assert np.flatnonzero(target).tolist() in ([7], [])
        await pair.right.until(lambda: len(pair.right.messages) == 3)
        await pair.right.fabric.revoke(grant)
        assert isinstance(await failure(write(Lane.BULK, region, grant.token, nothing)), RemoteAccessError)

    @_on_pair
    async def test_descriptors_may_be_reused(self, pair: Pair) -> None:
        """The arrays belong to the caller again when the call has returned."""
        source, region = pair.left.memory(3 * MIB)
        target, grant = pair.right.granted(3 * MIB)
        rows, then = one(0, 0, 3 * MIB - 1), one(3 * MIB - 1, 3 * MIB - 1, 1)
        operation = pair.left.endpoint.write(Lane.BULK, region, grant.token, rows, then=then)
        rows[:] = then[:] = -1
        await operation.done
        assert (source == target).all()

    # --- order ----------------------------------------------------------------------------------------------------

    @_on_pair
    async def test_no_mask_before_its_data(self, pair: Pair) -> None:
        """A thread that polls the masks never sees one before the last byte of its data, over thousands of writes."""
        slots, size = 500, 512
        source, region = pair.left.memory(slots * size + slots, fill=0)
        target, grant = pair.right.granted(slots * size + slots)
        data, masks = target[: slots * size].reshape(slots, size), target[slots * size :]
        early: list[int] = []
        seen, finished = set(), threading.Event()

        def poll() -> None:
            while not finished.is_set():
                # The generation is read before the data: data may only be newer.
                generations = masks.copy()
                oldest = data.min(axis=1)
                seen.update(generations.tolist())
                early.extend(np.flatnonzero(oldest < generations).tolist())

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        poller = threading.Thread(target=poll)
        poller.start()
        try:
            for generation in range(1, 7):
                source[:] = generation
                operations = []
                for slot in range(slots):
                    begin, mask = slot * size, slots * size + slot
                    operations.append(
                        pair.left.endpoint.write(
                            Lane(slot % 2), region, grant.token, one(begin, begin, size), then=one(mask, mask, 1)
                        )
                    )
                await asyncio.gather(*(operation.done for operation in operations))
        finally:
            finished.set()
            await asyncio.to_thread(poller.join)
            sys.setswitchinterval(interval)
        assert (target == 6).all()
        assert len(seen) > 1
        assert early == []

    @_on_pair
    async def test_urgent_is_not_behind_bulk(self, pair: Pair) -> None:
        """While bulk work is queued, little of it is placed before an urgent message is delivered."""
        size, count = self.large // 4, 12
        _, region = pair.left.memory(size)
        _, grant = pair.right.granted(size)
        bulk = [pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, size)) for _ in range(count)]
        await bulk[0].done
        received = pair.right.endpoint.counters
        before = received.bytes_received
        pair.left.endpoint.send(Lane.URGENT, b"u" * 1000)
        await pair.right.until(lambda: len(pair.right.messages) == 1)
        assert received.bytes_received - before <= self.urgent_bound
        assert not bulk[-1].done.done()
        for operation in bulk:
            operation.cancel()
            await asyncio.wait([operation.done])

    # --- bounds ---------------------------------------------------------------------------------------------------

    @_on_pair
    async def test_refused_accesses_touch_nothing(self, pair: Pair) -> None:
        size = 2 * MIB
        _, region = pair.left.memory(size)
        before = bytes(region.memory)
        target, grant = pair.right.granted(size, margin=4096, fill=7)
        _, no_write = pair.right.granted(size, writable=False, fill=7)
        _, no_read = pair.right.granted(size, readable=False, fill=7)
        revoked = pair.right.fabric.grant(grant.region, 0, size, writable=True, readable=True)
        await pair.right.fabric.revoke(revoked)
        largest = 2**63 - 1
        outside = [(-1, 1), (size, 1), (size - 1, 2), (0, size + 1), (largest, 1), (largest - 1, size), (-size, size)]
        attempts: list[Operation] = []
        for lane in Lane:

            def write(token: bytes, *rows: tuple[int, int], lane: Lane = lane, **more: Any) -> None:
                table = np.array([(0, *row) for row in rows if row[1] <= size], np.int64).reshape(-1, 3)
                attempts.append(pair.left.endpoint.write(lane, region, token, table, notify=b"never", **more))

            def read(token: bytes, *rows: tuple[int, int], lane: Lane = lane) -> None:
                table = np.array([(0, *row) for row in rows if row[1] <= size], np.int64).reshape(-1, 3)
                attempts.append(pair.left.endpoint.read(lane, region, token, table))

            for token in (b"", b"x", bytes(16), grant.token[:-1], grant.token + b"x", b"y" * 64, revoked.token):
                write(token, (0, 100))
                read(token, (0, 100))
            write(no_write.token, (0, 100))
            read(no_read.token, (0, 100))
            for offset, length in outside:
                if length > size:
                    continue
                write(grant.token, (offset, length))
                read(grant.token, (offset, length))
                write(grant.token, (0, size), (0, size), (offset, length))
                write(grant.token, (offset, length), (0, size))
                read(grant.token, (0, size), (offset, length))
                write(grant.token, (0, size), then=one(0, offset, length))
        for attempt in attempts:
            assert isinstance(await failure(attempt), RemoteAccessError)
        assert bytes(region.memory) == before
        for memory in (target, no_write.region.memory, no_read.region.memory):
            assert (np.asarray(memory) == 7).all()
        await _until(lambda: pair.right.endpoint.counters.access_errors > 0)
        assert pair.right.messages == []
        await pair.both_live()

    @_on_pair
    async def test_refusal_leaves_the_others_alone(self, pair: Pair) -> None:
        """Good and bad operations in turn: each ends as it should."""
        source, region = pair.left.memory(100 * 512)
        target, grant = pair.right.granted(100 * 512)
        operations = [
            pair.left.endpoint.write(
                Lane.BULK, region, grant.token if n % 2 else bytes(16), one(512 * n, 512 * n, 512), notify=bytes([n])
            )
            for n in range(100)
        ]
        for n, operation in enumerate(operations):
            error = await failure(operation)
            assert error is None if n % 2 else isinstance(error, RemoteAccessError)
            assert (target[512 * n : 512 * (n + 1)] == (source[512 * n : 512 * (n + 1)] if n % 2 else 0)).all()
        await pair.right.until(lambda: len(pair.right.messages) == 50)
        assert [message[0] for _, message in pair.right.messages] == list(range(1, 100, 2))

    @_on_pair
    async def test_invalid_arguments(self, pair: Pair) -> None:
        _, region = pair.left.memory(1000)
        _, grant = pair.right.granted(1000)
        largest = 2**63 - 1
        wrong = [
            one(-1, 0, 1),
            one(0, 0, -1),
            one(1000, 0, 1),
            one(0, 0, 1001),
            one(1001, 0, 0),
            one(largest, 0, largest),
        ]
        wrong += [np.zeros((2, 2), np.int64), np.zeros(3, np.int64), np.zeros((1, 3), np.float64)]
        for rows in wrong:
            with pytest.raises(InvalidArgument):
                pair.left.endpoint.write(Lane.BULK, region, grant.token, rows)
            with pytest.raises(InvalidArgument):
                pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, 1), then=rows)
            with pytest.raises(InvalidArgument):
                pair.left.endpoint.read(Lane.BULK, region, grant.token, rows)
        too_long = bytes(pair.left.fabric.capabilities.max_message + 1)
        with pytest.raises(InvalidArgument):
            pair.left.endpoint.send(Lane.URGENT, too_long)
        with pytest.raises(InvalidArgument):
            pair.left.endpoint.write(Lane.URGENT, region, grant.token, one(0, 0, 1), notify=too_long)
        for offset, length in ((-1, 1), (0, 1001), (1001, 0), (0, -1), (largest, largest)):
            with pytest.raises(InvalidArgument):
                pair.left.fabric.grant(region, offset, length)
        await pair.both_live()

    @_on_pair
    async def test_memory_that_can_not_be_registered(self, pair: Pair) -> None:
        for memory in (
            memoryview(b"read-only"),
            memoryview(bytearray(16)).cast("I"),
            memoryview(bytearray(8))[::2],
            memoryview(bytearray()),
        ):
            with pytest.raises(InvalidArgument):
                pair.left.fabric.register(memory)

    @_on_pair
    async def test_deregistered_regions(self, pair: Pair) -> None:
        _, region = pair.left.memory(1000)
        grant = pair.left.fabric.grant(region, 0, 1000)
        with pytest.raises(InvalidArgument):
            pair.left.fabric.deregister(region)
        await pair.left.fabric.revoke(grant)
        await pair.left.fabric.revoke(grant)
        for _ in range(2):
            pair.left.fabric.deregister(region)
        _, target = pair.right.granted(1000)
        with pytest.raises(InvalidArgument):
            pair.left.endpoint.write(Lane.BULK, region, target.token, one(0, 0, 1))
        with pytest.raises(InvalidArgument):
            pair.left.fabric.grant(region, 0, 1)

    # --- cancellation and revocation ------------------------------------------------------------------------------

    @_on_pair
    async def test_cancel_before_the_start(self, pair: Pair) -> None:
        """Whatever is queued is dropped without a trace; what is before and behind it goes on."""
        source, region = pair.left.memory(4 * MIB)
        target, grant = pair.right.granted(4 * MIB)
        endpoint = pair.left.endpoint
        first = endpoint.write(Lane.BULK, region, grant.token, one(0, 0, MIB))
        dropped = [
            endpoint.write(Lane.BULK, region, grant.token, one(MIB, MIB, MIB), notify=b"never"),
            endpoint.read(Lane.BULK, region, grant.token, one(2 * MIB, 3 * MIB, MIB)),
            endpoint.send(Lane.BULK, b"never"),
        ]
        last = endpoint.write(Lane.BULK, region, grant.token, one(2 * MIB, 2 * MIB, MIB), notify=b"last")
        for operation in dropped * 2:
            operation.cancel()
        for operation in dropped:
            assert isinstance(await failure(operation), Aborted)
        await first.done
        await last.done
        await pair.right.until(lambda: len(pair.right.messages) > 0)
        assert pair.right.messages == [(Lane.BULK, b"last")]
        assert (target[:MIB] == source[:MIB]).all()
        assert (target[2 * MIB : 3 * MIB] == source[2 * MIB : 3 * MIB]).all()
        assert not target[MIB : 2 * MIB].any()
        first.cancel()
        assert first.done.exception() is None

    @_on_pair
    async def test_cancel_on_the_way(self, pair: Pair) -> None:
        """Once a cancelled operation is done, its local memory is free: it is neither read nor written any more."""
        size = self.large
        source, region = pair.left.memory(size, fill=1)
        target, grant = pair.right.granted(size)
        for lane in Lane:
            target[:] = 0
            source[:] = 1
            write = pair.left.endpoint.write(lane, region, grant.token, one(0, 0, size), notify=b"never")
            await _until(lambda: target[0] == 1)
            write.cancel()
            write.cancel()
            assert isinstance(await failure(write), Aborted)
            source[:] = 2
            await pair.left.endpoint.send(lane, b"behind").done
            assert not (target == 2).any()
            source[:] = 0
            target[:] = 3
            read = pair.left.endpoint.read(lane, region, grant.token, one(0, 0, size))
            await _until(lambda: source[0] == 3)
            read.cancel()
            assert isinstance(await failure(read), Aborted)
            source[:] = 4
            tail, tail_region = pair.left.memory(1000, fill=0)
            await pair.left.endpoint.read(lane, tail_region, grant.token, one(0, 0, 1000)).done
            assert (tail == 3).all()
            assert (source == 4).all()
        assert [message for _, message in pair.right.messages] == [b"behind", b"behind"]
        await pair.both_live()

    @_on_pair
    async def test_revoke_on_the_way(self, pair: Pair) -> None:
        """When ``revoke`` has returned, no byte lands in the grant or leaves it."""
        size = self.large
        source, region = pair.left.memory(size, fill=1)
        for lane in Lane:
            source[:] = 1
            target, grant = pair.right.granted(size)
            rows = one(0, 0, size - 1)
            write = pair.left.endpoint.write(lane, region, grant.token, rows, then=one(0, size - 1, 1), notify=b"never")
            await _until(lambda target=target: target[0] == 1)  # type: ignore[misc]
            await pair.right.fabric.revoke(grant)
            placed = int(target.sum())
            assert isinstance(await failure(write), RemoteAccessError)
            await pair.left.endpoint.send(lane, b"behind").done
            assert int(target.sum()) == placed < size
            source[:] = 0
            target, grant = pair.right.granted(size, fill=3)
            read = pair.left.endpoint.read(lane, region, grant.token, rows)
            await _until(lambda: source[0] == 3)
            await pair.right.fabric.revoke(grant)
            target[:] = 4
            assert isinstance(await failure(read), RemoteAccessError)
            assert not (source == 4).any()
        assert [message for _, message in pair.right.messages] == [b"behind", b"behind"]
        await pair.both_live()

    @_on_pair
    async def test_revoke_one_of_two_grants(self, pair: Pair) -> None:
        """Grants of one region are independent of each other."""
        source, region = pair.left.memory(1000)
        target, grant = pair.right.granted(1000)
        other = pair.right.fabric.grant(grant.region, 0, 1000)
        await pair.right.fabric.revoke(grant)
        await pair.left.endpoint.write(Lane.BULK, region, other.token, one(0, 0, 1000)).done
        assert (source == target).all()

    # --- the end --------------------------------------------------------------------------------------------------

    @_on_pair
    async def test_loss_fails_everything(self, pair: Pair) -> None:
        """The peer goes away: every operation fails, then ``on_lost`` is called once."""
        ended = await self._end_amid_work(pair, pair.right.endpoint.close)
        await pair.left.until(lambda: len(pair.left.lost) > 0)
        await _turns(3)
        assert ended[-1] is pair.left.lost[0]
        assert len(pair.left.lost) == 1
        assert pair.right.lost == []

    @_on_pair
    async def test_close_fails_everything(self, pair: Pair) -> None:
        await self._end_amid_work(pair, pair.left.endpoint.close)
        await pair.right.until(lambda: len(pair.right.lost) > 0)
        await _turns(3)
        assert pair.left.lost == []
        assert len(pair.right.lost) == 1

    @_on_pair
    async def test_close_of_the_fabric(self, pair: Pair) -> None:
        closing: list[asyncio.Task[None]] = []
        await self._end_amid_work(pair, lambda: closing.append(asyncio.ensure_future(pair.left.fabric.close())))
        await closing[0]
        await pair.left.fabric.close()
        assert pair.left.lost == []

    async def _end_amid_work(self, pair: Pair, end: Callable[[], object]) -> list[object]:
        """End the connection under 18 operations; what their ends and ``on_lost`` said, in that order."""
        size = self.large // 4
        endpoint = pair.left.endpoint
        _, region = pair.left.memory(size)
        _, grant = pair.right.granted(size)
        operations: list[Operation] = []
        ended: list[object] = []

        def on_lost(error: KvdError) -> None:
            ended.append(error)
            pair.left.on_lost(error)

        endpoint.on_lost = on_lost
        for lane in Lane:
            for _ in range(3):
                operations.append(endpoint.write(lane, region, grant.token, one(0, 0, size), notify=b"n"))
                operations.append(endpoint.read(lane, region, grant.token, one(0, 0, size)))
                operations.append(endpoint.send(lane, b"message"))
        for operation in operations:
            operation.done.add_done_callback(lambda done: ended.append(done.exception()))
        await _until(lambda: pair.right.endpoint.counters.bytes_received > 0)
        end()
        await endpoint.wait_closed()
        errors = [await failure(operation) for operation in operations]
        assert sum(error is None for error in errors) < len(errors) // 2
        assert all(error is None or type(error) is FabricError for error in errors)
        with pytest.raises(FabricError):
            endpoint.write(Lane.BULK, region, grant.token, one(0, 0, 1))
        with pytest.raises(FabricError):
            endpoint.read(Lane.BULK, region, grant.token, one(0, 0, 1))
        with pytest.raises(FabricError):
            endpoint.send(Lane.URGENT, b"late")
        for _ in range(2):
            endpoint.close()
            await endpoint.wait_closed()
            for operation in operations:
                operation.cancel()
        await _turns(3)
        assert len(ended) == len(operations) + len(pair.left.lost)
        return ended

    @_on_pair
    async def test_close_inside_on_message(self, pair: Pair) -> None:
        """The owner may end the connection from a callback; nothing more is delivered."""
        got: list[bytes] = []

        def close(lane: Lane, message: bytes) -> None:
            got.append(message)
            pair.right.endpoint.close()

        pair.right.endpoint.on_message = close
        for n in range(10):
            pair.left.endpoint.send(Lane.URGENT, bytes([n]))
        await pair.left.until(lambda: len(pair.left.lost) > 0)
        assert got == [b"\0"]
        await pair.right.endpoint.wait_closed()

    @_on_pair
    async def test_on_message_that_fails(self, pair: Pair) -> None:
        """A mistake in the owner's callback is reported to the event loop; the connection lives on."""
        reported: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reported.append(context["exception"]))

        def fail(lane: Lane, message: bytes) -> None:
            raise ZeroDivisionError

        pair.right.endpoint.on_message = fail
        operations = [pair.left.endpoint.send(Lane.URGENT, b"x") for _ in range(3)]
        for operation in operations:
            await operation.done
        assert [type(error) for error in reported] == [ZeroDivisionError] * 3
        await pair.both_live()

    @_on_pair
    async def test_answers_from_on_message(self, pair: Pair) -> None:
        """Operations may be submitted from a callback."""
        _, region = pair.right.memory(1000, fill=9)
        target, grant = pair.left.granted(1000)

        def answer(lane: Lane, message: bytes) -> None:
            pair.right.endpoint.write(lane, region, message, one(0, 0, 1000), notify=b"done")

        pair.right.endpoint.on_message = answer
        for lane in Lane:
            target[:] = 0
            pair.left.endpoint.send(lane, grant.token)
            await pair.left.until(lambda lane=lane: (lane, b"done") in pair.left.messages)  # type: ignore[misc]
            assert (target == 9).all()

    @_on_pair
    async def test_several_connections(self, pair: Pair) -> None:
        """A fabric serves more than one peer, and the loss of one leaves the others alone."""
        lanes = pair.left.fabric.capabilities.lanes_need_streams
        near, far = memory_bringups(lanes)
        second = await asyncio.gather(pair.left.fabric.connect(near), pair.right.fabric.connect(far))
        extra = Pair(Side(pair.left.fabric, second[0]), Side(pair.right.fabric, second[1]))
        await extra.both_live()
        second[0].close()
        await extra.right.until(lambda: len(extra.right.lost) > 0)
        assert pair.left.lost == pair.right.lost == []
        await pair.both_live()


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def _until(condition: Callable[[], bool]) -> None:
    """Give the event loop its turns until ``condition`` holds, for what no callback tells."""
    while not condition():
        await _turns(1)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _random(nbytes: int, seed: int) -> Bytes:
    # Without zeros, so that a byte that was not written shows.
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
