"""Peers that are refused, addresses that can't be, and strangers; on real sockets, under both event loops."""

import asyncio
import socket
import struct

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import (
    AddressInUse,
    AuthenticationFailed,
    ConfigError,
    FingerprintMismatch,
    PeerUnknown,
    PeerUnreachable,
)
from kvd.peers import sockets
from kvd.wire.hello import MAGIC, PREFACE, Kind
from kvd.wire.messages import WIRE_VERSION, Delivered
from tests.integration.peer_nodes import (
    KEY,
    OTHER,
    REFUSED,
    Node,
    Puppet,
    both_loops,
    free_port,
    pair,
    sockets_open,
)


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
async def test_link_local_addresses_keep_their_interface():
    """fe80::1%eth0 means nothing without eth0, which uvloop's own functions lose."""
    (found,) = await sockets.resolve("fe80::1%lo", 7440)
    assert found[4] == ("fe80::1", 7440, 0, socket.if_nametoindex("lo"))
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = server.getsockname()
        with await sockets.connect(socket.AF_INET6, (*address[:3], socket.if_nametoindex("lo"))) as connected:
            assert connected.getpeername() == address
    with pytest.raises(ConnectionRefusedError):
        await sockets.connect(socket.AF_INET6, (*address[:3], socket.if_nametoindex("lo")))


@both_loops
async def test_a_name_that_leads_nowhere_says_where_it_led(start):
    a = await start("a", peers={"b": f"localhost:{free_port()}"})
    with pytest.raises(PeerUnreachable, match=r"at localhost:\d+: (\[::1\]|127\.0\.0\.1):\d+: connection refused"):
        await a.peers.session("b")


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
