"""What the configuration needs to know about the machine and the process that runs on it."""

from __future__ import annotations

import dataclasses
import grp
import os
import socket
from collections.abc import Callable, Mapping

from kvd.memory import limits

SYSTEM_SOCKET = "/run/kvd/kvd.sock"


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """Facts as plain values, so that every rule about them can be tried anywhere."""

    name: str
    memory: int
    """Bytes that this process may have: RAM, or its control groups' limit if that is less."""
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
        return cls(
            name=socket.gethostname(),
            memory=limits.memory_limit(),
            huge_page_bytes=limits.huge_page_bytes(),
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


def _group_id(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
