"""A lease's memory in this process: mapped from the daemon's memfd, and zero pages once the lease has ended.

Arrays that the user took from a transfer may outlive it. They must neither fault nor show the bytes of whoever gets
the memory next, so the pages behind them are replaced in place (one ``mmap`` with ``MAP_FIXED``, atomic for all
threads). The address range itself goes back when the last array is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

from kvd_client.errors import KvdError, OutOfMemory, ProtocolError

_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_munmap = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_live: weakref.WeakSet[Mapping] = weakref.WeakSet()


class _Pages:
    """The address range, apart from :class:`Mapping`, so that the finalizer does not keep the mapping alive."""

    __slots__ = ("address", "length", "retired")

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length, self.retired = address, length, False


class Mapping:
    """``nbytes`` of a sealed memfd from ``offset`` (a multiple of its page size) on, readable and writable.

    ``numpy.asarray(mapping)`` is a uint8 array over it without a copy; the array and all views of it keep the
    address range. ``dropped`` is called if the mapping and its last view vanish before :meth:`retire`.

    Raises :class:`ProtocolError` for a memfd that could shrink or is too short (touching its pages could kill the
    process), :class:`OutOfMemory` where the system refuses the mapping. Does not take ownership of ``fd``.

    With ``whole`` all of it is entered into the page table at once, for those who write all of it: a fault for each
    page that is written first takes six times as long, more than the writing.
    """

    def __init__(
        self, fd: int, offset: int, nbytes: int, dropped: Callable[[], None] | None = None, *, whole: bool = False
    ) -> None:
        check_memfd(fd, offset, nbytes)
        # Huge pages can only be mapped, replaced and unmapped in whole; f_bsize is the file's page size.
        page = os.fstatvfs(fd).f_bsize
        length = -(-nbytes // page) * page
        address = _map(None, length, mmap.MAP_SHARED | (_MAP_POPULATE if whole else 0), fd, offset)
        self._pages = _Pages(address, length)
        self.nbytes = nbytes
        # numpy makes this object the base of the arrays, which is what keeps it alive.
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
        final = weakref.finalize(self, _unmap, self._pages, dropped)
        final.atexit = False  # other threads may still use views then; the kernel unmaps a moment later anyway
        _live.add(self)

    @property
    def retired(self) -> bool:
        return self._pages.retired

    def retire(self) -> None:
        """Replace the pages by private zero pages. Idempotent. Call it before the daemon learns of the release."""
        pages = self._pages
        if pages.retired:
            return
        pages.retired = True
        _map(
            pages.address,
            pages.length,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE,
            -1,
            0,
        )


def check_memfd(fd: int, offset: int, nbytes: int) -> None:
    """Raise :class:`ProtocolError` unless ``fd`` has these bytes and can never lose them."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the daemon sent memory that is not sealed against shrinking; it was not mapped")
    size = os.fstat(fd).st_size
    if offset < 0 or nbytes <= 0 or offset + nbytes > size:
        raise ProtocolError(
            f"the daemon sent {size} bytes of memory for a lease of {nbytes} bytes at {offset}; it was not mapped",
            offset=offset,
            nbytes=nbytes,
            size=size,
        )


def _map(address: int | None, length: int, flags: int, fd: int, offset: int) -> int:
    got: int | None = _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if got is None or got == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OutOfMemory(
            f"mapping {length} bytes of a lease failed: {os.strerror(number)}; see vm.max_map_count and ulimit -v",
            need=length,
            errno=number,
        )
    return got


def _unmap(pages: _Pages, dropped: Callable[[], None] | None) -> None:
    if dropped is not None and not pages.retired:
        dropped()
    _munmap(pages.address, pages.length)


def _after_fork_in_child() -> None:
    # The child holds no lease: what it inherited would show the bytes of later requests.
    for mapping in list(_live):
        try:
            mapping.retire()
        except KvdError:
            continue


os.register_at_fork(after_in_child=_after_fork_in_child)
