"""Lists of memory pieces that one system call fills or sends (``struct iovec``), built by NumPy.

Python's own ``sendmsg`` and ``recvmsg_into`` want one memoryview a piece, which costs more than moving the piece when
it is small. Here a piece is a row of a preallocated table and the call goes to libc by ctypes; whoever adds
rows has checked that they lie in memory that stays alive until the vector is cleared or the rows are done.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from bisect import bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.fabric.regions import address_of

MOST_PIECES = 1024
"""IOV_MAX of Linux: most pieces of one system call."""

_ROW = struct.Struct("=QQ")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_RECEIVE_FLAGS = socket.MSG_DONTWAIT


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_ssize_t
    return function


_sendmsg = _function("sendmsg")
_recvmsg = _function("recvmsg")


class Vector:
    """Up to ``MOST_PIECES`` pieces of memory and how far they have been filled or sent.

    Fill it with :meth:`add` and :meth:`add_runs` after :meth:`clear`.
    """

    __slots__ = (
        "_ends",
        "_header",
        "_header_address",
        "_index",
        "_raw",
        "_table",
        "_table_address",
        "count",
        "done",
        "nbytes",
    )

    def __init__(self) -> None:
        # One more row for the piece that `receive` adds behind the last.
        self._raw = bytearray((MOST_PIECES + 1) * _ROW.size)
        self._table: npt.NDArray[np.uint64] = np.frombuffer(self._raw, np.uint64).reshape(-1, 2)
        self._table_address = address_of(self._raw)
        self._header = _MsgHdr()
        self._header_address = ctypes.addressof(self._header)
        self.clear()

    def clear(self) -> None:
        self._ends: list[int] = []
        self._index = 0
        self.count = 0
        self.done = 0
        self.nbytes = 0

    @property
    def remaining(self) -> int:
        return self.nbytes - self.done

    @property
    def room(self) -> int:
        """Pieces that can still be added."""
        return MOST_PIECES - self.count

    def add(self, address: int, nbytes: int) -> None:
        """Append one piece of at least one byte."""
        _ROW.pack_into(self._raw, self.count * _ROW.size, address, nbytes)
        self.count += 1
        self.nbytes += nbytes
        self._ends.append(self.nbytes)

    def add_runs(self, base: int, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Append a piece at ``base + offset`` for each row, at least one; none of length 0."""
        if len(offsets) == 1:
            self.add(base + int(offsets[0]), int(lengths[0]))
            return
        rows = self._table[self.count : self.count + len(offsets)]
        rows[:, 0] = offsets
        rows[:, 0] += np.uint64(base)
        rows[:, 1] = lengths
        self.count += len(offsets)
        self._ends += (lengths.cumsum() + self.nbytes).tolist()
        self.nbytes = self._ends[-1]

    def send(self, fd: int) -> int:
        """Send pieces that are left; the number of bytes, or -1 if the socket takes none now. Raises OSError."""
        n = self._call(_sendmsg, fd, self.count - self._index, _SEND_FLAGS)
        if n > 0:
            self._advance(n)
        return n

    def receive(self, fd: int, address: int, nbytes: int) -> tuple[int, int]:
        """Fill pieces that are left, then up to ``nbytes`` at ``address``.

        Returns (bytes received, those of them at ``address``); (-1, 0) if there are none now, (0, 0) at the end of
        the stream. Raises OSError.
        """
        _ROW.pack_into(self._raw, self.count * _ROW.size, address, nbytes)
        n = self._call(_recvmsg, fd, min(self.count + 1 - self._index, MOST_PIECES), _RECEIVE_FLAGS)
        if n <= 0:
            return n, 0
        surplus = n - self.remaining
        if surplus < 0:
            self._advance(n)
            return n, 0
        self._advance(n - surplus)
        return n, surplus

    def fill_from(self, address: int, nbytes: int) -> int:
        """Fill pieces with up to ``nbytes`` that lie at ``address`` already; the number taken."""
        return self._copy(address, nbytes, out=False)

    def gather(self, address: int, nbytes: int) -> int:
        """Copy up to ``nbytes`` of what is left to ``address``, and count it as sent; the number taken."""
        return self._copy(address, nbytes, out=True)

    def _copy(self, address: int, nbytes: int, *, out: bool) -> int:
        taken = left = min(nbytes, self.remaining)
        while left:
            piece, length = _ROW.unpack_from(self._raw, self._index * _ROW.size)
            n = min(left, length)
            target, source = (address, piece) if out else (piece, address)
            ctypes.memmove(target, source, n)
            self._advance(n)
            address += n
            left -= n
        return taken

    def redirect(self, first: int, stop: int, address: int) -> None:
        """Let what is left of pieces ``first`` to ``stop`` be memory at ``address``, which must be as long."""
        self._table[max(first, self._index) : stop, 0] = address

    def _call(self, function: Any, fd: int, pieces: int, flags: int) -> int:
        self._header.iov = self._table_address + self._index * _ROW.size
        self._header.iovlen = pieces
        n: int = function(fd, self._header_address, flags)
        if n < 0:
            number = ctypes.get_errno()
            if number in (errno.EAGAIN, errno.EINTR):
                return -1
            raise OSError(number, os.strerror(number))
        return n

    def _advance(self, n: int) -> None:
        self.done = done = self.done + n
        index = bisect_right(self._ends, done, self._index)
        if index < self.count:
            begin = self._ends[index - 1] if index else 0
            address, nbytes = _ROW.unpack_from(self._raw, index * _ROW.size)
            # Only what this call moved counts, since the piece may have been shortened before.
            moved = done - max(begin, done - n)
            if moved:
                _ROW.pack_into(self._raw, index * _ROW.size, address + moved, nbytes - moved)
        self._index = index
