"""All sessions of a daemon with its peers: dialling, accepting, and who is connected."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import structlog

from kvd.config import is_loopback, is_wildcard
from kvd.errors import (
    Busy,
    ConfigError,
    FabricError,
    FingerprintMismatch,
    KvdError,
    PeerLost,
    PeerRestarted,
    PeerUnknown,
    ProtocolError,
    ShuttingDown,
)
from kvd.fabric.base import Fabric
from kvd.peers import sockets
from kvd.peers.bringup import Incoming, SessionBringup, dial_failure, unless_ended
from kvd.peers.config import PeersConfig
from kvd.peers.link import ControlLink, Log
from kvd.peers.listener import Listener, Slot
from kvd.peers.records import Records
from kvd.peers.session import PeerSession
from kvd.types import Lane, NodeId
from kvd.wire.auth import LANE_KEY_BYTES, NONCE_BYTES
from kvd.wire.guard import guards
from kvd.wire.handshake import Acceptor, Dialler, LaneDialler
from kvd.wire.hello import SESSION_BYTES, Identity
from kvd.wire.machine import Established, LaneEstablished
from kvd.wire.messages import PeerMessage
from kvd_client.statuses import PeerStatus

MAX_SESSIONS = 1024
"""Sessions at a time, those included that are still connecting their fabric."""
AVOIDED_S = 60.0
"""How long a fabric that did not work on the way to a peer, where another one did, is not offered to it."""


class Peers:
    """Sessions with other nodes.

    ``fabrics`` are offered in this order of preference; the two sides of a session agree on the first one of the
    dialler's that the other side has, too. Where that one can't be connected, the dialler offers the others, and the
    peer's status says why.

    A pair of nodes can have two sessions, one dialled by each; both work. A node that dials again replaces the
    session that it dialled before; one that comes back with a new boot id ends all of its old sessions.

    ``on_message`` and ``on_fabric_message`` get what live sessions receive; a :class:`KvdError` that they raise ends
    that session. ``on_lost`` is called once for every session that has been live, whichever way it ended, by
    :meth:`PeerSession.close` and :meth:`close` too, always from the event loop.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        boot: str,
        config: PeersConfig,
        fabrics: Sequence[Fabric],
        fingerprint: Mapping[str, str | int],
        on_message: Callable[[PeerSession, PeerMessage], None],
        on_fabric_message: Callable[[PeerSession, Lane, bytes], None],
        on_lost: Callable[[PeerSession, KvdError], None],
        log: Log | None = None,
    ) -> None:
        self.node, self.boot = node, boot
        self._config = config
        self._fabrics = {fabric.name: fabric for fabric in fabrics}
        self._fingerprint = {**fingerprint, "security": config.level}
        self._log: Log = log if log is not None else structlog.get_logger("kvd.peers")
        self._on_message, self._on_fabric_message, self._on_lost = on_message, on_fabric_message, on_lost
        self._identity = self._introduce(config.advertise)
        self._listener: Listener | None = None
        self._sessions: dict[NodeId, list[PeerSession]] = {}
        """By node: the live ones, and those that have ended and will be reported in this turn of the loop."""
        self._dials: dict[NodeId, asyncio.Task[PeerSession]] = {}
        self._incoming: dict[bytes, Incoming] = {}
        self._links: set[ControlLink] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._records = Records(config.peers)
        self._closed = False

    @property
    def listening(self) -> str:
        """Where it listens, port filled in; several addresses (of a host name) with commas; empty: nowhere."""
        return ", ".join(self._listener.addresses) if self._listener else ""

    @property
    def unproven(self) -> int:
        """Connections that have not proven themselves yet."""
        return self._listener.unproven if self._listener else 0

    async def start(self) -> None:
        """Check the configuration and listen.

        Raises :class:`ConfigError` for an address that can't be, or reaches beyond this machine without a key, and
        :class:`AddressInUse` naming host and port.
        """
        config = self._config
        if not all(config.keys):
            raise ConfigError(
                "peers.key_file: a shared key is empty; give each at least 16 bytes", key="peers.key_file"
            )
        named = {f"peers.static.{node}": address for node, address in config.peers.items()}
        for key, text in {"peers.listen": config.listen, **named}.items():
            if text and not is_loopback(sockets.parse_address(text, key)[0]) and not config.keys:
                raise ConfigError(
                    f"{key} is {text}, beyond this machine, so peers must prove a shared key: set peers.key_file, "
                    "or use 127.0.0.1",
                    key=key,
                    address=text,
                )
        if not config.listen:
            return
        listener = Listener(
            self._serve,
            limit=config.max_unauthenticated,
            patience_s=config.handshake_timeout_s / 4,
            log=self._log,
        )
        listener.start(await sockets.listen(config.listen))
        self._listener = listener
        first = listener.addresses[0]
        wildcard = is_wildcard(sockets.parse_address(first, "peers.listen")[0])
        self._identity = self._introduce(config.advertise or ("" if wildcard else first))
        self._log.info("listening for peers", address=self.listening, authenticated=bool(config.keys))

    async def session(self, node: NodeId) -> PeerSession:
        """The live session with ``node``, or a new one; callers at the same time share one attempt.

        Raises :class:`PeerUnknown` (listing the known ones), :class:`PeerUnreachable` (with address and reason), what
        the handshake found (:class:`AuthenticationFailed`, :class:`FingerprintMismatch`, :class:`VersionMismatch`,
        :class:`ProtocolError`), or :class:`ShuttingDown`. Cancelling one caller does not end the attempt.
        """
        if self._closed:
            raise self._shutting_down()
        if (live := self._live(node)) is not None:
            return live
        attempt = self._dials.get(node)
        if attempt is None:
            address = self._address(node)
            attempt = asyncio.get_running_loop().create_task(self._dial(node, address))
            self._dials[node] = attempt
            attempt.add_done_callback(lambda task: self._dialled(node, task))
        try:
            return await asyncio.shield(attempt)
        except KvdError:
            if (live := self._live(node)) is not None:
                return live
            raise
        except asyncio.CancelledError:
            if self._closed and attempt.cancelled():
                raise self._shutting_down() from None
            raise

    def accept_keys(self, keys: Sequence[bytes]) -> None:
        """Prove with the first of ``keys`` from now on, and accept each. Live sessions go on, whatever they were made
        with. Raises :class:`ConfigError` where peers had to prove a key so far and need none any more, or the reverse:
        that takes a restart."""
        if bool(keys) != bool(self._config.keys):
            raise ConfigError(
                "peers.key_file: keys can be exchanged while the daemon runs, not added or dropped; restart it",
                key="peers.key_file",
            )
        self._config = dataclasses.replace(self._config, keys=list(keys))
        self._identity = self._introduce(self._identity.address)

    def sessions(self) -> list[PeerSession]:
        """All live sessions."""
        return [session for some in self._sessions.values() for session in some if session.error is None]

    def statuses(self) -> list[PeerStatus]:
        """Every configured node and every other one that has been connected, by name. Bytes are the payload of
        all sessions since the start."""
        return self._records.statuses(self._sessions, self._dials)

    async def close(self) -> None:
        """Stop listening and end all sessions with :class:`ShuttingDown`; on return nothing is open. Idempotent."""
        self._closed = True
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        for session in self.sessions():
            session.close(self._shutting_down())
        for link in list(self._links):
            link.end(self._shutting_down(), tell=True)
        await asyncio.sleep(0)  # lets the links report their ends
        await asyncio.gather(*self._ending, *(link.closed for link in self._links))

    # --- dialling

    def _address(self, node: NodeId) -> str:
        if node == self.node:
            raise PeerUnknown(f"node {node} is this node itself; name another one", peer=node)
        address = self._config.peers.get(node)
        if address is None:
            known = sorted({*self._config.peers, *self._sessions})
            listed = ", ".join(known) if known else "none"
            raise PeerUnknown(
                f"node {node} is not among the known peers ({listed}); add its address to peers.static",
                peer=node,
                known=known,
            )
        return address

    def _dialled(self, node: NodeId, task: asyncio.Task[PeerSession]) -> None:
        del self._dials[node]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._records.failed(node, error)
            self._log.warning("no session with peer", peer=node, reason=str(error))

    async def _dial(self, node: NodeId, address: str) -> PeerSession:
        """A session over the first fabric that works on the way to ``node``."""
        now = asyncio.get_running_loop().time()
        avoided = self._records.avoided(node, now)
        offer = [name for name in self._fabrics if name not in avoided]
        try:
            return await self._attempt(node, address, offer)
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
            session = await self._attempt(node, address, rest)
        except FingerprintMismatch:
            raise failed from None  # the peer has no other
        self._records.avoid(node, address, fabric, failed.message, now + AVOIDED_S)
        return session

    async def _attempt(self, node: NodeId, address: str, fabrics: Sequence[str]) -> PeerSession:
        opened: list[socket.socket] = []
        link: ControlLink | None = None
        agreed = ""
        try:
            control = await sockets.dial(node, address, self._config.connect_timeout_s)
            opened.append(control)
            # The lanes dial the very address that answered: a name may stand for several daemons.
            family, remote = control.family, control.getpeername()
            async with asyncio.timeout(self._config.handshake_timeout_s):
                identity = dataclasses.replace(self._identity, fabrics=tuple(fabrics))
                dialler = Dialler(identity, expect=node, nonce=secrets.token_bytes(NONCE_BYTES))
                peer = await sockets.negotiate(control, dialler)
                assert isinstance(peer, Established)
                opened.remove(control)
                link = await self._open_link(peer, control, dialled=True)
                streams: dict[Lane, socket.socket] = {}
                for lane in self._lanes(peer.fabric):
                    streams[lane] = await sockets.connect(family, remote)
                    opened.append(streams[lane])
                    nonce = secrets.token_bytes(NONCE_BYTES)
                    await sockets.negotiate(streams[lane], LaneDialler(self.node, peer, lane=lane, nonce=nonce))
                opened.clear()
                agreed = peer.fabric
                joining = self._join(peer, link, streams, address=address, dialled=True)
                return await unless_ended(link, joining)
        except (KvdError, OSError) as error:
            failure = dial_failure(node, address, link, error)
            if agreed and isinstance(failure, FabricError):
                failure.fields["fabric"] = agreed
            if link is not None:
                link.end(failure, tell=True)
            raise failure from None
        except BaseException:
            if link is not None:
                link.end(self._shutting_down(), tell=True)
            raise
        finally:
            for sock in opened:
                sock.close()

    # --- accepting

    async def _serve(self, connection: socket.socket, source: str, slot: Slot) -> None:
        slot.taken = True
        name = secrets.token_bytes(SESSION_BYTES)
        machine = Acceptor(
            self._identity,
            nonce=secrets.token_bytes(NONCE_BYTES),
            session=name,
            token=secrets.token_bytes(LANE_KEY_BYTES),
            find_lane=self._find_lane,
        )
        incoming = self._incoming[name] = Incoming(machine)
        opened: list[socket.socket] = [connection]
        link: ControlLink | None = None
        error: BaseException | None = None
        joining: Established | None = None
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                event = await sockets.negotiate(connection, machine)
                slot.release()
                opened.clear()
                if isinstance(event, LaneEstablished):
                    self._lane_came(event, connection, source)
                    return
                link = await self._open_link(event, connection, dialled=False)
                if len(self._links) > MAX_SESSIONS:
                    raise Busy(
                        f"node {self.node} has {MAX_SESSIONS} sessions, its limit; end some of them first",
                        retry_after_s=1.0,
                    )
                self._end_earlier_runs(event.node, event.boot)
                joining = event
                await unless_ended(link, self._join_incoming(event, link, incoming, source))
        except (KvdError, OSError) as caught:  # TimeoutError is an OSError
            error = caught
            if joining is not None and link is not None:
                failure = dial_failure(joining.node, source, link, caught)
                if isinstance(failure, FabricError):  # for the status, if the dialler comes back with another fabric
                    self._records.avoid(joining.node, source, joining.fabric, failure.message, 0.0)
        except asyncio.CancelledError:
            error = slot.evicted or self._shutting_down()
            raise
        finally:
            slot.release()
            del self._incoming[name]
            for sock in (*opened, *incoming.streams.values()):
                sock.close()
            if error is not None:
                self._refused(source, link, error)

    def _refused(self, source: str, link: ControlLink | None, error: BaseException) -> None:
        if isinstance(error, TimeoutError):
            error = ProtocolError("the handshake was not finished in time")
        if link is not None:
            link.end(error if isinstance(error, KvdError) else PeerLost(str(error)), tell=True)
        self._log.warning("connection of a peer refused", source=source, reason=str(error))

    def _find_lane(self, session: bytes, lane: Lane) -> bytes | None:
        incoming = self._incoming.get(session)
        if incoming is None or lane not in self._lanes(incoming.machine.fabric) or lane in incoming.streams:
            return None
        return incoming.machine.lane_key

    def _lanes(self, fabric: str) -> tuple[Lane, ...]:
        """Lanes for which the fabric that the two sides agreed on needs a stream."""
        found = self._fabrics.get(fabric)
        return found.capabilities.lanes_need_streams if found else ()

    def _lane_came(self, lane: LaneEstablished, stream: socket.socket, source: str) -> None:
        incoming = self._incoming.get(lane.session)
        if incoming is None or lane.lane in incoming.streams:
            stream.close()
            self._log.warning("connection of a peer refused", source=source, reason="its session is gone")
            return
        incoming.streams[lane.lane] = stream
        if len(incoming.streams) == len(self._lanes(incoming.machine.fabric)):
            incoming.arrived.set()

    async def _join_incoming(
        self, peer: Established, link: ControlLink, incoming: Incoming, source: str
    ) -> PeerSession:
        if self._lanes(peer.fabric):
            await incoming.arrived.wait()
        streams, incoming.streams = incoming.streams, {}
        return await self._join(peer, link, streams, address=peer.address or source, dialled=False)

    # --- both

    async def _open_link(self, peer: Established, control: socket.socket, *, dialled: bool) -> ControlLink:
        """Put the control connection, which is through its handshake, into a link's hands."""
        link = ControlLink(
            peer.node,
            heartbeat_s=self._config.heartbeat_s,
            timeout_s=self._config.timeout_s,
            log=self._log,
            protection=guards(peer.lane_key, dialled=dialled) if peer.authenticated else None,
            messages_s=self._config.messages_s,
        )
        try:
            await asyncio.get_running_loop().create_connection(lambda: link, sock=control)
        except BaseException:
            control.close()
            raise
        self._links.add(link)
        link.closed.add_done_callback(lambda _: self._links.discard(link))
        return link

    async def _join(
        self,
        peer: Established,
        link: ControlLink,
        streams: Mapping[Lane, socket.socket],
        *,
        address: str,
        dialled: bool,
    ) -> PeerSession:
        """Connect the fabric and bring the session to life."""
        try:
            secret = peer.lane_key if peer.authenticated else b""
            fabric = self._fabrics[peer.fabric]
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
            fabric=self._fabrics[peer.fabric],
            address=address,
            dialled=dialled,
            on_message=self._on_message,
            on_fabric_message=self._on_fabric_message,
            on_end=self._ended,
            log=self._log,
        )
        self._end_earlier_runs(session.node, session.boot)
        for other in self._sessions.get(session.node, []):
            if other.dialled == dialled:
                other.close(
                    PeerLost(
                        f"the session with node {session.node} is lost: a newer one replaces it",
                        peer=session.node,
                    )
                )
        self._sessions.setdefault(session.node, []).append(session)
        self._records.connected(session)
        self._log.info(
            "peer connected",
            peer=session.node,
            boot=session.boot,
            address=address,
            dialled=dialled,
            fabric=session.fabric.name,
        )
        session.start()
        return session

    def _live(self, node: NodeId) -> PeerSession | None:
        live = [session for session in self._sessions.get(node, []) if session.error is None]
        return max(live, key=lambda session: session.dialled, default=None)

    def _end_earlier_runs(self, node: NodeId, boot: str) -> None:
        for session in self._sessions.get(node, []):
            if session.boot != boot:
                session.close(
                    PeerRestarted(
                        f"node {node} has been restarted (boot id {boot} instead of {session.boot}); open the "
                        "transfer again",
                        peer=node,
                        boot=boot,
                        was=session.boot,
                    )
                )

    def _ended(self, session: PeerSession, error: KvdError) -> None:
        some = self._sessions[session.node]
        some.remove(session)
        if not some:
            del self._sessions[session.node]
        self._records.ended(session)
        self._log.info("peer session ended", peer=session.node, boot=session.boot, reason=str(error))
        ending = asyncio.get_running_loop().create_task(session.wait_closed())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        try:
            self._on_lost(session, error)
        except Exception:
            self._log.exception("handling the end of a session failed", peer=session.node)

    def _introduce(self, address: str) -> Identity:
        return Identity(
            node=self.node,
            boot=self.boot,
            address=address,
            fingerprint=self._fingerprint,
            fabrics=tuple(self._fabrics),
            keys=tuple(self._config.keys),
        )

    def _shutting_down(self) -> ShuttingDown:
        return ShuttingDown(f"node {self.node} is shutting down; use another one", node=self.node)
