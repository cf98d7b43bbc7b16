"""Waiting: threads that share a connection, a ring that is full, replies that another thread reads, Ctrl-C in one."""

from __future__ import annotations

import contextlib
import dis
import math
import queue
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvd_client import Client, exchange, stream
from kvd_client.errors import (
    Busy,
    DaemonLost,
    DeadlineExceeded,
    InvalidArgument,
)
from kvd_client.exchange import Exchange
from kvd_client.framing import decode_request, encode
from kvd_client.protocol import LENGTH, GetStatus, Ok
from kvd_client.ring import EVENT_IDLE, RING_EVENTS, WAKE_IDLE, WAKE_LAYER_READY
from tests.integration.api_entries import SPEC, random_kv
from tests.integration.api_harness import WAIT_S


def test_two_threads_wait_for_different_layers_and_a_third_asks(client):
    k, v = random_kv(1, 5)
    done: queue.Queue[int] = queue.Queue()
    with client.prefill("r", SPEC, [5]) as source, client.decode("r", SPEC, [5]) as sink:

        def wait(layer):
            sink.wait_ready(layer, WAIT_S)
            done.put(layer)

        threads = [threading.Thread(target=wait, args=(layer,)) for layer in (0, 1, 1, 2)]
        for thread in threads:
            thread.start()
        for layer, count in ((2, 1), (0, 1), (1, 2)):
            assert client.status().node == "test"
            source.put_layer(layer, k=k, v=v)
            assert [done.get(timeout=WAIT_S) for _ in range(count)] == [layer] * count
        for thread in threads:
            thread.join()


def test_replies_find_their_callers_among_many_threads(server, client):
    server.service.padding = "x" * 20_000
    problems: list[object] = []

    def ask(thread):
        for i in range(20):
            try:
                if i % 2:
                    assert client.status().reasons == [server.service.padding]
                else:
                    client.reject(handle=f"{thread}-{i}")
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert {r.handle for r in server.service.rejected} == {f"{t}-{i}" for t in range(8) for i in range(0, 20, 2)}


def test_waiting_ends_at_its_timeout_and_the_transfer_goes_on(client):
    k, v = random_kv(1, 5)
    with client.prefill("r", SPEC, [5]) as source, client.decode("r", SPEC, [5]) as sink:
        with pytest.raises(DeadlineExceeded, match="layer 1"):
            sink.wait_ready(1, timeout_s=0.01)
        for layer in range(SPEC.layers):
            source.layer(layer)[:] = 1
        with pytest.raises(InvalidArgument, match="have not been rung"):
            source.finish()
        with pytest.raises(DeadlineExceeded, match="goes on"):
            source.wait_delivered(timeout_s=0.01)
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=k, v=v)
        sink.wait_ready(timeout_s=WAIT_S)


def test_finish_without_waiting(client):
    with Client(client.socket_path, timeout_s=math.inf) as patient, patient.prefill("r", SPEC, [1]) as source:
        for layer in range(SPEC.layers):
            source.layer_ready(layer)
        source.finish(wait=False)
        with client.decode("r", SPEC, [1]) as sink:
            sink.wait_ready(timeout_s=math.inf)
        source.wait_delivered(WAIT_S)


def test_a_request_that_takes_long_holds_up_nobody(server, client):
    def hold():
        import asyncio

        server.service.hold = asyncio.Event()

    server.call(hold)
    answered = threading.Event()

    def ask():
        client.status()
        answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    k, v = random_kv(1, 2)
    with client.prefill("r", SPEC, [2]) as source, client.decode("r", SPEC, [2]) as sink:
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=k, v=v)
        sink.wait_ready(timeout_s=WAIT_S)
        assert not answered.is_set()
        server.call(lambda: server.service.hold.set())
        assert answered.wait(WAIT_S)
        asking.join()


def test_idle_is_rung_only_when_wanted(server, client):
    with client.decode("r", SPEC, [1]) as sink:
        sink.idle(0)
        client.status()
        assert server.service.events == []
        server.call(lambda: server.server.clients[0].set_wake(WAKE_LAYER_READY | WAKE_IDLE))
        seen: queue.Queue[tuple[int, ...]] = queue.Queue()
        server.service.on_event = lambda client, *event: seen.put(event)
        sink.idle(2)
        assert seen.get(timeout=WAIT_S)[:3] == (EVENT_IDLE, 2, sink.id)


def test_more_events_than_the_ring_holds(server, client):
    # The server is kept busy until the ring is full and the writer waits for room.
    gate = threading.Event()
    with client.prefill("r", SPEC, [1]) as source:
        server.service.on_event = lambda *_: gate.wait(WAIT_S)
        connection, count = source._connection, 0
        while connection.doorbell.has_room():
            source.layer_ready(0)
            count += 1

        def fill():
            for _ in range(100):
                source.layer_ready(0)

        filling = threading.Thread(target=fill)
        filling.start()
        while not connection._pumping.locked():
            filling.join(0.001)
        gate.set()
        filling.join()
        client.status()
        assert count >= RING_EVENTS
        assert len(server.service.events) == count + 100
        source.abort()
        source.release()


def ring_twice_the_ring(source):
    for _ in range(2 * RING_EVENTS):
        source.layer_ready(0)


def test_a_daemon_that_takes_no_events_is_busy(server):
    gate = threading.Event()
    with Client(server.path, timeout_s=1.0) as client:
        source = client.prefill("r", SPEC, [1])
        server.service.on_event = lambda *_: gate.wait(WAIT_S)
        try:
            with pytest.raises(Busy, match="has not taken an event"):
                ring_twice_the_ring(source)
        finally:
            server.service.on_event = None
            gate.set()


# --- requests side by side --------------------------------------------------------------------------------------------

WATCHED = (exchange.__file__, stream.__file__)


class Interrupt:
    """Raises KeyboardInterrupt at the ``number``-th place, counted from 1, that this thread passes in a ``with`` block.

    CPython sees to signals when a function begins, when a built-in one has returned (its result is lost then), and when
    a loop goes round. The profile function is called at the first two, and the trace function before the third.
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self.names: list[str] = []
        """Functions that were interrupted, the outermost first; empty where there was no such place."""

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in WATCHED:
            self._pass(frame)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in WATCHED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and "JUMP_BACKWARD" in dis.opname[frame.f_code.co_code[frame.f_lasti]]:
            self._pass(frame)
        return self._trace

    def _pass(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            inner: FrameType | None = frame
            while inner is not None and inner.f_code.co_filename in WATCHED:
                self.names.insert(0, inner.f_code.co_name)
                inner = inner.f_back
            raise KeyboardInterrupt


class Daemon:
    """Takes one connection, and answers requests two at a time, in the order in which they came."""

    def __init__(self, path: str) -> None:
        self.asked = threading.Event()
        """A request has come."""
        self.at_once = False
        """From now on each request is answered as it comes, with what waits before it."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        data, waiting = b"", []
        with self._listener, self._listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
            while received := connection.recv(1 << 16):
                data += received
                while len(data) >= LENGTH.size and len(data) >= LENGTH.size + LENGTH.unpack_from(data)[0]:
                    stop = LENGTH.size + LENGTH.unpack_from(data)[0]
                    waiting.append(decode_request(data[LENGTH.size : stop]).id)
                    data = data[stop:]
                if len(waiting) > 1 or self.at_once:
                    connection.sendall(b"".join(encode(Ok(id=number)) for number in waiting))
                    waiting.clear()
                self.asked.set()

    def join(self) -> None:
        self._thread.join()


class Other:
    """A request in a thread of its own, once the daemon has been ``asked``, or at once."""

    def __init__(self, exchange: Exchange, after: threading.Event | None) -> None:
        self.outcome: object = None
        self._exchange, self._after = exchange, after
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        if self._after is not None:
            self._after.wait()
        self.outcome = outcome_of(self._exchange)

    def join(self) -> object:
        self._thread.join()
        return self.outcome


def outcome_of(exchange: Exchange) -> object:
    try:
        return type(exchange.request(GetStatus())[0])
    except Exception as error:
        return type(error)


def test_a_reply_that_another_thread_has_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(str(tmp_path / "sock"))
    daemon.at_once = True
    exchange = Exchange(str(tmp_path / "sock"), WAIT_S)

    def send_and_be_slow(frame: bytes, deadline: float) -> None:
        send(frame, deadline)
        pumping = threading.Thread(target=lambda: exchange.wait(lambda: exchange.answer(1), deadline), daemon=True)
        pumping.start()
        pumping.join()
        monkeypatch.setattr(exchange, "_pump", lambda timeout_ms: pytest.fail("it waits for what it has"))

    send = exchange._send
    monkeypatch.setattr(exchange, "_send", send_and_be_slow)
    assert type(exchange.request(GetStatus())[0]) is Ok
    exchange._close()
    daemon.join()


@pytest.mark.parametrize("first", ["the interrupted one", "the other"])
def test_an_interrupt_costs_nobody_else_its_reply(tmp_path: Path, first: str) -> None:
    """At every place where CPython looks for one."""
    places = 0
    while True:
        daemon = Daemon(str(tmp_path / f"{places}.sock"))
        exchange = Exchange(str(tmp_path / f"{places}.sock"), WAIT_S)
        other = Other(exchange, daemon.asked if first == "the interrupted one" else None)
        if first == "the other":
            daemon.asked.wait()
        with Interrupt(places + 1) as interrupt:
            try:
                exchange.request(GetStatus())
            except KeyboardInterrupt:
                assert interrupt.names
        daemon.at_once = True
        daemon.asked.set()
        outcomes = [outcome_of(exchange), other.join()]
        if exchange.lost:
            # Bytes that were being read or sent may be lost, and with them where the next frame begins.
            assert {"_take_in", "_send"} & set(interrupt.names)
            assert outcomes[0] is DaemonLost
            assert outcomes[1] in (Ok, DaemonLost)
        else:
            assert outcomes == [Ok, Ok], interrupt.names
        assert exchange._replies == {}
        exchange._close()
        daemon.join()
        if not interrupt.names:
            break
        places += 1
    assert places >= 10
