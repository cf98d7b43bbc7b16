from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.notify import ListenFd, Notifier, feed_watchdog, listen_fds


class Manager:
    """What systemd is to a service: a datagram socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.socket.settimeout(10)

    def receive(self) -> list[str]:
        return self.socket.recv(4096).decode().splitlines()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory() as directory:
        where = f"{directory}/notify" if request.param == "path" else f"@kvd-test-{secrets.token_hex(8)}"
        found = Manager(where)
        yield found
        found.socket.close()


def test_what_the_manager_is_told(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    assert notifier.ready("serving\n2 peers")
    assert manager.receive() == ["READY=1", "STATUS=serving 2 peers"]
    assert notifier.status("3 transfers")
    assert manager.receive() == ["STATUS=3 transfers"]
    assert notifier.watchdog()
    assert manager.receive() == ["WATCHDOG=1"]
    assert notifier.reloading()
    first, second = manager.receive()
    assert first == "RELOADING=1"
    assert second.startswith("MONOTONIC_USEC=")
    assert notifier.extend_timeout(1.5)
    assert manager.receive() == ["EXTEND_TIMEOUT_USEC=1500000"]
    assert notifier.stopping("draining")
    assert manager.receive() == ["STOPPING=1", "STATUS=draining"]
    notifier.close()


def test_without_a_manager_nothing_happens() -> None:
    environ = {"WATCHDOG_USEC": "2000000"}
    notifier = Notifier.from_environment(environ)
    assert notifier.watchdog_interval is None
    assert not notifier.ready()
    assert environ == {}


def test_the_environment_is_taken_so_that_children_do_not_speak_for_the_daemon() -> None:
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "17", "HOME": "/"}
    assert Notifier.from_environment(environ, pid=17).watchdog_interval == 1.5
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    "environ",
    [
        {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "18"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {},
    ],
)
def test_the_watchdog_of_somebody_else_is_not_fed(environ: dict[str, str]) -> None:
    environ = {"NOTIFY_SOCKET": "/run/x", **environ}
    assert Notifier.from_environment(environ, pid=17).watchdog_interval is None


def test_an_address_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET is vsock:2:1234"):
        Notifier("vsock:2:1234")


def test_a_deaf_manager_neither_blocks_nor_raises(tmp_path: Path) -> None:
    assert not Notifier(str(tmp_path / "gone")).ready()
    manager = Manager(str(tmp_path / "full"))
    notifier = Notifier(manager.address)
    while notifier.status("x"):
        pass  # nobody reads: the queue fills up
    manager.receive()
    assert notifier.ready()
    manager.socket.close()
    notifier.close()


async def test_the_watchdog_is_fed_until_cancelled(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    manager.socket.setblocking(False)
    loop = asyncio.get_running_loop()
    feeding = asyncio.create_task(feed_watchdog(Notifier(manager.address, watchdog_s=0.002)))
    for _ in range(3):
        assert await loop.sock_recv(manager.socket, 4096) == b"WATCHDOG=1"
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    manager.socket.close()


async def test_the_watchdog_starves_while_no_work_gets_done(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    manager.socket.setblocking(False)
    answers = iter([False, False, True])
    asked: list[bool] = []

    def alive() -> bool:
        asked.append(next(answers, False))
        return asked[-1]

    feeding = asyncio.create_task(feed_watchdog(Notifier(manager.address, watchdog_s=0.002), alive))
    assert await asyncio.get_running_loop().sock_recv(manager.socket, 4096) == b"WATCHDOG=1"
    assert asked[:3] == [False, False, True]
    feeding.cancel()
    manager.socket.close()


async def test_no_watchdog_is_not_fed() -> None:
    await feed_watchdog(Notifier())


class TestListenFds:
    def test_names_and_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[int, bool]] = []
        monkeypatch.setattr(os, "set_inheritable", lambda fd, yes: calls.append((fd, yes)))
        environ = {"LISTEN_PID": "5", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "api:peers", "HOME": "/"}
        assert listen_fds(environ, pid=5) == [ListenFd("api", 3), ListenFd("peers", 4)]
        assert calls == [(3, False), (4, False)]
        assert environ == {"HOME": "/"}
        assert listen_fds(environ, pid=5) == []

    def test_without_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "set_inheritable", lambda fd, yes: None)
        assert listen_fds({"LISTEN_PID": "5", "LISTEN_FDS": "1"}, pid=5) == [ListenFd("unknown", 3)]

    @pytest.mark.parametrize(
        "environ", [{}, {"LISTEN_FDS": "1"}, {"LISTEN_PID": "6", "LISTEN_FDS": "1"}, {"LISTEN_PID": "5"}]
    )
    def test_those_of_another_process_are_left_alone(self, environ: dict[str, str]) -> None:
        assert listen_fds(environ, pid=5) == []

    @pytest.mark.parametrize("count", ["x", "-1", "1000"])
    def test_a_number_that_cannot_be_is_refused(self, count: str) -> None:
        with pytest.raises(ConfigError, match=f"LISTEN_FDS is {count}"):
            listen_fds({"LISTEN_PID": "5", "LISTEN_FDS": count}, pid=5)

    def test_a_descriptor_that_is_not_open_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def closed(fd: int, inheritable: bool) -> None:
            raise OSError(9, "Bad file descriptor")

        monkeypatch.setattr(os, "set_inheritable", closed)
        with pytest.raises(ConfigError, match=r"descriptor 3 \(api\), which isn't open"):
            listen_fds({"LISTEN_PID": "5", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "api"}, pid=5)
