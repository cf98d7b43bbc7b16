"""A throw-away systemd as PID 1 of its own namespaces: no VM, no container runtime, about half a second to boot.

Everything that units do inside is real (notify, watchdog, sockets, sandboxes, the journal), except for what a control
group without controllers can't enforce: MemoryMax, TasksMax, LimitMEMLOCK, a negative OOMScoreAdjust.

By hand, as root: ``python systemd_box.py [--ro DIR[:WHERE]]... [-v] -- COMMAND...``; exits as the command does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "ps", "systemctl", "journalctl")
SYSTEMD = "/lib/systemd/systemd"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S, STOP_S = 30, 10
PR_SET_PDEATHSIG = 1


def missing() -> str:
    """Why no box can be made here, in a few words; empty if it can."""
    if os.geteuid() != 0:
        return "a systemd of its own needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    absent += [] if os.path.exists(SYSTEMD) else [SYSTEMD]
    if absent:
        return f"missing: {', '.join(absent)}"
    try:
        with open("/proc/filesystems") as file:
            overlay = "overlay" in file.read()
        group = tempfile.mkdtemp(prefix="kvd-probe-", dir=_cgroup2())
        os.rmdir(group)
    except OSError as error:
        return f"no control group can be made: {error}"
    return "" if overlay else "the kernel has no overlayfs"


def _cgroup2() -> str:
    unified = "/sys/fs/cgroup/unified"
    root = unified if os.path.isdir(unified) else "/sys/fs/cgroup"
    if not os.path.exists(f"{root}/cgroup.procs"):
        raise FileNotFoundError(2, "no cgroup2 is mounted", root)
    return root


class Box:
    """A booted systemd. ``ro`` lists directories that units see, as ``DIR`` or ``DIR:WHERE``: not below /root or /tmp,
    which their sandboxes hide. The rest of this machine's root is there too; what is written to it is thrown away."""

    def __init__(self, ro: Sequence[str] = (), *, verbose: bool = False) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-box-"))
        self._cgroup = Path(_cgroup2(), self.directory.name)
        self._cgroup.mkdir()
        root, control = self.directory / "root", self.directory / "control"
        root.mkdir()
        control.mkdir()
        environ = {
            **os.environ,
            "BOX_RO": " ".join(ro),
            "BOX_CONTROL": str(control),
            "BOX_LOG_TARGET": "console" if verbose else "journal-or-kmsg",
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(control / "notify"))
            ready.settimeout(1)
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--pid"),
                    *("--fork", "--kill-child", "sh", str(HERE / "box-init.sh"), str(root)),
                ],
                env=environ,
                preexec_fn=self._enter_cgroup,
                stdin=subprocess.DEVNULL,
            )
            try:
                self._wait_ready(ready)
            except BaseException:
                self._process.kill()
                self._process.wait()
                self._clean_up()
                raise
        # the socket is closed and gone now: PID 1 goes on reporting, and would block once nobody reads
        os.unlink(control / "notify")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def _wait_ready(self, ready: socket.socket) -> None:
        for _ in range(BOOT_S):
            try:
                while b"READY=1" not in ready.recv(4096).splitlines():
                    pass
                return
            except TimeoutError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the box ended with {self._process.returncode}; see above") from None
        raise RuntimeError(f"the box was not ready within {BOOT_S} s; boot it with verbose=True to see why")

    def _enter_cgroup(self) -> None:
        (self._cgroup / "cgroup.procs").write_text("0")
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def command(self, *command: str) -> list[str]:
        """The command line that runs ``command`` inside, as root."""
        return [
            *("nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-C", "--root", "--wd"),
            *("env", "-i", f"PATH={PATH}", "LANG=C.UTF-8", "HOME=/root", "SYSTEMD_COLORS=0", "SYSTEMD_PAGER=cat"),
            *command,
        ]

    def run(self, *command: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run a command inside; arguments as of :func:`subprocess.run`."""
        return subprocess.run(self.command(*command), text=True, **kwargs)

    def out(self, *command: str) -> str:
        """What a command inside writes, standard error included, whatever its exit status."""
        done = self.run(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=60
        )
        return done.stdout.strip()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file inside; its directories are made."""
        script = 'mkdir -p "$(dirname "$0")" && cat > "$0" && chmod "$1" "$0"'
        self.run("sh", "-c", script, path, f"{mode:o}", input=text, check=True, timeout=60)

    def close(self) -> None:
        """Power off and leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGRTMIN + 14)  # systemctl exit
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        for directory, _, _ in os.walk(self._cgroup, topdown=False):
            os.rmdir(directory)
        shutil.rmtree(self.directory)

    def __enter__(self) -> Box:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command in a throw-away systemd.")
    parser.add_argument("--ro", action="append", default=[], metavar="DIR[:WHERE]")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    with Box(arguments.ro, verbose=arguments.verbose) as box:
        return box.run(*arguments.command).returncode


if __name__ == "__main__":
    sys.exit(main())
