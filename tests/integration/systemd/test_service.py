"""The units in ``systemd/`` under a real systemd: start and status text, stop, watchdog, queued clients, sandbox."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from systemd_box import Box, missing

UNITS = Path(__file__).resolve().parents[3] / "systemd"
HOME = "/opt/kvd"
SOCKET = "/run/kvd/kvd.sock"

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(missing() != "", reason=missing()),
]

TRANSFER = """
import sys
import numpy as np
from kvd_client import Client, KVSpec

spec = KVSpec(layers=2, kv_heads=2, entry_bytes=64, dtype="float16", model="test")
with Client(name="box") as client:
    source = client.prefill("r", spec, [16])
    print("open", flush=True)
    sys.stdin.readline()
    with source, client.decode("r", spec, [16], source=client.status().node) as sink:
        kv = np.random.default_rng(0).integers(0, 256, (2, 1, 16, 2, 64), dtype=np.uint8)
        for layer in range(2):
            source.put_layer(layer, kv[layer])
        source.finish()
        sink.wait_ready()
        for layer in range(2):
            assert np.array_equal(np.asarray(sink.layer(layer)).view(np.uint8).reshape(kv[layer].shape), kv[layer])
print("equal", flush=True)
"""

ASK_ANOTHER = """
from kvd_client import Client
from kvd_client.errors import DaemonLost

# systemd lets a stopped process go on to die, and until it does it may answer.
with Client(timeout_s=50) as client:
    pid = {old}
    while pid == {old}:
        try:
            pid = client.status().pid
        except DaemonLost:
            pass
print(pid)
"""

SCRAPE = """
import urllib.request

print(urllib.request.urlopen("http://127.0.0.1:9745/metrics", timeout=50).read().decode())
"""

TAKE_PORT = """
import socket, sys
with socket.create_server(("127.0.0.1", 7440)):
    print("taken", flush=True)
    sys.stdin.read()
"""


class Service:
    """kvd as installed in a box."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def systemctl(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = self.box.run("systemctl", *args, capture_output=True, timeout=60)
        if check and done.returncode:
            pytest.fail(f"systemctl {' '.join(args)}: {done.stderr}\n{self.journal()}")
        return done

    def show(self, unit: str = "kvd.service") -> dict[str, str]:
        lines = self.systemctl("show", unit).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, *args: str) -> str:
        self.box.run("journalctl", "--sync", check=True, timeout=60)
        return self.box.out("journalctl", "-u", "kvd.service", "-o", "cat", "--no-pager", *args)

    def kvd(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.box.run("kvd", *args, capture_output=True, timeout=60)

    def status(self) -> dict[str, Any]:
        """What the daemon says; waits in the socket's queue for one that starts."""
        done = self.kvd("status", "--json", "--socket", SOCKET)
        if done.returncode:
            pytest.fail(f"kvd status: {done.returncode}: {done.stderr}\n{self.journal()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def configure(self, toml: str | None = None, **drop_in: str) -> None:
        """The example or ``toml``, and settings of the [Service] section on top of the unit."""
        self.box.write("/etc/kvd/kvd.toml", (UNITS / "kvd.toml").read_text() if toml is None else toml)
        settings = "".join(f"{key}={value}\n" for key, value in drop_in.items())
        self.box.write("/etc/systemd/system/kvd.service.d/test.conf", f"[Service]\n{settings}")
        self.systemctl("daemon-reload")

    def script(self, text: str, **kwargs: Any) -> subprocess.Popen[str]:
        """A Python program as a user who is nobody, but for being a member of the group kvd."""
        nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--groups=kvd")
        command = self.box.command(*nobody, f"{HOME}/bin/python", "-c", text)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, text=True, **pipes, **kwargs)

    def follow(self, event: str) -> str:
        """The journal's next line of the daemon with this event; waits for it."""
        command = self.box.command("journalctl", "-u", "kvd.service", "-o", "cat", "-f", "-n", "all")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = next(line for line in process.stdout if f'"event":"{event}"' in line)
            process.kill()
        return line


def install(box: Box) -> None:
    """This interpreter and the packages under test, below /opt/kvd, and the units as a package would place them."""
    python = f"{HOME}/python/bin/{Path(sys.executable).resolve().name}"
    environ = f"PYTHONHOME={HOME}/python LD_LIBRARY_PATH={HOME}/python/lib PYTHONPATH={HOME}/source:{HOME}/site"
    start = f"#!/bin/sh\nexec env {environ} PYTHONDONTWRITEBYTECODE=1 {python}"
    box.write(f"{HOME}/bin/python", f'{start} "$@"\n', 0o755)
    box.write("/usr/local/bin/kvd", f'{start} -m kvd "$@"\n', 0o755)
    for name, where in (
        ("kvd.service", "/etc/systemd/system/kvd.service"),
        ("kvd.socket", "/etc/systemd/system/kvd.socket"),
        ("kvd-metrics.service", "/etc/systemd/system/kvd-metrics.service"),
        ("kvd.sysusers", "/etc/sysusers.d/kvd.conf"),
        ("kvd.tmpfiles", "/etc/tmpfiles.d/kvd.conf"),
        ("kvd.toml", "/etc/kvd/kvd.toml"),
    ):
        box.write(where, (UNITS / name).read_text())
    box.run("systemd-sysusers", "kvd.conf", check=True, timeout=60)
    box.run("systemd-tmpfiles", "--create", "kvd.conf", check=True, timeout=60)
    box.run("ip", "address", "add", "10.99.0.1/32", "dev", "lo", check=True, timeout=60)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    ro = [f"{sys.base_prefix}:{HOME}/python", f"{sysconfig.get_path('purelib')}:{HOME}/site"]
    for package in ("kvd", "kvd_client", "kvd_kernels"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        ro.append(f"{os.path.realpath(spec.submodule_search_locations[0])}:{HOME}/source/{package}")
    with Box(ro) as found:
        install(found)
        yield found


@pytest.fixture
def service(box: Box) -> Iterator[Service]:
    found = Service(box)
    found.configure()
    yield found
    found.systemctl("stop", "kvd.socket", "kvd.service", check=False)
    found.systemctl("reset-failed", check=False)
    box.run("journalctl", "--rotate", "--vacuum-time=1us", capture_output=True, check=True, timeout=60)


def test_systemd_understands_every_line(service: Service) -> None:
    units = [f"/etc/systemd/system/{name}" for name in ("kvd.service", "kvd.socket", "kvd-metrics.service")]
    said = service.box.out("systemd-analyze", "verify", "--man=no", *units)
    assert "kvd." not in said
    assert "kvd-metrics" not in said


def test_start_returns_when_the_daemon_is_ready_and_says_what_it_does(service: Service) -> None:
    service.systemctl("start", "kvd")
    shown = service.show()
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert "0 transfers running" in shown["StatusText"]
    status = service.status()
    assert str(status["pid"]) == shown["MainPID"]
    assert (status["health"], status["socket"]) == ("ok", SOCKET)
    assert service.show("kvd.socket")["ActiveState"] == "active"


def test_stop_ends_it_cleanly_and_keeps_the_socket(service: Service) -> None:
    service.systemctl("start", "kvd")
    service.systemctl("stop", "kvd")
    shown = service.show()
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == ("inactive", "success", "0")
    assert '"event":"stopped"' in service.journal()
    assert service.show("kvd.socket")["ActiveState"] == "active"


def test_stop_lets_a_running_transfer_end(service: Service) -> None:
    service.systemctl("start", "kvd")
    with service.script(TRANSFER) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "open\n"
        service.systemctl("stop", "--no-block", "kvd")
        assert '"transfers":1' in service.follow("draining")
        shown = service.show()
        assert shown["ActiveState"] == "deactivating"
        assert shown["StatusText"] == "draining 1 transfers"
        client.kill()
    service.systemctl("stop", "kvd")
    assert service.show()["Result"] == "success"


def test_a_hung_daemon_is_restarted_and_the_waiting_client_answered(service: Service) -> None:
    service.configure(WatchdogSec="3", TimeoutAbortSec="1")
    service.systemctl("start", "kvd")
    old = service.show()["MainPID"]
    service.box.run("kill", "-STOP", old, check=True, timeout=60)
    # More patient than `kvd status`: the watchdog, the abort and a new start come before the answer.
    client = service.script(ASK_ANOTHER.format(old=old))
    answer = client.communicate(timeout=60)[0].strip()
    assert answer.isdigit(), answer
    assert answer != old
    shown = service.show()
    assert int(shown["NRestarts"]) >= 1  # a busy machine may make the next one miss its first beat, too
    assert shown["ActiveState"] == "active"
    assert "Watchdog timeout" in service.box.out("journalctl", "-u", "kvd.service", "-o", "cat", "--no-pager")


def test_clients_that_connect_while_it_restarts_are_answered(service: Service) -> None:
    service.systemctl("start", "kvd")
    old = service.show()["MainPID"]
    service.box.run("kill", "-KILL", old, check=True, timeout=60)
    clients = [service.script("from kvd_client import Client; print(Client().status().pid)") for _ in range(8)]
    answers = {client.communicate(timeout=60)[0].strip() for client in clients}
    assert len(answers) == 1, answers
    assert answers == {service.show()["MainPID"]}
    assert answers != {old}
    assert service.show()["NRestarts"] == "1"


def test_a_client_starts_it(service: Service) -> None:
    service.systemctl("start", "kvd.socket")
    assert service.show()["ActiveState"] == "inactive"
    assert str(service.status()["pid"]) == service.show()["MainPID"]


def test_a_wrong_configuration_does_not_start_and_the_journal_says_why(service: Service) -> None:
    service.configure("[peers]\nheartbeat_s = 'often'\n")
    assert service.systemctl("start", "kvd", check=False).returncode != 0
    shown = service.show()
    assert (shown["ActiveState"], shown["Result"], shown["NRestarts"]) == ("failed", "exit-code", "0")
    said = service.journal()
    assert "kvd: /etc/kvd/kvd.toml: $.peers.heartbeat_s: expected float, got str" in said
    assert '"event"' not in said, "the daemon ran"


def test_a_taken_port_is_named_and_it_starts_once_the_port_is_free(service: Service) -> None:
    with service.script(TAKE_PORT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        assert service.systemctl("start", "kvd", check=False).returncode != 0
        assert "127.0.0.1:7440" in service.journal()
        other.kill()
    assert service.status()["listen"] == "127.0.0.1:7440"


def test_an_address_that_comes_late_is_waited_for(service: Service) -> None:
    """As at boot, where the network is up before it has all of its addresses."""
    text = (UNITS / "kvd.toml").read_text()
    text = text.replace('#listen = "127.0.0.1:7440"', 'listen = "127.0.9.9:7440"')
    service.configure(text)
    service.box.run("ip", "address", "del", "127.0.0.1/8", "dev", "lo", check=True, timeout=60)
    try:
        assert service.systemctl("start", "kvd", check=False).returncode != 0
        assert "can't listen on 127.0.9.9:7440" in service.journal()
    finally:
        service.box.run("ip", "address", "add", "127.0.0.1/8", "dev", "lo", check=True, timeout=60)
    assert service.status()["listen"] == "127.0.9.9:7440"


def test_a_transfer_works_inside_the_sandbox_and_the_group_may_use_it(service: Service) -> None:
    service.systemctl("start", "kvd")
    with service.script(TRANSFER) as client:
        said, _ = client.communicate("\n", timeout=60)
    assert said == "open\nequal\n"


def test_metrics_come_from_a_process_of_their_own(service: Service) -> None:
    service.systemctl("start", "kvd", "kvd-metrics")
    try:
        with service.script(SCRAPE) as scraper:
            said, _ = scraper.communicate(timeout=60)
        assert "\nkvd_up 1\n" in said
        assert 'node="' in said
        assert service.show("kvd-metrics.service")["NRestarts"] == "0"
    finally:
        service.systemctl("stop", "kvd-metrics")


def test_others_may_not_use_it(service: Service) -> None:
    service.systemctl("start", "kvd")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    done = service.box.run(*nobody, "kvd", "status", "--socket", SOCKET, capture_output=True, timeout=60)
    assert done.returncode == 3
    assert "this user may not use it" in done.stderr


def test_the_shared_key_is_readable_by_root_alone(service: Service) -> None:
    service.box.write("/etc/kvd/peer.key", "c29tZSBsb25nIGVub3VnaCBrZXk=\n", 0o600)
    text = (UNITS / "kvd.toml").read_text()
    text = text.replace('#listen = "127.0.0.1:7440"', 'listen = "10.99.0.1:7440"').replace("#key_file", "key_file")
    service.configure(text, LoadCredential="peer.key:/etc/kvd/peer.key")
    service.systemctl("start", "kvd")
    assert service.status()["listen"] == "10.99.0.1:7440"


def test_the_sandbox_holds(service: Service) -> None:
    service.systemctl("start", "kvd")
    pid = service.show()["MainPID"]
    box = service.box
    status = dict(line.split(":\t", 1) for line in box.out("cat", f"/proc/{pid}/status").splitlines() if ":\t" in line)
    assert status["Uid"].split()[1] == box.out("id", "-u", "kvd") != "0"
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {status[kind] for kind in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    inside = ("nsenter", "-t", pid, "-m")
    assert "Read-only file system" in box.out(*inside, "touch", "/usr/local/probe")
    assert "Read-only file system" in box.out(*inside, "touch", "/etc/kvd/probe")
    assert box.out(*inside, "sh", "-c", "ls -A /root /home 2>/dev/null | grep -v :") == ""
    assert box.run(*inside, "test", "-e", "/dev/kvm", timeout=60).returncode != 0
    limits = box.out("cat", f"/proc/{pid}/limits")
    assert "Max core file size        0                    0" in limits
    exposure = box.out("systemd-analyze", "security", "--no-pager", "kvd.service").splitlines()[-1]
    assert float(exposure.split(":")[1].split()[0]) < 2.0, exposure


def test_the_journal_knows_how_serious_a_line_is(service: Service) -> None:
    service.systemctl("start", "kvd")
    service.box.run("journalctl", "--sync", check=True, timeout=60)
    lines = service.box.out("journalctl", "-u", "kvd.service", "-o", "json", "--no-pager").splitlines()
    entries = [json.loads(line) for line in lines]
    ready = next(e for e in entries if e["MESSAGE"].startswith("{") and json.loads(e["MESSAGE"])["event"] == "ready")
    assert ready["PRIORITY"] == "6"
