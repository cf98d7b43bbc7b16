"""Mistakes in the configuration of verbs: one sentence with the fix and an exit code, wherever they are met."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.cli import config as configuration
from kvd.cli.doctor import doctor
from kvd.cli.main import exit_code
from kvd.errors import KvdError
from tests.verbs.devices import link_down, needs_devices

pytestmark = needs_devices

NOBODY = 65534
WRONG = {
    "device": ("mlx5_9", "(set fabric.device to|choose) one of rxe0, rxe1"),
    "port": (7, "has an active port 7(; | -> )set its .* or choose the port with fabric.port"),
    "gid_index": (200, "no GID 200 .*(; |-> )set fabric.gid_index to 1, or to -1"),
}


def written(folder: Path, name: str = "verbs", **values: object) -> Path:
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in {"name": name, **values}.items()]
    path = folder / "kvd.toml"
    path.write_text(
        "\n".join(["[node]", 'id = "wrong"', "[memory]", 'pool = "64MiB"', 'arena = "16MiB"', "[fabric]", *lines])
        + "\n"
    )
    return path


def said(command: Callable[[], int]) -> tuple[int, str]:
    """Exit code and output, as of the command line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = command()
        except KvdError as error:
            code = exit_code(error)
            print(error.message)
    return code, " ".join(out.getvalue().split())


def serve(path: Path) -> int:
    """As far as a daemon gets that can't have its fabric."""
    from kvd.daemon import Daemon

    config, _ = configuration.read(path)

    async def begin() -> None:
        Daemon(config)._pool.prepare(config.memory.arena)

    asyncio.run(begin())
    return 0


COMMANDS: list[tuple[Callable[[Path], int], int]] = [(configuration.check, 2), (doctor, 1), (serve, 1)]
"""With the exit code of each."""


def as_nobody(work: Callable[[], int], memlock: int) -> tuple[int, str]:
    """What ``work`` says in a process without rights."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                code, text = said(work)
            except BaseException as error:
                code, text = 99, repr(error)
            os.write(writing, f"{code} {text}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        code, _, text = pipe.read().partition(" ")
    os.waitpid(pid, 0)
    return int(code), text


@pytest.mark.parametrize("key", list(WRONG))
def test_a_wrong_value(tmp_path: Path, key: str) -> None:
    value, says = WRONG[key]
    path = written(tmp_path, **{key: value})
    for command, fails in COMMANDS:
        code, text = said(lambda command=command: command(path))  # type: ignore[misc]
        assert code == fails, text
        assert re.search(says, text), text
    code, text = said(lambda: configuration.check(written(tmp_path, "auto", **{key: value})))
    assert code == 0
    assert "auto means tcp here" in text


def test_a_link_local_address_that_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, gid_index=0)
    code, text = said(lambda: configuration.check(path))
    assert code == 2
    assert "a link-local GID 0" in text
    assert "set fabric.gid_index to 1, or to -1" in text


def test_a_port_that_is_down(tmp_path: Path) -> None:
    path = written(tmp_path, device="rxe1")
    with link_down():
        for command, fails in COMMANDS:
            code, text = said(lambda command=command: command(path))  # type: ignore[misc]
            assert code == fails, text
            assert "port 1 of the RDMA device 'rxe1' is not active" in text
            assert "set its network interface up" in text
    assert said(lambda: configuration.check(path)) == (0, f"{path}: usable")


@pytest.mark.parametrize(("command", "fails"), COMMANDS)
def test_a_user_without_rights(tmp_path: Path, command: Callable[[Path], int], fails: int) -> None:
    """First not on the device's file, then not to lock memory."""
    path = written(tmp_path)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o755)
    files = sorted(Path("/dev/infiniband").glob("uverbs*"))
    for file in files:
        file.chmod(0o600)
    try:
        code, text = as_nobody(lambda: command(path), 1 << 30)
        assert code == fails, text
        assert "group" in text
        assert "rdma" in text
    finally:
        for file in files:
            file.chmod(0o666)  # as udev's rules have it
    code, text = as_nobody(lambda: command(path), 1 << 16)
    assert code == fails, text
    assert re.search("memlock limit(:| is) 65536 bytes", text), text
    assert "LimitMEMLOCK=infinity" in text


def test_auto_is_tcp_where_the_memory_must_not_be_locked(tmp_path: Path) -> None:
    """With one arena's worth, too: the next one would have been refused when it was needed."""
    path = written(tmp_path, "auto")
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o755)
    limit = "memlock limit(:| is) 20971520 bytes, but the pool has 64MiB"
    for command, start in ((serve, "since verbs can't be used.*"), (configuration.check, "auto means tcp here: ")):
        code, text = as_nobody(lambda command=command: command(path), 20 << 20)  # type: ignore[misc]
        assert code == 0, text
        assert re.search(start + limit, text), text
