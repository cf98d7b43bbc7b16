"""The demo's child processes: started in sessions of their own, watched, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvd.demo.errors import DemoFailed

GRACE_S = 5.0
"""How long a process may take to end after it was asked to; then it is killed."""
_SETTLE_S = 0.5
"""How long other processes may take to fail after the first, before one is blamed."""
_PR_SET_PDEATHSIG = 1

Event = dict[str, Any]


@dataclasses.dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    talks: bool
    pidfd: int
    partial: bytearray = dataclasses.field(default_factory=bytearray)
    code: int | None = None
    """How it ended: its exit code, or a signal's number below zero."""
    unneeded: bool = False
    """Its end is wanted, whatever its exit code, and no event."""
    exited: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Children:
    """Processes started by :meth:`start`. Those that talk send events, all of which :meth:`next` returns.

    ``folder`` takes their logs. Needs a running event loop; :meth:`stop` must be called, and returns when
    all of them have ended.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, dict(environment)
        self._loop = asyncio.get_running_loop()
        self._children: dict[str, _Child] = {}
        self._events: asyncio.Queue[tuple[str, Event]] = asyncio.Queue()
        self._finished: set[str] = set()

    def start(self, name: str, argv: Sequence[str], *, talks: bool) -> None:
        """Start a process. One that talks takes commands and sends events, a JSON object a line;
        standard output of all others goes to their log."""
        log = self._folder / f"{name}.log"
        pipe = subprocess.PIPE if talks else None
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                _on_leash(argv, signal.SIGKILL if talks else signal.SIGTERM),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or stderr,
                stderr=stderr,
                env=self._environment,
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends the others in order
            )
        if cores := cores_for(os.sched_getaffinity(0), daemon=not talks):
            with contextlib.suppress(OSError):  # not everywhere permitted, and nothing depends on it
                os.sched_setaffinity(process.pid, cores)
        child = self._children[name] = _Child(name, process, log, talks, os.pidfd_open(process.pid))
        self._loop.add_reader(child.pidfd, self._on_exit, child)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            self._loop.add_reader(process.stdout.fileno(), self._on_output, child)

    def send(self, name: str, **command: Any) -> None:
        """Send a command. One to a process that has just ended is lost; :meth:`next` tells of the end."""
        stdin = self._children[name].process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()

    async def next(self) -> tuple[str, Event]:
        """The next event and whose it is. Raises :class:`DemoFailed` when a process fails or ends."""
        while True:
            name, event = await self._events.get()
            if event["event"] in ("failed", "exited"):
                if event.get("code") == 0 and name in self._finished:
                    continue
                raise await self._blame(name, event)
            return name, event

    async def finish(self, name: str) -> None:
        """Wait for the end of a process that has done its work."""
        self._finished.add(name)
        await self._children[name].exited.wait()

    async def end(self, *names: str) -> None:
        """End processes that do not talk, whose names can then be used again."""
        children = [self._children[name] for name in names]
        for child in children:
            if child.exited.is_set():
                raise self.failure(child.name)
            child.unneeded = True
            self._signal(child, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                for child in children:
                    await child.exited.wait()
        for child in children:
            self._signal(child, signal.SIGKILL)
            child.process.wait()
            self._forget(child)
            del self._children[child.name]

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    def ended(self, name: str) -> bool:
        """Whether the process is known to have ended."""
        return self._children[name].exited.is_set()

    async def _blame(self, name: str, event: Event) -> DemoFailed:
        """One failure makes others: what a daemon says about its own end explains what its clients say."""
        failures = [(name, event)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while True:
                    found = await self._events.get()
                    if found[1]["event"] in ("failed", "exited"):
                        failures.append(found)
        for name, event in failures:
            if event["event"] == "exited" and not self._children[name].talks:
                return self.failure(name)
        for name, event in failures:
            if event["event"] == "failed":
                return DemoFailed(f"the {name} process failed: {event['message']}", process=name)
        return self.failure(failures[0][0])

    def failure(self, name: str) -> DemoFailed:
        """A process's unexpected end, with the last thing that it said."""
        child = self._children[name]
        said = child.log.read_text(errors="replace").strip().splitlines()
        code = child.process.poll()
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        last = f"; it said: {said[-1].strip()}" if said else ", and said nothing"
        return DemoFailed(f"the {name} process {how}{last}", process=name, code=code)

    def kill(self) -> None:
        """Kill all that still run, at once."""
        for child in self._children.values():
            self._signal(child, signal.SIGKILL)

    async def stop(self) -> None:
        """End all processes: those that talk first, then the others with SIGTERM, and by SIGKILL what
        does not end."""
        try:
            for talks in (True, False):
                running = [child for child in self._children.values() if child.talks is talks]
                for child in running:
                    if child.process.stdin is not None:
                        with contextlib.suppress(BrokenPipeError):
                            child.process.stdin.close()
                    if not talks:
                        self._signal(child, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        for child in running:
                            await child.exited.wait()
                for child in running:
                    self._signal(child, signal.SIGKILL)
        finally:
            for child in self._children.values():
                self._signal(child, signal.SIGKILL)
                child.process.wait()
                self._forget(child)

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        if child.process.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)

    def _on_output(self, child: _Child) -> None:
        stdout = child.process.stdout
        assert stdout is not None
        try:
            data = os.read(stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(stdout.fileno())
            return
        child.partial += data
        *lines, rest = bytes(child.partial).split(b"\n")
        child.partial = bytearray(rest)
        for line in lines:
            self._events.put_nowait((child.name, json.loads(line)))

    def _on_exit(self, child: _Child) -> None:
        self._loop.remove_reader(child.pidfd)
        if child.process.stdout is not None:
            before = -1
            while before != len(child.partial) + self._events.qsize():  # what it said before it ended counts
                before = len(child.partial) + self._events.qsize()
                self._on_output(child)
        # Not reaped before all end: its process group keeps its name so long, and what it started can be killed.
        ended = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        child.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        child.exited.set()
        if not child.unneeded:
            self._events.put_nowait((child.name, {"event": "exited", "code": child.code}))

    def _forget(self, child: _Child) -> None:
        self._loop.remove_reader(child.pidfd)
        os.close(child.pidfd)
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                if pipe.readable():
                    self._loop.remove_reader(pipe.fileno())
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


_LEASH = f"""import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    os._exit(1)
os.execv(sys.argv[3], sys.argv[3:])"""


def _on_leash(argv: Sequence[str], number: signal.Signals) -> list[str]:
    """The command, which is sent ``number`` should this process go without a word, killed by SIGKILL for
    instance.

    Asked for between fork and exec by a small program, since Python code must not run there beside threads.
    """
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(int(number)), str(os.getpid()), *argv]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would send a child to another daemon or another configuration, and
    with one thread for each of the numeric libraries."""
    mine = {"KVD_SOCKET", "KVD_CONFIG", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"}
    mine |= {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {name: value for name, value in environ.items() if name not in mine} | threads | quiet


def cores_for(available: set[int], *, daemon: bool) -> set[int]:
    """The cores that a process should run on; empty: any.

    Where daemons run in earnest, a GPU computes and leaves the host's cores to them. On a machine of two or three
    cores the demo's inference would compete with the transfers that it waits for, and the figures would be those of
    the scheduler: daemons get the first core to themselves.
    """
    cores = sorted(available)
    if not 2 <= len(cores) <= 3:
        return set()
    return {cores[0]} if daemon else set(cores[1:])


def peak_memory(pid: int) -> int:
    """The most bytes that a running process ever had in memory, shared ones included; 0 if that can't be
    told."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_time(pid: int) -> float:
    """Seconds of CPU that a running process has used; 0 if that can't be told."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def now() -> float:
    """The clock that all processes of this machine share."""
    return time.monotonic()
