"""Real daemons for tests: started from a configuration file, ready when they say so, killed when the test ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvd_client import Client, KVSpec
from tests.waiting import eventually

READY_TIMEOUT_S = 120.0
"""For a busy machine, and for an emulated one: only a daemon that hangs is waited for so long."""


class DaemonProcess:
    """One ``kvd serve``. ``prefix`` is put before the command (``ip netns exec NAME``)."""

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        listen: str = "127.0.0.1:0",
        peers: Mapping[str, str] | None = None,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.folder = folder / node
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket = str(self.folder / "kvd.sock")
        self.log = self.folder / "log"
        self._prefix = list(prefix)
        sections: dict[str, dict[str, Any]] = {
            "node": {"id": node},
            "api": {"socket": self.socket},
            # A session that nobody asked for would count among the descriptors that tests compare (test_redial has it).
            "peers": {"listen": listen, "redial_s": 0.0},
            "memory": {"pool": "256MiB", "arena": "64MiB", "huge_pages": "never"},
            "log": {"format": "console", "level": "debug"},
        }
        for name, values in (config or {}).items():
            sections.setdefault(name, {}).update(values)
        self.listen = listen
        self.peers = dict(peers or {})
        self._sections = sections
        self.process: subprocess.Popen[bytes] | None = None
        self._notified: socket.socket | None = None

    def start(self) -> DaemonProcess:
        """Start it, and return when it has said READY; AssertionError with its log if it ends before."""
        self.begin()
        return self.ready()

    def begin(self) -> None:
        """Start it without waiting for :meth:`ready`."""
        self._write_config()
        address = str(self.folder / "notify")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(address)
        with open(self.log, "ab") as log:
            self.process = self._spawn(str(self.folder / "kvd.toml"), address, log)

    def ready(self) -> DaemonProcess:
        """Wait until a daemon that has begun says READY; AssertionError with its log if it ends before."""
        assert self._notified is not None
        pidfd = os.pidfd_open(self.pid)
        try:
            with self._notified as notified:
                seen, _, _ = select.select([notified, pidfd], [], [], READY_TIMEOUT_S)
                assert notified in seen, f"daemon {self.node} did not get ready:\n{self.log.read_text()}"
                assert b"READY=1" in notified.recv(4096)
        finally:
            os.close(pidfd)
        return self

    def _spawn(self, config: str, notify: str, log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "kvd", "serve", "--config", config],
            env={**os.environ, "NOTIFY_SOCKET": notify},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def client(self, name: str = "test") -> Client:
        return Client(self.socket, name=name)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        """End it with SIGTERM, and at once with a second one if it drains for too long; its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.terminate()
        return self.process.wait(10)

    def destroy(self) -> None:
        if self._notified is not None:
            self._notified.close()
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def resources(self) -> tuple[int, int]:
        """(open descriptors, resident bytes) of the daemon's process."""
        fds = len(os.listdir(f"/proc/{self.pid}/fd"))
        resident = next(
            int(line.split()[1]) * 1024
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if line.startswith("RssAnon:")
        )
        return fds, resident

    def _write_config(self) -> None:
        lines = []
        for name, values in self._sections.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        lines.append("[peers.static]")
        lines += [f'{node} = "{address}"' for node, address in self.peers.items()]
        (self.folder / "kvd.toml").write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else f'"{value}"'


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_all(daemons: Iterable[DaemonProcess]) -> None:
    """Start them side by side: most of a start is a processor's work."""
    started = list(daemons)
    for daemon in started:
        daemon.begin()
    for daemon in started:
        daemon.ready()


@contextlib.contextmanager
def two_daemons(folder: Path, **config: Mapping[str, Any]) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """``prefill`` and ``decode`` on this host, each with the other as a peer; sections of the configuration by name."""
    ports = {node: free_port() for node in ("prefill", "decode")}
    daemons = [
        DaemonProcess(
            folder,
            node,
            listen=f"127.0.0.1:{port}",
            peers={other: f"127.0.0.1:{ports[other]}" for other in ports if other != node},
            config=config,
        )
        for node, port in ports.items()
    ]
    try:
        start_all(daemons)
        yield daemons[0], daemons[1]
    finally:
        for daemon in daemons:
            daemon.destroy()


def nothing_is_left(*daemons: DaemonProcess) -> None:
    """Wait until each has everything back: leases, and the bytes of the pool and of the devices' channels. What is on
    its way into a lease keeps it for a moment, and so does a sink that has not confirmed what was gathered for it."""
    for daemon in daemons:
        with daemon.client("look") as client:

            def given_back(client: Client = client) -> bool:
                status = client.status()
                memory, devices = status.memory, status.devices
                return not any([memory.leases, memory.in_use, *(n for d in devices for n in (d.leases, *d.used))])

            eventually(f"{daemon.node} has everything back", given_back)


def small_spec(layers: int = 4, heads: int = 2, entry_bytes: int = 64) -> KVSpec:
    return KVSpec(layers=layers, kv_heads=heads, entry_bytes=entry_bytes, dtype="float16", model="test")


def random_layer(seed: int, rows: int, tokens: int, heads: int, entry_bytes: int) -> np.ndarray[Any, Any]:
    """Entries of one layer, (rows, tokens, heads, entry_bytes) uint8, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, (rows, tokens, heads, entry_bytes), dtype=np.uint8)
