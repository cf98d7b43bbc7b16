"""The parts of bringing a session up: what its fabric gets, the lanes that come in, and what can go wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvd.errors import FabricError, KvdError, PeerLost, PeerUnreachable
from kvd.peers.link import ControlLink
from kvd.peers.session import PeerSession
from kvd.peers.sockets import reason_of
from kvd.types import Lane, NodeId
from kvd.wire.handshake import Acceptor


class SessionBringup:
    """What a session offers its fabric (:class:`kvd.fabric.base.Bringup`)."""

    def __init__(
        self, link: ControlLink, streams: Mapping[Lane, socket.socket], *, secret: bytes, dialled: bool
    ) -> None:
        self._link, self._streams, self._secret, self._dialled = link, streams, secret, dialled

    @property
    def streams(self) -> Mapping[Lane, socket.socket]:
        return self._streams

    @property
    def secret(self) -> bytes:
        return self._secret

    @property
    def dialled(self) -> bool:
        return self._dialled

    async def exchange(self, blob: bytes) -> bytes:
        return await self._link.exchange(blob)

    def tell(self, blob: bytes) -> None:
        self._link.tell(blob)

    def listen(self, told: Callable[[bytes], None]) -> None:
        self._link.listen(told)


class Incoming:
    """A session on the accepting side that gathers its lanes."""

    def __init__(self, machine: Acceptor) -> None:
        self.machine = machine
        self.streams: dict[Lane, socket.socket] = {}
        self.arrived = asyncio.Event()


async def unless_ended(link: ControlLink, work: Coroutine[Any, Any, PeerSession]) -> PeerSession:
    """The result of ``work``, which is cancelled when ``link`` ends first; raises what ended it then."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        either: list[asyncio.Future[Any]] = [task, link.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert link.error is not None
    raise link.error


def dial_failure(node: NodeId, address: str, link: ControlLink | None, error: KvdError | OSError) -> KvdError:
    """What the callers of :meth:`Peers.session` get for what ended an attempt."""
    if link is not None and link.error is not None:
        error = link.error  # the peer ended it, and everything else followed from that
    if isinstance(error, PeerLost) and error.fields.get("reason") == FabricError.code:
        error = FabricError(error.message)  # the peer's fabric found it first, and this one was not asked any more
    if isinstance(error, KvdError) and not isinstance(error, PeerLost):
        error.fields.setdefault("peer", node)
        error.fields.setdefault("address", address)
        return error
    if isinstance(error, TimeoutError):
        reason = "it did not finish the handshake in time"
    else:
        reason = error.message if isinstance(error, KvdError) else reason_of(error)
    return PeerUnreachable(
        f"no session with node {node} at {address}: {reason}; look at its log",
        peer=node,
        address=address,
        reason=reason,
    )
