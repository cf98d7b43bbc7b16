"""A session with one peer, as the rest of the daemon sees it."""

from __future__ import annotations

from collections.abc import Callable

from kvd.errors import KvdError, PeerLost
from kvd.fabric.base import Endpoint, Fabric
from kvd.peers.link import ControlLink, Log
from kvd.types import Lane
from kvd.wire.machine import Established
from kvd.wire.messages import PeerMessage


class PeerSession:
    """A live connection to a peer: messages over the control connection, memory over ``endpoint``.

    Both sides are equal, whoever dialled. A session ends as a whole and once: when either connection breaks, the
    peer falls silent, or either side closes it. Its endpoint is closed then, ``error`` is set, and ``Peers`` reports
    it to ``on_lost`` from the event loop.
    """

    def __init__(
        self,
        peer: Established,
        link: ControlLink,
        endpoint: Endpoint,
        *,
        fabric: Fabric,
        address: str,
        dialled: bool,
        on_message: Callable[[PeerSession, PeerMessage], None],
        on_fabric_message: Callable[[PeerSession, Lane, bytes], None],
        on_end: Callable[[PeerSession, KvdError], None],
        log: Log,
    ) -> None:
        self.node = peer.node
        self.boot = peer.boot
        """Names the run of the peer's daemon: another one knows nothing of this one's transfers."""
        self.address = address
        """``host:port``: dialled, or what the peer advertises, or where its connection comes from."""
        self.endpoint = endpoint
        self.fabric = fabric
        self.dialled = dialled
        self.authenticated = peer.authenticated
        self._link, self._log = link, log
        self._on_message, self._on_fabric_message, self._on_end = on_message, on_fabric_message, on_end
        endpoint.on_lost = self._endpoint_lost
        link.on_end = self._ended
        counters = endpoint.counters
        link.traffic = lambda: counters.bytes_received + counters.messages_received

    @property
    def error(self) -> KvdError | None:
        """Why the session has ended; ``None`` while it lives."""
        return self._link.error

    def start(self) -> None:
        """Begin to deliver; messages that came early are delivered at once."""
        self._link.start(lambda message: self._on_message(self, message))
        self.endpoint.on_message = self._fabric_message

    def send(self, message: PeerMessage) -> None:
        """Queue a message; messages arrive in order. Raises :class:`PeerLost` if the session has ended, and
        :class:`ProtocolError` if the message exceeds a frame."""
        self._link.send(message)

    def close(self, error: KvdError) -> None:
        """End the session for ``error``, which the peer is told. Idempotent."""
        self._link.end(error, tell=True)
        self.endpoint.close()

    async def wait_closed(self) -> None:
        """Return when nothing of an ended session is open any more."""
        await self._link.closed
        await self.endpoint.wait_closed()

    def _fabric_message(self, lane: Lane, message: bytes) -> None:
        if self.error is not None:
            return
        try:
            self._on_fabric_message(self, lane, message)
        except KvdError as error:
            self._log.warning("peer notification refused", peer=self.node, reason=error.message)
            self.close(error)
        except Exception as error:
            self._log.exception("peer notification failed", peer=self.node)
            self.close(KvdError(f"a notification of node {self.node} met a bug: {error!r}", peer=self.node))

    def _endpoint_lost(self, error: KvdError) -> None:
        text = f"the session with node {self.node} is lost: {error.message}"
        self._link.end(PeerLost(text, peer=self.node, reason="fabric"), tell=True)

    def _ended(self, error: KvdError) -> None:
        self.endpoint.close()
        self._on_end(self, error)
