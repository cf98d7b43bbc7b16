"""Operations that are cancelled, and grants that are revoked, before the start and on the way."""

from __future__ import annotations

from kvd.errors import Aborted, RemoteAccessError
from kvd.fabric.conformance.pairs import MIB, Pair, failure, one
from kvd.fabric.conformance.suite import Suite, on_pair, until
from kvd.types import Lane


class Stops(Suite):
    """Once something has been stopped its memory is free, and all else goes on."""

    @on_pair
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

    @on_pair
    async def test_cancel_on_the_way(self, pair: Pair) -> None:
        """Once a cancelled operation is done, its local memory is free: it is neither read nor written any more."""
        size = self.large
        source, region = pair.left.memory(size, fill=1)
        target, grant = pair.right.granted(size)
        for lane in Lane:
            target[:] = 0
            source[:] = 1
            write = pair.left.endpoint.write(lane, region, grant.token, one(0, 0, size), notify=b"never")
            await until(lambda: target[0] == 1)
            write.cancel()
            write.cancel()
            assert isinstance(await failure(write), Aborted)
            source[:] = 2
            await pair.left.endpoint.send(lane, b"behind").done
            assert not (target == 2).any()
            source[:] = 0
            target[:] = 3
            read = pair.left.endpoint.read(lane, region, grant.token, one(0, 0, size))
            await until(lambda: source[0] == 3)
            read.cancel()
            assert isinstance(await failure(read), Aborted)
            source[:] = 4
            tail, tail_region = pair.left.memory(1000, fill=0)
            await pair.left.endpoint.read(lane, tail_region, grant.token, one(0, 0, 1000)).done
            assert (tail == 3).all()
            assert (source == 4).all()
        assert [message for _, message in pair.right.messages] == [b"behind", b"behind"]
        await pair.both_live()

    @on_pair
    async def test_revoke_on_the_way(self, pair: Pair) -> None:
        """When ``revoke`` has returned, no byte lands in the grant or leaves it."""
        size = self.large
        source, region = pair.left.memory(size, fill=1)
        for lane in Lane:
            source[:] = 1
            target, grant = pair.right.granted(size)
            rows = one(0, 0, size - 1)
            write = pair.left.endpoint.write(lane, region, grant.token, rows, then=one(0, size - 1, 1), notify=b"never")
            await until(lambda target=target: target[0] == 1)  # type: ignore[misc]
            await pair.right.fabric.revoke(grant)
            placed = int(target.sum())
            assert isinstance(await failure(write), RemoteAccessError)
            await pair.left.endpoint.send(lane, b"behind").done
            assert int(target.sum()) == placed < size
            source[:] = 0
            target, grant = pair.right.granted(size, fill=3)
            read = pair.left.endpoint.read(lane, region, grant.token, rows)
            await until(lambda: source[0] == 3)
            await pair.right.fabric.revoke(grant)
            target[:] = 4
            assert isinstance(await failure(read), RemoteAccessError)
            assert not (source == 4).any()
        assert [message for _, message in pair.right.messages] == [b"behind", b"behind"]
        await pair.both_live()

    @on_pair
    async def test_revoke_one_of_two_grants(self, pair: Pair) -> None:
        """Grants of one region are independent of each other."""
        source, region = pair.left.memory(1000)
        target, grant = pair.right.granted(1000)
        other = pair.right.fabric.grant(grant.region, 0, 1000)
        await pair.right.fabric.revoke(grant)
        await pair.left.endpoint.write(Lane.BULK, region, other.token, one(0, 0, 1000)).done
        assert (source == target).all()
