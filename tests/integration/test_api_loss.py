"""What is left when one end goes away without a word: killed clients, killed daemons, forked children."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvd_client import Client, KVSpec
from kvd_client.errors import DaemonLost, DaemonUnreachable, LeaseExpired, OutOfMemory, ProcessLost
from kvd_client.mapping import Mapping
from kvd_client.protocol import GetStatus
from tests.integration.api_harness import WAIT_S, ServerThread

SPEC = KVSpec(layers=2, kv_heads=1, entry_bytes=64, dtype="float32", model="test")

CLIENT = """
import sys
from kvd_client import Client, KVSpec
spec = KVSpec(layers=2, kv_heads=1, entry_bytes=64, dtype="float32", model="test")
with Client(sys.argv[1], name="victim") as client:
    sinks = [client.decode(f"r{i}", spec, [5]) for i in range(3)]
    print("ready", flush=True)
    sinks[0].wait_ready()
"""


@contextlib.contextmanager
def process(*arguments: str):
    """A Python process that has said that it is ready; killed at the end at the latest."""
    with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def daemon(path):
    return process("-m", "tests.integration.api_harness", os.fspath(path))


def kill(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(WAIT_S)


# --- a client goes --------------------------------------------------------------------------------------------------


def test_a_killed_client_is_reported_once_and_its_peer_told(server):
    with Client(server.path) as client, process("-c", CLIENT, server.path) as victim:
        source = client.prefill("r0", SPEC, [5])
        assert len(server.service.parts) == 4
        kill(victim)
        session = server.service.lost.get(timeout=WAIT_S)
        assert (session.name, session.pid) == ("victim", victim.pid)
        with pytest.raises(ProcessLost):
            source.wait_delivered(WAIT_S)
        source.release()
        assert server.service.parts == {}
    assert server.service.lost.get(timeout=WAIT_S).pid == os.getpid()
    with pytest.raises(queue.Empty):
        server.service.lost.get_nowait()


def test_a_lost_client_is_reported_after_its_requests_have_ended(server):
    def hold():
        server.service.hold = asyncio.Event()

    server.call(hold)
    client = Client(server.path)
    connection = client._connected()
    connection._send(b"".join(encode_status(i) for i in (101, 102, 103)), 1e9)
    while server.service.requests < 3:
        server.call(lambda: None)
    order = []
    report = server.service.client_lost

    def lost(session):
        order.append(server.service.cancelled)
        session.close("again")
        session.push(server.service.status())
        session.wake()
        report(session)

    server.service.client_lost = lost
    client.close()
    server.service.lost.get(timeout=WAIT_S)
    assert order == [3]


def encode_status(number: int) -> bytes:
    from kvd_client.framing import encode

    return encode(GetStatus(id=number))


def test_a_service_that_fails_on_a_loss_loses_only_that(server):
    def broken(session):
        raise ZeroDivisionError

    server.service.client_lost, report = broken, server.service.client_lost
    with Client(server.path) as client:
        client.status()
    assert server.log.wait("client_lost failed")
    server.log.exceptions.clear()
    server.service.client_lost = report
    with Client(server.path) as client:
        assert client.status().node == "test"


# --- the daemon goes ------------------------------------------------------------------------------------------------


def test_a_killed_daemon_leaves_errors_and_readable_memory(tmp_path):
    path = tmp_path / "s"
    k = np.random.default_rng(0).random((1, 1, 5, 8), dtype=np.float32)
    with Client(path) as client:
        with daemon(path) as victim:
            source, sink = client.prefill("r", SPEC, [5]), client.decode("r", SPEC, [5])
            source.put_layer(0, k=k, v=k)
            sink.wait_ready(0, WAIT_S)
            view = sink.k(0, np.float32)
            failed: queue.Queue[BaseException] = queue.Queue()

            def wait():
                try:
                    sink.wait_ready(1, WAIT_S)
                except DaemonLost as error:
                    failed.put(error)

            waiting = threading.Thread(target=wait)
            waiting.start()
            kill(victim)
            error = failed.get(timeout=WAIT_S)
            waiting.join()
        assert os.fspath(path) in error.message
        # Nobody can be given this memory any more, so what was local stays local.
        np.testing.assert_array_equal(view[0], k[0].transpose(1, 0, 2))
        for do in (
            lambda: sink.wait_ready(0, WAIT_S),
            lambda: sink.poll_ready(0),
            lambda: sink.layer(0),
            lambda: sink.idle(0),
            lambda: source.layer_ready(1),
            lambda: source.put_layer(1, k=k, v=k),
            lambda: source.finish(),
            lambda: source.wait_delivered(WAIT_S),
        ):
            with pytest.raises(DaemonLost):
                do()
        source.abort()
        source.release()
        sink.release()
        sink.release()
        assert not view.any()
        with pytest.raises(LeaseExpired):
            sink.layer(0)
        with pytest.raises(DaemonUnreachable, match="kvd serve"):
            client.status()
        with daemon(path) as restarted:
            assert client.status().pid == restarted.pid
            client.prefill("r", SPEC, [5]).release()


def test_a_restart_between_two_calls_goes_unnoticed(tmp_path):
    path = tmp_path / "s"
    with Client(path) as client:
        with daemon(path) as first:
            assert client.status().pid == first.pid
            kill(first)
        with daemon(path) as second:
            assert client.status().pid == second.pid


def test_the_with_block_ends_quietly_but_says_what_happened(tmp_path):
    path = tmp_path / "s"
    with Client(path) as client, daemon(path) as victim:
        source = client.prefill("r", SPEC, [5])

        def prefill():
            with source:
                source.layer_ready(0)
                kill(victim)

        with pytest.raises(DaemonLost):
            prefill()
        assert source.released


@pytest.mark.parametrize("way", ["one connection", "all of it"])
def test_a_daemon_that_ends_the_connection_takes_the_memory_along(tmp_path, way):
    # It may give the memory to the next request at once, so nothing of it may be seen here any more.
    with contextlib.ExitStack() as stack:
        server = ServerThread(tmp_path / "s")
        with server:
            client = stack.enter_context(Client(server.path))
            sink = client.decode("r", SPEC, [5])
            view = sink.layer(0)
            view[:] = 1
            if way == "one connection":
                server.call(lambda: server.server.clients[0].close("a reason"))
                with pytest.raises(DaemonLost):
                    sink.poll_ready(0)
        with pytest.raises(DaemonLost):
            sink.wait_ready(0, WAIT_S)
        with pytest.raises(DaemonLost):
            sink.poll_ready(0)
        assert not view.any()
        sink.release()
        assert server.log.exceptions == []


def test_a_stopping_server_reports_every_client_and_refuses_nothing_twice(tmp_path):
    with contextlib.ExitStack() as stack:
        with ServerThread(tmp_path / "s") as server:
            clients = [stack.enter_context(Client(server.path)) for _ in range(5)]
            for client in clients:
                client.decode(f"r{client!r}", SPEC, [1])
            server.wait(server.server.close())
            assert server.service.lost.qsize() == 5
            assert server.service.parts == {}
            assert not (tmp_path / "s").exists()
            for client in clients:
                with pytest.raises(DaemonUnreachable):
                    client.status()
        assert server.log.exceptions == []


# --- forks ----------------------------------------------------------------------------------------------------------


def in_child(do) -> str:
    """What ``do`` returns or raises in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(do())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(server):
    with Client(server.path) as client, client.decode("r", SPEC, [5]) as sink:
        view = sink.layer(0)
        view[:] = 1
        for do in (
            client.status,
            lambda: client.prefill("s", SPEC, [1]),
            lambda: sink.poll_ready(0),
            lambda: sink.wait_ready(0, 1),
            sink.abort,
            sink.release,
            lambda: sink.layer(0),
        ):
            answer = in_child(do)
            assert answer.startswith("InvalidArgument")
            assert "after the fork" in answer
        assert in_child(lambda: view.any()) == "False"
        assert in_child(lambda: Client(server.path).status().node) == "test"
        assert client.status().node == "test"
        assert (view == 1).all()


def test_a_child_does_not_hide_its_parents_death(server, tmp_path):
    code = f"""
import os, sys
from kvd_client import Client
client = Client({server.path!r}, name="parent")
client.status()
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
os.waitpid(child, 0)
"""
    with process("-c", code) as parent:
        kill(parent)
        # The child still runs, since its standard input is open.
        assert server.service.lost.get(timeout=WAIT_S).name == "parent"
        parent.stdin.close()


def test_a_client_made_before_a_fork_and_not_used_yet_says_so(server):
    client = Client(server.path)
    assert "make a new Client after the fork" in in_child(client.status)
    assert client.status().node == "test"
    client.close()


# --- mappings -------------------------------------------------------------------------------------------------------


def sealed_memfd(nbytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_a_mapping_is_shared_until_it_is_retired():
    fd = sealed_memfd(3 * 4096)
    mapping = Mapping(fd, 4096, 5000)
    view = np.asarray(mapping)
    assert view.shape == (5000,)
    view[:] = 7
    assert os.pread(fd, 1, 4096) == b"\x07"
    assert os.pread(fd, 1, 0) == b"\x00"
    mapping.retire()
    mapping.retire()
    assert not view.any()
    view[:] = 8
    assert os.pread(fd, 1, 4096) == b"\x07"
    os.close(fd)


def resident(view: np.ndarray) -> int:
    """Bytes of its mapping that this process can touch without a fault."""
    address, inside = view.__array_interface__["data"][0], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the view is not mapped")


def test_who_writes_all_of_a_lease_has_all_of_it_mapped_at_once():
    fd = sealed_memfd(64 * 4096)
    os.posix_fallocate(fd, 0, 64 * 4096)
    view = np.asarray(Mapping(fd, 4096, 50 * 4096))
    whole = np.asarray(Mapping(fd, 4096, 50 * 4096, whole=True))
    assert (resident(view), resident(whole)) == (0, 50 * 4096)
    whole[:] = 7
    assert view.all()
    os.close(fd)


def test_huge_pages_are_replaced_and_unmapped_in_whole():
    try:
        fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    page = os.fstatvfs(fd).f_bsize
    try:
        os.ftruncate(fd, 2 * page)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        try:
            mapping = Mapping(fd, page, 5000)
        except OutOfMemory:
            pytest.skip("no huge page is free")
        view = np.asarray(mapping)
        view[:] = 7
        mapping.retire()
        assert not view.any()
        del mapping, view
        with open("/proc/self/maps") as maps:
            assert "huge (deleted)" not in maps.read()
    finally:
        os.close(fd)


def test_a_reader_in_another_thread_never_faults_while_the_lease_ends():
    fd = sealed_memfd(1 << 20)
    stop, sums = threading.Event(), []
    mapping = Mapping(fd, 0, 1 << 20)
    view = np.asarray(mapping)
    view[:] = 1
    started = threading.Event()

    def read():
        while not stop.is_set():
            sums.append(int(view.max()))
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(WAIT_S)
    mapping.retire()
    before = len(sums)
    while len(sums) < before + 3 and reader.is_alive():
        reader.join(0.001)
    stop.set()
    reader.join()
    assert sums[0] == 1
    assert sums[-1] == 0
    os.close(fd)


def test_dropping_tells_unless_retired():
    fd = sealed_memfd(4096)
    told = []
    mapping = Mapping(fd, 0, 4096, lambda: told.append(1))
    view = np.asarray(mapping)[10:20]
    del mapping
    assert told == []
    del view
    assert told == [1]
    mapping = Mapping(fd, 0, 4096, lambda: told.append(2))
    mapping.retire()
    del mapping
    assert told == [1]
    os.close(fd)


def test_importing_the_client_imports_nothing_heavy():
    code = "import sys, kvd_client; print(sorted({'kvd', 'torch', 'uvloop', 'numpy', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
