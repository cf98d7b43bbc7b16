"""All sessions of a daemon with its peers: the one object that the rest of the daemon knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from kvd.addresses import is_loopback, is_wildcard
from kvd.errors import ConfigError, KvdError
from kvd.fabric.base import Fabric
from kvd.peers import sockets
from kvd.peers.accepting import Accepting
from kvd.peers.bringup import SessionBuilder, shutting_down
from kvd.peers.config import PeersConfig
from kvd.peers.dialling import Dialling
from kvd.peers.link import Log
from kvd.peers.listener import Listener
from kvd.peers.records import Records
from kvd.peers.session import PeerSession
from kvd.peers.table import SessionTable
from kvd.types import Lane, NodeId
from kvd.wire.hello import Identity
from kvd.wire.messages import PeerMessage
from kvd_client.statuses import PeerStatus


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
        self._log: Log = log if log is not None else structlog.get_logger("kvd.peers")
        identity = Identity(
            node=node,
            boot=boot,
            address=config.advertise,
            fingerprint={**fingerprint, "security": config.level},
            fabrics=tuple(fabric.name for fabric in fabrics),
            keys=tuple(config.keys),
        )
        records = Records(config.peers)
        self.counters: Mapping[str, int] = records.counters
        """Attempts to dial that failed, connections of others that were refused, sessions that ended."""
        self._table = SessionTable(records, on_lost, self._log)
        self._builder = SessionBuilder(identity, config, fabrics, self._table, on_message, on_fabric_message, self._log)
        self._dialling = Dialling(config, self._builder, self._table, records, self._log)
        self._table.lost = self._dialling.lost
        self._accepting = Accepting(config, self._builder, self._table, records, self._log)
        self._listener: Listener | None = None

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
            self._accepting.serve,
            limit=config.max_unauthenticated,
            patience_s=config.handshake_timeout_s / 4,
            log=self._log,
        )
        listener.start(await sockets.listen(config.listen))
        self._listener = listener
        first = listener.addresses[0]
        wildcard = is_wildcard(sockets.parse_address(first, "peers.listen")[0])
        self._introduce(address=config.advertise or ("" if wildcard else first))
        self._log.info("listening for peers", address=self.listening, authenticated=bool(config.keys))

    async def session(self, node: NodeId) -> PeerSession:
        """The live session with ``node``, or a new one; callers at the same time share one attempt.

        Raises :class:`PeerUnknown` (listing the known ones), :class:`PeerUnreachable` (with address and reason), what
        the handshake found (:class:`AuthenticationFailed`, :class:`FingerprintMismatch`, :class:`VersionMismatch`,
        :class:`ProtocolError`), or :class:`ShuttingDown`. Cancelling one caller does not end the attempt.
        """
        return await self._dialling.session(node)

    def accept_keys(self, keys: Sequence[bytes]) -> None:
        """Prove with the first of ``keys`` from now on, and accept each. Live sessions go on, whatever they were made
        with. Raises :class:`ConfigError` where peers had to prove a key so far and need none any more, or the reverse:
        that takes a restart."""
        if bool(keys) != bool(self._config.keys):
            raise ConfigError(
                "peers.key_file: keys can be exchanged while the daemon runs, not added or dropped; restart it",
                key="peers.key_file",
            )
        self._introduce(keys=tuple(keys))

    def sessions(self) -> list[PeerSession]:
        """All live sessions."""
        return self._table.sessions()

    def statuses(self) -> list[PeerStatus]:
        """Every configured node and every other one that has been connected, by name. Bytes are the payload of
        all sessions since the start."""
        return self._table.statuses(self._dialling.under_way)

    async def close(self) -> None:
        """Stop listening and end all sessions with :class:`ShuttingDown`; on return nothing is open. Idempotent."""
        await self._dialling.close()
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        for session in self.sessions():
            session.close(shutting_down(self.node))
        await self._builder.close()
        await self._table.wait_closed()

    def _introduce(self, **changed: Any) -> None:
        self._builder.identity = dataclasses.replace(self._builder.identity, **changed)
