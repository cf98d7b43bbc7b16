"""What is refused: accesses beyond a grant, arguments that make no sense, memory that is not the fabric's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.errors import InvalidArgument, RemoteAccessError
from kvd.fabric.base import Operation
from kvd.fabric.conformance.pairs import MIB, Pair, failure, one
from kvd.fabric.conformance.suite import Suite, on_pair, until
from kvd.types import Lane


class Accesses(Suite):
    """Whatever is refused touches no byte, and leaves everything else alone."""

    @on_pair
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
        await until(lambda: pair.right.endpoint.counters.access_errors > 0)
        assert pair.right.messages == []
        await pair.both_live()

    @on_pair
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

    @on_pair
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

    @on_pair
    async def test_memory_that_can_not_be_registered(self, pair: Pair) -> None:
        for memory in (
            memoryview(b"read-only"),
            memoryview(bytearray(16)).cast("I"),
            memoryview(bytearray(8))[::2],
            memoryview(bytearray()),
        ):
            with pytest.raises(InvalidArgument):
                pair.left.fabric.register(memory)

    @on_pair
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
