"""How much memory the system would still give: /proc/meminfo and the control groups above this process.

Asked before memory is taken, because a shared-memory file that outgrows a control group ends in the OOM killer, not
in an error that a daemon could pass on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can still be taken, and the limit that decides."""

    free: int
    limit: int
    what: str
    """The limit in words: ``the machine's memory``, or a control group's file."""
    fix: str


def available_memory(root: Path = Path("/")) -> Available:
    """The tightest of the machine's memory and the control groups' limits (versions 1 and 2) under ``root``.

    Page cache of files counts as free, since the kernel drops it under pressure; a limit that can't be read does not
    count.
    """
    return min(_limits(root), key=lambda limit: limit.free, default=_UNKNOWN)


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process could have if nothing else did: the least of the same limits."""
    return min((limit.limit for limit in _limits(root)), default=_UNKNOWN.limit)


_UNKNOWN = Available(free=1 << 62, limit=1 << 62, what="an unknown limit", fix="use less memory")


def free_huge_pages(size: int, root: Path = Path("/")) -> int:
    """Huge pages of ``size`` bytes that are neither used nor promised to somebody."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{size // 1024}kB"
    free, promised = _number(folder / "free_hugepages"), _number(folder / "resv_hugepages")
    return max(0, (free or 0) - (promised or 0))


def huge_page_size(root: Path = Path("/")) -> int:
    """The system's default huge page in bytes, 0 where it has none."""
    return _meminfo(root).get("Hugepagesize", 0)


def huge_page_bytes(root: Path = Path("/")) -> int:
    """Bytes of huge pages of the default size that the system has set aside, used or not."""
    return _meminfo(root).get("HugePages_Total", 0) * huge_page_size(root)


def transparent_shared(root: Path = Path("/")) -> bool:
    """Whether shared memory gets transparent huge pages when it asks for them."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
    return any(f"[{mode}]" in text for mode in ("always", "within_size", "advise", "force"))


def _limits(root: Path) -> Iterator[Available]:
    """The machine's memory, and each limit of a control group that this process is in."""
    info = _meminfo(root)
    if "MemAvailable" in info:
        yield Available(
            free=info["MemAvailable"],
            limit=info.get("MemTotal", info["MemAvailable"]),
            what="the machine's memory",
            fix="lower memory.pool or stop what else uses memory",
        )
    yield from _groups(root)


def _groups(root: Path) -> Iterator[Available]:
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            top, names, cached = base, ("memory.max", "memory.current"), ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            top, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = ("total_inactive_file", "total_active_file")
        else:
            continue
        for folder in _upwards(top, path):
            limit, used = (_number(folder / name) for name in names)
            if limit is None or used is None:
                continue
            stat = _fields(_text(folder / "memory.stat") or "")
            droppable = sum(stat.get(name, 0) for name in cached)
            yield Available(
                free=max(0, limit - used + min(used, droppable)),
                limit=limit,
                what=f"the control group's {folder / names[0]}",
                fix="raise that limit (systemd: MemoryMax=) or lower memory.pool",
            )


def _upwards(top: Path, path: str) -> Iterator[Path]:
    folder = top / path.lstrip("/")
    while folder != top and top in folder.parents:
        yield folder
        folder = folder.parent
    yield top


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _fields(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
