"""Bytes of a process into frames, no faster than its rate allows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvd.errors import ProtocolError
from kvd.throttle import Throttle
from kvd_client.protocol import LENGTH

_RECEIVE = 1 << 16


class Inbox:
    """Reads ``sock`` from the start, and hands each frame's body to ``frame``.

    At most ``requests_s`` frames a second are taken, the rest stays in the socket for as long; ``resumed`` is called
    when reading goes on. ``violated`` is told of a frame that is too large, ``left`` what the system says of a process
    that is gone (an empty string: nothing). Both must :meth:`close` this, and ``frame`` may.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        max_frame: int,
        requests_s: float,
        *,
        frame: Callable[[bytes | bytearray], None],
        resumed: Callable[[], None],
        violated: Callable[[ProtocolError], None],
        left: Callable[[str], None],
    ) -> None:
        self.max_frame = max_frame
        """Largest body that is taken."""
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._frame, self._resumed, self._violated, self._left = frame, resumed, violated, left
        self._partial = bytearray()
        self._throttle = Throttle(loop, requests_s, self._go_on)
        self._closed = False
        loop.add_reader(self._fd, self._readable)

    @property
    def held(self) -> bool:
        """The process is over its rate, and nothing is read from it."""
        return self._throttle.held

    @property
    def inside_frame(self) -> bool:
        """A frame has begun and not ended."""
        return bool(self._partial)

    def close(self) -> None:
        """Read nothing more. Call it before the socket is closed. Idempotent."""
        self._closed = True
        self._throttle.cancel()
        self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        try:
            # A plain receive: descriptors that a process sends along are closed by the kernel, never opened here.
            data = self._sock.recv(_RECEIVE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._left(error.strerror or str(error))
            return
        if not data:
            self._left("")
        elif self._partial:
            self._partial += data
            del self._partial[: self._frames(self._partial)]
        else:
            used = self._frames(data)
            if used < len(data):
                self._partial += data[used:]

    def _frames(self, data: bytes | bytearray) -> int:
        """Take the whole frames of ``data``; returns how many bytes that were."""
        at, size = 0, len(data)
        while size - at >= LENGTH.size and not self._closed and not self._throttle.held:
            (length,) = LENGTH.unpack_from(data, at)
            if length > self.max_frame:
                message = f"a frame of {length} bytes; the limit is {self.max_frame}"
                self._violated(ProtocolError(message, size=length))
                break
            stop = at + LENGTH.size + length
            if stop > size:
                break
            self._frame(data[at + LENGTH.size : stop])
            at = stop
            if not self._closed and self._throttle.count():
                self._loop.remove_reader(self._fd)
        return size if self._closed else at

    def _go_on(self) -> None:
        del self._partial[: self._frames(self._partial)]
        if not self._throttle.held and not self._closed:
            self._loop.add_reader(self._fd, self._readable)
            self._resumed()
