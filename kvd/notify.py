"""systemd's side of a service: telling it that the daemon is ready, feeding its watchdog, taking sockets from it.

The protocol is datagrams of ``KEY=value`` lines to the socket in ``$NOTIFY_SOCKET`` (sd_notify(3)), so no library is
needed. Without that variable everything here does nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import structlog

from kvd.errors import ConfigError

log = structlog.get_logger(__name__)

FIRST_LISTEN_FD = 3
MAX_LISTEN_FDS = 64


class Notifier:
    """Sends the state of this process to its service manager. Never blocks, and never raises for a deaf manager."""

    def __init__(self, address: str = "", *, watchdog_s: float | None = None) -> None:
        """``address``: a path, or ``@name`` for an abstract socket; empty: nobody listens. ``watchdog_s``: the time
        after which the manager kills a process it hasn't heard of."""
        if address and address[0] not in "/@":
            raise ConfigError(f"NOTIFY_SOCKET is {address}; kvd knows paths and @abstract names", address=address)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._deaf = False
        self.watchdog_interval = None if watchdog_s is None or not address else watchdog_s / 2
        """Seconds between two :meth:`watchdog` calls: half of what the manager allows; ``None``: it doesn't ask."""

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ, pid: int | None = None) -> Notifier:
        """The manager that started this process. Takes its variables out of ``environ``, so that no child process
        speaks for the daemon."""
        address = environ.pop("NOTIFY_SOCKET", "")
        micros = environ.pop("WATCHDOG_USEC", "")
        meant = environ.pop("WATCHDOG_PID", "")
        mine = not meant or meant == str(os.getpid() if pid is None else pid)
        watchdog_s = int(micros) / 1e6 if micros.isascii() and micros.isdigit() and int(micros) and mine else None
        return cls(address, watchdog_s=watchdog_s)

    def ready(self, status: str = "") -> bool:
        """The daemon serves; also ends a :meth:`reloading`."""
        return self._send("READY=1", status)

    def status(self, text: str) -> bool:
        """One line for ``systemctl status``."""
        return self._send("", text)

    def watchdog(self) -> bool:
        """A sign of life."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> bool:
        """The daemon has begun to end."""
        return self._send("STOPPING=1", status)

    def reloading(self) -> bool:
        """The daemon reads its configuration again; :meth:`ready` must follow."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def extend_timeout(self, seconds: float) -> bool:
        """Ask for so much more time to start or to stop."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, status: str = "") -> bool:
        """Whether the message has been handed over."""
        if not self._address:
            return False
        lines = [state] if state else []
        if status:
            lines.append("STATUS=" + " ".join(status.split()))
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            # a full queue is the manager's trouble, not ours: the event loop must not wait for it
            if not self._deaf:
                log.warning("service_manager_deaf", error=str(error))
            self._deaf = True
            return False
        self._deaf = False
        return True


async def feed_watchdog(notifier: Notifier, alive: Callable[[], bool] = lambda: True) -> None:
    """Feed the watchdog until cancelled; returns at once if there is none.

    It runs on the daemon's event loop, so a loop that is blocked starves it. ``alive`` may say more: while it returns
    ``False`` (work is waiting and none gets done), no sign of life is given either.
    """
    interval = notifier.watchdog_interval
    while interval is not None:
        if alive():
            notifier.watchdog()
        await asyncio.sleep(interval)


class ListenFd(NamedTuple):
    """A listening socket that systemd opened: ``FileDescriptorName=`` of its unit, and the descriptor."""

    name: str
    fd: int


def listen_fds(environ: MutableMapping[str, str] = os.environ, pid: int | None = None) -> list[ListenFd]:
    """The descriptors that systemd passed to this process (sd_listen_fds(3)); the caller owns them.

    They are set to close on exec, and the variables are taken out of ``environ``: a second call returns nothing.
    Raises :class:`ConfigError` if the variables contradict themselves.
    """
    meant, count, names = (environ.pop(f"LISTEN_{key}", "") for key in ("PID", "FDS", "FDNAMES"))
    if meant != str(os.getpid() if pid is None else pid) or not count:
        return []
    if not (count.isascii() and count.isdigit() and int(count) <= MAX_LISTEN_FDS):
        raise ConfigError(
            f"LISTEN_FDS is {count}, not a number up to {MAX_LISTEN_FDS}; start kvd by kvd.socket", count=count
        )
    numbers = range(FIRST_LISTEN_FD, FIRST_LISTEN_FD + int(count))
    labels = names.split(":") if names else []
    labels += ["unknown"] * (len(numbers) - len(labels))
    found = [ListenFd(label, fd) for label, fd in zip(labels, numbers, strict=False)]
    for name, fd in found:
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            message = f"LISTEN_FDS names descriptor {fd} ({name}), which isn't open; start kvd by kvd.socket"
            raise ConfigError(message, fd=fd) from error
    return found
