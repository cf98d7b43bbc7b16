"""Accepting: a peer's control connection and the lanes that follow it become a session."""

from __future__ import annotations

import asyncio
import secrets
import socket

from kvd.errors import AuthenticationFailed, Busy, FabricError, KvdError, PeerLost, ProtocolError
from kvd.peers import sockets
from kvd.peers.bringup import SessionBuilder, failure_of, shutting_down, unless_ended
from kvd.peers.config import PeersConfig
from kvd.peers.link import ControlLink, Log
from kvd.peers.listener import Slot
from kvd.peers.records import Records
from kvd.peers.session import PeerSession
from kvd.peers.table import SessionTable
from kvd.types import Lane
from kvd.wire.auth import LANE_KEY_BYTES, NONCE_BYTES
from kvd.wire.handshake import Acceptor
from kvd.wire.hello import SESSION_BYTES
from kvd.wire.machine import Established, LaneEstablished

MAX_SESSIONS = 1024
"""Sessions at a time, those included that are still connecting their fabric."""


class _Incoming:
    """A session that gathers its lanes."""

    def __init__(self, machine: Acceptor) -> None:
        self.machine = machine
        self.streams: dict[Lane, socket.socket] = {}
        self.arrived = asyncio.Event()


class Accepting:
    """Part of :class:`~kvd.peers.manager.Peers`: :meth:`serve` is what its listener runs for each connection."""

    def __init__(
        self,
        config: PeersConfig,
        builder: SessionBuilder,
        table: SessionTable,
        records: Records,
        log: Log,
    ) -> None:
        self._node, self._handshake_timeout_s = builder.identity.node, config.handshake_timeout_s
        self._builder, self._table, self._records, self._log = builder, table, records, log
        self._incoming: dict[bytes, _Incoming] = {}
        """By the session's name. Connections that turn out to be lanes are here during their handshake, too."""

    async def serve(self, connection: socket.socket, source: str, slot: Slot) -> None:
        """Carry a connection from ``source``, control or lane, through its handshake, and to the end of the session's
        bringing up. What goes wrong is logged and told the peer."""
        slot.taken = True
        name = secrets.token_bytes(SESSION_BYTES)
        machine = Acceptor(
            self._builder.identity,
            nonce=secrets.token_bytes(NONCE_BYTES),
            session=name,
            token=secrets.token_bytes(LANE_KEY_BYTES),
            find_lane=self._find_lane,
        )
        incoming = self._incoming[name] = _Incoming(machine)
        opened: list[socket.socket] = [connection]
        link: ControlLink | None = None
        error: BaseException | None = None
        joining: Established | None = None
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                event = await sockets.negotiate(connection, machine)
                slot.release()
                opened.clear()
                if isinstance(event, LaneEstablished):
                    self._lane_came(event, connection, source)
                    return
                link = await self._builder.open_link(event, connection, dialled=False)
                if self._builder.links > MAX_SESSIONS:
                    raise Busy(
                        f"node {self._node} has {MAX_SESSIONS} sessions, its limit; end some of them first",
                        retry_after_s=1.0,
                    )
                self._table.check_claim(event.node, event.boot, event.address or source)
                self._table.end_earlier_runs(event.node, event.boot)
                joining = event
                await unless_ended(link, self._join(event, link, incoming, source))
        except (KvdError, OSError) as caught:  # TimeoutError is an OSError
            error = caught
            if joining is not None and link is not None:
                failure = failure_of(joining.node, source, link, caught)
                if isinstance(failure, FabricError):  # for the status, if the dialler comes back with another fabric
                    self._records.avoid(joining.node, source, joining.fabric, failure.message, 0.0)
        except asyncio.CancelledError:
            error = slot.evicted or shutting_down(self._node)
            raise
        finally:
            slot.release()
            del self._incoming[name]
            for sock in (*opened, *incoming.streams.values()):
                sock.close()
            if error is not None:
                if machine.stray and isinstance(error, AuthenticationFailed):
                    error = ProtocolError(
                        "a lane of no session that is here; of one that was refused just before, see there"
                    )
                self._refused(source, link, error)

    async def _join(self, peer: Established, link: ControlLink, incoming: _Incoming, source: str) -> PeerSession:
        if self._builder.lanes(peer.fabric):
            await incoming.arrived.wait()
        streams, incoming.streams = incoming.streams, {}
        return await self._builder.join(peer, link, streams, address=peer.address or source, dialled=False)

    def _find_lane(self, session: bytes, lane: Lane) -> bytes | None:
        incoming = self._incoming.get(session)
        if incoming is None or lane not in self._builder.lanes(incoming.machine.fabric) or lane in incoming.streams:
            return None
        return incoming.machine.lane_key

    def _lane_came(self, lane: LaneEstablished, stream: socket.socket, source: str) -> None:
        incoming = self._incoming.get(lane.session)
        if incoming is None or lane.lane in incoming.streams:
            stream.close()
            self._log.warning("connection of a peer refused", source=source, reason="its session is gone")
            return
        incoming.streams[lane.lane] = stream
        if len(incoming.streams) == len(self._builder.lanes(incoming.machine.fabric)):
            incoming.arrived.set()

    def _refused(self, source: str, link: ControlLink | None, error: BaseException) -> None:
        if isinstance(error, TimeoutError):
            error = ProtocolError("the handshake was not finished in time")
        if link is not None:
            link.end(error if isinstance(error, KvdError) else PeerLost(str(error)), tell=True)
        self._records.counters["connections_refused"] += 1
        self._log.warning("connection of a peer refused", source=source, reason=str(error))
