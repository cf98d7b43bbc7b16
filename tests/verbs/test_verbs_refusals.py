"""What a device refuses, and what it has no room for."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os

import numpy as np
import pytest

from kvd.errors import FabricError, InvalidArgument, RemoteAccessError
from kvd.fabric.conformance import Pair, failure, one
from kvd.types import Lane
from tests.verbs.devices import needs_devices
from tests.verbs.pairs import on_pair

pytestmark = needs_devices


def _forged(pair: Pair, token: bytes, **changes: int) -> bytes:
    """A token of the right fabric that says what is not so: only the device can tell."""
    from kvd.fabric.verbs.wire import unpack_token

    key = pair.right.fabric.key
    return dataclasses.replace(unpack_token(token, key), **changes).pack(key)


@pytest.mark.parametrize("what", ["key", "range", "rights", "revoked"])
@pytest.mark.parametrize("kind", ["write", "read"])
def test_the_device_refuses_what_the_sender_should_not_have_sent(what: str, kind: str) -> None:
    """The peer's device does, whatever this side believes; all that was under way goes on, once and in order."""

    @on_pair
    async def body(pair: Pair) -> None:
        source, region = pair.left.memory(1000)
        target, grant = pair.right.granted(
            1000, margin=64, writable=what != "rights", readable=what != "rights", fill=7
        )
        around, open_grant = pair.right.granted(20 * 1000)
        offset = 0
        if what == "key":
            from kvd.fabric.verbs.wire import unpack_token

            token = _forged(pair, grant.token, rkey=unpack_token(grant.token, pair.right.fabric.key).rkey ^ 0xFF)
        elif what == "range":
            token, offset = _forged(pair, grant.token, length=2000), 1000
        elif what == "rights":
            token = _forged(pair, grant.token, writable=True, readable=True)
        else:
            token = grant.token
            await pair.right.fabric.revoke(grant)
            pair.left.endpoint._revocations.revoked.clear()
        submit, write = getattr(pair.left.endpoint, kind), pair.left.endpoint.write

        def good(number: int):
            return write(Lane.BULK, region, open_grant.token, one(0, 1000 * number, 1000), notify=number.to_bytes(1))

        operations = [good(number) for number in range(10)]
        refused = submit(Lane.BULK, region, token, one(0, offset, 10))
        operations += [good(number) for number in range(10, 20)]
        back = [pair.right.endpoint.send(Lane.BULK, bytes([number])) for number in range(20)]
        error = await failure(refused)
        assert isinstance(error, RemoteAccessError)
        assert error.fields["status"] == 10
        for operation in (*operations, *back):
            await operation.done
        await pair.right.until(lambda: len(pair.right.messages) == 20)
        await pair.left.until(lambda: len(pair.left.messages) == 20)
        for side in (pair.left, pair.right):
            assert [body[0] for _, body in side.messages] == list(range(20))
            assert side.lost == []
            assert side.endpoint._recoveries[Lane.BULK].epoch == 1
            assert side.endpoint.counters.bytes_in_flight == {Lane.URGENT: 0, Lane.BULK: 0}
        assert (around.reshape(20, 1000) == source).all()
        assert (target == 7).all()
        await pair.both_live()

    body()


@on_pair
async def test_a_region_above_the_devices_limit_is_registered_in_pieces(pair: Pair) -> None:
    """Requests don't cross from one piece into the next, and messages above the device's limit are cut."""
    fabric = pair.left.fabric
    fabric.device.max_region = 3 * 4096
    for lane in pair.left.endpoint._lanes.values():
        lane._span, lane._chunk = 3 * 4096, 5000
    source, region = pair.left.memory(10 * 4096)
    assert len(fabric.local(region)[1]) == 4
    target, grant = pair.right.granted(10 * 4096)
    rows = np.array([[100, 0, 4000], [4100, 4000, 30000], [34100, 34000, 6000]])
    await pair.left.endpoint.write(Lane.BULK, region, grant.token, rows).done
    assert (target[:40000] == source[100:40100]).all()
    back, back_region = pair.left.memory(10 * 4096, fill=0)
    await pair.left.endpoint.read(Lane.URGENT, back_region, grant.token, rows).done
    assert (back[100:40100] == source[100:40100]).all()
    with pytest.raises(FabricError, match="registers 12288 at most"):
        fabric.grant(region, 0, 4 * 4096)
    grant = fabric.grant(region, 4096, 3 * 4096)  # its own registration may lie across pieces
    _, nines = pair.right.memory(3 * 4096, fill=9)
    await pair.right.endpoint.write(Lane.BULK, nines, grant.token, one(0, 0, 3 * 4096)).done
    assert (source[4096 : 4 * 4096] == 9).all()


@on_pair
async def test_a_dmabuf_is_refused_with_a_reason(pair: Pair) -> None:
    """Soft-RoCE has no dma-bufs, and a memfd is none: only hardware shows more."""
    device = pair.left.fabric.device
    descriptor = os.memfd_create("no dma-buf")
    try:
        os.truncate(descriptor, 4096)
        for offset, nbytes in ((-1, 10), (0, 0), (0, 1 << 64)):
            with pytest.raises(InvalidArgument, match="dma-buf"):
                device.register_dmabuf(descriptor, offset, nbytes)
        with pytest.raises(FabricError, match=r"no dma-buf support.*host memory") as caught:
            device.register_dmabuf(descriptor, 0, 4096, remote_write=True)
        assert caught.value.fields["errno"] == errno.EOPNOTSUPP
        assert device.takes_dmabufs is False
        fabric, memory = pair.left.fabric, memoryview(bytearray(4096))
        with pytest.raises(FabricError, match="no dma-buf support"):
            fabric.register_dmabuf(memory, descriptor, 0)
        assert not fabric.exports
        fabric.deregister(fabric.register(memory))
    finally:
        os.close(descriptor)


@on_pair
async def test_a_region_of_a_dmabuf_is_addressed_by_offsets_in_it(pair: Pair) -> None:
    """With a registration that is a fake, since soft-RoCE has none: which bytes of which descriptor are registered with
    which rights, where a grant's token and local requests point, and that all of it ends."""
    from kvd.fabric.verbs import binding as ib
    from kvd.fabric.verbs.wire import unpack_token

    fabric, made = pair.left.fabric, []

    class FakeDmaBufMR:
        def __init__(self, domain: object, nbytes: int, access: int, *, dmabuf: int, offset: int) -> None:
            self.what, self.lkey, self.rkey, self.closed = (dmabuf, offset, nbytes, access), 11, 22, False
            made.append(self)

        def close(self) -> None:
            self.closed = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ib, "DmaBufMR", FakeDmaBufMR)
        patch.setattr(fabric.device, "max_region", 3 * 4096)
        region = fabric.register_dmabuf(memoryview(bytearray(5 * 4096)), 77, 64)
        assert [one.what[:3] for one in made] == [(77, 64, 3 * 4096), (77, 64 + 3 * 4096, 2 * 4096)]
        assert fabric.local(region) == (64, [11, 11])
        grant = fabric.grant(region, 4096, 100, writable=True)
        registered = made[-1]
        assert registered.what == (77, 64 + 4096, 100, ib.ACCESS_LOCAL_WRITE | ib.ACCESS_REMOTE_WRITE)
        token = unpack_token(grant.token, fabric.key)
        assert token is not None
        assert (token.address, token.length, token.rkey) == (64 + 4096, 100, 22)
        with pytest.raises(FabricError, match="registers 12288 at most"):
            fabric.grant(region, 0, 4 * 4096)
        # The bytes of a small write are fetched by the device: at that address this process has none.
        operation = pair.left.endpoint._submit_access("write", Lane.BULK, region, b"", [], None)
        assert not operation.inline
        await asyncio.gather(operation.done, return_exceptions=True)
        await fabric.revoke(grant)
        assert registered.closed
        fabric.deregister(region)
        assert all(one.closed for one in made)
        assert not fabric.exports
