"""Dialling: one attempt a node at a time, whoever asks, over the first fabric that works on the way to it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
import socket
from collections.abc import Container, Sequence

from kvd.errors import FabricError, FingerprintMismatch, KvdError, PeerUnknown
from kvd.peers import sockets
from kvd.peers.bringup import SessionBuilder, failure_of, shutting_down, unless_ended
from kvd.peers.config import PeersConfig
from kvd.peers.link import ControlLink, Log
from kvd.peers.records import Records
from kvd.peers.session import PeerSession
from kvd.peers.table import SessionTable
from kvd.types import Lane, NodeId
from kvd.wire.auth import NONCE_BYTES
from kvd.wire.handshake import Dialler, LaneDialler
from kvd.wire.machine import Established

AVOIDED_S = 60.0
"""How long a fabric that did not work on the way to a peer, where another one did, is not offered to it."""
REDIAL_MOST_S = 60.0
"""Longest pause between two attempts that nobody asked for."""
REDIAL_PATIENCE = 6
"""Who has been dialled by a lost peer gives that one so many times the first pause to come back by itself."""


class Dialling:
    """Part of :class:`~kvd.peers.manager.Peers`."""

    def __init__(
        self,
        config: PeersConfig,
        builder: SessionBuilder,
        table: SessionTable,
        records: Records,
        log: Log,
    ) -> None:
        self._node, self._addresses = builder.identity.node, config.peers
        self._connect_timeout_s, self._handshake_timeout_s = config.connect_timeout_s, config.handshake_timeout_s
        self._builder, self._table, self._records, self._log = builder, table, records, log
        self._attempts: dict[NodeId, asyncio.Task[PeerSession]] = {}
        self._redial_s = config.redial_s
        self._redials: dict[NodeId, asyncio.TimerHandle] = {}
        self._unasked: set[NodeId] = set()
        """Of the nodes that are being dialled, those that nobody waits for."""
        self._closed = False

    @property
    def under_way(self) -> Container[NodeId]:
        """The nodes that are being dialled."""
        return self._attempts

    async def session(self, node: NodeId) -> PeerSession:
        """As :meth:`kvd.peers.manager.Peers.session`."""
        if self._closed:
            raise shutting_down(self._node)
        if (live := self._table.live(node)) is not None:
            return live
        attempt = self._attempts.get(node) or self._begin(node, self._address(node))
        self._unasked.discard(node)
        try:
            return await asyncio.shield(attempt)
        except KvdError:
            if (live := self._table.live(node)) is not None:
                return live
            raise
        except asyncio.CancelledError:
            if self._closed and attempt.cancelled():
                raise shutting_down(self._node) from None
            raise

    def lost(self, session: PeerSession) -> None:
        """A session has ended: dial the node again after a while, unless somebody does before. Else a peer that is
        back would count as down until the next transfer with it, which may go elsewhere for that reason."""
        if session.node in self._addresses and self._table.live(session.node) is None:
            self._redial_later(session.node, self._redial_s * (1 if session.dialled else REDIAL_PATIENCE))

    async def close(self) -> None:
        """End all attempts; who waits for one gets :class:`ShuttingDown`. Idempotent."""
        self._closed = True
        for timer in self._redials.values():
            timer.cancel()
        self._redials.clear()
        attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)

    def _address(self, node: NodeId) -> str:
        if node == self._node:
            raise PeerUnknown(f"node {node} is this node itself; name another one", peer=node)
        address = self._addresses.get(node)
        if address is None:
            known = sorted({*self._addresses, *self._table.nodes})
            listed = ", ".join(known) if known else "none"
            raise PeerUnknown(
                f"node {node} is not among the known peers ({listed}); add its address to peers.static",
                peer=node,
                known=known,
            )
        return address

    def _begin(self, node: NodeId, address: str) -> asyncio.Task[PeerSession]:
        attempt = asyncio.get_running_loop().create_task(self._dial(node, address))
        self._attempts[node] = attempt
        attempt.add_done_callback(lambda task: self._ended(node, task))
        return attempt

    def _ended(self, node: NodeId, attempt: asyncio.Task[PeerSession]) -> None:
        del self._attempts[node]
        unasked = node in self._unasked
        self._unasked.discard(node)
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            # Nobody waits for what is tried on and on, and it says the same all night.
            known = unasked and self._records.error(node) == str(error)
            failures = self._records.failed(node, error)
            say = self._log.debug if known else self._log.warning
            say("no session with peer", peer=node, reason=str(error), attempts=failures)
            self._redial_later(node, min(self._redial_s * 2 ** min(failures, 10), REDIAL_MOST_S))

    def _redial_later(self, node: NodeId, pause_s: float) -> None:
        if pause_s and not self._closed and node not in self._redials:
            # Not all nodes at once, when one comes back that all of them know.
            pause_s *= random.uniform(0.75, 1.25)
            self._redials[node] = asyncio.get_running_loop().call_later(pause_s, self._redial, node)

    def _redial(self, node: NodeId) -> None:
        del self._redials[node]
        if self._table.live(node) is None and node not in self._attempts:
            self._unasked.add(node)
            self._begin(node, self._addresses[node])

    async def _dial(self, node: NodeId, address: str) -> PeerSession:
        now = asyncio.get_running_loop().time()
        avoided = self._records.avoided(node, now)
        offer = [name for name in self._builder.identity.fabrics if name not in avoided]
        try:
            return await self._connect(node, address, offer)
        except FingerprintMismatch:
            self._records.forgive(node)  # it may have nothing but what was avoided
            raise
        except FabricError as error:
            failed = error
        fabric = str(failed.fields.get("fabric", ""))
        rest = [name for name in offer if name != fabric]
        if not rest or rest == offer:
            raise failed
        self._log.warning("fabric does not work with peer", peer=node, fabric=fabric, then=rest, reason=failed.message)
        try:
            session = await self._connect(node, address, rest)
        except FingerprintMismatch:
            raise failed from None  # the peer has no other
        self._records.avoid(node, address, fabric, failed.message, now + AVOIDED_S)
        return session

    async def _connect(self, node: NodeId, address: str, fabrics: Sequence[str]) -> PeerSession:
        """A session over the first of ``fabrics`` that the peer has; a :class:`FabricError` names in ``fabric`` which
        one that was."""
        opened: list[socket.socket] = []
        link: ControlLink | None = None
        agreed = ""
        try:
            control = await sockets.dial(node, address, self._connect_timeout_s)
            opened.append(control)
            # The lanes dial the very address that answered: a name may stand for several daemons.
            family, remote = control.family, control.getpeername()
            async with asyncio.timeout(self._handshake_timeout_s):
                identity = dataclasses.replace(self._builder.identity, fabrics=tuple(fabrics))
                dialler = Dialler(identity, expect=node, nonce=secrets.token_bytes(NONCE_BYTES))
                peer = await sockets.negotiate(control, dialler)
                assert isinstance(peer, Established)
                opened.remove(control)
                link = await self._builder.open_link(peer, control, dialled=True)
                streams: dict[Lane, socket.socket] = {}
                for lane in self._builder.lanes(peer.fabric):
                    streams[lane] = await sockets.connect(family, remote)
                    opened.append(streams[lane])
                    nonce = secrets.token_bytes(NONCE_BYTES)
                    await sockets.negotiate(streams[lane], LaneDialler(self._node, peer, lane=lane, nonce=nonce))
                opened.clear()
                agreed = peer.fabric
                return await unless_ended(link, self._builder.join(peer, link, streams, address=address, dialled=True))
        except (KvdError, OSError) as error:
            failure = failure_of(node, address, link, error)
            if agreed and isinstance(failure, FabricError):
                failure.fields["fabric"] = agreed
            if link is not None:
                link.end(failure, tell=True)
            raise failure from None
        except BaseException:
            if link is not None:
                link.end(shutting_down(self._node), tell=True)
            raise
        finally:
            for sock in opened:
                sock.close()
