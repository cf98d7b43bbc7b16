"""The demo's children: what they say, how they fail, and that none of them outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvd.demo.errors import DemoFailed
from kvd.demo.processes import Children, child_environment, cores_for

ECHO = """
from kvd.demo.lines import run_child
def body(line):
    print("what a library prints")
    line.emit("up")
    while True:
        line.emit("got", what=line.command()["what"])
run_child(body)
"""


@contextlib.asynccontextmanager
async def children(folder: Path) -> AsyncIterator[Children]:
    made = Children(folder, child_environment(os.environ))
    try:
        yield made
    finally:
        await made.stop()
    for name in made._children:
        assert made._children[name].process.returncode is not None


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class Watch:
    """A process of somebody else's, watched by a descriptor, so that its number can't become another's."""

    def __init__(self, pid: int) -> None:
        self.pidfd = os.pidfd_open(pid)

    def ends(self) -> bool:
        """Wait until it has ended."""
        ready, _, _ = select.select([self.pidfd], [], [], 20)
        os.close(self.pidfd)
        return bool(ready)


async def test_commands_and_events(tmp_path: Path) -> None:
    async with children(tmp_path) as made:
        made.start("echo", python(ECHO), talks=True)
        assert await made.next() == ("echo", {"event": "up"})
        for what in ("a", "é\n", "x" * 300_000):
            made.send("echo", what=what)
            assert await made.next() == ("echo", {"event": "got", "what": what})
    assert (tmp_path / "echo.log").read_text() == "what a library prints\n"


async def test_a_failure_is_one_sentence(tmp_path: Path) -> None:
    code = """
from kvd.demo.lines import run_child
from kvd.demo.errors import DemoFailed
def body(line):
    raise DemoFailed("the sky fell; hold it up")
run_child(body)
"""
    async with children(tmp_path) as made:
        made.start("sky", python(code), talks=True)
        with pytest.raises(DemoFailed, match="the sky process failed: the sky fell; hold it up"):
            await made.next()


async def test_an_unforeseen_error_keeps_its_traceback_in_the_log(tmp_path: Path) -> None:
    code = "from kvd.demo.lines import run_child\nrun_child(lambda line: 1 // 0)"
    async with children(tmp_path) as made:
        made.start("sum", python(code), talks=True)
        with pytest.raises(DemoFailed, match="the sum process failed: ZeroDivisionError: "):
            await made.next()
    assert "Traceback" in (tmp_path / "sum.log").read_text()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('port 7 is taken')", "ended with code 1; it said: port 7 is taken"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL, and said nothing"),
    ],
)
async def test_an_end_that_nobody_asked_for(tmp_path: Path, code: str, said: str) -> None:
    async with children(tmp_path) as made:
        made.start("daemon", python(code), talks=False)
        with pytest.raises(DemoFailed, match=f"the daemon process {said}"):
            await made.next()
        assert made.ended("daemon")


async def test_the_daemon_is_blamed_for_what_its_client_reports(tmp_path: Path) -> None:
    client = """
from kvd.demo.lines import run_child
from kvd_client.errors import DaemonLost
def body(line):
    line.emit("up")
    line.command()
    raise DaemonLost("the connection to the daemon ended")
run_child(body)
"""
    async with children(tmp_path) as made:
        made.start("client", python(client), talks=True)
        await made.next()
        made.send("client")
        made.start("daemon", python("import sys; sys.exit('no memory')"), talks=False)
        with pytest.raises(DemoFailed, match="the daemon process ended with code 1; it said: no memory"):
            await made.next()


async def test_a_child_that_has_done_its_work_may_end(tmp_path: Path) -> None:
    code = "from kvd.demo.lines import run_child\nrun_child(lambda line: line.emit('done'))"
    async with children(tmp_path) as made:
        made.start("model", python(code), talks=True)
        assert await made.next() == ("model", {"event": "done"})
        await made.finish("model")
        made.start("echo", python(ECHO), talks=True)
        assert await made.next() == ("echo", {"event": "up"})


BELOW = """
import os, signal, subprocess, sys
from kvd.demo.lines import Line
below = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.DEVNULL)
"""


async def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    code = BELOW + "line = Line(); line.emit('below', pid=below.pid); line.command()"
    async with children(tmp_path) as made:
        made.start("child", python(code), talks=True)
        _, event = await made.next()
        below = Watch(event["pid"])
    assert below.ends()


async def test_a_child_may_clean_up_when_it_shall_go(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
from pathlib import Path
from kvd.demo.lines import run_child
file = Path({str(tmp_path / "unfinished")!r})
def body(line):
    try:
        file.touch()
        line.emit("working")
        subprocess.run([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.DEVNULL)
    finally:
        file.unlink()
run_child(body, cleans_up=True)
"""
    async with children(tmp_path) as made:
        made.start("model", python(code), talks=True)
        assert await made.next() == ("model", {"event": "working"})
        assert (tmp_path / "unfinished").exists()
    assert not (tmp_path / "unfinished").exists()
    assert made._children["model"].code == 130


async def test_what_ignores_signals_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.demo.processes.GRACE_S", 0.1)
    deaf = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    talks = 'sys.stdout.write(\'{"event": "up"}\\n\'); sys.stdout.flush()\n'
    async with children(tmp_path) as made:
        made.start("talker", python(deaf + talks + "signal.pause()"), talks=True)
        await made.next()
    assert made._children["talker"].process.returncode == -signal.SIGKILL


async def test_kill_cuts_stop_short(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    made = Children(tmp_path, child_environment(os.environ))
    made.start("stubborn", python(code), talks=False)
    stop = asyncio.create_task(made.stop())
    made.kill()
    await stop
    assert made._children["stubborn"].process.returncode == -signal.SIGKILL


async def test_children_go_with_a_killed_parent(tmp_path: Path) -> None:
    parent = f"""
import asyncio, os, sys
from pathlib import Path
from kvd.demo.lines import Line
from kvd.demo.processes import Children
async def main():
    made = Children(Path({str(tmp_path)!r}), os.environ)
    made.start("daemon", [sys.executable, "-c", "import signal; signal.pause()"], talks=False)
    Line().emit("below", pid=made.pid("daemon"))
    await made.next()
asyncio.run(main())
"""
    async with children(tmp_path) as made:
        made.start("parent", python(parent), talks=True)
        _, event = await made.next()
        below = Watch(event["pid"])
        os.kill(made.pid("parent"), signal.SIGKILL)
        assert below.ends()


async def test_a_name_can_be_used_again_after_the_end(tmp_path: Path) -> None:
    async with children(tmp_path) as made:
        for _ in range(2):
            made.start("daemon", python("import signal; signal.pause()"), talks=False)
            watch = Watch(made.pid("daemon"))
            await made.end("daemon")
            assert watch.ends()
        made.start("echo", python(ECHO), talks=True)
        assert await made.next() == ("echo", {"event": "up"})  # no word of those that were to end


async def test_an_end_that_came_by_itself_is_told(tmp_path: Path) -> None:
    async with children(tmp_path) as made:
        made.start("daemon", python("import sys; print('why', file=sys.stderr); sys.exit(4)"), talks=False)
        await made._children["daemon"].exited.wait()
        with pytest.raises(DemoFailed, match="the daemon process ended with code 4; it said: why"):
            await made.end("daemon")


@pytest.mark.parametrize(
    ("available", "daemons", "inference"),
    [({5}, set(), set()), ({0, 1}, {0}, {1}), ({7, 3, 4}, {3}, {4, 7}), ({0, 1, 2, 3}, set(), set())],
)
def test_daemons_and_inference_do_not_share_few_cores(
    available: set[int], daemons: set[int], inference: set[int]
) -> None:
    assert cores_for(available, daemon=True) == daemons
    assert cores_for(available, daemon=False) == inference
