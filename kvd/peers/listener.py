"""Accepts the connections of peers, with a bound on those that have not proven themselves yet."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Coroutine

from kvd.errors import Busy
from kvd.peers.link import Log
from kvd.peers.sockets import address_text

PAUSE_S = 0.1
"""How long accepting pauses when the system has no descriptors left."""


class Slot:
    """The place of one connection among the unproven ones. ``serve`` gives it back as soon as it knows its peer."""

    def __init__(self, listener: Listener, since: float) -> None:
        self._listener = listener
        self.since = since
        self.task: asyncio.Task[None] | None = None
        self.taken = False
        """Set by ``serve`` in its first step: the connection is its own from then on."""
        self.evicted: Busy | None = None

    def release(self) -> None:
        """Idempotent."""
        self._listener._release(self)


class Listener:
    """``serve(connection, its address, slot)`` runs as a task for each connection, and owns it.

    At most ``limit`` connections are unproven at a time. When one more comes, it waits for a slot; one that has been
    held for ``patience_s`` is taken away (its task is cancelled, with ``slot.evicted`` set), so that strangers who
    connect and say nothing can't keep peers out.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket, str, Slot], Coroutine[None, None, None]],
        *,
        limit: int,
        patience_s: float,
        log: Log,
    ) -> None:
        self._serve, self._limit, self._patience_s, self._log = serve, limit, patience_s, log
        self._slots: dict[Slot, None] = {}
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []

    @property
    def addresses(self) -> list[str]:
        """Where it listens, ports filled in."""
        return [address_text(sock.getsockname()) for sock in self._sockets]

    @property
    def unproven(self) -> int:
        """Connections that hold a slot."""
        return len(self._slots)

    def start(self, sockets: list[socket.socket]) -> None:
        """Accept on these listening sockets, which belong to the listener from now on."""
        self._sockets = sockets
        for sock in sockets:
            self._spawn(self._accept(sock))

    async def close(self) -> None:
        """Stop accepting, cancel what is being served, and return when all of it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(sock)
            except OSError as error:
                self._log.warning("a peer's connection can't be accepted", reason=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                await self._make_room()
            except BaseException:
                connection.close()
                raise
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # it may be reset already; reading it will tell
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            slot = Slot(self, loop.time())
            self._slots[slot] = None
            slot.task = self._spawn(self._serve(connection, address_text(address), slot))
            slot.task.add_done_callback(functools.partial(self._served, slot=slot, connection=connection))

    async def _make_room(self) -> None:
        while len(self._slots) >= self._limit:
            oldest = next(iter(self._slots))
            wait_s = oldest.since + self._patience_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._freed.wait()
            else:
                oldest.evicted = Busy(
                    f"{self._limit} connections wait for their handshake; this was the oldest", retry_after_s=1.0
                )
                assert oldest.task is not None
                oldest.task.cancel()
                self._release(oldest)

    def _release(self, slot: Slot) -> None:
        if slot in self._slots:
            del self._slots[slot]
            self._freed.set()

    def _served(self, task: asyncio.Task[None], slot: Slot, connection: socket.socket) -> None:
        self._release(slot)
        if not slot.taken:
            connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.warning("serving a peer's connection met a bug", reason=repr(error))
