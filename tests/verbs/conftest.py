"""The daemons that the verbs tests share, and the lines that a run ends with."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvd_client import Client
from tests.integration.daemons import DaemonProcess, free_port
from tests.integration.fault_helpers import SEEN, table
from tests.verbs.devices import DEVICES
from tests.verbs.forked import ForkedDaemon

pytest.register_assert_rewrite("kvd.fabric.conformance")

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

PATIENT = {"connect_timeout_s": 30, "handshake_timeout_s": 30, "timeout_s": 30}
"""An emulated CPU that others share must not make a peer look dead."""
SMALL = {"pool": "64MiB", "arena": "16MiB"}
FABRICS = {"prefill": ("verbs", DEVICES[0]), "decode": ("auto", DEVICES[1]), "plain": ("tcp", "")}


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """What earlier modules left in cycles goes now, and not while a test counts descriptors."""
    gc.collect()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DaemonProcess]]:
    """``prefill`` insists on verbs, ``decode`` takes what the other side has, ``plain`` has tcp only."""
    folder = tmp_path_factory.mktemp("daemons")
    ports = {node: free_port() for node in FABRICS}
    found = {
        node: ForkedDaemon(
            folder,
            node,
            listen=f"127.0.0.1:{ports[node]}",
            peers={other: f"127.0.0.1:{ports[other]}" for other in ports if other != node},
            # At that rate some of a prompt is left to be fetched.
            config={
                "fabric": {"name": name, "device": device, **({"rate": "2mbit"} if node == "prefill" else {})},
                "peers": PATIENT,
                "memory": SMALL,
            },
        )
        for node, (name, device) in FABRICS.items()
    }
    try:
        # The forks have it too. An emulated CPU may take long for what follows when a link is up again.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvd.fabric.verbs.recovery.PATIENCE_S", 40.0)
            for daemon in found.values():
                daemon.start()
        yield found
    finally:
        for daemon in found.values():
            daemon.destroy()


@pytest.fixture
def daemons(cluster: dict[str, DaemonProcess]) -> tuple[DaemonProcess, DaemonProcess]:
    return cluster["prefill"], cluster["decode"]


@pytest.fixture
def clients(daemons: tuple[DaemonProcess, DaemonProcess]) -> Iterator[tuple[Client, Client]]:
    with daemons[0].client("prefill") as source, daemons[1].client("decode") as sink:
        yield source, sink


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    if "KVD_VERBS_GUEST" not in os.environ:  # the whole suite's run, which has a table of its own
        return
    if SEEN:
        terminalreporter.section("faults over verbs: what each side was told, and how soon")
        for line in table(SEEN):
            terminalreporter.write_line(line)
    ran = sum(len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed"))
    terminalreporter.write_line(f"{ran} tests ran in the guest, on {os.cpu_count()} CPU(s)")
