"""Bringing a session up, as far as dialling and accepting have it in common: link, fabric, and what can go wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kvd.errors import FabricError, KvdError, PeerLost, PeerUnreachable, ShuttingDown
from kvd.fabric.base import Fabric
from kvd.fabric.priority import go_first
from kvd.peers.config import PeersConfig
from kvd.peers.link import ControlLink, Log
from kvd.peers.session import PeerSession
from kvd.peers.sockets import give_up_after, reason_of
from kvd.peers.table import SessionTable
from kvd.types import Lane, NodeId
from kvd.wire.guard import guards
from kvd.wire.hello import Identity
from kvd.wire.machine import Established
from kvd.wire.messages import PeerMessage

STALLED = 3.0
"""A lane whose bytes are not acknowledged for so many times ``timeout_s`` has failed, though the peer is heard of."""


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


class SessionBuilder:
    """Makes a session of a connection that is through its handshake: :meth:`open_link`, then :meth:`join`."""

    def __init__(
        self,
        identity: Identity,
        config: PeersConfig,
        fabrics: Sequence[Fabric],
        table: SessionTable,
        on_message: Callable[[PeerSession, PeerMessage], None],
        on_fabric_message: Callable[[PeerSession, Lane, bytes], None],
        log: Log,
    ) -> None:
        self.identity = identity
        """How this node introduces itself; replaced once it listens, and when its keys are exchanged."""
        self._config = config
        self._fabrics = {fabric.name: fabric for fabric in fabrics}
        self._table, self._log = table, log
        self._on_message, self._on_fabric_message = on_message, on_fabric_message
        self._links: set[ControlLink] = set()

    @property
    def links(self) -> int:
        """Control connections that are open: of sessions, and of those that are still connecting their fabric."""
        return len(self._links)

    def lanes(self, fabric: str) -> tuple[Lane, ...]:
        """Lanes for which the fabric that the two sides agreed on needs a stream."""
        found = self._fabrics.get(fabric)
        return found.capabilities.lanes_need_streams if found else ()

    async def open_link(self, peer: Established, control: socket.socket, *, dialled: bool) -> ControlLink:
        """Put the control connection, which is through its handshake, into a link's hands."""
        link = ControlLink(
            peer.node,
            heartbeat_s=self._config.heartbeat_s,
            timeout_s=self._config.timeout_s,
            log=self._log,
            protection=guards(peer.lane_key, dialled=dialled) if peer.authenticated else None,
            messages_s=self._config.messages_s,
        )
        go_first(control)  # it carries the requests of fetches
        try:
            await asyncio.get_running_loop().create_connection(lambda: link, sock=control)
        except BaseException:
            control.close()
            raise
        self._links.add(link)
        link.closed.add_done_callback(lambda _: self._links.discard(link))
        return link

    async def join(
        self,
        peer: Established,
        link: ControlLink,
        streams: Mapping[Lane, socket.socket],
        *,
        address: str,
        dialled: bool,
    ) -> PeerSession:
        """Connect the fabric and bring the session to life. ``streams`` are the fabric's from here on."""
        try:
            for stream in streams.values():
                give_up_after(stream, STALLED * self._config.timeout_s)
            fabric = self._fabrics[peer.fabric]
            secret = peer.lane_key if peer.authenticated else b""
            endpoint = await fabric.connect(SessionBringup(link, streams, secret=secret, dialled=dialled))
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        # From here to the end nothing is awaited: the endpoint must have its callbacks before it hears of anything.
        if link.error is not None:
            endpoint.close()
            raise link.error
        session = PeerSession(
            peer,
            link,
            endpoint,
            fabric=fabric,
            address=address,
            dialled=dialled,
            on_message=self._on_message,
            on_fabric_message=self._on_fabric_message,
            on_end=self._table.ended,
            log=self._log,
        )
        self._table.add(session)
        session.start()
        return session

    async def close(self) -> None:
        """End every link, and return when the last one is closed and has reported its end."""
        for link in list(self._links):
            link.end(shutting_down(self.identity.node), tell=True)
        await asyncio.sleep(0)  # lets the links report their ends
        await asyncio.gather(*(link.closed for link in self._links))


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


def failure_of(node: NodeId, address: str, link: ControlLink | None, error: KvdError | OSError) -> KvdError:
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


def shutting_down(node: NodeId) -> ShuttingDown:
    """What everybody is told once the daemon closes."""
    return ShuttingDown(f"node {node} is shutting down; use another one", node=node)
