"""What the configuration needs to know about the machine and the process that runs on it."""

from __future__ import annotations

import dataclasses
import grp
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

UNLIMITED = 1 << 62
SYSTEM_SOCKET = "/run/kvd/kvd.sock"


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """Facts as plain values, so that every rule about them can be tried anywhere."""

    name: str
    memory: int
    """Bytes that this process may have: RAM, or its control group's limit if that is less."""
    huge_page_bytes: int
    """Bytes of huge pages that the system has set aside."""
    uid: int
    groups: frozenset[int]
    service_dir: str
    """``$RUNTIME_DIRECTORY``: what a service manager made for this process; or empty."""
    runtime_dir: str
    """``$XDG_RUNTIME_DIR``: the user's own; or empty."""
    group_id: Callable[[str], int | None]
    """Number of a named group; ``None`` if there is none of that name."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Host:
        """The facts of this machine and process."""
        info = parse_meminfo(Path("/proc/meminfo").read_text())
        return cls(
            name=socket.gethostname(),
            memory=min(info.get("MemTotal", UNLIMITED), _cgroup_limit()),
            huge_page_bytes=info.get("HugePages_Total", 0) * info.get("Hugepagesize", 0),
            uid=os.geteuid(),
            groups=frozenset({os.getegid(), *os.getgroups()}),
            service_dir=environ.get("RUNTIME_DIRECTORY", "").split(":")[0],
            runtime_dir=environ.get("XDG_RUNTIME_DIR", ""),
            group_id=_group_id,
        )

    @property
    def default_socket(self) -> str:
        """Where this user's daemon listens when nothing is configured."""
        if self.service_dir:
            return f"{self.service_dir}/kvd.sock"
        if self.uid == 0:
            return SYSTEM_SOCKET
        return f"{self.runtime_dir}/kvd/kvd.sock" if self.runtime_dir else f"/tmp/kvd-{self.uid}/kvd.sock"


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` as numbers: sizes in bytes, counts as they are."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        found[name] = int(number) * (1024 if unit else 1)
    return found


def _cgroup_limit() -> int:
    """The least ``memory.max`` of this process' control group and of those above it."""
    least = UNLIMITED
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return least
    for line in lines:
        if line.startswith("0::"):
            group = Path("/sys/fs/cgroup", line[3:].lstrip("/"))
            for level in (group, *group.parents):
                try:
                    text = (level / "memory.max").read_text().strip()
                except OSError:
                    continue
                if text.isdigit():
                    least = min(least, int(text))
    return least


def _group_id(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
