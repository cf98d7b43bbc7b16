"""Who may come to the API's socket, at which path it may lie, and what happens where accepting fails."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import tempfile
import threading
from types import SimpleNamespace

import pytest

from kvd.api.access import Peer, check_access, group_id
from kvd.errors import AddressInUse, ConfigError
from kvd_client import Client, KVSpec
from kvd_client.errors import Busy, PermissionDenied
from kvd_client.framing import encode
from kvd_client.protocol import PROTOCOL_VERSION, Hello, Welcome
from tests.integration.api_harness import WAIT_S, Raw, ServerThread
from tests.integration.children import in_child

SPEC = KVSpec(layers=1, kv_heads=1, entry_bytes=64, dtype="float32", model="test")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")


@pytest.fixture
def server(tmp_path):
    with ServerThread(tmp_path / "api.sock") as server:
        yield server
        assert server.log.exceptions == []


# --- who may come ---------------------------------------------------------------------------------------------------


def as_user(name: str, group: int, path: str, groups: tuple[int, ...] = ()) -> str:
    """What a status request answers in a process of that user. Forked, since other users may not reach this Python."""

    def ask() -> str:
        os.setgroups(groups)
        os.setgid(group)
        os.setuid(pwd.getpwnam(name).pw_uid)
        return f"ok {Client(path).status().node}"

    return in_child(ask)


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
        assert answer.startswith("PermissionDenied: PERMISSION_DENIED: user nobody is not in the group daemon")
        while (closed := server.log.wait("client closed"))["level"] != "warning":
            continue
        assert closed["reason"].startswith("PERMISSION_DENIED")
        # In the user database counts, too, whatever groups the process has now.
        assert as_user("daemon", nobody, public) == "ok test"
        with Client(public) as root:
            assert root.status().node == "test"
        session = server.server.clients
        assert session == [] or all(s.uid == os.getuid() for s in session)


def test_membership_by_the_user_database(monkeypatch):
    user = pwd.getpwnam("daemon")
    peer = Peer(1, user.pw_uid, user.pw_gid, frozenset())
    groups = {54321: ["somebody", "daemon"], 54322: ["somebody"]}
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_mem=groups[number]))
    check_access(peer, "kvd", 54321)
    with pytest.raises(PermissionDenied, match="user daemon is not in the group other"):
        check_access(peer, "other", 54322)


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
            early.sock.sendall(encode(Hello(id=1, version=PROTOCOL_VERSION, name="early")))
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
