"""An arena: one sealed memfd, mapped and fully backed by memory, from which leases are carved.

The descriptor goes to inference processes, which map their lease from it. Its size is sealed and every page exists
from the start, so that no access by anybody ends in SIGBUS; a process that still maps a lease of a dead daemon keeps
the pages alive by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from typing import Literal, TypeAlias

from kvd.errors import InvalidArgument, OutOfMemory
from kvd.memory import limits

HugePages: TypeAlias = Literal["auto", "never", "always"]

PAGE = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23
_FIX = {
    errno.EMFILE: "raise the limit on open files (systemd: LimitNOFILE=)",
    errno.ENFILE: "raise fs.file-max",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EPERM: "allow huge pages (vm.hugetlb_shm_group) or set memory.huge_pages to never",
}


class Arena:
    """Shared memory of ``nbytes`` bytes; use :func:`create_arena`.

    ``page_size`` is what offsets must be multiples of to be mapped by a process: the system's page, or the huge page
    of hugetlb memory. ``kind`` is ``hugetlb``, ``transparent`` (huge pages where the kernel finds them) or ``normal``.
    """

    __slots__ = ("_map", "_memory", "fd", "kind", "nbytes", "page_size")

    def __init__(self, fd: int, mapping: mmap.mmap, *, page_size: int, kind: str) -> None:
        self.fd = fd
        self.nbytes = len(mapping)
        self.page_size = page_size
        self.kind = kind
        self._map = mapping
        self._memory: memoryview | None = memoryview(mapping)

    @property
    def memory(self) -> memoryview:
        """All of it, writable, format ``B``; raises :class:`InvalidArgument` after :meth:`close`."""
        if self._memory is None:
            raise InvalidArgument("the arena is closed; its memory can't be used any more")
        return self._memory

    @property
    def closed(self) -> bool:
        return self._memory is None

    def close(self) -> None:
        """Give the memory back. Idempotent. Where views of it are left, the pages stay until the last one goes."""
        if self._memory is None:
            return
        os.close(self.fd)
        self.fd = -1
        memory, self._memory = self._memory, None
        with contextlib.suppress(BufferError):
            memory.release()
            self._map.close()


def create_arena(nbytes: int, *, huge_page: int = 0, transparent: bool = False) -> Arena:
    """An arena of at least ``nbytes`` bytes, rounded up to whole pages, every page backed by memory.

    With ``huge_page`` (its size in bytes) the memory is hugetlb; otherwise ``transparent`` asks the kernel for huge
    pages where it has some. Safe to call in a worker thread: the long part runs without the GIL.

    Raises :class:`OutOfMemory` with ``limit``, ``need`` and ``fix``; nothing is left behind then.
    """
    if nbytes <= 0:
        raise InvalidArgument(f"an arena of {nbytes} bytes makes no sense; give a positive size", nbytes=nbytes)
    page = huge_page or PAGE
    size = -(-nbytes // page) * page
    _check_room(size, huge_page)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page:
        flags |= os.MFD_HUGETLB | (huge_page.bit_length() - 1) << os.MFD_HUGE_SHIFT
    with contextlib.ExitStack() as undo:
        try:
            fd = os.memfd_create("kvd-arena", flags)
            undo.callback(os.close, fd)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            undo.callback(mapping.close)
            # Arenas hold other people's prompts: gigabytes that have no place in a core dump.
            mapping.madvise(mmap.MADV_DONTDUMP)
            if transparent and not huge_page:
                _populate(mapping)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise _refused(error, size, huge_page) from error
        undo.pop_all()
    kind = "hugetlb" if huge_page else "transparent" if transparent else "normal"
    return Arena(fd, mapping, page_size=page, kind=kind)


def _check_room(size: int, huge_page: int) -> None:
    if huge_page:
        free = limits.free_huge_pages(huge_page) * huge_page
        limit, what, fix = (
            free,
            "free huge pages",
            f"raise vm.nr_hugepages by {-(-(size - free) // huge_page)}",
        )
    else:
        room = limits.available_memory()
        free, limit, what, fix = room.free, room.limit, room.what, room.fix
    if size > free:
        raise OutOfMemory(
            f"an arena needs {size} bytes and {what} has {free} left; {fix}",
            need=size,
            free=free,
            limit=limit,
            fix=fix,
        )


def _populate(mapping: mmap.mmap) -> None:
    """Fault all pages in as huge pages. fallocate alone would take small ones: it does not see the advice."""
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        # Through libc, since mmap.madvise holds the GIL. What stays unpopulated here (a kernel before 5.14, no
        # memory) is left to fallocate, which reports it properly.
        _libc.madvise(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapping)), _MADV_POPULATE_WRITE)
    except OSError:
        pass
    finally:
        del anchor


_libc = ctypes.CDLL(None)


def _refused(error: OSError, size: int, huge_page: int) -> OutOfMemory:
    name = errno.errorcode.get(error.errno or 0, "error")
    default = "reserve more huge pages (vm.nr_hugepages)" if huge_page else "lower memory.pool"
    fix = _FIX.get(error.errno or 0, default)
    room = limits.available_memory()
    return OutOfMemory(
        f"the system refused an arena of {size} bytes ({name}: {error.strerror}); {fix}",
        need=size,
        free=room.free,
        limit=room.limit,
        fix=fix,
        errno=name,
    )
