"""Threads that share a connection: replies that another thread reads, and Ctrl-C in one of them."""

from __future__ import annotations

import contextlib
import dis
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvd_client import exchange, stream
from kvd_client.errors import DaemonLost
from kvd_client.exchange import Exchange
from kvd_client.framing import decode_request, encode
from kvd_client.protocol import LENGTH, GetStatus, Ok
from tests.integration.api_harness import WAIT_S

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
        with self._listener, self._listener.accept()[0] as connection, contextlib.suppress(ConnectionResetError):
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
            # Bytes that were being read may be lost, and with them where the next frame begins.
            assert "_receive" in interrupt.names
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
