"""Which address of a device to use, and what to do when memory can't be registered; needs no pyverbs."""

from __future__ import annotations

import errno
import ipaddress
import resource
from collections.abc import Sequence
from pathlib import Path

from kvd.errors import FabricError

_CAP_IPC_LOCK = 14


def choose_gid(
    table: Sequence[tuple[int, str, bool]], wanted: int, *, infiniband: bool, device: str
) -> tuple[int, str]:
    """Index and text of the address to use, of a ``table`` of (index, GID, whether it is RoCE v2).

    On Ethernet that is a RoCE v2 address, an IPv4 one first, then a global IPv6 one, never a link-local one, which has
    no route to other networks. ``wanted`` >= 0 names the index instead. Raises :class:`FabricError` if there is none.
    """
    for index, gid, _ in table:
        if index == wanted:
            return index, gid
    if wanted < 0:
        if infiniband and table:
            return table[0][0], table[0][1]
        usable = []
        for index, gid, version_2 in table:
            address = ipaddress.IPv6Address(gid)
            if version_2 and not address.is_link_local and not address.is_unspecified:
                usable.append((address.ipv4_mapped is None, index, gid))
        if usable:
            return min(usable)[1:]
    asked = f"no GID {wanted}" if wanted >= 0 else "no RoCE v2 GID that is not link-local"
    raise FabricError(
        f"the RDMA device {device!r} has {asked} (it has {', '.join(f'{i}: {gid}' for i, gid, _ in table) or 'none'}); "
        "give its network interface an IP address, or choose one with fabric.gid_index",
        device=device,
    )


def registration_error(device: str, nbytes: int, number: int, text: str) -> FabricError:
    """Why memory was not registered, with the fix."""
    soft = memlock_limit()
    fix = "look at the kernel log"
    if number in (errno.ENOMEM, errno.EPERM) and soft is not None:
        fix = (
            f"the memlock limit is {soft} bytes: raise it to more than all registered memory (LimitMEMLOCK=infinity in "
            "the systemd unit, ulimit -l unlimited in a shell)"
        )
    elif number == errno.ENOMEM:
        fix = "the device or the system has no memory left for it: lower memory.pool"
    elif number == errno.EFAULT:
        fix = "the memory is not mapped writable, or is a GPU's without a peer memory module (nvidia-peermem)"
    return FabricError(
        f"{nbytes} bytes can't be registered with the RDMA device {device!r}: {text}; {fix}",
        device=device,
        need=nbytes,
        limit=soft,
        errno=number,
    )


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None: any number, as with CAP_IPC_LOCK, which root has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return None if soft == resource.RLIM_INFINITY or capabilities & 1 << _CAP_IPC_LOCK else soft
