"""Frames and descriptors over the daemon's Unix socket, without blocking where nobody asked for it."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable

from kvd_client.errors import Busy, DaemonUnreachable, ProtocolError
from kvd_client.framing import decode_reply
from kvd_client.protocol import LENGTH, MAX_FRAME, CacheOpened, Opened, Reply, Welcome

_RECEIVE = 1 << 16
_ANCILLARY = socket.CMSG_SPACE(64 * array.array("i").itemsize)
# Combined once: `|` on the socket module's flags costs 3 us.
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
_length = LENGTH.unpack_from
_AT_ONCE = 4096
"""Bytes that a Unix socket takes in whole or not at all."""
_LOST = -1
"""Stands for the descriptors of one reply that this process had no room for."""
_WITH_DESCRIPTORS = (Opened, CacheOpened, Welcome)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd != _LOST:
            os.close(fd)


class StreamEnded(Exception):
    """The stream can't be used any more, for the reason that is its text; nothing for users of the library."""


class Stream:
    """A connected socket. Any thread may send; one at a time may receive.

    Raises :class:`DaemonUnreachable` where nobody accepts within ``timeout_s`` seconds.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self._sock = _dial(path, timeout_s)
        self._lock = threading.RLock()
        self._sending = False
        self._partial = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, frame: bytes, deadline: float) -> None:
        """Send a frame, waiting for room. Raises :class:`DaemonUnreachable` at the ``deadline`` if nothing of it was
        taken, :class:`Busy` in a signal handler that has interrupted its thread's own sending, and
        :class:`StreamEnded` on a broken stream, which a frame sent by half is, too."""
        with self._lock:
            if self._sending:
                raise Busy(
                    "this signal handler has interrupted its own thread while that sent a request; set a flag in the "
                    "handler, and make the call where that is looked at",
                    socket=self.path,
                    retry_after_s=0.001,
                )
            self._sending = True
            at = 0
            try:
                while at < len(frame):
                    try:
                        at += self._sock.send(frame[at:] if at else frame, _SEND_FLAGS)
                    except BlockingIOError:
                        if self._wait_sendable(deadline):
                            continue
                        if at:
                            raise StreamEnded("a request could not be sent in whole before its timeout") from None
                        raise DaemonUnreachable(
                            f"the daemon at {self.path} accepts no request; see its log", socket=self.path
                        ) from None
                    except OSError as error:
                        raise StreamEnded(error.strerror or str(error)) from None
            except DaemonUnreachable:
                raise
            except BaseException:  # a signal handler's, too, and then nobody knows how much of a large frame has left
                if at or len(frame) > _AT_ONCE:
                    self.shutdown()
                raise
            finally:
                self._sending = False

    def _wait_sendable(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        left = deadline - time.monotonic()
        return bool(poll.poll(int(left * 1000) + 1 if left > 0 else 0))

    def receive(self, arrived: list[tuple[Reply, list[int]]]) -> None:
        """Append what has arrived, each reply with its descriptors, which become the caller's; none of them, where this
        process may not have so many more. Does not wait. Raises :class:`StreamEnded`; what was appended before that
        counts."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_RECEIVE, _ANCILLARY, _RECEIVE_FLAGS)
        except BlockingIOError:
            return
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from None
        size = len(data)
        if size > LENGTH.size and not (ancillary or self._partial) and _length(data)[0] == size - LENGTH.size:
            # One whole frame without descriptors: nearly always so, and worth a short way.
            try:
                reply = decode_reply(data[LENGTH.size :])
            except ProtocolError as error:
                raise StreamEnded(f"it sent {error.message}") from None
            if type(reply) not in _WITH_DESCRIPTORS:
                arrived.append((reply, []))
                return
        came = array.array("i")
        for _, kind, rights in ancillary:
            if kind == socket.SCM_RIGHTS:
                came.frombytes(rights[: len(rights) // 4 * 4])
        if flags & _TRUNCATED:  # this process may have no more of them; its other transfers go on
            close_all(came)
            came = array.array("i", [_LOST])
        self._descriptors.extend(came)
        if not data:
            raise StreamEnded("it closed the connection")
        try:
            if self._partial:
                self._partial += data
                del self._partial[: self._frames(self._partial, arrived)]
            else:
                used = self._frames(data, arrived)
                if used < len(data):
                    self._partial += data[used:]
        except ProtocolError as error:
            raise StreamEnded(f"it sent {error.message}") from None

    def _frames(self, data: bytes | bytearray, arrived: list[tuple[Reply, list[int]]]) -> int:
        at, size = 0, len(data)
        while size - at >= LENGTH.size:
            (length,) = _length(data, at)
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes; the limit is {MAX_FRAME}")
            stop = at + LENGTH.size + length
            if stop > size:
                break
            reply = decode_reply(data[at + LENGTH.size : stop])
            fds: list[int] = []
            if type(reply) in _WITH_DESCRIPTORS:  # a quarter of what isinstance costs on these classes
                assert isinstance(reply, (Opened, CacheOpened, Welcome))
                # They came with the frame's first byte, so they are here if they were sent.
                if self._descriptors and self._descriptors[0] == _LOST:
                    self._descriptors.popleft()
                elif not 0 <= reply.descriptors <= len(self._descriptors):
                    raise ProtocolError(f"a {type(reply).__name__} without its {reply.descriptors} descriptors")
                else:
                    fds = [self._descriptors.popleft() for _ in range(reply.descriptors)]
            arrived.append((reply, fds))
            at = stop
        return at

    def shutdown(self) -> None:
        """End the stream for both sides. Keeps the descriptor, which another thread may be about to use."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took. Idempotent."""
        self._sock.close()
        while self._descriptors:
            close_all([self._descriptors.popleft()])


def _dial(path: str, timeout_s: float) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise DaemonUnreachable(
            f"this process can't make a socket for the daemon at {path}: {error.strerror}; see ulimit -n", socket=path
        ) from error
    try:
        # A blocking connect waits while the listener's queue is full or its daemon restarts (socket activation).
        deadline, connected = time.monotonic() + timeout_s, False
        while not connected:
            microseconds = max(1, int((deadline - time.monotonic()) * 1e6))  # none at all would be for ever
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", *divmod(microseconds, 10**6)))
            sock.connect(path)
            try:
                sock.getpeername()
                connected = True
            except OSError as error:  # a signal has ended the wait, which Python takes for a connection
                if error.errno != errno.ENOTCONN:
                    raise
                if time.monotonic() > deadline:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            hint = "this user may not use it; add it to the group of the socket"
        elif isinstance(error, BlockingIOError):
            hint = "something listens there and accepts nobody; see the daemon's log"
        elif os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
            hint = "that is no socket; set KVD_SOCKET to the daemon's"
        else:
            hint = "start the daemon with `kvd serve` or `systemctl start kvd`, or set KVD_SOCKET to its socket"
        raise DaemonUnreachable(
            f"no daemon answers at {path} ({error.strerror or error}); {hint}", socket=path
        ) from error
    return sock
