"""Peer sessions on real sockets over the tcp fabric, under asyncio's own loop and under uvloop."""

import asyncio
import os
import socket

import numpy as np
import pytest

from kvd.errors import (
    Aborted,
    ConfigError,
    FabricError,
    FingerprintMismatch,
)
from kvd.fabric.loopback import LoopbackFabric
from kvd.fabric.priority import PRIORITY, go_first
from kvd.fabric.tcp import TcpFabric
from kvd.peers import bringup
from kvd.types import Lane
from kvd.wire.messages import Accepted, Announce, Delivered
from tests.integration.peer_nodes import (
    KEY,
    both_loops,
    free_port,
    pair,
    sockets_open,
)


@pytest.mark.parametrize("keys", [[KEY], []], ids=["key", "no key"])
@both_loops
async def test_messages_and_memory_cross_both_ways(start, keys):
    a, b, at_a, at_b = await pair(start, keys=keys)
    assert (at_a.node, at_b.node) == ("b", "a")
    assert (at_a.boot, at_b.boot) == (b.peers.boot, a.peers.boot)
    assert (at_a.address, at_b.address) == (b.address, a.address)
    assert at_a.authenticated is at_b.authenticated is bool(keys)

    for n in range(100):
        at_a.send(Accepted(transfer=n, source=1))
        at_b.send(Announce(source=n, request="r", rank=0))
    assert [(await b.messages.get())[1].transfer for _ in range(100)] == list(range(100))
    assert [(await a.messages.get())[1].source for _ in range(100)] == list(range(100))

    data, room = bytearray(os.urandom(300_000)), bytearray(300_000)
    here, there = a.fabric.register(memoryview(data)), b.fabric.register(memoryview(room))
    grant = b.fabric.grant(there, 0, len(room))
    runs = np.array([[0, 0, len(data)]], dtype=np.int64)
    await at_a.endpoint.write(Lane.BULK, here, grant.token, runs, notify=b"there").done
    assert room == data
    assert await b.notes.get() == (at_b, Lane.BULK, b"there")
    await at_b.endpoint.send(Lane.URGENT, b"thanks").done
    assert await a.notes.get() == (at_a, Lane.URGENT, b"thanks")

    (status,) = a.peers.statuses()
    assert (status.node, status.state, status.boot, status.fabric) == ("b", "connected", b.peers.boot, "tcp")
    assert status.bytes_sent == len(data)
    assert b.peers.statuses()[0].bytes_received == len(data)


@both_loops
async def test_requests_go_first_in_a_queue_that_sorts(start, monkeypatch):
    """The control connection carries those of fetches: at either end it passes bulk that has been handed over."""
    preferred = []
    monkeypatch.setattr(bringup, "go_first", lambda sock: (go_first(sock), preferred.append(priority(sock))))
    await pair(start, keys=[])
    assert preferred == [PRIORITY, PRIORITY]


def priority(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


@both_loops
async def test_nodes_agree_on_a_fabric_that_both_have(start):
    """Mixed clusters: whoever dials, a pair uses the first of the dialler's fabrics that the other one has, too."""
    best = [LoopbackFabric, TcpFabric]  # loopback stands for what is better than tcp and needs no streams
    kinds = {"rich": best, "plain": [TcpFabric], "other": best}
    nodes = {name: await start(name, fabrics=[make() for make in made]) for name, made in kinds.items()}
    expected = {("plain", "rich"): "tcp", ("other", "rich"): "loopback", ("other", "plain"): "tcp"}
    for (dialler, acceptor), fabric in expected.items():
        a, b = nodes[dialler], nodes[acceptor]
        at_a = await a.peers.session(acceptor)
        at_a.send(Delivered(transfer=0))
        at_b, _ = await b.messages.get()
        assert at_a.fabric.name == at_b.fabric.name == fabric
        data, room = bytearray(os.urandom(1000)), bytearray(1000)
        here, there = at_a.fabric.register(memoryview(data)), at_b.fabric.register(memoryview(room))
        grant = at_b.fabric.grant(there, 0, 1000)
        await at_a.endpoint.write(Lane.BULK, here, grant.token, np.array([[0, 0, 1000]])).done
        assert room == data
    shown = {status.node: status.fabric for status in nodes["other"].peers.statuses()}
    assert shown == {"rich": "loopback", "plain": "tcp"}


@both_loops
async def test_nodes_without_a_common_fabric_refuse_each_other(start):
    await start("rich", fabrics=[LoopbackFabric()])
    plain = await start("plain")
    with pytest.raises(FingerprintMismatch, match="fabrics") as caught:
        await plain.peers.session("rich")
    assert caught.value.fields["differs"]["fabrics"] == {"rich": ["loopback"], "plain": ["tcp"]}


class Blocked(LoopbackFabric):
    """What is agreed on and then can't be connected: at this end, or only at the other."""

    def __init__(self, *, here=True):
        super().__init__()
        self.here, self.tried = here, 0

    async def connect(self, bringup):
        self.tried += 1
        if self.here:
            raise FabricError("the path carries nothing; let it through")
        await asyncio.Event().wait()


@both_loops
@pytest.mark.parametrize("end", ["dialler", "acceptor", "both"])
async def test_a_fabric_that_cannot_be_connected_makes_room_for_the_next(start, logged, end):
    """Both ends' statuses say why; the next dials don't try it again, until its time is over or it has worked."""
    blocked = {name: Blocked(here=end in (name, "both")) for name in ("acceptor", "dialler")}
    b = await start("acceptor", fabrics=[blocked["acceptor"], TcpFabric()])
    a = await start("dialler", fabrics=[blocked["dialler"], TcpFabric()])
    session = await a.peers.session("acceptor")
    session.send(Delivered(transfer=0))
    await b.messages.get()
    for node in (a, b):
        (status,) = node.peers.statuses()
        assert (status.state, status.fabric) == ("connected", "tcp")
        assert "the path carries nothing; let it through" in status.error
    assert "carries nothing" in await logged.reason("fabric does not work with peer")
    session.close(Aborted("again"))
    await a.losses.get()
    assert (await a.peers.session("acceptor")).fabric.name == "tcp"
    assert blocked["dialler"].tried == 1


@both_loops
async def test_a_fabric_that_cannot_be_connected_is_named_where_there_is_no_other(start):
    b = await start("b", fabrics=[Blocked()])
    for fabrics in ([Blocked(here=False)], [Blocked(here=False), TcpFabric()]):
        a = await start(f"a{len(fabrics)}", fabrics=fabrics)
        for _ in range(2):
            with pytest.raises(FabricError, match="carries nothing") as caught:
                await a.peers.session("b")
            assert (caught.value.fields["peer"], caught.value.fields["fabric"]) == ("b", "loopback")
        assert "carries nothing" in {status.node: status.error for status in a.peers.statuses()}["b"]
    assert b.peers.sessions() == []


@both_loops
async def test_callers_share_one_dial_and_its_session(start):
    b = await start("b")
    a = await start("a")
    found = await asyncio.gather(*(a.peers.session("b") for _ in range(50)))
    assert len(set(found)) == 1
    assert await a.peers.session("b") is found[0]
    found[0].send(Delivered(transfer=1))
    at_b, _ = await b.messages.get()
    assert b.peers.sessions() == [at_b]


@both_loops
async def test_five_thousand_uses_take_no_further_socket(start):
    a, _, at_a, _ = await pair(start)
    before = sockets_open()
    for _ in range(5000):
        assert await a.peers.session("b") is at_a
    assert sockets_open() == before


@both_loops
async def test_a_cancelled_caller_leaves_the_dial_to_the_others(start):
    await start("b")
    a = await start("a")
    one, two = (asyncio.ensure_future(a.peers.session("b")) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    assert (await two).node == "b"
    with pytest.raises(asyncio.CancelledError):
        await one


@both_loops
async def test_the_accepting_side_uses_the_session_it_has(start):
    _, b, _, at_b = await pair(start)
    assert await b.peers.session("a") is at_b


@both_loops
async def test_both_may_dial_at_once(start):
    port = free_port()
    b = await start("b", peers={"a": f"127.0.0.1:{port}"})
    a = await start("a", listen=f"127.0.0.1:{port}")
    at_a, at_b = await asyncio.gather(a.peers.session("b"), b.peers.session("a"))
    for n in range(50):
        at_a.send(Delivered(transfer=n))
        at_b.send(Delivered(transfer=n))
    for node in (a, b):
        assert [(await node.messages.get())[1].transfer for _ in range(50)] == list(range(50))
        assert node.losses.empty()
        assert 1 <= len(node.peers.sessions()) <= 2
    assert await a.peers.session("b") is at_a
    assert await b.peers.session("a") is at_b


@pytest.mark.parametrize("listen", ["[::1]:0", "localhost:0"])
@both_loops
async def test_ipv6_and_host_names(start, listen):
    try:
        b = await start("b", listen=listen)
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    a = await start("a", listen="", peers={"b": listen[:-1] + b.address.rpartition(":")[2]})
    session = await a.peers.session("b")
    session.send(Delivered(transfer=1))
    at_b, _ = await b.messages.get()
    assert a.peers.listening == ""
    assert at_b.address.startswith(("[::1]:", "127.0.0.1:"))
