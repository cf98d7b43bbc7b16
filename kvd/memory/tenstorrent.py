"""Channels that are the DRAM banks of a Tenstorrent card: one window of its driver for each, exported as a dma-buf.

A Blackhole has up to eight windows of 4 GiB in BAR 4, and a bank fits into one. The driver (tt-kmd 2.10 or newer)
exports whole pages of a window; the card aligns tensors to 64 bytes. So each channel exports a slab of whole pages, and
offsets are added to where kvd's part begins in it. Wormhole's windows have 16 MiB at most, which holds no bank.

The requests and their structures are those of ``ioctl.h`` of tt-kmd 2.10 (its dma-buf export has the number 16); the
driver takes no size from the request's number. Nobody has run this on a card yet: what is tested is every argument,
against a driver that judges them as tt-kmd's ``memory.c`` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvd.errors import DeviceUnavailable, InvalidArgument
from kvd.fabric.base import Region
from kvd.memory.registrar import Registrar
from kvd.memory.windows import WINDOW, parse_noc, slab

MAGIC = 0xFA00
GET_DEVICE_INFO = MAGIC | 0
GET_DRIVER_INFO = MAGIC | 5
ALLOCATE_TLB = MAGIC | 11
FREE_TLB = MAGIC | 12
CONFIGURE_TLB = MAGIC | 13
EXPORT_TLB_DMABUF = MAGIC | 16

DEVICE_INFO = struct.Struct("=II8H")
"""Size of the output wanted; its size, vendor, device, subsystem (2), bus and function, DMA limit, domain, reserved."""
DRIVER_INFO = struct.Struct("=III4B")
"""Size of the output wanted; its size, version of the requests, version of the driver (3), reserved."""
ALLOCATE = struct.Struct("=QQIIQQQ")
"""Size, reserved; id, reserved, offset for mmap uncached, the same write-combined, reserved."""
FREE = struct.Struct("=I")
"""Id."""
CONFIGURE = struct.Struct("=IIQ4H5B3xIIQ")
"""Id, reserved; address, end x and y, start x and y, NoC, multicast, ordering, linked, static channel, reserved (2);
reserved."""
EXPORT = struct.Struct("=IIIiQQ")
"""Size of this, flags, id, descriptor (from the driver), offset in the window, bytes."""

VENDOR, BLACKHOLE, WORMHOLE = 0x1E52, 0xB140, 0x401E
NAMES = {BLACKHOLE: "Blackhole", WORMHOLE: "Wormhole"}
NEEDED = (2, 10)
"""The first driver that exports windows."""
STRICT = 1
"""Ordering of a window: a read sees what was written before it."""
FOLDER = Path("/dev/tenstorrent")


@runtime_checkable
class DmaBufRegistrar(Protocol):
    """A fabric whose device reads and writes other devices itself."""

    def register_dmabuf(self, memory: memoryview, fd: int, offset: int) -> Region:
        """``memory``: what begins at ``offset`` in the dma-buf ``fd``, as this process sees it. Raises as
        :meth:`kvd.fabric.base.Fabric.register`."""


class TenstorrentBacking:
    """Bank ``c`` of the card at ``path`` from address ``origin`` on, ``channel_bytes`` bytes, is channel ``c``; ``noc``
    has the tile of each bank, ``"X-Y"`` (:func:`parse_noc`).

    Raises :class:`DeviceUnavailable` with ``path`` and the fix, nothing left behind, where there is no such card or its
    driver refuses, and :class:`InvalidArgument` for parts of a bank that no window holds.
    """

    kind = "tenstorrent"

    def __init__(self, path: str, channels: int, channel_bytes: int, *, origin: int, noc: Sequence[str]) -> None:
        if len(noc) != channels:
            raise InvalidArgument(
                f"{len(noc)} tiles are named for {channels} channels; noc needs the tile of each bank",
                channels=channels,
            )
        start, length, lead = slab(origin, channel_bytes)
        tiles = [parse_noc(text) for text in noc]
        self.origin = origin
        self.lead = lead
        self._memories: list[memoryview] = []
        self._exports: list[int] = []
        with contextlib.ExitStack() as undo:
            card = _Card(path)
            undo.callback(card.close)
            card.check()
            for channel, tile in enumerate(tiles):
                window, at = card.allocate(channel, channels)
                undo.callback(card.free, window)
                card.aim(window, tile)
                fd = card.export(window, start, length)
                undo.callback(os.close, fd)
                self._exports.append(fd)
                # A window can only be mapped from its beginning.
                mapping = card.map(at, start + length)
                self._memories.append(memoryview(mapping)[origin : origin + channel_bytes])
                undo.callback(_unmap, mapping, self._memories[-1])
            self._undo = undo.pop_all()

    def memory(self, channel: int) -> memoryview:
        """The bank as this process sees it: write-combined, so writes are fast and reads are slow."""
        return self._memories[channel]

    def fd(self, channel: int) -> int:
        """The bank's dma-buf; kvd's part begins ``lead`` bytes into it."""
        return self._exports[channel]

    def register(self, fabric: Registrar, channel: int) -> Region:
        if isinstance(fabric, DmaBufRegistrar):
            return fabric.register_dmabuf(self.memory(channel), self.fd(channel), self.lead)
        return fabric.register(self.memory(channel))

    def close(self) -> None:
        """Give the windows back. Idempotent. While another driver still uses an export, its window stays taken and the
        card can't be reset."""
        self._memories.clear()
        self._exports.clear()
        self._undo.close()


class _Card:
    """The driver's file of one card, and its requests; each raises :class:`DeviceUnavailable`."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Not O_APPEND: then the driver keeps the card at full power as long as the file is open.
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error, "can't be opened", _OPENING) from None

    def close(self) -> None:
        os.close(self._fd)

    def check(self) -> None:
        """Raise where this is no Blackhole, or its driver doesn't export windows."""
        found = self._ask(GET_DEVICE_INFO, DEVICE_INFO, DEVICE_INFO.size - 4, *[0] * 9, what="tells nothing of itself")
        vendor, device = found[2], found[3]
        if vendor != VENDOR or device != BLACKHOLE:
            name = NAMES.get(device, "an unknown device") if vendor == VENDOR else "no Tenstorrent card"
            raise DeviceUnavailable(
                f"{self.path} is {name} ({vendor:04x}:{device:04x}), which has no windows of 4 GiB to hold a bank; use "
                'a Blackhole card, or backing = "host"',
                path=self.path,
                vendor=vendor,
                device=device,
            )
        info = self._ask(GET_DRIVER_INFO, DRIVER_INFO, DRIVER_INFO.size - 4, *[0] * 6, what="has a driver without name")
        version = info[3:6]  # all 0 from drivers that don't tell yet
        if version < NEEDED:
            raise DeviceUnavailable(
                f"the driver of {self.path} has version {'.'.join(map(str, version)) if any(version) else 'unknown'} "
                "and exports no windows; install tt-kmd 2.10 or newer",
                path=self.path,
                version=list(version),
            )

    def allocate(self, channel: int, channels: int) -> tuple[int, int]:
        """A window's id, and the offset at which this file maps it write-combined."""
        found = self._ask(
            ALLOCATE_TLB,
            ALLOCATE,
            WINDOW,
            *[0] * 6,
            what=f"has no window of 4 GiB left for channel {channel} of {channels}",
            fixes=_ALLOCATING,
        )
        return found[2], found[5]

    def free(self, window: int) -> None:
        # The driver frees it anyway when the file closes.
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._fd, FREE_TLB, FREE.pack(window))

    def aim(self, window: int, tile: tuple[int, int]) -> None:
        """Let the window show the bank at a tile, from address 0 on."""
        x, y = tile
        values = (window, 0, 0, x, y, 0, 0, 0, 0, STRICT, 0, 0, 0, 0, 0)
        self._ask(CONFIGURE_TLB, CONFIGURE, *values, what=f"has no bank at tile {x}-{y}", fixes=_AIMING)

    def export(self, window: int, start: int, length: int) -> int:
        """A dma-buf of ``length`` bytes from ``start`` on, whole pages both."""
        found = self._ask(
            EXPORT_TLB_DMABUF,
            EXPORT,
            *(EXPORT.size, 0, window, -1, start, length),
            what=f"exports no {length} bytes of a window",
            fixes=_EXPORTING,
        )
        return int(found[3])

    def map(self, at: int, length: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=at)
        except OSError as error:
            raise self._refused(error, f"maps no {length} bytes of a window", {}) from None

    def _ask(
        self, request: int, form: struct.Struct, *values: int, what: str, fixes: dict[int, str] | None = None
    ) -> tuple[int, ...]:
        argument = bytearray(form.pack(*values))
        try:
            fcntl.ioctl(self._fd, request, argument)
        except OSError as error:
            raise self._refused(error, what, fixes or {}) from None
        return form.unpack(argument)

    def _refused(self, error: OSError, what: str, fixes: dict[int, str]) -> DeviceUnavailable:
        name = errno.errorcode.get(error.errno or 0, "error")
        fix = fixes.get(error.errno or 0, 'check the card with tt-smi, or set backing = "host"')
        return DeviceUnavailable(
            f"{self.path} {what} ({name}: {(error.strerror or str(error)).lower()}); {fix}",
            path=self.path,
            errno=name,
        )


_OPENING = {
    errno.ENOENT: 'load the driver (modprobe tenstorrent, of tt-kmd 2.10 or newer), or set backing = "host"',
    errno.ENODEV: 'the card is gone or was reset; check it with tt-smi, or set backing = "host"',
    errno.EACCES: "let the daemon's user read and write it (a udev rule; DeviceAllow= of the unit)",
    errno.EPERM: "let the daemon's user read and write it (a udev rule; DeviceAllow= of the unit)",
}
_ALLOCATING = {
    errno.ENOMEM: "end the process that holds them, or let the BIOS give the card a larger BAR (resizable BAR)",
    errno.EINVAL: "let the BIOS give the card a larger BAR (resizable BAR)",
}
_AIMING = {errno.EINVAL: "compare noc with the banks that the card's runtime reports"}
_EXPORTING = {
    errno.EINVAL: "install tt-kmd 2.10 or newer, and let origin and channel_bytes end inside the card's BAR",
    errno.EOPNOTSUPP: "the kernel must be 5.8 or newer",
    errno.ENOTTY: "install tt-kmd 2.10 or newer",
}


def _unmap(mapping: mmap.mmap, memory: memoryview) -> None:
    # Views that somebody still has keep the mapping until they go.
    with contextlib.suppress(BufferError):
        memory.release()
        mapping.close()


def describe(folder: Path = FOLDER) -> tuple[str, str]:
    """What ``kvd doctor`` says: the cards that are there, and the fix where there are none."""
    cards = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not cards:
        return (
            f"no Tenstorrent card: there is no {folder}/*",
            "load the driver (modprobe tenstorrent, of tt-kmd 2.10 or newer); channels in host memory work without",
        )
    return f"Tenstorrent cards: {', '.join(str(folder / name) for name in cards)}", ""
