"""Bytes that change on the way, and memory that is given back in the middle.

Subclass :class:`FabricFaults` beside :class:`~kvd.fabric.conformance.FabricConformance`; it takes the same fixture
``make_fabric``. A fabric that gets its streams from the caller is put behind a proxy that flips one bit; set
``finds_damage`` to False where the fabric is configured not to look.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from kvd.errors import ChecksumMismatch, FabricError, KvdError, RemoteAccessError
from kvd.fabric.base import Fabric
from kvd.fabric.conformance.pairs import MIB, MemoryBringup, Pair, Side, failure, memory_bringups, one, tcp_pair
from kvd.fabric.conformance.suite import LIMIT_S, Suite, on_pair
from kvd.types import Lane


class Flipper:
    """Carries one direction of a byte stream, and flips one bit of byte ``at``, counted from the stream's start."""

    def __init__(self, at: int, bit: int = 0) -> None:
        self.at, self.bit = at, bit
        self.seen = 0

    def pass_on(self, data: bytearray) -> None:
        if self.seen <= self.at < self.seen + len(data):
            data[self.at - self.seen] ^= 1 << self.bit
        self.seen += len(data)


async def carry(source: socket.socket, target: socket.socket, flipper: Flipper | None) -> None:
    """Copy one direction until either end closes."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := bytearray(await loop.sock_recv(source, 1 << 16)):
            if flipper is not None:
                flipper.pass_on(data)
            await loop.sock_sendall(target, data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.asynccontextmanager
async def damaged_pair(
    make_fabric: Callable[[], Fabric], flippers: Mapping[tuple[Lane, bool], Flipper]
) -> AsyncIterator[Pair]:
    """Two fabrics whose streams pass ``flippers``: by lane, and whether from left to right."""
    fabrics = make_fabric(), make_fabric()
    left, right = memory_bringups(fabrics[0].capabilities.lanes_need_streams)
    middle: dict[Lane, tuple[socket.socket, socket.socket]] = {}
    carriers = []
    loop = asyncio.get_running_loop()
    for lane, far in dict(left.streams).items():
        # left <-> far ... near <-> right: what left wrote to `far`'s other end is carried on.
        near, end = tcp_pair()
        middle[lane] = (right.streams[lane], near)
        right.streams = {**right.streams, lane: end}
        carriers.append(loop.create_task(carry(middle[lane][0], near, flippers.get((lane, True)))))
        carriers.append(loop.create_task(carry(near, middle[lane][0], flippers.get((lane, False)))))
        del far
    try:
        bringups: tuple[MemoryBringup, MemoryBringup] = (left, right)
        endpoints = await asyncio.gather(fabrics[0].connect(bringups[0]), fabrics[1].connect(bringups[1]))
        yield Pair(Side(fabrics[0], endpoints[0]), Side(fabrics[1], endpoints[1]))
    finally:
        for fabric in fabrics:
            await fabric.close()
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)
        for pair in middle.values():
            for sock in pair:
                sock.close()


class FabricFaults(Suite):
    """See the module."""

    finds_damage = True

    def _run(self, body: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await body

        with asyncio.Runner(loop_factory=type(self).loop_factory) as runner:
            runner.run(limited())

    def test_a_flipped_bit_is_never_taken_for_data(self, make_fabric: Callable[[], Fabric]) -> None:
        """Whichever bit of a write, its mask and its message flips: the write fails, or the connection does; the mask
        never says that damaged bytes are in place, and no byte outside the grant is touched. So with a write into
        several grants."""
        self._skip_where_nothing_is_checked(make_fabric)
        size, outcomes = 40_000, set()
        # Everything of the frames of the write but most of its payload, then the mask's, the message's and beyond.
        places = [*range(0, 200, 7), *range(200, size, 9_001), *range(size, size + 900, 23)]

        async def flip(at: int) -> None:
            lane = Lane(at % 2)
            async with damaged_pair(make_fabric, {(lane, True): Flipper(at, at % 8)}) as pair:
                source, region = pair.left.memory(size + 64)
                source[size:] = 1
                target, grant = pair.right.granted(size + 64, margin=4096, fill=0)
                data = np.array([[0, 0, size - 300], [size - 300, size - 300, 300]], np.int64)
                if at % 3 or not pair.left.fabric.capabilities.several_grants:
                    operation = pair.left.endpoint.write(
                        lane, region, grant.token, data, then=one(size, size, 64), notify=b"in place"
                    )
                else:
                    begin, length = grant.offset, size - 300
                    grants = [
                        pair.right.fabric.grant(grant.region, begin + start, stop - start)
                        for start, stop in ((0, length), (length, size), (size, size + 64))
                    ]
                    rows = one(0, 0, length), one(length, 0, 300), one(size, 0, 64)
                    first, second, then = [(each.token, row) for each, row in zip(grants, rows, strict=True)]
                    operation = pair.left.endpoint.write_parts(
                        lane, region, (first, second), then=then, notify=b"in place"
                    )
                error = await failure(operation)
                inside = target[4096:-4096]
                assert not target[:4096].any()
                assert not target[-4096:].any()
                if inside[size:].any() or pair.right.messages or error is None:
                    assert (inside[:size] == source[:size]).all(), f"bit {at % 8} of byte {at}"
                if error is None:
                    assert (inside == source).all()
                else:
                    assert isinstance(error, FabricError)
                    outcomes.add(type(error))
                    if isinstance(error, ChecksumMismatch):
                        assert error.fields["reason"] == "damaged"
                        await pair.right.until(lambda: True)
                        assert pair.right.endpoint.counters.checksum_errors == 1
                        assert pair.right.fabric.checksum_errors == 1
                        await pair.both_live()
                    else:
                        assert pair.right.fabric.checksum_errors == 1

        async def flips() -> None:
            for at in places:
                await flip(at)

        self._run(flips())
        assert outcomes

    def test_a_flipped_bit_in_an_answer(self, make_fabric: Callable[[], Fabric]) -> None:
        """What a read brings back is checked as well, and acknowledgements are: nothing counts as done by mistake."""
        self._skip_where_nothing_is_checked(make_fabric)
        size = 20_000

        async def flip(at: int) -> None:
            async with damaged_pair(make_fabric, {(Lane.BULK, False): Flipper(at, at % 8)}) as pair:
                target, region = pair.left.memory(size, fill=0)
                source, grant = pair.right.granted(size, fill=None)
                error = await failure(pair.left.endpoint.read(Lane.BULK, region, grant.token, one(0, 0, size)))
                if error is None:
                    assert (target == source).all()
                    message = pair.left.endpoint.send(Lane.BULK, b"x")
                    assert isinstance(await failure(message), FabricError | None)
                else:
                    assert isinstance(error, FabricError)
                    assert pair.left.fabric.checksum_errors == 1

        async def flips() -> None:
            for at in (0, 8, 33, 70, 78, 90, 5000, size, size + 60, size + 100, size + 200):
                await flip(at)

        self._run(flips())

    def _skip_where_nothing_is_checked(self, make_fabric: Callable[[], Fabric]) -> None:
        fabric = make_fabric()
        if not fabric.capabilities.lanes_need_streams or not self.finds_damage:
            pytest.skip("this fabric does not check bytes, or not in a way that a stream shows")

    @on_pair
    async def test_late_data_never_lands_in_reused_memory(self, pair: Pair) -> None:
        """Revoked in the middle of a write and granted again at once: the old write's bytes are not seen again."""
        size = 24 * MIB
        _, region = pair.left.memory(size)
        target, target_region = pair.right.memory(size, fill=0)
        for turn in range(4):
            target[:] = 0
            old = pair.right.fabric.grant(target_region, 0, size)
            rest = np.full(64, 7, np.uint8)
            mask_region = pair.left.fabric.register(rest.data)
            late = pair.left.endpoint.write(Lane.BULK, region, old.token, one(0, 0, size))
            behind = pair.left.endpoint.write(Lane.BULK, mask_region, old.token, one(0, 0, 64), notify=b"late")
            if turn:
                await asyncio.sleep(0)
                # The fabric tells nobody when the first byte lands.
                while not target.any():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            await pair.right.fabric.revoke(old)
            target[:] = 255
            new = pair.right.fabric.grant(target_region, 0, size)
            fresh = pair.left.endpoint.write(Lane.URGENT, mask_region, new.token, one(0, 0, 64))
            assert isinstance(await failure(late), RemoteAccessError)
            assert isinstance(await failure(behind), RemoteAccessError)
            await fresh.done
            assert (target[:64] == 7).all()
            assert (target[64:] == 255).all()
            await pair.right.fabric.revoke(new)
        assert not pair.right.messages

    @on_pair
    async def test_partial_failure_waits_for_all_that_is_under_way(self, pair: Pair) -> None:
        """One of several writes from the same memory is refused: the others still read it, and are not done before
        they have; what is written into the memory after the last is done reaches nobody."""
        size, count = 4 * MIB, 6
        source, region = pair.left.memory(size)
        sent = source.copy()
        grants = [pair.right.granted(size) for _ in range(count)]
        await pair.right.fabric.revoke(grants[2][1])
        done: list[int] = []
        operations = [
            pair.left.endpoint.write(Lane(n % 2), region, grant.token, one(0, 0, size))
            for n, (_, grant) in enumerate(grants)
        ]
        for n, operation in enumerate(operations):
            operation.done.add_done_callback(lambda _, n=n: done.append(n))  # type: ignore[misc]
        errors = [await failure(operation) for operation in operations]
        source[:] = 0
        assert sorted(done) == list(range(count))
        assert [isinstance(error, RemoteAccessError) for error in errors] == [n == 2 for n in range(count)]
        await pair.left.endpoint.send(Lane.BULK, b"drain").done
        await pair.left.endpoint.send(Lane.URGENT, b"drain").done
        for n, (target, _) in enumerate(grants):
            assert (target == (sent if n != 2 else 0)).all()

    @on_pair
    async def test_cancelled_writes_let_go_of_their_memory(self, pair: Pair) -> None:
        """After all of several cancelled writes are done, their memory can be written: no byte of it is sent."""
        size = 8 * MIB
        source, region = pair.left.memory(size, fill=1)
        target, grant = pair.right.granted(size)
        operations = [pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, size)) for _ in range(4)]
        await asyncio.sleep(0)
        for operation in operations:
            operation.cancel()
        for operation in operations:
            assert isinstance(await failure(operation), KvdError)
        source[:] = 9
        await pair.left.endpoint.send(Lane.BULK, b"drain").done
        await pair.right.until(lambda: bool(pair.right.messages))
        assert not (target == 9).any()
