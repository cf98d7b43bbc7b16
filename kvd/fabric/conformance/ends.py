"""How connections end, and what their owners may do in the callbacks that tell them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvd.errors import FabricError, KvdError
from kvd.fabric.base import Operation
from kvd.fabric.conformance.pairs import Pair, Side, failure, memory_bringups, one
from kvd.fabric.conformance.suite import Suite, on_pair, turns, until
from kvd.types import Lane


class Ends(Suite):
    """Every operation ends with its connection, and nothing is told twice or afterwards."""

    @on_pair
    async def test_loss_fails_everything(self, pair: Pair) -> None:
        """The peer goes away: every operation fails, then ``on_lost`` is called once."""
        ended = await self._end_amid_work(pair, pair.right.endpoint.close)
        await pair.left.until(lambda: len(pair.left.lost) > 0)
        await turns(3)
        assert ended[-1] is pair.left.lost[0]
        assert len(pair.left.lost) == 1
        assert pair.right.lost == []

    @on_pair
    async def test_close_fails_everything(self, pair: Pair) -> None:
        await self._end_amid_work(pair, pair.left.endpoint.close)
        await pair.right.until(lambda: len(pair.right.lost) > 0)
        await turns(3)
        assert pair.left.lost == []
        assert len(pair.right.lost) == 1

    @on_pair
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
        await until(lambda: pair.right.endpoint.counters.bytes_received > 0)
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
        await turns(3)
        assert len(ended) == len(operations) + len(pair.left.lost)
        return ended

    @on_pair
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

    @on_pair
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

    @on_pair
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

    @on_pair
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
