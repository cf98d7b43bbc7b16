"""Signal handlers that call the client, or raise, at any moment: nothing hangs, and the client goes on."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd_client import Client, KVSpec
from kvd_client.errors import Aborted, Busy, DaemonLost, DaemonUnreachable, LeaseExpired
from tests.integration.api_harness import WAIT_S, ServerThread
from tests.waiting import eventually

SPEC = KVSpec(layers=2, kv_heads=2, entry_bytes=16, dtype="float16", model="test")
KV = np.ones((1, 2, 4, 4), np.float16)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with ServerThread(tmp_path / "api.sock") as server, Client(server.path, name="test", timeout_s=WAIT_S) as client:
        yield client


@contextlib.contextmanager
def interrupting(client: Client, handler: Callable[[], Any]) -> Iterator[None]:
    """Run ``handler`` in this thread while it waits for something that the client reads."""
    main = threading.get_ident()
    client.status()
    connection = client._connection
    assert connection is not None

    def interrupt() -> None:
        eventually("the thread waits", connection._pumping.locked)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_asks_and_aborts_what_its_own_thread_waits_for(client: Client) -> None:
    seen = []
    with client.decode("r", SPEC, [4]) as sink:

        def handler() -> None:
            seen.append(client.status().node)
            sink.abort("stop")

        with interrupting(client, handler), pytest.raises(Aborted, match="stop"):
            sink.wait_ready()
    assert len(seen) == 1
    assert client.status().memory.leases == 0


@pytest.mark.parametrize("end", ["release", "close"])
def test_a_handler_ends_what_its_own_thread_waits_for(client: Client, end: str) -> None:
    sink = client.decode("r", SPEC, [4])
    with interrupting(client, sink.release if end == "release" else client.close), pytest.raises(LeaseExpired):
        sink.wait_ready()


def test_a_handler_that_raises_while_its_thread_waits_costs_nothing_else(client: Client) -> None:
    def handler() -> None:
        raise KeyboardInterrupt

    with client.decode("other", SPEC, [4]) as other:
        with interrupting(client, handler), pytest.raises(KeyboardInterrupt), client.decode("r", SPEC, [4]) as sink:
            sink.wait_ready()
        assert client.status().memory.leases == 1
        assert not other.poll_ready(0)


def test_a_handler_that_raises_while_a_reply_is_read_ends_the_connection_at_once(client, monkeypatch) -> None:
    sink = client.decode("r", SPEC, [4])
    stream = client._connection._stream
    receive = stream.receive

    def interrupted(arrived):
        receive([])
        raise KeyboardInterrupt

    monkeypatch.setattr(stream, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.status()
    with pytest.raises(DaemonLost, match="signal handler"):
        sink.poll_ready(0)
    assert client.status().memory.leases == 0  # over a new connection


def test_a_handler_may_not_call_in_the_middle_of_reading_or_sending(client, monkeypatch) -> None:
    client.status()
    stream, found = client._connection._stream, []
    receive, send = stream.receive, stream._sock.send

    def ask() -> None:
        with pytest.raises(Busy, match="set a flag") as caught:
            client.status()
        found.append(caught.value)

    class Sock:
        def send(self, *args):
            ask()
            return send(*args)

        def __getattr__(self, name):
            return getattr(sock, name)

    def reading(arrived):
        ask()
        receive(arrived)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "receive", reading)
        assert client.status().node
    sock = stream._sock
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_sock", Sock())
        assert client.status().node
    assert len(found) == 2
    assert client.status().node


def test_a_handler_that_raises_in_a_fence_leaves_the_ring_usable(client, monkeypatch) -> None:
    class Barrier:
        def __init__(self, lock):
            self.lock, self.armed = lock, True

        def release(self):
            self.lock.release()
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt

        def acquire(self):
            return self.lock.acquire()

    with client.decode("r", SPEC, [4]) as sink, client.prefill("r", SPEC, [4]) as source:
        doorbell = client._connection.doorbell
        doorbell._barrier = Barrier(doorbell._barrier)
        with pytest.raises(KeyboardInterrupt):
            source.put_layer(0, k=KV, v=KV)
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=KV, v=KV)
        sink.wait_ready(timeout_s=WAIT_S)


def test_an_interrupted_release_is_made_up_for(client, monkeypatch) -> None:
    sink = client.decode("r", SPEC, [4])
    connection = client._connection
    with monkeypatch.context() as patch:
        patch.setattr(connection, "_send", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sink.release()
    client.status()
    assert client.status().memory.leases == 0


@pytest.mark.parametrize("timeout_s", [0, 1e-9, -1])
def test_no_time_to_wait_is_not_for_ever(tmp_path: Path, timeout_s: float) -> None:
    path = str(tmp_path / "full.sock")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(path)
        with pytest.raises(DaemonUnreachable, match="accepts nobody"):
            Client(path, timeout_s=timeout_s).status()


def test_a_file_that_is_no_socket_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="that is no socket"):
        Client(tmp_path).status()
