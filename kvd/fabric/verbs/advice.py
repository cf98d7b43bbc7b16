"""Which device and address to use, and what to do when memory can't be registered; needs no pyverbs."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvd.errors import FabricError

_CAP_IPC_LOCK = 14


def by_distance(names: Sequence[str], sys: Path = Path("/sys"), cpus: Iterable[int] | None = None) -> list[str]:
    """RDMA devices, the nearest first: those on a NUMA node of the CPUs that this process may use, where its memory
    is; then those closest to a GPU on the PCI bus; then as they were. What the system does not tell makes no
    difference."""
    home = {_node_of(cpu, sys) for cpu in (os.sched_getaffinity(0) if cpus is None else cpus)}
    gpus = [path.resolve().parts for path in (sys / "bus/pci/drivers/nvidia").glob("*:*:*.*")]

    def distance(name: str) -> tuple[bool, int]:
        device = (sys / "class/infiniband" / name / "device").resolve()
        try:
            node = int((device / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        return node >= 0 and node not in home, -max((_shared(device.parts, gpu) for gpu in gpus), default=0)

    return sorted(names, key=distance)


def _node_of(cpu: int, sys: Path) -> int:
    found = next((sys / f"devices/system/cpu/cpu{cpu}").glob("node*"), None)
    return int(found.name.removeprefix("node")) if found else -1


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many bridges two devices are behind together."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def choose_gid(
    table: Sequence[tuple[int, str, bool]], wanted: int, *, infiniband: bool, device: str
) -> tuple[int, str]:
    """Index and text of the address to use, of a ``table`` of (index, GID, whether it is RoCE v2).

    On Ethernet that is a RoCE v2 address, an IPv4 one first, then a global IPv6 one, never a link-local one, which has
    no route to other networks. ``wanted`` >= 0 names the index instead. Raises :class:`FabricError` if there is none.
    """
    routed = [entry for entry in table if infiniband or _has_routes(entry[1])]
    if wanted < 0:
        usable = [entry for entry in routed if infiniband or entry[2]]
        if usable:
            return min(usable, key=lambda entry: (not infiniband and not _is_ipv4(entry[1]), entry[0]))[:2]
        what = "no RoCE v2 GID that is not link-local"
    else:
        asked = next((entry for entry in table if entry[0] == wanted), None)
        if asked in routed:
            return asked[:2]
        what = f"no GID {wanted}" if asked is None else f"a link-local GID {wanted}, without a route to other networks"
    if routed:
        fix = f"set fabric.gid_index to {' or '.join(str(entry[0]) for entry in routed)}, or to -1 for kvd to choose"
    else:
        fix = "give its network interface an IP address"
    raise FabricError(
        f"the RDMA device {device!r} has {what} (it has {', '.join(f'{i}: {gid}' for i, gid, _ in table) or 'none'}); "
        f"{fix}",
        device=device,
        gid_index=wanted,
    )


def _has_routes(gid: str) -> bool:
    address = ipaddress.IPv6Address(gid)
    return not address.is_link_local and not address.is_unspecified


def _is_ipv4(gid: str) -> bool:
    return ipaddress.IPv6Address(gid).ipv4_mapped is not None


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


def check_memlock(device: str, nbytes: int) -> None:
    """Raises :class:`FabricError` where this process may not lock the ``nbytes`` that are going to be registered: at
    the start, and not when the first arena that is too many is wanted."""
    limit = memlock_limit()
    if limit is not None and limit < nbytes:
        raise FabricError(
            f"the memlock limit is {limit} bytes, but the pool has {nbytes}, which the RDMA device {device!r} needs "
            "locked; raise it (LimitMEMLOCK=infinity in the systemd unit, ulimit -l unlimited in a shell), or lower "
            "memory.pool",
            device=device,
            need=nbytes,
            limit=limit,
        )


NO_DMABUF = (errno.EBADF, errno.EINVAL)
"""What a driver says of a descriptor that is no dma-buf; and below, one that takes none, whatever the descriptor."""
NO_DMABUFS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT)


def dmabuf_error(device: str, nbytes: int, number: int, text: str) -> FabricError:
    """Why another device's memory was not registered, with what would make it possible."""
    if number in NO_DMABUF:
        fix = "the descriptor is not a dma-buf, or the range lies outside of it"
    elif number in NO_DMABUFS:
        fix = "its driver or this kernel has no dma-buf support (mlx5, irdma and efa have, from Linux 5.12 on)"
    else:
        fix = "look at the kernel log of the RDMA driver and of the device that exports the memory"
    return FabricError(
        f"{nbytes} bytes of a dma-buf can't be registered with the RDMA device {device!r}: {text}; {fix}; else set "
        'fabric.name = "tcp", which moves the data through host memory',
        device=device,
        need=nbytes,
        errno=number,
    )


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None: any number, as with CAP_IPC_LOCK, which root has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return None if soft == resource.RLIM_INFINITY or capabilities & 1 << _CAP_IPC_LOCK else soft
