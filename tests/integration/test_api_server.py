"""The server against clients that are not the library: foreign bytes, abused descriptors, limits."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvd.api.server import MOST_LOOKERS, ApiLimits
from kvd_client import Client, KVSpec
from kvd_client.errors import Busy, VersionMismatch
from kvd_client.framing import encode
from kvd_client.protocol import (
    LENGTH,
    MAX_FRAME,
    PROTOCOL_VERSION,
    Failure,
    GetStatus,
    Hello,
    OpenSource,
    Release,
    Status,
    Welcome,
)
from tests.integration.api_harness import WAIT_S, Raw, ServerThread

SPEC = KVSpec(layers=1, kv_heads=1, entry_bytes=64, dtype="float32", model="test")


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


# --- foreign bytes --------------------------------------------------------------------------------------------------


HELLO = encode(Hello(id=1, version=PROTOCOL_VERSION))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "frame of"),
        (b"\xff\xff\xff\xff", "frame of"),
        (LENGTH.pack(MAX_FRAME + 1), "frame of"),
        (frame(b""), "wrong form"),
        (frame(b"\xc1"), "wrong form"),
        (frame(b"\x91" * 2000), "wrong form"),
        (frame(b"\x91" * 5000), "frame of"),
        (HELLO + frame(b"\x91" * 100_000), "not msgpack"),
        (HELLO + frame(b"\x93" * 20 + b"\xc0" * 8000), "not msgpack"),
        (HELLO + frame(msgpack.packb([[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]], b"x" * 5000])), "nested"),
        (frame(msgpack.packb({"type": "no_such"})), "wrong form"),
        (frame(msgpack.packb({"type": "hello", "version": "one"})), "wrong form"),
        (encode(GetStatus(id=4)), "first message is GetStatus"),
        (HELLO + HELLO, "second greeting"),
        (HELLO + frame(b"\x00"), "wrong form"),
        (HELLO + encode(GetStatus(id=1)) + b"\xff\xff\xff\x7f", "frame of"),
    ],
)
def test_foreign_bytes_close_their_connection_with_a_reason(server, data, reason):
    with Client(server.path) as bystander, Raw(server.path, greet=False) as raw:
        bystander.status()
        server.log.wait("client")
        raw.sock.sendall(data)
        said = raw.ended()
        assert isinstance(said, Failure)
        assert said.code == "PROTOCOL"
        assert reason in said.message
        closed = server.log.wait("client closed")
        assert closed["level"] == "warning"
        assert reason in closed["reason"]
        assert closed["pid"] == os.getpid()
        assert bystander.status().node == "test"


@pytest.mark.parametrize("sent", [1, 3, 4, 5, len(HELLO) - 1])
def test_a_frame_that_never_ends(server, sent):
    with Raw(server.path, greet=False) as raw:
        raw.sock.sendall(HELLO[:sent])
    assert server.log.wait("client closed")["reason"] == "the connection ended inside a frame"


def test_frames_in_pieces_and_frames_together(server):
    with Raw(server.path, greet=False) as raw:
        for i in range(len(HELLO)):
            raw.sock.sendall(HELLO[i : i + 1])
        assert isinstance(raw.reply(), Welcome)
        raw.sock.sendall(b"".join(encode(GetStatus(id=i)) for i in range(2, 50)))
        assert [raw.reply().id for _ in range(2, 50)] == list(range(2, 50))
        large = OpenSource(id=50, request="r", spec=SPEC, lengths=[1] * 100_000, capacity=1)
        raw.sock.sendall(encode(large) + encode(Release(id=51, transfer=9)))
        assert raw.reply().code == "INVALID_ARGUMENT"
        assert raw.reply().code == "NOT_FOUND"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.booleans(),
    st.one_of(
        st.binary(min_size=1, max_size=300),
        st.binary(max_size=300).map(frame),
        st.recursive(
            st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=9), st.floats()),
            lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner)),
        ).map(lambda tree: frame(msgpack.packb(tree))),
        st.fixed_dictionaries(
            {
                "type": st.sampled_from(["hello", "open_source", "open_sink", "finish", "release", "abort", "reject"]),
                "transfer": st.integers(-(2**63), 2**64 - 1),
                "version": st.integers(-(2**63), 2**64 - 1),
                "id": st.integers(-(2**63), 2**64 - 1),
            }
        ).map(lambda tree: frame(msgpack.packb(tree))),
    ),
)
@example(True, frame(msgpack.packb({"type": "release", "transfer": 2**64 - 1, "id": -(2**63)})))
def test_any_bytes_leave_the_server_serving(server, greet, data):
    with Raw(server.path, greet=greet) as raw:
        with contextlib.suppress(OSError):  # closed already
            raw.sock.sendall(data)
            raw.sock.shutdown(socket.SHUT_WR)
        raw.ended()
    with Raw(server.path) as other:
        other.sock.sendall(encode(GetStatus(id=3)))
        assert isinstance(other.reply(), Status)
    assert server.log.exceptions == []


def test_a_wrong_version_is_answered_with_both_versions(server):
    with Raw(server.path, greet=False) as raw:
        raw.sock.sendall(encode(Hello(id=8, version=PROTOCOL_VERSION + 1)))
        said = raw.ended()
        assert (said.id, said.code) == (8, "VERSION_MISMATCH")
        assert said.fields == {"client": PROTOCOL_VERSION + 1, "daemon": PROTOCOL_VERSION}


def test_the_library_names_a_wrong_version(server, monkeypatch):
    monkeypatch.setattr("kvd_client.connection.PROTOCOL_VERSION", 99)
    with Client(server.path) as client, pytest.raises(VersionMismatch, match="version 99"):
        client.status()


def test_silence_is_closed_after_a_while(tmp_path):
    limits = ApiLimits(hello_s=0.01)
    with ServerThread(tmp_path / "s", limits=limits) as server, Raw(server.path, greet=False) as raw:
        assert raw.ended() is None
        assert server.log.wait("client closed")["reason"] == "no first message in time"
        with Raw(server.path) as other:
            other.sock.sendall(encode(GetStatus(id=2)))
            assert isinstance(other.reply(), Status)


# --- descriptors ----------------------------------------------------------------------------------------------------


def send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@pytest.mark.parametrize("greet", [False, True])
@pytest.mark.parametrize("count", [1, 253])
def test_descriptors_from_a_client_are_closed(server, greet, count):
    with Raw(server.path, greet=greet) as raw:
        read, write = os.pipe()
        send_fds(raw.sock, encode(GetStatus(id=2)) if greet else HELLO, [write] * count)
        os.close(write)
        raw.reply()
        # End of file: no copy of the pipe's other end is open any more, in the server neither.
        assert os.read(read, 1) == b""
        os.close(read)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_and_sessions_come_back(server):
    with Client(server.path) as client:
        client.status()
    server.service.lost.get(timeout=WAIT_S)
    before = open_fds()
    for _ in range(20):
        with Client(server.path) as client:
            client.prefill("r", SPEC, [1])
            client.decode("r", SPEC, [1])
        server.service.lost.get(timeout=WAIT_S)
    assert server.call(lambda: len(server.server._sessions)) == 0
    del client
    assert open_fds() == before
    assert server.service.parts == {}


def test_replies_with_descriptors_wait_in_order_for_a_slow_reader(server):
    # Status replies fill the socket; the memfd of the open must still come with its own reply.
    server.service.padding = "x" * 100_000
    with Raw(server.path) as raw:
        fds = len(raw.fds)
        for i in range(10):
            raw.sock.sendall(encode(GetStatus(id=10 + i)))
        raw.sock.sendall(encode(OpenSource(id=30, request="r", spec=SPEC, lengths=[1], capacity=1, head_count=1)))
        raw.sock.sendall(encode(GetStatus(id=40)))
        for i in range(10):
            assert raw.reply().id == 10 + i
        opened = raw.reply()
        assert opened.id == 30
        assert len(raw.fds) == fds + 1
        assert os.fstat(raw.fds[-1]).st_ino == os.fstat(server.service.memfd).st_ino
        assert raw.reply().id == 40


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_reader_too_slow_is_closed(tmp_path):
    with ServerThread(tmp_path / "s", limits=ApiLimits(write_buffer=1 << 20)) as server:
        server.service.padding = "x" * 60_000
        with Raw(server.path) as slow, Raw(server.path) as other:
            server.log.wait("client")
            server.log.wait("client")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for i in range(100):
                    slow.sock.sendall(encode(GetStatus(id=2 + i)))
            assert server.log.wait("client closed")["reason"].startswith("slow reader")
            other.sock.sendall(encode(GetStatus(id=2)))
            assert isinstance(other.reply(), Status)


def test_requests_in_progress_are_limited(tmp_path):
    with ServerThread(tmp_path / "s", limits=ApiLimits(requests=3)) as server, Raw(server.path) as raw:

        def hold():
            server.service.hold = asyncio.Event()

        server.call(hold)
        for i in range(5):
            raw.sock.sendall(encode(GetStatus(id=10 + i)))
        assert [(r.id, r.code) for r in (raw.reply(), raw.reply())] == [(13, "BUSY"), (14, "BUSY")]
        server.call(lambda: server.service.hold.set())
        assert sorted(raw.reply().id for _ in range(3)) == [10, 11, 12]


def test_who_asks_what_is_wrong_is_told_though_all_places_are_taken(tmp_path):
    limits = ApiLimits(clients=1)
    with ServerThread(tmp_path / "s", limits=limits) as server, Raw(server.path), contextlib.ExitStack() as stack:
        lookers = [stack.enter_context(Client(server.path, name="kvd status")) for _ in range(MOST_LOOKERS)]
        for looker in lookers:
            assert looker.status().node == "test"
        with pytest.raises(Busy, match="status only"):
            lookers[0].prefill("r", KVSpec(layers=1, kv_heads=1, entry_bytes=64, dtype="f", model="m"), [4])
        refused = server.log.wait("request refused")
        assert (refused["level"], refused["code"], refused["request"]) == ("warning", "BUSY", "r")
        assert refused["pid"] == os.getpid()
        with Client(server.path, name="kvd status") as another, pytest.raises(Busy, match="1 processes"):
            another.status()
        assert dict(server.server.failures) == {"BUSY": 1}


def test_the_number_of_clients_is_limited(tmp_path):
    with (
        ServerThread(tmp_path / "s", limits=ApiLimits(clients=2)) as server,
        Raw(server.path) as one,
        Raw(server.path),
    ):
        with Client(server.path) as third:
            with pytest.raises(Busy, match="2 processes"):
                third.status()
            one.sock.close()
            server.service.lost.get(timeout=WAIT_S)
            third.status()
        assert server.log.exceptions == []


def test_many_clients_at_once(server):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server.path, name=f"n{i}")) for i in range(100)]
        for _ in range(2):
            for client in clients:
                client.status()
        assert server.call(lambda: {s.name for s in server.server.clients}) == {f"n{i}" for i in range(100)}
    lost = [server.service.lost.get(timeout=WAIT_S) for _ in range(100)]
    assert len({session.id for session in lost}) == 100
