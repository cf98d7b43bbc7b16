"""Daemons as processes of their own that begin as forks of the test's: in the guest, the imports alone take 10 s."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from kvd.errors import KvdError
from tests.integration.daemons import DaemonProcess

AHEAD = ("kvd.config_check", "kvd.daemon", "kvd.fabric.loopback", "kvd.fabric.tcp", "kvd.fabric.verbs.fabric")
"""What ``kvd serve`` imports as it goes, imported once for all forks: most of a daemon's start, otherwise."""


class Forked:
    """What :class:`DaemonProcess` needs of a ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("kvd serve", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedDaemon(DaemonProcess):
    """One ``kvd serve`` in a fork of this process, which keeps nothing of its parent open. Only the command line is not
    parsed, which alone takes an emulated CPU seconds."""

    def _spawn(self, config: str, notify: str, log: BinaryIO) -> Any:
        from kvd.cli.serve import serve

        for module in AHEAD:
            importlib.import_module(module)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return Forked(pid)
        code = 1
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for wanted, descriptor in enumerate((null, log.fileno(), log.fileno())):
                os.dup2(descriptor, wanted)
            os.closerange(3, 4096)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ["NOTIFY_SOCKET"] = notify
            code = serve(Path(config), socket=None, node=None, listen=None)
        except KvdError as error:
            print(f"kvd: {error.message}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
