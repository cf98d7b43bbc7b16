"""The Unix socket of the local API: listening, admitting processes, and giving the path back.

Plain non-blocking sockets under ``add_reader``, not transports: descriptors are passed with the replies, and a round
trip has no more than one turn of the loop in it. What a connection does is in :mod:`kvd.api.session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvd.api.access import check_access, group_id, peer_of
from kvd.api.service import Answer, ApiLimits, Log, Service
from kvd.api.session import ClientSession, Context
from kvd.errors import AddressInUse, Busy, ConfigError, KvdError
from kvd_client.framing import encode
from kvd_client.protocol import Failure

__all__ = ["Answer", "ApiLimits", "ApiServer", "ClientSession", "Log", "Service"]

_BACKLOG = 128
_ACCEPTS_A_TURN = 16
_ACCEPT_PAUSE_S = 0.5
_MAX_PATH = 107
LOOKERS = ("kvd status", "kvd metrics")
"""What the commands call themselves that only ask for the status."""
MOST_LOOKERS = 4
"""How many of them are served above the limit of clients."""


class ApiServer:
    """Serves the local API at ``socket_path``, or on ``listen_fd``, a listening socket that somebody else made
    (systemd) and whose path and permissions are that one's business.

    With ``group`` the socket belongs to that group, and only root, the daemon's user and the group's members are
    served. ``node`` and ``boot`` are what :class:`Welcome` says.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        service: Service,
        *,
        group: str | None = None,
        node: str,
        boot: str,
        log: Log,
        limits: ApiLimits | None = None,
        listen_fd: int | None = None,
    ) -> None:
        self.path = Path(socket_path)
        self._service = service
        self._group = group
        self._group_id = -1
        self._node, self._boot = node, boot
        self._log = log
        self._limits = limits if limits is not None else ApiLimits()
        self._listen_fd = listen_fd
        self._listener: socket.socket | None = None
        self._reserve = -1
        """A descriptor kept for telling a process that there are none left; -1: none."""
        self._identity: tuple[int, int] | None = None
        self._sessions: set[ClientSession] = set()
        self._numbers = itertools.count(1)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._empty = asyncio.Event()
        self._context: Context | None = None

    @property
    def clients(self) -> list[ClientSession]:
        """The processes that have been welcomed and are connected."""
        return [session for session in self._sessions if session.welcomed and not session.closed]

    @property
    def failures(self) -> Mapping[str, int]:
        """Requests that failed since the start, by code."""
        return self._context.failures if self._context is not None else {}

    async def start(self) -> None:
        """Listen. Raises :class:`AddressInUse` where a daemon answers at the path already, and :class:`ConfigError`
        for a path or a group that cannot be used. A socket that a dead daemon left is replaced."""
        if self._group is not None:
            self._group_id = group_id(self._group)
        self._listener = self._inherited(self._listen_fd) if self._listen_fd is not None else self._bind()
        self._reserve = _open_reserve()
        loop = asyncio.get_running_loop()
        self._context = Context(
            loop=loop,
            service=self._service,
            log=self._log,
            limits=self._limits,
            node=self._node,
            boot=self._boot,
            welcomed=self._admit,
            gone=self._gone,
        )
        loop.add_reader(self._listener.fileno(), self._accept)
        self._timers["sweep"] = loop.call_later(self._limits.sweep_s, self._sweep)

    async def close(self) -> None:
        """Stop listening, remove the socket if it is still this server's, and end all connections; on return
        ``client_lost`` has been called for each. Idempotent."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._unlink()
            self._listener.close()
            self._listener = None
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        for session in list(self._sessions):
            session.close("the daemon stops")
        while self._sessions:
            self._empty.clear()
            await self._empty.wait()

    # --- the path -------------------------------------------------------------------------------------------------

    def _inherited(self, fd: int) -> socket.socket:
        try:
            listener = socket.socket(fileno=fd)
            right = listener.family == socket.AF_UNIX and listener.type == socket.SOCK_STREAM
            right = right and bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError as error:
            raise ConfigError(
                f"descriptor {fd}, passed for the local API, is no socket ({error.strerror}); start kvd by kvd.socket"
            ) from error
        if not right:
            raise ConfigError(
                f"descriptor {fd}, passed for the local API, is no listening Unix stream socket; "
                "kvd.socket needs ListenStream= with a path"
            )
        listener.setblocking(False)
        return listener

    def _bind(self) -> socket.socket:
        path = self.path
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigError(
                f"api.socket: {path} is longer than the {_MAX_PATH} bytes that a Unix socket's path can have; "
                "name a shorter one",
                path=str(path),
            )
        with self._locked_parent():
            self._clear_path()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                listener.bind(os.fspath(path))
                found = os.stat(path)
                self._identity = (found.st_dev, found.st_ino)
                # Nobody can connect before listen(), so nobody meets the permissions that bind() gave.
                if self._group is not None:
                    os.chown(path, -1, self._group_id)
                os.chmod(path, 0o660)
                listener.listen(_BACKLOG)
            except OSError as error:
                self._unlink()
                listener.close()
                raise ConfigError(
                    f"api.socket: {path} can't be used: {error.strerror}; name another path or run as another user",
                    path=str(path),
                    errno=error.errno,
                ) from error
        return listener

    @contextlib.contextmanager
    def _locked_parent(self) -> Iterator[None]:
        # Two daemons that start at once must not both find a dead socket and replace each other's. A lock on the
        # folder leaves no file behind and is gone with its holder.
        parent = self.path.absolute().parent
        try:
            folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"api.socket: the folder {parent} can't be opened ({error.strerror}); "
                "create it, or name another socket path",
                path=str(self.path),
            ) from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _clear_path(self) -> None:
        path = os.fspath(self.path)
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"api.socket: {path} exists and is not a socket; remove it or name another path", path=path
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            result = probe.connect_ex(path)
        # ECONNREFUSED alone means that nobody listens; a full queue (EAGAIN) belongs to somebody.
        if result != errno.ECONNREFUSED:
            raise AddressInUse(
                f"another daemon listens at {path}; stop it, or name another socket path",
                path=path,
                errno=result,
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._log.info("replaced the socket of a daemon that is gone", path=path)

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._identity:
                os.unlink(self.path)
        self._identity = None

    # --- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        listener, context = self._listener, self._context
        if listener is None or context is None:
            return
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._turn_away(listener):
                    return  # whoever else waits makes the listener readable again
                # The listener stays readable, and without a pause the loop would spin.
                self._log.warning("can't accept clients for a moment", reason=error.strerror or str(error))
                context.loop.remove_reader(listener.fileno())
                self._timers["accept"] = context.loop.call_later(_ACCEPT_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            self._begin(context, sock)

    def _turn_away(self, listener: socket.socket) -> bool:
        """Out of descriptors: tell the next process at once, with the descriptor that is kept for this, instead of
        leaving it to its time-out. False where that one is gone, too."""
        if self._reserve < 0:
            self._reserve = _open_reserve()
        if self._reserve < 0:
            return False
        os.close(self._reserve)
        self._reserve = -1
        with contextlib.suppress(OSError):  # somebody else took the descriptor, or the process has left
            sock, _ = listener.accept()
            with sock:
                busy = Busy(
                    "the daemon has no descriptors for another client; try again later, and raise the limit on open "
                    "files (systemd: LimitNOFILE=)",
                    errno="EMFILE",
                    retry_after_s=1.0,
                )
                frame = encode(Failure(code=busy.code, message=busy.message, fields=busy.fields))
                sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._log.warning("client turned away", reason=busy.message)
        self._reserve = _open_reserve()
        return self._reserve >= 0

    def _resume(self) -> None:
        if self._listener is not None and self._context is not None:
            self._context.loop.add_reader(self._listener.fileno(), self._accept)

    def _begin(self, context: Context, sock: socket.socket) -> None:
        try:
            peer = peer_of(sock)
        except OSError as error:
            self._log.warning("client closed", reason=f"no credentials: {error.strerror}")
            sock.close()
            return
        session = ClientSession(context, next(self._numbers), sock, peer)
        self._sessions.add(session)
        try:
            if len(self._sessions) > 2 * self._limits.clients + MOST_LOOKERS:
                raise self._full()
            if self._group is not None:
                check_access(peer, self._group, self._group_id)
        except KvdError as error:
            session.refuse(error)

    def _admit(self, session: ClientSession) -> None:
        others = self.clients
        if len(others) < self._limits.clients:
            return
        # Who asks what is wrong must not be told only that too many ask.
        if session.name not in LOOKERS or sum(other.looks_only for other in others) >= MOST_LOOKERS:
            raise self._full()
        session.looks_only = True

    def _full(self) -> Busy:
        return Busy(
            f"the daemon serves {self._limits.clients} processes already, as many as api.max_clients allows; close "
            "one, or raise it",
            clients=self._limits.clients,
            retry_after_s=1.0,
        )

    def _gone(self, session: ClientSession) -> None:
        self._sessions.discard(session)
        if not self._sessions:
            self._empty.set()

    def _sweep(self) -> None:
        if self._context is None:
            return
        for session in list(self._sessions):
            session.sweep()
        self._timers["sweep"] = self._context.loop.call_later(self._limits.sweep_s, self._sweep)


def _open_reserve() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
