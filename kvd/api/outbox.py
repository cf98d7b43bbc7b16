"""Frames on their way to a process that may read slowly, with the descriptors that belong to them."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # combined once: `|` on these costs 3 us


class Outbox:
    """Sends at once what the socket takes, and keeps the rest, up to ``most_bytes``, until it takes more.

    ``stuck`` is told why the process can't be waited for any longer, ``left`` what the system says of a process that is
    gone (an empty string: nothing). Both must :meth:`close` this.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        most_bytes: int,
        *,
        stuck: Callable[[str], None],
        left: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._most_bytes = most_bytes
        self._stuck = stuck
        self._left = left
        self._closed = False
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._waiting_bytes = 0

    def send(self, frame: bytes, fds: Sequence[int]) -> None:
        """Send a frame; the caller may close ``fds`` as soon as this returns."""
        if not self._waiting:
            sent = self._write(frame, fds)
            if sent == len(frame) or self._closed:
                return
            if sent:
                frame, fds = frame[sent:], ()
            self._loop.add_writer(self._fd, self._writable)
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError as error:
            _close_fds(copies)
            self._stuck(f"a descriptor can't be kept for a slow reader: {error.strerror}")
            return
        self._waiting.append((frame, copies))
        self._waiting_bytes += len(frame)
        if self._waiting_bytes > self._most_bytes:
            self._stuck(f"slow reader: {self._waiting_bytes} bytes of replies wait")

    def close(self) -> None:
        """Send nothing more. Call it before the socket is closed. Idempotent."""
        self._closed = True
        self._loop.remove_writer(self._fd)
        while self._waiting:
            _close_fds(self._waiting.popleft()[1])

    def _write(self, frame: bytes, fds: Sequence[int]) -> int:
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                return self._sock.sendmsg([frame], rights, _SEND_FLAGS)
            return self._sock.send(frame, _SEND_FLAGS)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                self._stuck("slow reader: too many descriptors wait")
            else:
                self._left(error.strerror or str(error))
            return 0

    def _writable(self) -> None:
        while self._waiting:
            frame, fds = self._waiting[0]
            sent = self._write(frame, fds)
            if self._closed or sent == 0:
                return
            self._waiting_bytes -= sent
            _close_fds(fds)
            if sent < len(frame):
                self._waiting[0] = (frame[sent:], [])
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._fd)


def _close_fds(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
