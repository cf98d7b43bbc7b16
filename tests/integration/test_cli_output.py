"""Commands whose standard files are closed or full, as cron jobs, units and pipes leave them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvd_client import Client, KVSpec
from kvd_client.errors import DaemonUnreachable
from tests.waiting import eventually

WAIT_S = 60


def shell(redirections: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command of kvd as a shell starts it, with its output and standard error captured where they are open."""
    line = f'exec "$0" -m kvd "$@" {redirections}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *args],
        capture_output=True,
        encoding=environ.get("PYTHONIOENCODING", "utf-8"),
        timeout=WAIT_S,
        check=False,
        env=os.environ | environ,
    )


def answers(address: Path) -> bool:
    with contextlib.suppress(DaemonUnreachable), Client(address) as client:
        return bool(client.status().node)
    return False


@pytest.mark.parametrize("command", [("errors",), ("plan", "layouts"), ("version",), ("config", "show")])
def test_a_full_disk_is_one_sentence(command: tuple[str, ...]) -> None:
    done = shell(">/dev/full", *command)
    assert (done.returncode, done.stderr) == (1, "kvd: the output can't be written: no space left on device\n")


def test_a_reader_that_has_enough_is_no_error() -> None:
    done = shell("| head -1", "plan", "layouts")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_output_that_the_caller_closed_goes_nowhere() -> None:
    assert (shell(">&-", "plan", "layouts").returncode, shell("2>&-", "plan", "layouts").returncode) == (0, 0)
    done = shell("2>&-", "config", "check", "--config", "/nonexistent/kvd.toml")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("redirections", [">&-", "<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_a_daemon_needs_no_standard_files(tmp_path: Path, redirections: str) -> None:
    address = tmp_path / "kvd.sock"
    line = f'exec "$0" -m kvd serve --socket {address} --listen 127.0.0.1:0 {redirections}'
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(WAIT_S)
        environ = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        daemon = subprocess.Popen(["bash", "-c", line, sys.executable], stderr=subprocess.DEVNULL, env=environ)
        try:
            while b"READY=1" not in notified.recv(4096):
                pass
            with Client(address) as client:
                assert client.status().pid == daemon.pid
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(WAIT_S) == 0
        finally:
            daemon.kill()
            daemon.wait()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_encoding_that_lacks_a_name_shows_it_all_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=16, dtype="f16", model="m")
    address = tmp_path / "api.sock"
    line = f'exec "$0" -m kvd serve --socket {address} --listen 127.0.0.1:0'
    daemon = subprocess.Popen(["bash", "-c", line, sys.executable], stderr=subprocess.DEVNULL)
    try:
        eventually("the daemon answers", lambda: answers(address))
        with Client(address) as client, client.decode("caf\xe9 \u8336", spec, [4]):
            found = shell("", "status", "--socket", str(address), *options, PYTHONIOENCODING="latin-1")
    finally:
        daemon.kill()
        daemon.wait()
    assert (found.returncode, found.stderr) == (0, "")
    assert "caf\xe9 ?" in found.stdout


def test_an_interrupt_while_the_program_is_loaded_leaves_no_trace() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'kvd.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from kvd.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
