"""What is left when one end goes away without a word: killed clients and killed daemons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading

import numpy as np
import pytest

from kvd_client import Client, KVSpec
from kvd_client.errors import DaemonLost, DaemonUnreachable, LeaseExpired, ProcessLost
from kvd_client.protocol import GetStatus
from tests.integration.api_harness import WAIT_S, ServerThread
from tests.integration.children import kill, process

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


def daemon(path):
    return process("-m", "tests.integration.api_harness", os.fspath(path))


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
