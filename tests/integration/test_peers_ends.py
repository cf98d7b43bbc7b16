"""How peer sessions end, and what becomes of peers that do not answer; on real sockets, under both event loops."""

import asyncio
import dataclasses
import socket
import struct

import numpy as np
import pytest

from kvd.errors import (
    Aborted,
    AuthenticationFailed,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    ShuttingDown,
)
from kvd.fabric.tcp import TcpFabric
from kvd.peers import sockets
from kvd.types import Lane
from kvd.wire import framing
from kvd.wire.messages import Announce, Delivered, Ping
from tests.integration.peer_nodes import (
    OTHER,
    Node,
    Puppet,
    both_loops,
    free_port,
    lost,
    pair,
    sockets_open,
)


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
async def test_a_peer_that_is_back_is_connected_again_though_nobody_asks(start, logged):
    """Whoever dialled dials again; the other one waits for that."""
    a, b, at_a, _ = await pair(start, redial_s=0.01)
    listen = b.address
    await b.close()
    await lost(a, at_a, PeerLost)
    (status,) = a.peers.statuses()
    assert (status.node, status.state == "connected") == ("b", False)
    assert status.error
    again = await start("b", listen=listen, redial_s=0.01)
    await logged.lines("peer connected", peer="b", boot=again.peers.boot)
    (status,) = a.peers.statuses()
    assert (status.state, status.error, status.down_s) == ("connected", "", 0.0)


@both_loops
async def test_a_second_daemon_with_a_peers_id_is_refused_and_told_of(start, logged):
    """A cloned machine. On one host it is a restart, and the old run's sessions end."""
    b = await start("b")
    a = await start("a", peers={"b": b.address}, advertise="10.0.0.1:7440")
    session = await a.peers.session("b")
    clone = await start("a", peers={"b": b.address}, advertise="10.0.0.99:7440")
    with pytest.raises(PeerUnreachable, match="two daemons go by the id a: one at 10"):
        await clone.peers.session("b")
    (status,) = b.peers.statuses()
    assert (status.state, status.boot, session.error) == ("connected", a.peers.boot, None)
    assert "one at 10.0.0.99:7440, refused" in status.trouble
    restarted = await start("a", peers={"b": b.address}, advertise="10.0.0.1:7441")
    await restarted.peers.session("b")
    await lost(a, session, PeerLost)
    assert b.peers.statuses()[0].boot == restarted.peers.boot
    # The clone's lanes come behind its refusal, and are no matter of keys.
    assert not [entry for entry in logged.entries if "AUTHENTICATION" in str(entry.get("reason", ""))]


@both_loops
async def test_attempts_that_nobody_asked_for_get_rarer_and_say_a_thing_once(start, logged):
    address = f"127.0.0.1:{free_port()}"
    a = await start("a", peers={"b": address}, listen="", redial_s=0.001)
    with pytest.raises(PeerUnreachable):
        await a.peers.session("b")
    lines = await logged.lines("no session with peer", 6)
    assert a.peers.statuses()[0].error.endswith("(6 attempts)")
    assert [line["attempts"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["reason"] for line in lines] == [lines[0]["reason"]] * 6
    assert logged.levels("no session with peer") == ["warning"] + ["debug"] * 5
    assert a.peers.statuses()[0].down_s > 0.001 * (2 + 4 + 8 + 16 + 32) * 0.75


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

    at_b._on_message = fail
    at_a.send(Delivered(transfer=1))
    ended, reason = await b.losses.get()
    assert ended is at_b
    assert "ZeroDivisionError" in reason.message
    at_c.send(Delivered(transfer=2))
    assert (await b.messages.get())[1] == Delivered(transfer=2)
