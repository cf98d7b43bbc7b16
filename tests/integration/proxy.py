"""A TCP proxy between two daemons that sees, changes, repeats and swallows what they say."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

CONTROL, URGENT, BULK = range(3)
"""The connections of a session, in the order in which they are dialled."""

Meddle = Callable[[int, bool, bytes], bytes]
"""(number of the connection, whether towards the listener, bytes) to the bytes that are passed on."""


class Proxy:
    """Listens on 127.0.0.1 and carries each connection to ``target``; use it as a context."""

    def __init__(self, target: tuple[str, int], meddle: Meddle | None = None) -> None:
        self._target = target
        self.meddle = meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen: dict[tuple[int, bool], bytearray] = {}
        """What was said, by connection and direction, before it was changed."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._sockets: list[socket.socket] = []
        self._count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._waker.send(b"x")
        self._thread.join(10)
        for sock in (*self._sockets, self._listener, self._wake, self._waker):
            sock.close()
        self._selector.close()

    @property
    def session(self) -> int:
        """The number of the last session's control connection."""
        return max(0, self._count - 3)

    def stream(self, connection: int, to_listener: bool) -> bytes:
        return bytes(self.seen.get((connection, to_listener), b""))

    def everything(self) -> bytes:
        return b"".join(bytes(data) for data in self.seen.values())

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._carry(*key.data)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        number, self._count = self._count, self._count + 1
        self._sockets += [near, far]
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(near, selectors.EVENT_READ, (near, far, number, True))
        self._selector.register(far, selectors.EVENT_READ, (far, near, number, False))

    def _carry(self, source: socket.socket, target: socket.socket, number: int, to_listener: bool) -> None:
        try:
            data = source.recv(1 << 18)
            if data:
                self.seen.setdefault((number, to_listener), bytearray()).extend(data)
                if self.meddle is not None:
                    data = self.meddle(number, to_listener, data)
                target.sendall(data)
                return
        except OSError:
            pass
        self._selector.unregister(source)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class FlipOnce:
    """Flips one bit of one direction of one connection, ``at`` bytes after the first that ``armed`` let through."""

    def __init__(self, connection: int, to_listener: bool, at: int, bit: int = 3) -> None:
        self._where = (connection, to_listener)
        self._left = at
        self._bit = bit
        self.done = False

    def __call__(self, connection: int, to_listener: bool, data: bytes) -> bytes:
        if (connection, to_listener) != self._where or self.done:
            return data
        if self._left >= len(data):
            self._left -= len(data)
            return data
        changed = bytearray(data)
        changed[self._left] ^= 1 << self._bit
        self.done = True
        return bytes(changed)
