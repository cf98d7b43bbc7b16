"""Attackers on the listeners of a live daemon, and a bystander whose transfers must not suffer.

The daemon attacked is a source; an honest second daemon is the sink of the bystander's transfers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.fuzz.attackers import ATTACKS, PATIENCE_S, SPEC
from tests.integration.daemons import DaemonProcess, free_port, random_layer
from tests.waiting import eventually

LOOK_EVERY_S = 0.1
"""At what the daemon holds."""


@dataclasses.dataclass(slots=True)
class Report:
    """What came of a run."""

    messages: dict[str, int]
    connections: dict[str, int]
    seconds: float
    transfers: int
    """Of the bystander, all delivered with every byte right."""
    anonymous_before: int
    anonymous_most: int
    anonymous_after: int
    descriptors_before: int
    descriptors_most: int
    descriptors_after: int
    left_in_use: int
    """Bytes that leases take when all attackers have gone."""
    bugs: list[str]
    """Lines of the daemon's log that tell of what should not happen."""
    trouble: list[str]
    """What went wrong for the bystander or in an attacker."""


class Bystander:
    """Honest transfers, one after the other, until told to stop."""

    def __init__(self, source: DaemonProcess, sink: DaemonProcess) -> None:
        self.source, self.sink = source, sink
        self.stop = threading.Event()
        self.begun = threading.Event()
        """A transfer was well, or all is over."""
        self.transfers = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.source.client("bystander") as source, self.sink.client("bystander") as sink:
                while not self.stop.is_set():
                    request = f"honest {self.transfers}"
                    with (
                        sink.decode(request, SPEC, [64], source=self.source.node) as decode,
                        source.prefill(request, SPEC, [64]) as prefill,
                    ):
                        for layer in range(SPEC.layers):
                            prefill.put_layer(layer, entries=random_layer(layer, 1, 64, 2, 64))
                        decode.wait_ready(timeout_s=PATIENCE_S)
                        for layer in range(SPEC.layers):
                            assert np.array_equal(decode.layer(layer)[0, :64], random_layer(layer, 1, 64, 2, 64)[0])
                        prefill.finish(timeout_s=PATIENCE_S)
                    self.transfers += 1
                    self.begun.set()
        except BaseException as error:  # shown in the report
            self.error = error
            self.begun.set()


@contextlib.contextmanager
def daemons(folder: Path) -> Iterator[tuple[DaemonProcess, DaemonProcess, tuple[str, int], bytes]]:
    """The daemon to attack, its honest peer, its address, and the key."""
    key = secrets.token_hex(32)
    file = folder / "key"
    file.touch(mode=0o600)
    file.write_text(key)
    port = free_port()
    common = {
        "peers": {"key_file": str(file)},
        "memory": {"pool": "64MiB", "arena": "16MiB", "client_limit": "16MiB"},
        "log": {"level": "error"},
    }
    attacked = DaemonProcess(folder, "prefill", listen=f"127.0.0.1:{port}", config=common)
    honest = DaemonProcess(folder, "decode", peers={"prefill": f"127.0.0.1:{port}"}, config=common)
    try:
        yield attacked.start(), honest.start(), ("127.0.0.1", port), key.encode()
    finally:
        for daemon in (attacked, honest):
            daemon.destroy()


def cycling(threads: list[threading.Thread]) -> Iterator[threading.Thread]:
    """Those that still run, again and again until none does."""
    while running := [thread for thread in threads if thread.is_alive()]:
        yield from running


def run(folder: Path, messages: int, seed: int, say: Callable[[str], None] = lambda text: None) -> Report:
    """Attack a daemon with about ``messages`` messages; at least so many are sent in all."""
    with daemons(folder) as (daemon, honest, address, key):
        bystander = Bystander(daemon, honest)
        quiet = threading.Thread(target=bystander.run)
        quiet.start()
        bystander.begun.wait()
        before = daemon.resources()[::-1]
        attackers = [
            kind(daemon, address, key, seed * 100 + n, max(1, round(messages * share)))
            for n, (kind, share) in enumerate(ATTACKS.items())
        ]
        threads = [threading.Thread(target=attacker.run) for attacker in attackers]
        begin, told = time.monotonic(), time.monotonic()
        for thread in threads:
            thread.start()
        most = before
        for thread in cycling(threads):
            thread.join(LOOK_EVERY_S)
            assert daemon.process is not None
            if daemon.process.poll() is not None:
                break
            fds, anonymous = daemon.resources()
            most = (max(most[0], anonymous), max(most[1], fds))
            if time.monotonic() - told > 10:
                told = time.monotonic()
                done = sum(attacker.messages for attacker in attackers)
                say(f"{done} messages, {bystander.transfers} transfers, {most[0] >> 20} MiB, {most[1]} descriptors")
        seconds = time.monotonic() - begin
        bystander.stop.set()
        quiet.join()
        trouble = [f"{type(a).__name__}: {a.error!r}" for a in attackers if a.error is not None]
        if bystander.error is not None:
            trouble.append(f"bystander: {bystander.error!r}")
        after, in_use = most, -1
        if daemon.process is not None and daemon.process.poll() is None:
            with daemon.client("afterwards") as client:
                with contextlib.suppress(AssertionError):  # the report says how much
                    eventually("all memory is back", lambda: client.status().memory.in_use == 0, PATIENCE_S)
                in_use = client.status().memory.in_use
            after = daemon.resources()[::-1]
        else:
            trouble.append("the daemon has died")
        log = daemon.log.read_text()
        return Report(
            messages={attacker.name: attacker.messages for attacker in attackers},
            connections={attacker.name: attacker.connections for attacker in attackers},
            seconds=seconds,
            transfers=bystander.transfers,
            anonymous_before=before[0],
            anonymous_most=most[0],
            anonymous_after=after[0],
            descriptors_before=before[1],
            descriptors_most=most[1],
            descriptors_after=after[1],
            left_in_use=in_use,
            bugs=[line for line in log.splitlines() if line.strip()],
            trouble=trouble,
        )
