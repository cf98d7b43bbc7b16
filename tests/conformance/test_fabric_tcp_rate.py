"""The tcp fabric's rate limit, on a clock that is turned by hand, and how its connections begin and end."""

import asyncio
import contextlib
import functools
import itertools
import socket
import struct

import pytest

from kvd.errors import FabricError, InvalidArgument
from kvd.fabric import frames, tcp_endpoint, tcp_receive
from kvd.fabric.conformance import MIB, Side, failure, one, tcp_pair
from kvd.fabric.frames import HEADER_BYTES, Kind, Protection
from kvd.fabric.priority import PRIORITY
from kvd.fabric.tcp import TcpFabric
from kvd.fabric.tcp_endpoint import MIN_PIECE_BYTES, PIECE_S, TURN_S
from kvd.fabric.tcp_receive import BURST_S, LaneIn
from kvd.fabric.tcp_send import LaneOut
from kvd.types import Lane
from tests.conformance.tcp_peer import Bringup, Peer, against_peer, lost, settle, until

pytestmark = pytest.mark.timeout(60)


# --- the rate limit ---------------------------------------------------------------------------------------------------


class HandTurnedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until the test moves it."""

    now = 1000.0

    def time(self):
        return self.now


def with_hand_turned_clock(test):
    @functools.wraps(test)
    def run():
        with asyncio.Runner(loop_factory=HandTurnedLoop) as runner:
            runner.run(test())

    return run


@with_hand_turned_clock
async def test_rate_covers_both_lanes_and_urgent_goes_first():
    """At 200 Mbit/s: bulk leaves in pieces of two milliseconds, and what urgent work waits for is one of them."""
    loop, rate = asyncio.get_running_loop(), 25e6
    async with against_peer(rate=rate) as (side, peer):
        _, region = side.memory(MIB)
        counters = side.endpoint.counters
        side.endpoint.write(Lane.BULK, region, bytes(16), one(0, 0, MIB))
        await settle()
        piece = int(rate * PIECE_S)
        at_first = counters.bytes_sent
        assert 0 < at_first <= rate * 0.003 + 2 * piece
        assert await drained(peer, Lane.BULK) <= at_first + 10 * (HEADER_BYTES + frames.RUN_BYTES)
        total = at_first
        for _ in range(20):
            loop.now += 0.001
            await settle()
            await drained(peer, Lane.BULK)
            total = counters.bytes_sent
        assert total - at_first == pytest.approx(20 * rate / 1000, rel=0.15)
        await drained(peer, Lane.BULK)
        side.endpoint.write(Lane.URGENT, region, bytes(16), one(0, 0, 64 << 10))
        await settle()
        bulk = 0
        urgent = await drained(peer, Lane.URGENT)
        while urgent < 64 << 10:
            loop.now += 0.001
            await settle()
            urgent += await drained(peer, Lane.URGENT)
            bulk += await drained(peer, Lane.BULK)
        assert bulk <= piece + 2 * (HEADER_BYTES + frames.RUN_BYTES)
        assert piece >= MIN_PIECE_BYTES


@pytest.mark.parametrize("kernel", [100e6, 400e6])
async def test_urgent_goes_before_the_rest_of_what_the_kernel_takes_slowly(monkeypatch, kernel):
    """Where handing over is as slow as the link, as with a shaper on this host: the event loop gets its turn between
    slices of bulk, and what has become urgent meanwhile is next."""
    loop, clock, sends = asyncio.get_running_loop(), [1000.0], []
    send = LaneOut.send
    async with against_peer() as (side, peer):
        _, region = side.memory(MIB)

        def slow_send(out):
            n = send(out)
            sends.append((out.lane, n))
            clock[0] += n / kernel
            if len(sends) == 2:
                loop.call_soon(side.endpoint.write, Lane.URGENT, region, bytes(16), one(0, 0, 64 << 10))
            return n

        monkeypatch.setattr(LaneOut, "send", slow_send)
        monkeypatch.setattr(tcp_endpoint, "monotonic", lambda: clock[0])
        side.endpoint.write(Lane.BULK, region, bytes(16), one(0, 0, 64 << 10))
        await settle()
        side.endpoint.write(Lane.BULK, region, bytes(16), one(0, 0, MIB))
        arrived = 0
        while arrived < MIB:
            await settle()
            arrived += await drained(peer, Lane.BULK)
        lanes = [lane for lane, _ in sends]
        # The first, which tells the speed; the one on which it becomes urgent; at most one that was due already.
        assert lanes.index(Lane.URGENT) in (2, 3)
        assert max(n for lane, n in sends if lane is Lane.BULK) <= 1.5 * TURN_S * kernel + 1000


async def test_the_event_loop_gets_its_turn_between_frames_that_take_long_to_receive(monkeypatch):
    clock, taken = itertools.count(1000.0, 0.6 * BURST_S), []
    receive = LaneIn.receive
    async with against_peer() as (side, peer):
        _, region = side.memory(MIB)
        grant = side.fabric.grant(region, 0, MIB)

        def counted(lane):
            before = side.endpoint.counters.bytes_received
            receive(lane)
            taken.append(side.endpoint.counters.bytes_received - before)

        monkeypatch.setattr(LaneIn, "receive", counted)
        monkeypatch.setattr(tcp_receive, "monotonic", lambda: next(clock))
        size, count = 20_000, 20
        frames_sent = [
            peer.frame(Lane.BULK, Kind.WRITE, [(0, size)], bytes(size), token=grant.token, op=op)
            for op in range(1, count + 1)
        ]
        await peer.send(Lane.BULK, b"".join(frames_sent))
        await until(lambda: sum(taken) == count * size)
        assert max(taken) <= 3 * size


async def drained(peer, lane):
    """How many bytes the lane has brought."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while data := peer.sockets[lane].recv(MIB):
            count += len(data)
    return count


# --- connecting and losing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("reset", [False, True])
async def test_loss_of_either_lane(lane, reset):
    async with against_peer() as (side, peer):
        _, region = side.memory(1000)
        operations = [side.endpoint.write(each, region, bytes(16), one(0, 0, 1000)) for each in Lane]
        await peer.receive(lane)
        if reset:
            peer.sockets[lane].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.sockets[lane].close()
        error = await lost(side)
        assert isinstance(error, FabricError)
        assert error.fields["lane"] == lane.name.lower()
        for operation in operations:
            assert type(await failure(operation)) is FabricError
        assert len(side.lost) == 1


async def test_early_messages_wait_for_the_owner():
    """What arrives before ``on_message`` is set is not lost."""
    fabric, pairs = TcpFabric(checksums=False), {lane: tcp_pair() for lane in Lane}
    hello = frames.pack_hello(Protection.NONE)
    endpoint = await fabric.connect(Bringup({lane: pair[0] for lane, pair in pairs.items()}, hello))
    peer = Peer({lane: pair[1] for lane, pair in pairs.items()})
    await peer.send(Lane.URGENT, peer.frame(Lane.URGENT, Kind.MESSAGE, payload=b"early"))
    await settle()
    side = Side(fabric, endpoint)
    await side.until(lambda: len(side.messages) == 1)
    await fabric.close()
    peer.close()


async def test_the_urgent_lane_goes_first_in_a_queue_that_sorts_and_bulk_keeps_little_in_its_socket():
    fabric, pairs = TcpFabric(unsent_bytes=65_536), {lane: tcp_pair() for lane in Lane}
    streams = {lane: pair[0] for lane, pair in pairs.items()}
    await fabric.connect(Bringup(streams, frames.pack_hello(fabric.protection)))
    priorities = {lane: sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) for lane, sock in streams.items()}
    assert priorities == {Lane.URGENT: PRIORITY, Lane.BULK: 0}
    assert streams[Lane.BULK].getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 65_536
    assert streams[Lane.URGENT].getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) != 65_536
    await fabric.close()
    for pair in pairs.values():
        pair[1].close()


@pytest.mark.parametrize("answer", [b"", b"GET / HTTP/1.1", frames.pack_hello() + b"x", FabricError("no"), None])
async def test_failed_connect_closes_the_streams(answer):
    pairs = {lane: tcp_pair() for lane in Lane}
    fabric = TcpFabric()
    connecting = asyncio.ensure_future(fabric.connect(Bringup({lane: pair[0] for lane, pair in pairs.items()}, answer)))
    if answer is None:
        await settle()
        connecting.cancel()
    with pytest.raises(asyncio.CancelledError if answer is None else FabricError):
        await connecting
    assert all(pair[0].fileno() == -1 for pair in pairs.values())
    assert fabric.endpoints == set()
    for pair in pairs.values():
        pair[1].close()


async def test_connect_without_a_lane():
    pair = tcp_pair()
    with pytest.raises(FabricError, match="urgent"):
        await TcpFabric().connect(Bringup({Lane.BULK: pair[0]}, frames.pack_hello()))
    assert pair[0].fileno() == -1
    pair[1].close()


@pytest.mark.parametrize(
    "option", [{"rate": -1}, {"inflight_bytes": 0}, {"frame_bytes": frames.MAX_PAYLOAD + 1}, {"unsent_bytes": 0}]
)
def test_senseless_options(option):
    with pytest.raises(InvalidArgument, match=next(iter(option))):
        TcpFabric(**option)
