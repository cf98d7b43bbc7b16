"""Two daemons move transfers over two RDMA devices; what starts where, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client import Client
from tests.integration.daemons import DaemonProcess, free_port, small_spec
from tests.integration.test_transfer import check, put
from tests.verbs.devices import DEVICES, needs_devices

pytestmark = [needs_devices, pytest.mark.timeout(180)]

WAIT_S = 60.0
SPEC = small_spec()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """``prefill`` asks for verbs, ``decode`` has it chosen."""
    ports = {"prefill": free_port(), "decode": free_port()}
    both = [
        DaemonProcess(
            tmp_path_factory.mktemp("daemons"),
            node,
            listen=f"127.0.0.1:{port}",
            peers={other: f"127.0.0.1:{ports[other]}" for other in ports if other != node},
            config={"fabric": {"name": name, "device": device}},
        )
        for (node, port), name, device in zip(ports.items(), ("verbs", "auto"), DEVICES, strict=True)
    ]
    try:
        for daemon in both:
            daemon.start()
        yield both[0], both[1]
    finally:
        for daemon in both:
            daemon.destroy()


@pytest.fixture
def clients(daemons: tuple[DaemonProcess, DaemonProcess]) -> Iterator[tuple[Client, Client]]:
    with daemons[0].client("prefill") as source, daemons[1].client("decode") as sink:
        yield source, sink


def test_a_transfer(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    assert source.status().fabric == sink.status().fabric == "verbs"
    with sink.decode("first", SPEC, [100, 37], source="prefill") as decode:
        with source.prefill("first", SPEC, [100, 37]) as prefill:
            put(prefill, SPEC, [100, 37])
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode, SPEC, [100, 37])


def test_a_row_of_transfers_gives_everything_back(
    daemons: tuple[DaemonProcess, DaemonProcess], clients: tuple[Client, Client]
) -> None:
    source, sink = clients
    for number in range(20):
        if number == 10:  # the memory and the session are there now
            descriptors = [_opened(daemon) for daemon in daemons]
        request = f"row-{number}"
        with source.prefill(request, SPEC, [64], sink="decode") as prefill, sink.decode(request, SPEC, [64]) as decode:
            put(prefill, SPEC, [64], seed=number)
            decode.wait_ready(timeout_s=WAIT_S)
            prefill.finish(timeout_s=WAIT_S)
            check(decode, SPEC, [64], seed=number)
    for client in clients:
        status = client.status()
        assert (status.memory.leases, status.memory.in_use) == (0, 0)
    # A client's own descriptors go a moment after its transfer.
    while [len(_opened(daemon)) for daemon in daemons] > [len(before) for before in descriptors]:
        pass


def _opened(daemon: DaemonProcess) -> list[str]:
    folder = Path(f"/proc/{daemon.pid}/fd")
    return [str(path.readlink()) for path in folder.iterdir() if path.is_symlink()]


def test_no_daemon_loads_torch(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    for daemon in daemons:
        assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()


def test_tcp_opens_no_device(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "plain", config={"fabric": {"name": "tcp"}})
    try:
        daemon.start()
        names = os.listdir(f"/proc/{daemon.pid}/fd")
        opened = [os.readlink(f"/proc/{daemon.pid}/fd/{name}") for name in names]
        assert [path for path in opened if "infiniband" in path] == []
        assert "pyverbs" not in Path(f"/proc/{daemon.pid}/maps").read_text()
    finally:
        daemon.destroy()


def test_verbs_on_a_device_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "lost", config={"fabric": {"name": "verbs", "device": "mlx5_9"}})
    with pytest.raises(AssertionError, match=r"no RDMA device 'mlx5_9' here; choose one of rxe0, rxe1"):
        daemon.start()


def test_auto_on_a_device_that_is_not_there_is_tcp(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "wary", config={"fabric": {"name": "auto", "device": "mlx5_9"}})
    try:
        daemon.start()
        with daemon.client() as client:
            assert client.status().fabric == "tcp"
        assert daemon.log.read_text().count("fabric auto: tcp") == 1
    finally:
        daemon.destroy()


def test_doctor_finds_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "kvd", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verbs work: rxe0 port 1" in done.stdout
    assert "FIX" not in done.stdout
