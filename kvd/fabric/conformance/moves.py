"""Bytes and messages arrive whole, and in the order that the contract promises."""

from __future__ import annotations

import asyncio
import sys
import threading

import numpy as np

from kvd.errors import RemoteAccessError
from kvd.fabric.base import Operation
from kvd.fabric.conformance.pairs import MIB, Bytes, Pair, failure, one
from kvd.fabric.conformance.suite import Suite, on_pair, open_descriptors, until
from kvd.types import Lane


class Moves(Suite):
    """Writes, reads and messages of all sizes, and what may overtake what."""

    # --- bytes and messages ---------------------------------------------------------------------------------------

    @on_pair
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

    @on_pair
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

    @on_pair
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
        await until(lambda: sum(side.bytes_sent for side in counters) >= total)
        await until(lambda: sum(side.bytes_received for side in counters) >= total)
        assert [sum(side.bytes_sent for side in counters), sum(side.bytes_received for side in counters)] == [total] * 2

    @on_pair
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

    @on_pair
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

    @on_pair
    async def test_message_after_earlier_writes(self, pair: Pair) -> None:
        """A message finds the bytes of every write that was submitted before it on its lane."""
        size, seen = 5 * MIB, []
        source, region = pair.left.memory(size)
        target, grant = pair.right.granted(size)
        pair.right.endpoint.on_message = lambda lane, message: seen.append((message, bool((source == target).all())))
        pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, size), notify=b"notify")
        await pair.left.endpoint.send(Lane.BULK, b"send").done
        assert seen == [(b"notify", True), (b"send", True)]

    @on_pair
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

    @on_pair
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

    @on_pair
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
            for generation in range(1, 5):
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
        assert (target == 4).all()
        assert len(seen) > 1
        assert early == []

    @on_pair
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
