"""Windows of a Tenstorrent card, against a driver in this file that judges requests as tt-kmd 2.10 does."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import DeviceUnavailable, FabricError, InvalidArgument
from kvd.fabric.base import Region
from kvd.memory import tenstorrent as tt
from kvd.memory.device import NpuDevice
from kvd.memory.windows import PAGE, WINDOW, parse_noc, slab

NOC = ["17-14", "17-15", "17-18"]
NBYTES = 1 << 16


class Driver:
    """One card. Its window ``i`` shows the bank that it is aimed at; a bank is the head of its 4 GiB in a sparse file,
    which stands for BAR 4 and for the exported buffers as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.device = 0xB140
        self.version = (2, 10, 1)
        self.windows = 8
        self.banks = {parse_noc(tile) for tile in NOC}
        self.taken: dict[int, tuple[int, int] | None] = {}
        self.exports: list[tuple[int, int, int]] = []
        self.fail: dict[int, int] = {}
        self.opened = 0
        path.write_bytes(b"")
        os.truncate(path, 9 * WINDOW)

    def ioctl(self, fd: int, request: int, argument: Any) -> int:
        assert os.path.samestat(os.fstat(fd), os.stat(self.path))
        if request in self.fail:
            raise OSError(self.fail[request], os.strerror(self.fail[request]))
        done = {
            0xFA00: self.device_info,
            0xFA05: self.driver_info,
            0xFA0B: self.allocate,
            0xFA0C: self.free,
            0xFA0D: self.configure,
            0xFA10: self.export,
        }[request](argument)
        if done:
            raise OSError(done, os.strerror(done))
        return 0

    def device_info(self, argument: bytearray) -> int:
        assert struct.unpack_from("=I", argument)[0] == 20 == len(argument) - 4
        struct.pack_into("=IHH", argument, 4, 20, 0x1E52, self.device)
        return 0

    def driver_info(self, argument: bytearray) -> int:
        assert struct.unpack_from("=I", argument)[0] == 12 == len(argument) - 4
        struct.pack_into("=II3B", argument, 4, 12, 2, *self.version)
        return 0

    def allocate(self, argument: bytearray) -> int:
        size, reserved = struct.unpack_from("=QQ", argument)
        if size != WINDOW or reserved:
            return errno.EINVAL
        free = [202 + i for i in range(self.windows) if 202 + i not in self.taken]
        if not free:
            return errno.ENOMEM
        self.taken[free[0]] = None
        at = (free[0] - 202) * WINDOW
        struct.pack_into("=IIQQQ", argument, 16, free[0], 0, at + (1 << 60), at, 0)
        return 0

    def free(self, argument: bytes) -> int:
        return 0 if self.taken.pop(struct.unpack("=I", argument)[0], 0) != 0 else errno.EPERM

    def configure(self, argument: bytearray) -> int:
        window, _, address, x, y, x0, y0, noc, multicast, ordering = struct.unpack_from("=IIQ4H3B", argument)
        if window not in self.taken:
            return errno.EPERM
        if address % WINDOW or (x, y) not in self.banks or (x0, y0, noc, multicast) != (0, 0, 0, 0):
            return errno.EINVAL
        assert ordering == 1
        self.taken[window] = (x, y)
        return 0

    def export(self, argument: bytearray) -> int:
        size, flags, window, _, offset, nbytes = struct.unpack("=IIIiQQ", argument)
        if size != len(argument) or flags or offset % PAGE or nbytes % PAGE or offset + nbytes > WINDOW:
            return errno.EINVAL
        if self.taken.get(window) is None:  # the driver would export a window that is aimed at nothing
            return errno.EPERM
        fd = os.open(self.path, os.O_RDWR)
        self.exports.append((window, offset, nbytes))
        struct.pack_into("=i", argument, 12, fd)
        return 0


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(tmp_path / "0")
    monkeypatch.setattr(fcntl, "ioctl", found.ioctl)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def backing(driver: Driver, channels: int = 3, nbytes: int = NBYTES, origin: int = 0, noc: Any = NOC) -> Any:
    return tt.TenstorrentBacking(str(driver.path), channels, nbytes, origin=origin, noc=noc[:channels])


def test_structures_are_those_of_the_drivers_header() -> None:
    """sizeof and offsetof as a C compiler gives them for ioctl.h of tt-kmd 2.10 on x86-64."""
    forms = (tt.DEVICE_INFO, tt.DRIVER_INFO, tt.ALLOCATE, tt.FREE, tt.CONFIGURE, tt.EXPORT)
    assert [form.size for form in forms] == [24, 16, 48, 4, 48, 32]

    def offset(form: struct.Struct, field: int) -> int:
        values = [0] * len(form.unpack(bytes(form.size)))
        values[field] = 1
        return form.pack(*values).index(1)

    assert offset(tt.DEVICE_INFO, 3) == 10  # device_id
    assert offset(tt.DRIVER_INFO, 3) == 12  # driver_version_major
    assert offset(tt.ALLOCATE, 5) == 32  # mmap_offset_wc
    assert offset(tt.CONFIGURE, 2) == 8  # addr
    assert offset(tt.CONFIGURE, 9) == 26  # ordering
    assert offset(tt.EXPORT, 3) == 12  # fd
    assert offset(tt.EXPORT, 5) == 24  # size
    numbers = (tt.GET_DEVICE_INFO, tt.GET_DRIVER_INFO, tt.ALLOCATE_TLB, tt.FREE_TLB, tt.CONFIGURE_TLB)
    assert (*numbers, tt.EXPORT_TLB_DMABUF) == (0xFA00, 0xFA05, 0xFA0B, 0xFA0C, 0xFA0D, 0xFA10)


@pytest.mark.parametrize("origin", [0, 64, PAGE - 64, 3 * PAGE, 4_278_190_080 - NBYTES])
def test_slabs_are_whole_pages_around_the_channel(origin: int) -> None:
    start, length, lead = slab(origin, NBYTES)
    assert start % PAGE == length % PAGE == 0
    assert 0 <= lead < PAGE
    assert start + lead == origin
    assert origin + NBYTES <= start + length < origin + NBYTES + PAGE


@pytest.mark.parametrize("origin", [-64, WINDOW - NBYTES + 64, WINDOW])
def test_what_no_window_holds_is_refused(origin: int) -> None:
    with pytest.raises(InvalidArgument, match="don't lie in a window of 4294967296 bytes"):
        slab(origin, NBYTES)


@pytest.mark.parametrize("origin", [0, 64 + 2 * PAGE])
def test_each_bank_is_a_window_an_export_and_memory(driver: Driver, origin: int) -> None:
    before = descriptors()
    channels = backing(driver, origin=origin)
    assert [driver.taken[window] for window in sorted(driver.taken)] == [(17, 14), (17, 15), (17, 18)]
    start, length, lead = slab(origin, NBYTES)
    assert driver.exports == [(202 + i, start, length) for i in range(3)]
    assert (channels.origin, channels.lead) == (origin, lead)
    for channel in range(3):
        assert channels.memory(channel).nbytes == NBYTES
        channels.memory(channel)[:3] = bytes([channel] * 3)
        with open(driver.path, "rb") as bar:
            bar.seek(channel * WINDOW + origin)
            assert bar.read(3) == bytes([channel] * 3)
    channels.close()
    channels.close()
    assert driver.taken == {}
    assert descriptors() == before


def test_a_device_of_windows_places_tensors_at_the_cards_addresses(driver: Driver) -> None:
    npu = NpuDevice("bh", backing(driver, origin=1 << 20), channels=3, channel_bytes=NBYTES, alignment=64)
    npu.lease(100, "A")
    lease = npu.lease(2048, "A")
    assert lease.address == (1 << 20) + 128
    lease.memory(2)[:4] = b"tile"
    with mmap.mmap(os.open(driver.path, os.O_RDWR), PAGE, offset=2 * WINDOW + (1 << 20)) as bank:
        assert bank[128:132] == b"tile"
    assert npu.status().backing == "tenstorrent"
    npu.close()
    assert driver.taken == {}


def test_fabrics_that_reach_other_devices_get_the_dma_buf_and_others_the_mapping(driver: Driver) -> None:
    given: list[tuple[int, int, int]] = []

    class Direct:
        name = "direct"

        def register(self, memory: memoryview) -> Region:
            raise AssertionError("the pages of a card can't be pinned")

        def register_dmabuf(self, memory: memoryview, fd: int, offset: int) -> Region:
            given.append((memory.nbytes, fd, offset))
            return Region(len(given), memory)

        def deregister(self, region: Region) -> None: ...

    class Tcp:
        name = "tcp"

        def register(self, memory: memoryview) -> Region:
            return Region(1, memory)

        def deregister(self, region: Region) -> None: ...

    channels = backing(driver, origin=PAGE + 64)
    npu = NpuDevice("bh", channels, channels=3, channel_bytes=NBYTES, alignment=64, fabrics=[Direct(), Tcp()])
    assert given == [(NBYTES, channels.fd(c), 64) for c in range(3)]
    assert npu.region(1, "tcp").memory.nbytes == NBYTES
    npu.close()

    def refused(self: Any, memory: memoryview, fd: int, offset: int) -> Region:
        raise FabricError("65536 bytes of a dma-buf can't be registered")

    Direct.register_dmabuf = refused  # type: ignore[method-assign]
    with pytest.raises(FabricError, match="dma-buf can't be registered"):
        NpuDevice("bh", backing(driver), channels=3, channel_bytes=NBYTES, alignment=64, fabrics=[Direct()])
    assert driver.taken == {}


def test_without_a_card_one_sentence_says_so(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        tt.TenstorrentBacking(str(tmp_path / "none"), 1, NBYTES, origin=0, noc=["1-1"])
    assert caught.value.message == (
        f"{tmp_path}/none can't be opened (ENOENT: no such file or directory); load the driver (modprobe tenstorrent, "
        'of tt-kmd 2.10 or newer), or set backing = "host"'
    )
    assert caught.value.fields == {"path": f"{tmp_path}/none", "errno": "ENOENT"}


def test_what_is_no_card_is_refused(tmp_path: Path) -> None:
    """A real request to a real file that is none of the driver's."""
    (tmp_path / "file").write_bytes(b"")
    before = descriptors()
    with pytest.raises(DeviceUnavailable, match="tells nothing of itself \\(ENOTTY"):
        tt.TenstorrentBacking(str(tmp_path / "file"), 1, NBYTES, origin=0, noc=["1-1"])
    assert descriptors() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": 0x401E}, r"is Wormhole \(1e52:401e\), which has no windows of 4 GiB"),
        ({"device": 0x1234}, r"is an unknown device \(1e52:1234\)"),
        ({"version": (2, 9, 1)}, "has version 2.9.1 and exports no windows; install tt-kmd 2.10"),
        ({"version": (0, 0, 0)}, "has version unknown and exports no windows"),
        ({"windows": 2}, r"has no window of 4 GiB left for channel 2 of 3 \(ENOMEM.*larger BAR"),
        ({"windows": 0}, r"has no window of 4 GiB left for channel 0 of 3"),
        ({"banks": {(17, 14)}}, r"has no bank at tile 17-15 \(EINVAL.*compare noc"),
        ({"fail": {tt.EXPORT_TLB_DMABUF: errno.EOPNOTSUPP}}, "the kernel must be 5.8 or newer"),
        ({"fail": {tt.EXPORT_TLB_DMABUF: errno.EINVAL}}, r"exports no 65536 bytes of a window \(EINVAL.*tt-kmd 2.10"),
        ({"fail": {tt.GET_DEVICE_INFO: errno.ENODEV}}, r"tells nothing of itself \(ENODEV.*tt-smi"),
    ],
)
def test_what_the_driver_refuses_leaves_nothing_behind(driver: Driver, change: dict[str, Any], words: str) -> None:
    for name, value in change.items():
        setattr(driver, name, value)
    before = descriptors()
    with pytest.raises(DeviceUnavailable, match=words) as caught:
        backing(driver)
    assert "\n" not in caught.value.message
    assert caught.value.fields["path"] == str(driver.path)
    assert driver.taken == {}
    assert descriptors() == before


def test_a_window_that_cannot_be_mapped_leaves_nothing_behind(driver: Driver) -> None:
    os.truncate(driver.path, WINDOW + 1)
    before = descriptors()
    with pytest.raises((DeviceUnavailable, ValueError)):
        backing(driver)
    assert driver.taken == {}
    assert descriptors() == before


@pytest.mark.parametrize("noc", [["17-14"], ["17-14", "17-15", "17-18", "17-21"]])
def test_each_channel_needs_a_tile(driver: Driver, noc: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=f"{len(noc)} tiles are named for 3 channels"):
        tt.TenstorrentBacking(str(driver.path), 3, NBYTES, origin=0, noc=noc)


@pytest.mark.parametrize("text", ["", "17", "17,14", "17-", "-1-4", "17-140", "a-b", "17-14 "])
def test_tiles_have_two_coordinates(text: str) -> None:
    assert parse_noc("17-14") == (17, 14)
    with pytest.raises(ValueError, match="is not a tile's coordinates"):
        parse_noc(text)


def test_doctor_has_a_line_for_cards(tmp_path: Path) -> None:
    what, fix = tt.describe(tmp_path / "tenstorrent")
    assert what == f"no Tenstorrent card: there is no {tmp_path}/tenstorrent/*"
    assert "modprobe tenstorrent" in fix
    (tmp_path / "tenstorrent").mkdir()
    (tmp_path / "tenstorrent" / "0").touch()
    assert tt.describe(tmp_path / "tenstorrent") == (f"Tenstorrent cards: {tmp_path}/tenstorrent/0", "")
