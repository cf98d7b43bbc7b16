"""The server against clients that are not the library: foreign bytes, abused descriptors, wrong users, taken paths."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import grp
import os
import pwd
import queue
import socket
import stat
import tempfile
import threading

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvd.api.access import Peer, check_access, group_id
from kvd.api.server import ApiLimits
from kvd.errors import AddressInUse, ConfigError
from kvd_client import Client, KVSpec
from kvd_client.doorbell import Doorbell
from kvd_client.errors import Busy, DaemonLost, DaemonUnreachable, InvalidArgument, PermissionDenied, VersionMismatch
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
    decode_reply,
    encode,
)
from kvd_client.ring import (
    EVENT_IDLE,
    EVENT_LAYER_READY,
    EVENT_METADATA_READY,
    RING_EVENT,
    RING_EVENTS_OFFSET,
    RING_HEAD_OFFSET,
)
from tests.integration.api_harness import WAIT_S, ServerThread

SPEC = KVSpec(layers=1, kv_heads=1, entry_bytes=64, dtype="float32", model="test")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")


@pytest.fixture
def server(tmp_path):
    with ServerThread(tmp_path / "api.sock") as server:
        yield server
        assert server.log.exceptions == []


class Raw:
    """A connection that sends what a test wants."""

    def __init__(self, path: str, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(path)
        self.partial = b""
        self.fds: list[int] = []
        if greet:
            self.sock.sendall(encode(Hello(id=1, version=PROTOCOL_VERSION, name="raw")))
            assert isinstance(self.reply(), Welcome)

    def reply(self):
        while True:
            if len(self.partial) >= 4:
                (length,) = LENGTH.unpack_from(self.partial)
                if len(self.partial) >= 4 + length:
                    body, self.partial = self.partial[4 : 4 + length], self.partial[4 + length :]
                    return decode_reply(body)
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
            self.fds += fds
            if not data:
                raise EOFError
            self.partial += data

    def ended(self) -> Failure | None:
        """Read to the end of the connection; the Failure that was said last."""
        said = None
        try:
            while True:
                said = self.reply()
        except (EOFError, ConnectionResetError):
            return said

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


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


# --- the ring -------------------------------------------------------------------------------------------------------


def close_by_ring(server, spoil) -> str:
    with Client(server.path) as bystander, Raw(server.path) as raw:
        bystander.status()
        doorbell = Doorbell(raw.fds[0], raw.fds[1])
        spoil(doorbell)
        doorbell.wake()
        said = raw.ended()
        assert said.code == "PROTOCOL"
        assert doorbell.closed
        assert bystander.status().node == "test"
        return said.message


def test_a_head_that_jumps_closes_the_connection(server):
    def spoil(doorbell):
        doorbell._u64[RING_HEAD_OFFSET // 8] = 2**63 + 5

    assert "head" in close_by_ring(server, spoil)


def test_an_unknown_kind_closes_the_connection(server):
    def spoil(doorbell):
        doorbell.ring(EVENT_LAYER_READY, 0, 1, 0, 0, 1)
        doorbell.ring(77, 0, 1, 0, 0, 1)

    assert "unknown kind 77" in close_by_ring(server, spoil)


def test_every_known_kind_reaches_the_service(server):
    kinds = [EVENT_LAYER_READY, EVENT_IDLE, EVENT_METADATA_READY]
    with Client(server.path) as client:
        for kind in kinds:
            client._connected().doorbell.ring(kind, 1, 2, 3, 4, 5)
        client.status()  # by its answer the events have been taken
    assert server.service.events == [(kind, 1, 2, 3, 4, 5) for kind in kinds]


def test_an_event_that_the_service_refuses_closes_the_connection(server):
    with Client(server.path) as client:
        source = client.prefill("r", SPEC, [1])
        client._connected().ring(source._part, EVENT_LAYER_READY, 999, 0, 0, 1)
        with pytest.raises(DaemonLost, match="layer 999"):
            source.wait_delivered(WAIT_S)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 2**64 - 1), st.binary(min_size=RING_EVENT.size, max_size=20 * RING_EVENT.size))
def test_any_bytes_in_the_ring_leave_the_server_serving(server, head, records):
    with Raw(server.path) as raw:
        doorbell = Doorbell(raw.fds[0], raw.fds[1])
        doorbell._bytes[RING_EVENTS_OFFSET : RING_EVENTS_OFFSET + len(records)] = records
        doorbell._u64[RING_HEAD_OFFSET // 8] = head
        doorbell.wake()
        with contextlib.suppress(OSError):  # closed already
            raw.sock.sendall(encode(GetStatus(id=2)))
            raw.sock.shutdown(socket.SHUT_WR)
        raw.ended()
    with Raw(server.path) as other:
        other.sock.sendall(encode(GetStatus(id=3)))
        assert isinstance(other.reply(), Status)
    assert server.log.exceptions == []


def test_events_without_a_wake_up_are_found_by_the_sweep(tmp_path):
    with ServerThread(tmp_path / "s", limits=ApiLimits(sweep_s=0.01)) as server, Client(server.path) as client:
        seen: queue.Queue[int] = queue.Queue()
        server.service.on_event = lambda client, kind, layer, *rest: seen.put(layer)
        doorbell = client._connected().doorbell
        doorbell.wake = lambda: None
        doorbell.ring(EVENT_LAYER_READY, 5, 1, 0, 0, 1)
        assert seen.get(timeout=WAIT_S) == 5


# --- who may come ---------------------------------------------------------------------------------------------------


def as_user(name: str, group: int, path: str, groups: tuple[int, ...] = ()) -> str:
    """What a status request answers in a process of that user. Forked, since other users may not reach this Python."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "the child broke"
        try:
            os.setgroups(groups)
            os.setgid(group)
            os.setuid(pwd.getpwnam(name).pw_uid)
            answer = f"ok {Client(path).status().node}"
        except BaseException as error:
            answer = str(error)
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def public(tmp_path):
    """A folder that other users can enter; pytest's own is private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield os.path.join(folder, "api.sock")


@needs_root
def test_only_the_group_is_served(public):
    group = grp.getgrnam("daemon").gr_gid
    nobody = pwd.getpwnam("nobody").pw_gid
    with ServerThread(public, group="daemon") as server:
        found = os.stat(public)
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, group)
        assert as_user("nobody", group, public) == "ok test"
        assert as_user("nobody", nobody, public, (group,)) == "ok test"
        assert as_user("daemon", nobody, public, (group,)) == "ok test"
        assert "this user may not use it" in as_user("nobody", nobody, public)
        # Whoever opens the socket to everybody opens it to the group only.
        os.chmod(public, 0o666)
        answer = as_user("nobody", nobody, public)
        assert answer.startswith("PERMISSION_DENIED: user nobody is not in the group daemon")
        while (closed := server.log.wait("client closed"))["level"] != "warning":
            continue
        assert closed["reason"].startswith("PERMISSION_DENIED")
        # In the user database counts, too, whatever groups the process has now.
        assert as_user("daemon", nobody, public) == "ok test"
        with Client(public) as root:
            assert root.status().node == "test"
        session = server.server.clients
        assert session == [] or all(s.uid == os.getuid() for s in session)


def test_membership_by_the_user_database():
    member = next(((g, name) for g in grp.getgrall() for name in g.gr_mem if g.gr_gid), None)
    if member is None:
        pytest.skip("no group of this machine has members")
    group, name = member
    user = pwd.getpwnam(name)
    check_access(Peer(1, user.pw_uid, user.pw_gid, frozenset()), group.gr_name, group.gr_gid)


def test_a_user_that_the_database_does_not_know_is_denied_by_number():
    group = grp.getgrnam("daemon")
    with pytest.raises(PermissionDenied, match="user 54321"):
        check_access(Peer(1, 54321, 54321, frozenset({12345})), "daemon", group.gr_gid)
    check_access(Peer(1, 54321, 54321, frozenset({group.gr_gid})), "daemon", group.gr_gid)
    check_access(Peer(1, os.geteuid(), 54321, frozenset()), "daemon", group.gr_gid)


def test_a_group_that_does_not_exist_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="no-such-group"), ServerThread(tmp_path / "s", group="no-such-group"):
        pass
    assert group_id("root") == 0


def test_the_peer_is_known_by_the_kernels_word(server):
    with Client(server.path, name="me") as client:
        client.status()
        (session,) = server.call(lambda: server.server.clients)
        assert (session.pid, session.uid, session.gid) == (os.getpid(), os.getuid(), os.getgid())
        assert session.name == "me"


# --- the path -------------------------------------------------------------------------------------------------------


def test_a_path_with_a_live_daemon_is_refused_and_stays(server):
    with pytest.raises(AddressInUse, match="another daemon listens") as found, ServerThread(server.path):
        pass
    assert server.path in found.value.message
    with Client(server.path) as client:
        assert client.status().node == "test"


def test_a_socket_left_behind_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(path))
    with ServerThread(path) as server, Client(path) as client:
        assert client.status().node == "test"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        assert server.log.wait("replaced the socket of a daemon that is gone")["path"] == os.fspath(path)
    assert not path.exists()


def test_a_file_at_the_path_is_not_removed(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="not a socket"), ServerThread(path):
        pass
    assert path.read_text() == "data"


@pytest.mark.parametrize("path", ["missing/s", "x" * 120], ids=["no folder", "too long"])
def test_paths_that_can_not_be_used(tmp_path, path):
    with pytest.raises(ConfigError, match=r"api\.socket"), ServerThread(tmp_path / path):
        pass


def test_a_path_that_somebody_else_has_taken_meanwhile_stays(tmp_path):
    path = tmp_path / "s"
    with ServerThread(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(os.fspath(path))
            identity = path.stat().st_ino
    assert path.stat().st_ino == identity


def test_two_daemons_that_start_at_once(tmp_path):
    # Both see the same dead socket; exactly one may have it, and the other must not remove the winner's.
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(path))
    servers, refused = [], []
    start, checked = threading.Barrier(4), threading.Event()

    def run():
        start.wait()
        try:
            with ServerThread(path) as server:
                servers.append(server)
                checked.wait(WAIT_S)
        except AddressInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(servers) + len(refused) < 4:
        for thread in threads:
            thread.join(0.001)
    with Client(path) as client:
        assert client.status().node == "test"
    checked.set()
    for thread in threads:
        thread.join()
    assert (len(servers), len(refused)) == (1, 3)


def test_a_socket_from_the_service_manager_is_used_and_left_alone(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        # A client that came before the daemon is served by it.
        with Raw(os.fspath(path), greet=False) as early:
            early.sock.sendall(HELLO)
            with ServerThread(path, listen_fd=os.dup(listener.fileno())):
                assert isinstance(early.reply(), Welcome)
                with Client(path) as client:
                    assert client.status().node == "test"
        assert path.exists()


def test_a_descriptor_that_is_no_listener_is_refused(tmp_path):
    read, write = os.pipe()
    pair = socket.socketpair()
    for fd in (read, os.dup(pair[0].fileno())):
        with pytest.raises(ConfigError, match=f"descriptor {fd}"), ServerThread(tmp_path / "s", listen_fd=fd):
            pass
    os.close(write)
    for sock in pair:
        sock.close()


class Scarce:
    """A listener whose ``accept`` fails with these errors first."""

    def __init__(self, listener, *failures):
        self.listener, self.failures = listener, iter(failures)

    def accept(self):
        for error in self.failures:
            raise error
        return self.listener.accept()

    def fileno(self):
        return self.listener.fileno()

    def close(self):
        self.listener.close()


def make_scarce(server, *failures):
    def make():
        server.server._listener = Scarce(server.server._listener, *failures)

    server.call(make)


def test_running_out_of_memory_pauses_accepting_only(server):
    make_scarce(server, OSError(errno.ENOBUFS, "No buffer space available"))
    with Client(server.path) as client:
        assert client.status().node == "test"
    assert server.log.wait("can't accept clients for a moment")["reason"] == "No buffer space available"


@pytest.mark.parametrize("taken", [False, True])
def test_running_out_of_descriptors_turns_processes_away_at_once(server, taken):
    """With the descriptor that is kept for it; where even that is taken by somebody else, they wait for a moment."""
    failures = [OSError(errno.EMFILE, "Too many open files")] * (2 if taken else 1)
    make_scarce(server, *failures)
    with Client(server.path) as client:
        if not taken:
            with pytest.raises(Busy, match="LimitNOFILE") as caught:
                client.status()
            assert caught.value.fields["retry_after_s"] > 0
        assert client.status().node == "test"


def test_nobody_there_is_said_with_the_way_to_start_it(tmp_path):
    with Client(tmp_path / "none") as client, pytest.raises(DaemonUnreachable) as found:
        client.status()
    for word in (os.fspath(tmp_path / "none"), "kvd serve", "systemctl start kvd"):
        assert word in found.value.message


def test_something_else_at_the_socket_is_said(tmp_path):
    path = os.fspath(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer():
            sock, _ = listener.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"220 smtp ready\r\n")
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with Client(path) as client, pytest.raises(DaemonUnreachable, match="frame of"):
            client.status()
        thread.join()


def test_a_daemon_that_does_not_answer_is_unreachable_after_the_timeout(server):
    with Client(server.path, timeout_s=0.05) as client:
        client.status()

        def hold():
            server.service.hold = asyncio.Event()

        server.call(hold)
        with pytest.raises(DaemonUnreachable, match=r"GetStatus within 0\.05 s"):
            client.status()
        server.call(lambda: server.service.hold.set())
        client.reject(handle="still connected")


def test_the_socket_is_taken_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("KVD_SOCKET", server.path)
    with Client() as client:
        assert client.status().node == "test"
    monkeypatch.delenv("KVD_SOCKET")
    assert Client().socket_path == "/run/kvd/kvd.sock"


def test_a_closed_client_says_so(server):
    client = Client(server.path)
    source = client.prefill("r", SPEC, [1])
    view = source.layer(0)
    view[:] = 3
    client.close()
    client.close()
    assert not view.any()
    source.release()
    with pytest.raises(InvalidArgument, match="closed"):
        client.status()
    server.service.lost.get(timeout=WAIT_S)
    assert server.service.parts == {}
