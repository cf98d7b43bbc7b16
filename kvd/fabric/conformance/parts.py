"""Writes into several grants: one operation, whose mask bytes follow nothing that was refused, stopped or damaged."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvd.errors import Aborted, InvalidArgument, RemoteAccessError
from kvd.fabric.base import Grant, Operation
from kvd.fabric.conformance.pairs import MIB, Bytes, Pair, failure, one
from kvd.fabric.conformance.suite import Suite, on_pair, until
from kvd.types import Descriptors, Lane


def several(pair: Pair) -> None:
    """Skip where the fabric has no writes into several grants."""
    if not pair.left.fabric.capabilities.several_grants:
        pytest.skip("this fabric does not write into several grants at once")


class Parts(Suite):
    """Where ``capabilities.several_grants`` says so."""

    @on_pair
    async def test_parts_arrive_in_order(self, pair: Pair) -> None:
        """Scattered rows and empty parts of three grants, masks in a fourth, and a message that finds all of it."""
        several(pair)
        size, seen = 3 * MIB + 5, []
        source, region = pair.left.memory(size + 9)
        targets = [pair.right.granted(size, fill=0) for _ in range(3)]
        masks, granted = pair.right.granted(64, fill=0)
        cuts = np.unique(np.random.default_rng(3).integers(1, size, 300))
        starts = np.concatenate([[0], cuts])
        rows = np.stack([starts, starts, np.diff([*starts, size])], axis=1)[::-1].copy()
        nothing = np.empty((0, 3), np.int64)
        for lane in Lane:
            for target, _ in targets:
                target[:] = 0
            masks[:] = 0
            pair.right.endpoint.on_message = lambda lane, message: seen.append(
                (lane, message, all((t == source[:size]).all() for t, _ in targets), masks.tolist())
            )
            parts = [(targets[0][1].token, rows), (targets[1][1].token, one(0, 0, size)), (granted.token, nothing)]
            parts.append((targets[2][1].token, rows))
            then = granted.token, np.array([[size, 3, 4], [size, 40, 9]], np.int64)
            operation = pair.left.endpoint.write_parts(lane, region, parts, then=then, notify=b"all")
            for _, each in parts:
                each[:] = -1
            then[1][:] = -1
            await operation.done
            rows = np.stack([starts, starts, np.diff([*starts, size])], axis=1)[::-1].copy()
            expected = [0] * 64
            expected[3:7], expected[40:49] = source[size : size + 4].tolist(), source[size:].tolist()
            await until(lambda: bool(seen))
            assert seen.pop() == (lane, b"all", True, expected)
        assert pair.left.endpoint.counters.writes == 2
        pair.right.endpoint.on_message = pair.right.on_message
        await pair.both_live()

    @on_pair
    async def test_arguments_of_parts(self, pair: Pair) -> None:
        several(pair)
        _, region = pair.left.memory(100)
        _, grant = pair.right.granted(100)
        write = pair.left.endpoint.write_parts
        with pytest.raises(InvalidArgument):
            write(Lane.BULK, region, [])
        for wrong in (one(-1, 0, 1), one(0, 0, 101), np.zeros((2, 2), np.int64)):
            with pytest.raises(InvalidArgument):
                write(Lane.BULK, region, [(grant.token, one(0, 0, 1)), (grant.token, wrong)])
            with pytest.raises(InvalidArgument):
                write(Lane.BULK, region, [(grant.token, one(0, 0, 1))], then=(grant.token, wrong))
        too_long = bytes(pair.left.fabric.capabilities.max_message + 1)
        with pytest.raises(InvalidArgument):
            write(Lane.BULK, region, [(grant.token, one(0, 0, 1))], notify=too_long)
        await pair.both_live()

    @on_pair
    async def test_no_mask_behind_a_refused_part(self, pair: Pair) -> None:
        """Whichever part is refused, and why: nothing behind it lands, no mask and no message; what is submitted next
        goes its way."""
        several(pair)
        size = MIB + 3
        source, region = pair.left.memory(size)
        good = [pair.right.granted(size, fill=0) for _ in range(3)]
        masks, granted = pair.right.granted(16, fill=0)
        _, no_write = pair.right.granted(size, writable=False)
        _, revoked = pair.right.granted(size)
        await pair.right.fabric.revoke(revoked)
        whole = one(0, 0, size)
        wrong: list[tuple[bytes, Descriptors]] = [
            (token, whole) for token in (b"x", bytes(16), no_write.token, revoked.token, granted.token)
        ]
        wrong += [(bytes(16), np.empty((0, 3), np.int64)), (revoked.token, one(0, 5, 0))]
        for offset in (-1, 1, size, 2**63 - size):
            wrong.append((good[1][1].token, np.array([[0, 0, size - 1], [0, offset, size]], np.int64)))
        for lane in Lane:
            for each in wrong:
                for place in range(3):
                    await self._refused(pair, lane, region, [grant for _, grant in good], granted, each, place)
                    for number, (target, _) in enumerate(good):
                        assert not target[:].any() or number < place
                        if target.any():
                            assert (target == source).all()
                        target[:] = 0
            assert isinstance(
                await failure(
                    pair.left.endpoint.write_parts(
                        lane, region, [(good[0][1].token, whole)], then=(granted.token, one(0, 15, 2)), notify=b"never"
                    )
                ),
                RemoteAccessError,
            )
            assert not masks.any()
            good[0][0][:] = 0
        assert all(message.startswith(b"behind") for _, message in pair.right.messages)
        await pair.both_live()

    async def _refused(
        self, pair: Pair, lane: Lane, region: Any, good: Sequence[Grant], masks: Grant, wrong: Any, place: int
    ) -> None:
        parts = [(grant.token, one(0, 0, grant.length)) for grant in good]
        parts[place] = wrong
        then = masks.token, one(0, 0, 16)
        operation = pair.left.endpoint.write_parts(lane, region, parts, then=then, notify=b"never")
        behind = pair.left.endpoint.send(lane, b"behind")
        assert isinstance(await failure(operation), RemoteAccessError)
        await behind.done
        assert not np.asarray(masks.region.memory).any()

    @on_pair
    async def test_no_mask_behind_a_part_that_is_stopped(self, pair: Pair) -> None:
        """One of the grants is revoked on the way, or the write is cancelled: no mask, no message."""
        several(pair)
        size = self.large // 2
        _, region = pair.left.memory(size, fill=1)
        for lane in Lane:
            for revoked in (0, 1, None):
                first, second, third = (pair.right.granted(size, fill=0) for _ in range(3))
                parts = [(grant.token, one(0, 0, size)) for _, grant in (first, second)]
                then = third[1].token, one(0, 0, 16)
                write = pair.left.endpoint.write_parts(lane, region, parts, then=then, notify=b"never")
                await until(lambda first=first: first[0][0] == 1)  # type: ignore[misc]
                if revoked is None:
                    write.cancel()
                else:
                    await pair.right.fabric.revoke((first, second)[revoked][1])
                    placed = int((first, second)[revoked][0].sum())
                assert isinstance(await failure(write), Aborted if revoked is None else RemoteAccessError)
                await pair.left.endpoint.send(lane, b"behind").done
                assert revoked is None or int((first, second)[revoked][0].sum()) == placed < size
                assert not third[0].any()
        assert {message for _, message in pair.right.messages} == {b"behind"}
        await pair.both_live()

    @on_pair
    async def test_no_mask_before_all_parts(self, pair: Pair) -> None:
        """A thread that polls the masks never sees one before the last byte of any part."""
        several(pair)
        slots, size = 100, 512
        source, region = pair.left.memory(size, fill=0)
        halves = [pair.right.granted(slots * size, fill=0) for _ in range(2)]
        masks, granted = pair.right.granted(slots, fill=0)
        data: list[Bytes] = [target.reshape(slots, size) for target, _ in halves]
        early: list[int] = []
        seen, finished = set(), threading.Event()

        def poll() -> None:
            while not finished.is_set():
                generations = masks.copy()  # before the data, which may only be newer
                oldest = np.minimum(data[0].min(axis=1), data[1].min(axis=1))
                seen.update(generations.tolist())
                early.extend(np.flatnonzero(oldest < generations).tolist())

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        poller = threading.Thread(target=poll)
        poller.start()
        try:
            for generation in range(1, 5):
                source[:] = generation
                operations: list[Operation] = []
                for slot in range(slots):
                    parts = [(grant.token, one(0, size * slot, size)) for _, grant in halves]
                    then = granted.token, one(0, slot, 1)
                    operations.append(pair.left.endpoint.write_parts(Lane(slot % 2), region, parts, then=then))
                await asyncio.gather(*(operation.done for operation in operations))
                await until(lambda generation=generation: generation in seen)  # type: ignore[misc]
        finally:
            finished.set()
            await asyncio.to_thread(poller.join)
            sys.setswitchinterval(interval)
        assert (masks == 4).all()
        assert early == []
