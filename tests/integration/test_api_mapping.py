"""A mapping of a lease: shared until it is retired, and zeros from then on."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from kvd_client.errors import OutOfMemory
from kvd_client.mapping import Mapping
from tests.integration.api_harness import WAIT_S


def sealed_memfd(nbytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_a_mapping_is_shared_until_it_is_retired():
    fd = sealed_memfd(3 * 4096)
    mapping = Mapping(fd, 4096, 5000)
    view = np.asarray(mapping)
    assert view.shape == (5000,)
    view[:] = 7
    assert os.pread(fd, 1, 4096) == b"\x07"
    assert os.pread(fd, 1, 0) == b"\x00"
    mapping.retire()
    mapping.retire()
    assert not view.any()
    view[:] = 8
    assert os.pread(fd, 1, 4096) == b"\x07"
    os.close(fd)


def resident(view: np.ndarray) -> int:
    """Bytes of its mapping that this process can touch without a fault."""
    address, inside = view.__array_interface__["data"][0], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the view is not mapped")


def test_who_writes_all_of_a_lease_has_all_of_it_mapped_at_once():
    fd = sealed_memfd(64 * 4096)
    os.posix_fallocate(fd, 0, 64 * 4096)
    view = np.asarray(Mapping(fd, 4096, 50 * 4096))
    whole = np.asarray(Mapping(fd, 4096, 50 * 4096, whole=True))
    assert (resident(view), resident(whole)) == (0, 50 * 4096)
    whole[:] = 7
    assert view.all()
    os.close(fd)


def test_huge_pages_are_replaced_and_unmapped_in_whole():
    try:
        fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    page = os.fstatvfs(fd).f_bsize
    try:
        os.ftruncate(fd, 2 * page)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        try:
            mapping = Mapping(fd, page, 5000)
        except OutOfMemory:
            pytest.skip("no huge page is free")
        view = np.asarray(mapping)
        view[:] = 7
        mapping.retire()
        assert not view.any()
        del mapping, view
        with open("/proc/self/maps") as maps:
            assert "huge (deleted)" not in maps.read()
    finally:
        os.close(fd)


def test_a_reader_in_another_thread_never_faults_while_the_lease_ends():
    fd = sealed_memfd(1 << 20)
    stop, sums = threading.Event(), []
    mapping = Mapping(fd, 0, 1 << 20)
    view = np.asarray(mapping)
    view[:] = 1
    started = threading.Event()

    def read():
        while not stop.is_set():
            sums.append(int(view.max()))
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(WAIT_S)
    mapping.retire()
    before = len(sums)
    while len(sums) < before + 3 and reader.is_alive():
        reader.join(0.001)
    stop.set()
    reader.join()
    assert sums[0] == 1
    assert sums[-1] == 0
    os.close(fd)


def test_dropping_tells_unless_retired():
    fd = sealed_memfd(4096)
    told = []
    mapping = Mapping(fd, 0, 4096, lambda: told.append(1))
    view = np.asarray(mapping)[10:20]
    del mapping
    assert told == []
    del view
    assert told == [1]
    mapping = Mapping(fd, 0, 4096, lambda: told.append(2))
    mapping.retire()
    del mapping
    assert told == [1]
    os.close(fd)
