"""Everything that keeps the verbs fabric from working on this host, found at once, each with its fix.

What the system tells is read from /sys and /dev, so that the findings are there without pyverbs too.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvd.errors import FabricError
from kvd.fabric.regions import address_of
from kvd.fabric.verbs import advice

PROBE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``fix`` is empty if all is well."""

    what: str
    fix: str = ""
    key: str = ""
    """The configuration's key that it is about, if verbs can't be used at all before it is mended."""

    @property
    def ok(self) -> bool:
        return not self.fix


def examine(
    *,
    pool: int,
    device: str = "",
    port: int = 1,
    gid_index: int = -1,
    sys: Path = Path("/sys"),
    dev: Path = Path("/dev"),
    memlock: int | None = -1,
    cards: bool = False,
) -> Iterator[Finding]:
    """All findings for a daemon that registers up to ``pool`` bytes. ``memlock``: its limit, None for none, -1: this
    process's. ``cards``: the device shall reach other devices' memory, too."""
    there = list(_devices(sys, dev, device))
    yield from there
    limit = advice.memlock_limit() if memlock == -1 else memlock
    if limit is None or limit >= pool:
        yield Finding(f"memlock limit: {'none' if limit is None else f'{limit} bytes'}, the pool has {pool}")
    else:
        yield Finding(
            f"memlock limit: {limit} bytes, but the pool has {pool}",
            "raise it: LimitMEMLOCK=infinity in the systemd unit, ulimit -l unlimited in a shell, or a memlock line in "
            "/etc/security/limits.conf; or lower memory.pool (this is the limit of this shell; a systemd unit has its "
            "own: systemctl show -p LimitMEMLOCK kvd)",
            "memory.pool",
        )
    yield from _peer_memory(sys, dev)
    yield _trial(device, port, gid_index, there=all(finding.ok for finding in there), cards=cards)


def _devices(sys: Path, dev: Path, wanted: str) -> Iterator[Finding]:
    folder = sys / "class/infiniband"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names:
        yield Finding(
            "no RDMA device in the kernel",
            "load the NIC's driver (mlx5_ib, irdma, bnxt_re …), or rdma_rxe with "
            "`rdma link add rxe0 type rxe netdev NAME` to try without one; in a container, pass the devices in",
            "fabric.name",
        )
    elif wanted and wanted not in names:
        yield Finding(
            f"RDMA devices: {', '.join(names)}, but the configuration asks for {wanted}",
            f"set fabric.device to one of {', '.join(names)}",
            "fabric.device",
        )
    else:
        yield Finding(f"RDMA devices: {', '.join(names)}")
    if not names:
        return
    files = sorted((dev / "infiniband").glob("uverbs*"))
    refused = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if not files:
        yield Finding(
            f"no {dev}/infiniband/uverbs*",
            "load ib_uverbs; in a systemd unit, PrivateDevices=no and DeviceAllow=char-infiniband_verbs rw",
            "fabric.name",
        )
    elif refused:
        yield Finding(
            f"no permission on {', '.join(refused)}",
            "add the daemon's user to the files' group (usually rdma), or allow it with a udev rule",
            "fabric.name",
        )
    else:
        yield Finding(f"device files: {', '.join(map(str, files))}")


def _peer_memory(sys: Path, dev: Path) -> Iterator[Finding]:
    """GPU memory can only be registered through a module that translates its addresses."""
    if not (dev / "nvidiactl").exists():
        return
    if (sys / "module/nvidia_peermem").exists():
        yield Finding("GPU memory: nvidia-peermem is loaded")
    else:
        yield Finding("GPU memory: nvidia-peermem is not loaded", "modprobe nvidia-peermem; host memory works without")


def _trial(name: str, port: int, gid_index: int, *, there: bool, cards: bool) -> Finding:
    """Open the device and register memory, as the daemon would; and ask it for dma-bufs. ``there``: whether that can
    succeed; what is in the way is said already where it can't, and only pyverbs is looked for."""
    try:
        from kvd.fabric.verbs.device import Device
    except ImportError as error:
        return Finding(
            f"pyverbs can't be imported: {error}",
            "install python3-pyverbs and ibverbs-providers, and make the virtual environment with "
            "--system-site-packages; or pip install kvd-transport[rdma] with libibverbs-dev",
            "fabric.name",
        )
    if not there:
        return Finding("pyverbs is installed")
    try:
        device = Device(name, port, gid_index)
    except FabricError as error:
        return _split(error)
    with mmap.mmap(-1, PROBE_BYTES) as memory:
        try:
            with memoryview(memory) as view:
                device.register(address_of(view), PROBE_BYTES, remote_write=True).close()
            dmabufs = device.takes_dmabufs
        except FabricError as error:
            return _split(error)
        finally:
            device.close()
    largest = "any size" if device.max_region >= 1 << 62 else f"{device.max_region} bytes"
    return _worked(device.details, largest, dmabufs, cards)


def _worked(details: str, largest: str, dmabufs: bool | None, cards: bool) -> Finding:
    takes = {True: "it takes cards' dma-bufs", False: "it takes no dma-bufs", None: "nobody knows if it takes dma-bufs"}
    return Finding(
        f"verbs work: {details}; memory registrations of {largest} at most; {takes[dmabufs]}",
        'a card\'s channels need them (mlx5, irdma and efa have them, from Linux 5.12 on); set fabric.name = "tcp"'
        if cards and dmabufs is False
        else "",
    )


def _split(error: FabricError) -> Finding:
    what, _, fix = error.message.rpartition("; ")
    return Finding(what, fix, "fabric.gid_index" if "gid_index" in error.fields else "fabric.name")
