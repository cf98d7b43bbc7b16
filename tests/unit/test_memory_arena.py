"""Arenas and limits: real memfds, and a made-up /proc and /sys."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import InvalidArgument, OutOfMemory
from kvd.memory import limits
from kvd.memory.arena import PAGE, create_arena


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_arena_is_whole_backed_and_zero() -> None:
    arena = create_arena(3 * PAGE + 1)
    try:
        assert arena.nbytes == len(arena.memory) == 4 * PAGE
        assert not any(arena.memory)
        stat = os.fstat(arena.fd)
        assert stat.st_size == arena.nbytes
        assert stat.st_blocks * 512 == arena.nbytes, "every page exists, so that nobody meets SIGBUS later"
    finally:
        arena.close()


def test_a_process_that_maps_the_descriptor_sees_the_same_bytes() -> None:
    arena = create_arena(2 * PAGE)
    with mmap.mmap(arena.fd, PAGE, offset=PAGE) as theirs:
        arena.memory[PAGE : PAGE + 4] = b"kv!\x01"
        assert theirs[:4] == b"kv!\x01"
        theirs[5] = 7
        assert arena.memory[PAGE + 5] == 7
        arena.close()
        assert theirs[5] == 7, "a mapping outlives the arena"


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE])
def test_nobody_can_change_an_arenas_size(size: int) -> None:
    arena = create_arena(2 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(arena.fd)
    arena.close()


def test_closing_is_idempotent_and_leaves_nothing() -> None:
    before = open_descriptors()
    arena = create_arena(PAGE)
    arena.close()
    arena.close()
    assert arena.closed
    assert open_descriptors() == before
    with pytest.raises(InvalidArgument):
        _ = arena.memory


def test_a_view_that_is_left_keeps_its_pages() -> None:
    arena = create_arena(PAGE)
    part, array = arena.memory[16:32], np.frombuffer(arena.memory, np.uint8)
    arena.close()
    part[:] = b"x" * 16
    assert bytes(array[15:33]) == b"\0" + b"x" * 16 + b"\0"


def test_more_than_the_machine_has_is_refused_before_anything_is_taken() -> None:
    before = open_descriptors()
    with pytest.raises(OutOfMemory, match=r"memory\.pool") as caught:
        create_arena(1 << 50)
    assert caught.value.fields["need"] == 1 << 50
    assert caught.value.fields["limit"] == limits.available_memory().limit
    assert 0 < caught.value.fields["free"] < 1 << 50
    assert caught.value.fields["fix"]
    assert open_descriptors() == before


def test_a_size_the_system_refuses_becomes_an_error_with_a_fix() -> None:
    before = open_descriptors()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, old[1]))
    try:
        with pytest.raises(OutOfMemory, match="EFBIG") as caught:
            create_arena(2 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "ulimit -f" in caught.value.fields["fix"]
    assert open_descriptors() == before


def test_huge_pages_that_are_not_there_are_named() -> None:
    page = 2 << 20
    free = limits.free_huge_pages(page)
    with pytest.raises(OutOfMemory, match=r"vm\.nr_hugepages by 3") as caught:
        create_arena((free + 3) * page, huge_page=page)
    assert caught.value.fields["free"] == free * page


def test_huge_pages_where_the_system_has_some() -> None:
    page = limits.huge_page_size()
    if not page or not limits.free_huge_pages(page):
        pytest.skip("no free huge pages (vm.nr_hugepages)")
    arena = create_arena(1, huge_page=page)
    assert (arena.kind, arena.nbytes, arena.page_size) == ("hugetlb", page, page)
    arena.memory[-1] = 1
    arena.close()


def test_transparent_huge_pages_are_a_wish_only() -> None:
    arena = create_arena(4 << 20, transparent=True)
    assert (arena.kind, arena.page_size, arena.nbytes) == ("transparent", PAGE, 4 << 20)
    arena.memory[-1] = 1
    assert os.fstat(arena.fd).st_blocks * 512 == 4 << 20
    arena.close()


def test_an_arena_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        create_arena(0)


# --- limits -------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def system(root: Path, *, available: int = 8192, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    wanted = {
        "proc/meminfo": f"MemTotal: 16777216 kB\nMemAvailable: {available * 1024} kB\nHugepagesize: 2048 kB\n",
        "proc/self/cgroup": cgroup,
        **(files or {}),
    }
    for name, text in wanted.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    room = limits.available_memory(system(tmp_path))
    assert (room.free, room.limit, room.what) == (8192 * MIB, 16384 * MIB, "the machine's memory")


def test_the_tightest_group_above_the_process_decides(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files = {
        f"{top}/system.slice/memory.max": str(1000 * MIB),
        f"{top}/system.slice/memory.current": str(900 * MIB),
        f"{top}/system.slice/memory.stat": f"anon 5\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\n",
        f"{top}/system.slice/kvd.service/memory.max": "max\n",
        f"{top}/system.slice/kvd.service/memory.current": str(10 * MIB),
    }
    room = limits.available_memory(system(tmp_path, cgroup="0::/system.slice/kvd.service\n", files=files))
    assert (room.free, room.limit) == (150 * MIB, 1000 * MIB)
    assert "system.slice/memory.max" in room.what
    assert "MemoryMax" in room.fix
    assert limits.memory_limit(tmp_path) == 1000 * MIB


def test_a_container_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(64 * MIB), "sys/fs/cgroup/memory.current": str(80 * MIB)}
    assert limits.available_memory(system(tmp_path, cgroup="0::/\n", files=files)).free == 0


def test_version_one_groups_count_too(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/docker/abc"
    files = {
        f"{folder}/memory.limit_in_bytes": str(512 * MIB),
        f"{folder}/memory.usage_in_bytes": str(500 * MIB),
        f"{folder}/memory.stat": f"cache 1\ntotal_inactive_file {4 * MIB}\ntotal_active_file 0\n",
    }
    lines = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n"
    assert limits.available_memory(system(tmp_path, cgroup=lines, files=files)).free == 16 * MIB
    assert limits.memory_limit(tmp_path) == 512 * MIB


def test_a_system_that_tells_nothing_sets_no_limit(tmp_path: Path) -> None:
    assert limits.available_memory(tmp_path).free >= 1 << 60
    assert limits.memory_limit(tmp_path) >= 1 << 60
    assert limits.huge_page_bytes(tmp_path) == 0
    assert limits.huge_page_size(tmp_path) == 0
    assert limits.free_huge_pages(2 * MIB, tmp_path) == 0
    assert not limits.transparent_shared(tmp_path)


@pytest.mark.parametrize(
    ("text", "given"),
    [("always within_size [advise] never deny force", True), ("always within_size advise [never] deny force", False)],
)
def test_huge_page_settings_are_read(tmp_path: Path, text: str, given: bool) -> None:
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": text,
        f"{folder}/free_hugepages": "7\n",
        f"{folder}/resv_hugepages": "3\n",
    }
    root = system(tmp_path, files=files)
    assert limits.transparent_shared(root) is given
    assert limits.free_huge_pages(2 * MIB, root) == 4
    assert limits.huge_page_size(root) == 2 * MIB
