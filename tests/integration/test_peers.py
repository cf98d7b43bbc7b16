"""Peer sessions on real sockets over the tcp fabric, under asyncio's own loop and under uvloop."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import os
import secrets
import socket
import struct

import msgspec
import numpy as np
import psutil
import pytest
import structlog
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import (
    Aborted,
    AddressInUse,
    AuthenticationFailed,
    ConfigError,
    FabricError,
    FingerprintMismatch,
    PeerLost,
    PeerRestarted,
    PeerUnknown,
    PeerUnreachable,
    ProtocolError,
    ShuttingDown,
)
from kvd.fabric.loopback import LoopbackFabric
from kvd.fabric.tcp import TcpFabric
from kvd.peers import Peers, PeersConfig, sockets
from kvd.types import Lane
from kvd.wire import framing, guard
from kvd.wire.handshake import Dialler
from kvd.wire.hello import MAGIC, PREFACE, Identity, Kind
from kvd.wire.messages import WIRE_VERSION, Accepted, Announce, Delivered, Ping

KEY, OTHER = b"k" * 32, b"o" * 32
FINGERPRINT = {"layout": 1}
SHOWN = {**FINGERPRINT, "security": "plain"}
REFUSED = "connection of a peer refused"


def both_loops(test):
    """Run an async test on a fresh loop of each kind; its ``start`` makes nodes that are closed in the end."""
    signature = inspect.signature(test)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "start"]
    factory = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(test)
    def run(*, loop_factory, **arguments):
        async def main():
            async with contextlib.AsyncExitStack() as stack:
                if "start" in signature.parameters:
                    arguments["start"] = starter(stack)
                await test(**arguments)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())

    run.__signature__ = signature.replace(parameters=[*kept, factory])
    loops = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop_factory", loops, ids=["asyncio", "uvloop"])(run)


def starter(stack):
    """Makes nodes that listen, each knowing the ones made before it, until ``stack`` closes them."""
    nodes = []

    async def start(name, **config):
        known = {node.name: node.address for node in nodes if node.address} | config.pop("peers", {})
        node = Node(name, peers=known, **config)
        await node.peers.start()
        stack.push_async_callback(node.close)
        nodes.append(node)
        return node

    return start


class Node:
    """A daemon's peer sessions, with what its callbacks were told in queues."""

    def __init__(self, name, *, boot=None, fingerprint=FINGERPRINT, fabrics=None, **config):
        config = {"listen": "127.0.0.1:0", "keys": [KEY]} | config
        self.name, self.messages, self.notes, self.losses = (
            name,
            asyncio.Queue(),
            asyncio.Queue(),
            asyncio.Queue(),
        )
        self.fabrics = fabrics or [TcpFabric()]
        self.fabric = self.fabrics[0]
        self.peers = Peers(
            node=name,
            boot=boot or f"{name}-{secrets.token_hex(4)}",
            config=PeersConfig(**config),
            fabrics=self.fabrics,
            fingerprint=fingerprint,
            on_message=lambda session, message: self.messages.put_nowait((session, message)),
            on_fabric_message=lambda session, lane, note: self.notes.put_nowait((session, lane, note)),
            on_lost=lambda session, error: self.losses.put_nowait((session, error)),
            log=structlog.get_logger(),
        )

    @property
    def address(self):
        return self.peers.listening

    async def close(self):
        await self.peers.close()
        for fabric in self.fabrics:
            await fabric.close()


class Logged:
    """What was logged, and a way to wait for a line."""

    def __init__(self):
        self.entries, self._more = [], asyncio.Event()

    def __call__(self, logger, method, entry):
        self.entries.append(entry)
        self._more.set()
        raise structlog.DropEvent

    async def reason(self, event):
        """The reason in the first line of this event."""
        while True:
            for entry in self.entries:
                if entry["event"] == event:
                    return entry["reason"]
            self._more.clear()
            await self._more.wait()


@pytest.fixture
def logged():
    logged = Logged()
    before = structlog.get_config()
    structlog.configure(processors=[logged], cache_logger_on_first_use=False)
    yield logged
    structlog.configure(**before)


async def pair(start, **config):
    """Two nodes and the session that a dialled, seen from both."""
    b = await start("b", **config)
    a = await start("a", **config)
    at_a = await a.peers.session("b")
    at_a.send(Ping(number=0))
    at_a.send(Delivered(transfer=0))
    at_b, _ = await b.messages.get()
    return a, b, at_a, at_b


def sockets_open():
    return len([fd for fd in psutil.Process().net_connections("tcp") if fd.status != "NONE"])


# --- what works ---------------------------------------------------------------------------------------------------


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


# --- how sessions end ---------------------------------------------------------------------------------------------


async def lost(node, session, error):
    """The next loss must be this session's, with this error; nothing of it is left open."""
    ended, reason = await node.losses.get()
    assert ended is session
    assert type(reason) is error
    assert session.error is reason
    await session.wait_closed()
    assert session not in node.peers.sessions()
    with pytest.raises(PeerLost):
        session.send(Delivered(transfer=0))
    return reason


def raw(transport_owner):
    """The socket under a link or an endpoint's lane."""
    return transport_owner._link._transport.get_extra_info("socket")


@both_loops
async def test_closing_tells_the_peer_the_reason(start):
    a, b, at_a, at_b = await pair(start)
    at_a.close(Aborted("enough"))
    at_a.close(Aborted("twice does nothing"))
    assert (await lost(a, at_a, Aborted)).message == "enough"
    reason = await lost(b, at_b, PeerLost)
    assert reason.fields == {"peer": "a", "reason": "ABORTED"}
    assert "enough" in reason.message
    assert a.losses.empty()
    assert b.losses.empty()


@both_loops
async def test_a_reset_control_connection_ends_the_whole_session_on_both_sides(start):
    a, b, at_a, at_b = await pair(start)
    room = bytearray(1 << 20)
    region = a.fabric.register(memoryview(room))
    runs = np.array([[0, 0, len(room)]], dtype=np.int64)
    raw(at_a).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    at_a._link._transport.abort()
    for node, session in ((a, at_a), (b, at_b)):
        await lost(node, session, PeerLost)
    with pytest.raises(PeerLost):
        at_a.send(Delivered(transfer=0))
    with pytest.raises(Exception, match="FABRIC"):
        at_a.endpoint.write(Lane.BULK, region, b"x" * 16, runs)


@both_loops
async def test_a_lost_lane_ends_the_whole_session_on_both_sides(start):
    a, b, at_a, at_b = await pair(start)
    at_a.endpoint._lanes[Lane.BULK].sock.shutdown(socket.SHUT_RDWR)
    reason = await lost(a, at_a, PeerLost)
    assert reason.fields["reason"] == "fabric"
    await lost(b, at_b, PeerLost)
    assert a.losses.empty()
    assert b.losses.empty()


@both_loops
async def test_after_a_loss_the_next_caller_dials_again_at_once(start):
    a, b, at_a, at_b = await pair(start)
    at_a._link._transport.abort()
    await lost(a, at_a, PeerLost)
    again = await a.peers.session("b")
    assert again is not at_a
    again.send(Delivered(transfer=7))
    assert (await b.messages.get())[1] == Delivered(transfer=7)
    await lost(b, at_b, PeerLost)


@both_loops
async def test_a_restarted_peer_ends_its_earlier_session(start):
    a, b, at_a, at_b = await pair(start)
    twin = Node("a", boot="second", peers={"b": b.address}, listen="")
    session = await twin.peers.session("b")
    reason = await lost(b, at_b, PeerRestarted)
    assert reason.fields == {"peer": "a", "boot": "second", "was": a.peers.boot}
    await lost(a, at_a, PeerLost)
    session.send(Delivered(transfer=7))
    at_b_again, _ = await b.messages.get()
    assert at_b_again.boot == "second"
    await twin.close()


@both_loops
async def test_a_restarted_daemon_listens_on_its_port_at_once(start):
    b = Node("b", boot="first")
    await b.peers.start()
    address = b.address
    a = await start("a", peers={"b": address})
    first = await a.peers.session("b")
    await b.close()
    await lost(a, first, PeerLost)
    with pytest.raises(PeerUnreachable):
        await a.peers.session("b")
    b = await start("b", boot="second", listen=address)
    assert (await a.peers.session("b")).boot == "second"


@both_loops
async def test_a_claimant_without_the_key_ends_nothing(start):
    _, b, at_a, at_b = await pair(start)
    claimant = Node("a", boot="stolen", peers={"b": b.address}, listen="", keys=[OTHER])
    with pytest.raises(AuthenticationFailed):
        await claimant.peers.session("b")
    await claimant.close()
    at_a.send(Delivered(transfer=7))
    assert await b.messages.get() == (at_b, Delivered(transfer=7))
    assert b.losses.empty()


@both_loops
async def test_closing_ends_all_sessions_and_leaves_nothing_open(start):
    before = sockets_open()
    b = Node("b")
    await b.peers.start()
    a = await start("a", peers={"b": b.address}, listen="")
    at_a = await a.peers.session("b")
    at_a.send(Delivered(transfer=1))
    at_b, _ = await b.messages.get()
    await b.close()
    await b.close()
    await lost(b, at_b, ShuttingDown)
    assert (await lost(a, at_a, PeerLost)).fields["reason"] == "SHUTTING_DOWN"
    with pytest.raises(ShuttingDown):
        await b.peers.session("a")
    await a.close()
    assert sockets_open() == before


@both_loops
async def test_closing_ends_the_dials_under_way(start):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        a = Node("a", peers={"b": sockets.address_text(silent.getsockname())}, listen="")
        dial = asyncio.ensure_future(a.peers.session("b"))
        connection, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
        assert a.peers.statuses()[0].state == "connecting"
        await a.close()
        with pytest.raises(ShuttingDown):
            await dial
        connection.close()


# --- peers that do not answer -------------------------------------------------------------------------------------


class Puppet:
    """A peer that goes through the handshake and does nothing by itself afterwards, as a stopped process would."""

    def __init__(self, name, target, *, keys=(KEY,), fabric="none"):
        self.identity = Identity(node=name, boot="p", address="", fingerprint=SHOWN, fabrics=(fabric,), keys=keys)
        self.target = target

    async def connect(self):
        self.control = await sockets.dial("b", self.target, 5)
        machine = Dialler(self.identity, expect="b", nonce=secrets.token_bytes(32))
        established = await sockets.negotiate(self.control, machine)
        self.writer, self.parser = guard.guards(established.lane_key, dialled=True)

    async def send(self, message):
        await self.write(self.writer.frame(msgspec.msgpack.encode(message)))

    async def write(self, data):
        await asyncio.get_running_loop().sock_sendall(self.control, data)

    def close(self):
        self.control.close()


class OneSidedFabric(TcpFabric):
    """Needs no stream, exchanges nothing: whoever is through the handshake is connected."""

    name = "none"
    capabilities = dataclasses.replace(TcpFabric.capabilities, lanes_need_streams=())

    async def connect(self, bringup):
        return QuietEndpoint()


class QuietEndpoint:
    def __init__(self):
        self.counters = dataclasses.make_dataclass("C", [])()
        self.counters.bytes_received = self.counters.messages_received = self.counters.bytes_sent = 0
        self.closed = asyncio.Event()

    def close(self):
        self.closed.set()

    async def wait_closed(self):
        await self.closed.wait()


async def puppet_pair(**config):
    b = Node("b", fabrics=[OneSidedFabric()], **config)
    await b.peers.start()
    puppet = Puppet("a", b.address)
    await puppet.connect()
    await puppet.send(Delivered(transfer=0))
    session, _ = await b.messages.get()
    return b, puppet, session


@both_loops
async def test_a_peer_that_dials_again_replaces_its_former_session():
    """The peer has noticed a break that this side has not noticed yet."""
    b, puppet, session = await puppet_pair()
    again = Puppet("a", b.address)
    await again.connect()
    reason = await lost(b, session, PeerLost)
    assert "newer" in reason.message
    await again.send(Delivered(transfer=7))
    session_again, message = await b.messages.get()
    assert message == Delivered(transfer=7)
    assert b.peers.sessions() == [session_again]
    puppet.close()
    again.close()
    await b.close()


@both_loops
async def test_a_stopped_peer_is_lost_after_the_timeout():
    b, puppet, session = await puppet_pair(heartbeat_s=0.1, timeout_s=0.5)
    reason = await lost(b, session, PeerLost)
    assert reason.fields == {"peer": "a", "reason": "silent"}
    puppet.parser.feed(puppet.control.recv(1 << 16))
    assert framing.decode(puppet.parser.next()) == Ping(number=1)
    assert session.endpoint.closed.is_set()
    puppet.close()
    await b.close()


class TellingFabric(OneSidedFabric):
    """Tells its peer things after the bring-up, as verbs does."""

    def __init__(self):
        super().__init__()
        self.heard = asyncio.Queue()

    async def connect(self, bringup):
        self.bringup = bringup
        assert await bringup.exchange(b"hello") == b"hello"
        return QuietEndpoint()

    def told(self, blob):
        if blob == b"wrong":
            raise ProtocolError("the peer's fabric told nonsense; run the same release at both ends")
        self.heard.put_nowait(blob)


@both_loops
async def test_fabrics_tell_each_other_things_after_the_bringup(start):
    """In order, those first that came before the other side listened; nonsense ends the session."""
    b = await start("b", fabrics=[TellingFabric()])
    a = await start("a", fabrics=[TellingFabric()])
    at_a = await a.peers.session("b")
    for n in range(10):
        a.fabric.bringup.tell(bytes([n]))
    at_a.send(Delivered(transfer=0))
    at_b, _ = await b.messages.get()
    b.fabric.bringup.listen(b.fabric.told)
    a.fabric.bringup.listen(a.fabric.told)
    for n in range(10, 50):
        a.fabric.bringup.tell(bytes([n]))
    b.fabric.bringup.tell(b"back")
    assert [await b.fabric.heard.get() for _ in range(50)] == [bytes([n]) for n in range(50)]
    assert await a.fabric.heard.get() == b"back"
    a.fabric.bringup.tell(b"wrong")
    await lost(b, at_b, ProtocolError)
    await lost(a, at_a, PeerLost)
    a.fabric.bringup.tell(b"late")  # nobody is there


@both_loops
async def test_more_than_a_fabric_may_tell_an_inattentive_peer_ends_the_session(start):
    b = await start("b", fabrics=[TellingFabric()])
    a = await start("a", fabrics=[TellingFabric()])
    at_a = await a.peers.session("b")
    at_a.send(Delivered(transfer=0))
    at_b, _ = await b.messages.get()
    for _ in range(20):
        a.fabric.bringup.tell(b"more")
    await lost(b, at_b, ProtocolError)


@both_loops
async def test_traffic_of_the_fabric_is_a_sign_of_life():
    b, puppet, session = await puppet_pair(heartbeat_s=0.01, timeout_s=0.03)
    ticks = 0
    tick, ticked = session._link._tick, asyncio.Event()

    def counted():
        nonlocal ticks
        ticks += 1
        session.endpoint.counters.bytes_received += 1
        tick()
        if ticks == 12:
            ticked.set()

    session._link._tick = counted
    session._link._timer.cancel()
    counted()
    await ticked.wait()
    assert session.error is None
    session._link._tick = tick
    await lost(b, session, PeerLost)
    puppet.close()
    await b.close()


@both_loops
async def test_a_peer_that_does_not_read_is_lost_and_costs_a_bounded_buffer():
    b, puppet, session = await puppet_pair()
    announce = Announce(source=1, request="r" * 60_000, rank=0)
    sent = 0
    while session.error is None:
        session.send(announce)
        sent += 60_000
        await asyncio.sleep(0)
    assert sent < 32 << 20
    reason = await lost(b, session, PeerLost)
    assert reason.fields["reason"] == "not reading"
    puppet.close()
    await b.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 64, struct.pack("<I", 5) + b"hello" * 4, bytes(20)])
@both_loops
async def test_garbage_in_a_session_ends_that_session(garbage):
    b, puppet, session = await puppet_pair()
    await puppet.write(garbage)
    await lost(b, session, ProtocolError)
    puppet.close()
    await b.close()


@both_loops
async def test_a_handler_that_raises_ends_its_session_only(start, logged):
    _, b, at_a, at_b = await pair(start)
    c = await start("c")
    at_c = await c.peers.session("b")

    def fail(session, message):
        raise ZeroDivisionError("a bug")

    b.peers._on_message, kept = fail, b.peers._on_message
    at_b._on_message = fail
    at_a.send(Delivered(transfer=1))
    ended, reason = await b.losses.get()
    assert ended is at_b
    assert "ZeroDivisionError" in reason.message
    b.peers._on_message = kept
    at_c.send(Delivered(transfer=2))
    assert (await b.messages.get())[1] == Delivered(transfer=2)


# --- refusals -----------------------------------------------------------------------------------------------------


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@both_loops
async def test_a_taken_port_is_named(start):
    b = await start("b")
    other = Node("other", listen=b.address)
    with pytest.raises(AddressInUse, match=b.address):
        await other.peers.start()


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "nonsense", "127.0.0.1:99999"])
@both_loops
async def test_an_address_that_cannot_be_is_a_config_error(listen):
    with pytest.raises(ConfigError, match=r"peers\.listen"):
        await Node("b", listen=listen).peers.start()


@pytest.mark.parametrize(
    "config",
    [{"listen": "0.0.0.0:0"}, {"listen": "[::]:0"}, {"listen": "", "peers": {"x": "192.0.2.1:7440"}}],
)
@both_loops
async def test_beyond_this_machine_a_key_is_needed(config):
    with pytest.raises(ConfigError, match="shared key"):
        await Node("b", keys=[], **config).peers.start()


@both_loops
async def test_an_empty_key_is_no_key():
    with pytest.raises(ConfigError, match="empty"):
        await Node("b", keys=[b""]).peers.start()


@both_loops
async def test_unknown_nodes_list_the_known_ones(start):
    a, *_ = await pair(start)
    with pytest.raises(PeerUnknown) as caught:
        await a.peers.session("z")
    assert caught.value.fields == {"peer": "z", "known": ["b"]}
    with pytest.raises(PeerUnknown, match="itself"):
        await a.peers.session("a")


@both_loops
async def test_an_unreachable_peer_names_address_and_reason_and_shows_in_the_status(start):
    address = f"127.0.0.1:{free_port()}"
    a = await start("a", peers={"b": address})
    for _ in range(2):
        with pytest.raises(PeerUnreachable) as caught:
            await a.peers.session("b")
    assert caught.value.fields["address"] == address
    assert "refused" in caught.value.fields["reason"]
    (status,) = a.peers.statuses()
    assert (status.state, status.address) == ("down", address)
    assert status.error.startswith("PEER_UNREACHABLE")
    assert status.error.endswith("(2 attempts)")


@both_loops
async def test_a_peer_that_never_answers_the_handshake_is_unreachable(start):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = sockets.address_text(silent.getsockname())
        a = await start("a", peers={"b": address}, handshake_timeout_s=0.05)
        with pytest.raises(PeerUnreachable, match="handshake"):
            await a.peers.session("b")


REFUSALS = {
    "wrong key": ({"keys": [OTHER]}, AuthenticationFailed, "authenticate"),
    "no key": ({"keys": []}, AuthenticationFailed, "node b has a shared key and node a has none"),
    "fingerprint": ({"fingerprint": {"layout": 2}}, FingerprintMismatch, "layout: 2 on a, 1 on b"),
}


@pytest.mark.parametrize("case", REFUSALS)
@both_loops
async def test_refusals_are_told_to_both_sides_and_both_live_on(start, logged, case):
    config, error, text = REFUSALS[case]
    b = await start("b")
    a = await start("a", **config)
    with pytest.raises(error, match=text) as caught:
        await a.peers.session("b")
    assert caught.value.fields["address"] == b.address
    assert text in await logged.reason(REFUSED)
    c = await start("c")
    assert (await c.peers.session("b")).node == "b"
    assert logged.entries
    assert not [entry for entry in logged.entries if KEY.decode() in repr(entry) or OTHER.decode() in repr(entry)]


@both_loops
async def test_refused_attempts_leave_no_socket(start):
    b = await start("b")
    before = sockets_open()
    a = await start("a", listen="", keys=[OTHER])
    for _ in range(20):
        with pytest.raises(AuthenticationFailed):
            await a.peers.session("b")
    await b.peers.close()
    assert sockets_open() == before - 1


@both_loops
async def test_an_address_with_another_node_names_both(start):
    b = await start("b")
    a = await start("a", peers={"c": b.address})
    with pytest.raises(FingerprintMismatch) as caught:
        await a.peers.session("c")
    assert (caught.value.fields["expected"], caught.value.fields["found"]) == ("c", "b")


# --- strangers ----------------------------------------------------------------------------------------------------

FOREIGN = [
    b"GET / HTTP/1.1\r\nHost: kvd\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 190,
    b"\x00" * 100,
    PREFACE.pack(MAGIC, WIRE_VERSION, Kind.CONTROL) + b"\xff" * 100,
    PREFACE.pack(MAGIC, WIRE_VERSION, Kind.LANE) + struct.pack("<I", 3) + b"\x93\x93\x93",
    PREFACE.pack(MAGIC, 77, Kind.CONTROL),
]


async def answer_to(address, data):
    """Everything that comes back for these bytes until the connection is closed."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@both_loops
async def test_foreign_bytes_close_their_connection_with_a_logged_reason_and_no_other(start, logged):
    _, b, at_a, at_b = await pair(start)
    for data in FOREIGN:
        logged.entries.clear()
        answer = await answer_to(b.address, data)
        assert answer == b"" or data.startswith(MAGIC)
        assert await logged.reason(REFUSED)
        assert b.peers.unproven == 0
    at_a.send(Delivered(transfer=9))
    assert await b.messages.get() == (at_b, Delivered(transfer=9))


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@pytest.fixture(scope="module")
def victim(runner):
    async def begin():
        b = Node("b")
        await b.peers.start()
        a = Node("a", peers={"b": b.address}, listen="")
        return a, b, await a.peers.session("b")

    a, b, session = runner.run(begin())
    yield b, session
    runner.run(a.close())
    runner.run(b.close())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(max_size=600),
        st.builds(
            lambda kind, rest: PREFACE.pack(MAGIC, WIRE_VERSION, kind) + rest,
            st.integers(0, 4),
            st.binary(max_size=600),
        ),
        st.binary(max_size=400).map(
            lambda body: PREFACE.pack(MAGIC, WIRE_VERSION, 1) + struct.pack("<I", len(body)) + body
        ),
    )
)
def test_no_stranger_harms_a_session(runner, victim, data):
    b, session = victim

    async def attack():
        await answer_to(b.address, data)
        session.send(Delivered(transfer=1))
        assert (await b.messages.get())[1] == Delivered(transfer=1)
        assert len(b.peers.sessions()) == 1

    runner.run(attack())


@both_loops
async def test_silent_strangers_cannot_keep_peers_out(start, logged):
    b = await start("b", max_unauthenticated=4, handshake_timeout_s=2.0)
    host, port = b.address.rsplit(":", 1)
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
    a = await start("a")
    assert (await a.peers.session("b")).node == "b"
    assert b.peers.unproven <= 4
    assert "the oldest" in await logged.reason(REFUSED)
    for _, writer in strangers:
        writer.close()


@both_loops
async def test_a_silent_stranger_is_closed_after_the_handshake_timeout(start, logged):
    b = await start("b", handshake_timeout_s=0.05)
    host, port = b.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b""
    assert b.peers.unproven == 0
    assert "not finished in time" in await logged.reason(REFUSED)
    writer.close()


@both_loops
async def test_a_session_whose_lanes_never_come_ends(start, logged):
    b = await start("b", handshake_timeout_s=0.5)
    puppet = Puppet("a", b.address, fabric="tcp")
    await puppet.connect()
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(puppet.control, 4096):
        pass
    puppet.close()
    assert b.peers.sessions() == []
    assert b.losses.empty()


@both_loops
async def test_many_nodes_connect_at_once(start):
    b = await start("b", max_unauthenticated=4)
    others = [await start(f"n{n}", listen="") for n in range(20)]
    sessions = await asyncio.gather(*(other.peers.session("b") for other in others))
    for session in sessions:
        session.send(Delivered(transfer=1))
    assert len({(await b.messages.get())[0].node for _ in others}) == 20
