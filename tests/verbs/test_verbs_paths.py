"""Links that go down, paths that drop packets, a peer that vanishes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvd.errors import FabricError
from kvd.fabric.conformance import Pair, connected, failure, memory_bringups, one, open_descriptors
from kvd.types import Lane
from tests.verbs.devices import DEVICES, large_packets_vanish, link_down, needs_devices, packets_vanish
from tests.verbs.pairs import on_pair

pytestmark = needs_devices


@contextlib.contextmanager
def lagging(lags: list[float]) -> Iterator[None]:
    """``lags`` get the seconds between the event loop's turns, 5 ms and what else held it."""
    loop = asyncio.get_running_loop()

    def turn(last: float) -> None:
        nonlocal timer
        now = loop.time()
        lags.append(now - last)
        timer = loop.call_later(0.005, turn, now)

    timer = loop.call_soon(turn, loop.time())
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.race
def test_a_link_that_is_down_for_longer_than_the_retries_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gives up within half a second; the connection tries on, and what was under way gets through. The
    kernel, which would hold the event loop for a second each time, is never left to find the peer's address."""
    from kvd.fabric.verbs import neighbour, recovery
    from kvd.fabric.verbs.device import Device

    monkeypatch.setattr(recovery, "PATIENCE_S", 40.0)
    answers: list[bool] = []
    errors: list[int] = []
    ask, connect = neighbour.known, Device.connect

    def asked(*question: str) -> bool:
        answers.append(ask(*question))
        return answers[-1]

    def tried(*arguments: Any) -> None:
        try:
            connect(*arguments)
        except FabricError as error:
            errors.append(error.fields["errno"])
            raise

    monkeypatch.setattr(neighbour, "known", asked)
    monkeypatch.setattr(Device, "connect", tried)

    @on_pair
    async def body(pair: Pair) -> None:
        source, region = pair.left.memory(100_000)
        target, grant = pair.right.granted(100_000)
        lags: list[float] = []
        with link_down(), lagging(lags):
            operations = [
                pair.left.endpoint.write(lane, region, grant.token, one(n * 1000, n * 1000, 1000), notify=n.to_bytes(1))
                for n in range(100)
                for lane in [Lane(n % 2)]
            ]
            operations.append(pair.right.endpoint.send(Lane.BULK, b"back"))
            await asyncio.wait([operations[0].done], timeout=2)
        for operation in operations:
            await operation.done
        assert (source == target).all()
        await pair.right.until(lambda: len(pair.right.messages) == 100)
        for lane in Lane:
            assert [body[0] for where, body in pair.right.messages if where is lane] == list(range(lane, 100, 2))
        assert pair.left.endpoint._recoveries[Lane.BULK].epoch >= 1
        assert pair.left.lost == pair.right.lost == []
        assert not all(answers)
        assert errno.ETIMEDOUT not in errors, "a queue pair was connected while the peer's address was not known"
        lags.sort()
        print(f"longest that the event loop was held while the link was down: {lags[-1] * 1000:.0f} ms")

    body()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are given up sooner, though not before the device's own retries are over several times."""
    from kvd.fabric.verbs import recovery

    monkeypatch.setattr(recovery, "PATIENCE_S", 2.0)


def test_a_link_that_stays_down_ends_the_connection_and_the_next_one_works(impatient: None) -> None:
    @on_pair
    async def broken(pair: Pair) -> None:
        _, region = pair.left.memory(1000)
        _, grant = pair.right.granted(1000)
        with link_down():
            error = await failure(pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, 1000)))
            assert type(error) is FabricError
            await pair.left.until(lambda: len(pair.left.lost) > 0)
            assert "IBV_WC_RETRY_EXC_ERR" in pair.left.lost[0].message
            assert "did not recover" in pair.left.lost[0].message
            await pair.right.until(lambda: len(pair.right.lost) > 0)

    @on_pair
    async def whole(pair: Pair) -> None:
        await pair.both_live()

    broken()
    whole()


@pytest.mark.parametrize(
    ("obstacle", "says"),
    [(packets_vanish, "carries nothing: "), (large_packets_vanish, "carries small packets, but none of 4096 bytes: ")],
)
def test_a_path_that_drops_packets_is_not_used(obstacle: Callable[[], Any], says: str) -> None:
    """Everything connects all the same; only the probe finds it out, and both ends are told. Then all is well again."""
    from kvd.fabric.verbs.fabric import VerbsFabric

    async def body() -> None:
        fabrics = [VerbsFabric(device=device) for device in DEVICES]
        before = open_descriptors()
        with obstacle():
            near, far = memory_bringups(())
            errors = await asyncio.gather(fabrics[0].connect(near), fabrics[1].connect(far), return_exceptions=True)
        for error in errors:
            assert type(error) is FabricError
            assert says in error.message
        assert [fabric.endpoints for fabric in fabrics] == [set(), set()]
        assert open_descriptors() == before
        ready = iter(fabrics)
        async with connected(lambda: next(ready)) as pair:
            await pair.both_live()

    asyncio.run(asyncio.wait_for(body(), 100))


@on_pair
async def test_an_address_that_nobody_has_is_named(pair: Pair) -> None:
    """The kernel is asked until it has given up, and nobody is kept waiting for it."""
    import msgspec

    from kvd.fabric.verbs import bringup

    endpoint = pair.left.endpoint
    mine = bringup.greeting(endpoint.fabric.device, endpoint._lanes, endpoint.fabric.key, (0, 0))
    nobody = msgspec.structs.replace(mine, gid=mine.gid[:-4] + "0063")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bringup, "RESOLVE_S", 0.3)
        with pytest.raises(FabricError, match="nobody on veth0 answers"):
            await bringup.resolved(endpoint.fabric.device, nobody, lambda: None)


class PipeBringup:
    """Blobs over two pipes, in hexadecimal lines; what is told later gets lost."""

    streams: dict[Lane, object] = {}  # noqa: RUF012

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = os.fdopen(reading), writing

    async def exchange(self, blob: bytes) -> bytes:
        os.write(self.writing, f"{blob.hex()}\n".encode())
        return bytes.fromhex((await asyncio.to_thread(self.reading.readline)).strip())

    def tell(self, blob: bytes) -> None:
        pass

    def listen(self, told: object) -> None:
        pass

    def close(self) -> None:
        self.reading.close()
        os.close(self.writing)


async def serve_peer(bringup: PipeBringup) -> None:
    """A peer that grants its memory and waits to be killed."""
    from kvd.fabric.verbs.fabric import VerbsFabric

    fabric = VerbsFabric(device=DEVICES[1])
    region = fabric.register(memoryview(bytearray(1 << 20)))
    endpoint = await fabric.connect(bringup)
    endpoint.on_message = lambda lane, message: None
    endpoint.send(Lane.URGENT, fabric.grant(region, 0, 1 << 20).token)
    await asyncio.Event().wait()


def test_a_killed_peer_process_is_noticed_by_the_next_write(impatient: None) -> None:
    """Nobody says goodbye: the device's retries end, with a named error, and everything is given back."""
    from kvd.fabric.verbs.fabric import VerbsFabric

    async def body(bringup: PipeBringup, peer: int) -> None:
        fabric = VerbsFabric(device=DEVICES[0])
        endpoint = await fabric.connect(bringup)
        tokens: asyncio.Queue[bytes] = asyncio.Queue()
        lost: asyncio.Queue[FabricError] = asyncio.Queue()
        endpoint.on_lost = lost.put_nowait
        endpoint.on_message = lambda lane, message: tokens.put_nowait(message)
        token = await tokens.get()
        region = fabric.register(memoryview(bytearray(1 << 20)))
        await endpoint.write(Lane.BULK, region, token, one(0, 0, 1 << 20)).done
        os.kill(peer, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, peer, 0)
        error = await failure(endpoint.write(Lane.BULK, region, token, one(0, 0, 1 << 20)))
        assert type(error) is FabricError
        reason = (await lost.get()).message
        assert "RETRY_EXC" in reason
        assert "did not recover" in reason
        await fabric.close()

    before = open_descriptors()
    (there, to), (back, fro) = os.pipe(), os.pipe()
    peer = os.fork()
    if not peer:
        try:
            os.close(to)
            os.close(back)
            asyncio.run(serve_peer(PipeBringup(there, fro)))
        finally:
            os._exit(1)
    os.close(there)
    os.close(fro)
    bringup = PipeBringup(back, to)
    asyncio.run(asyncio.wait_for(body(bringup, peer), 100))
    bringup.close()
    assert open_descriptors() == before
