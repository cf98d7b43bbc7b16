"""Who is connected: the sessions of a daemon by node, and what ends one of them in favour of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container

from kvd.addresses import split_address
from kvd.errors import AlreadyExists, KvdError, PeerLost, PeerRestarted
from kvd.peers.link import Log
from kvd.peers.records import Records
from kvd.peers.session import PeerSession
from kvd.types import NodeId
from kvd_client.statuses import PeerStatus


class SessionTable:
    """At most two live sessions a node, one dialled by each side.

    A node that dials again replaces the session that it dialled before; one that comes back with a new boot id ends
    all of its old sessions. ``on_lost`` is called once for every session that was added, whichever way it ended.
    """

    def __init__(self, records: Records, on_lost: Callable[[PeerSession, KvdError], None], log: Log) -> None:
        self._records, self._on_lost, self._log = records, on_lost, log
        self._sessions: dict[NodeId, list[PeerSession]] = {}
        """By node: the live ones, and those that have ended and will be reported in this turn of the loop."""
        self._ending: set[asyncio.Task[None]] = set()
        self.lost: Callable[[PeerSession], None] = lambda session: None
        """Called for every session that has ended, once it is no longer in the table."""

    @property
    def nodes(self) -> list[NodeId]:
        """Those that have a session."""
        return list(self._sessions)

    def sessions(self) -> list[PeerSession]:
        """All live ones."""
        return [session for some in self._sessions.values() for session in some if session.error is None]

    def live(self, node: NodeId) -> PeerSession | None:
        """The node's live session; of two, the one that was dialled here."""
        live = [session for session in self._sessions.get(node, []) if session.error is None]
        return max(live, key=lambda session: session.dialled, default=None)

    def statuses(self, connecting: Container[NodeId]) -> list[PeerStatus]:
        """As :meth:`Records.statuses`."""
        return self._records.statuses(self._sessions, connecting)

    def check_claim(self, node: NodeId, boot: str, address: str) -> None:
        """Raise :class:`AlreadyExists` where another run of ``node`` is live on another host than ``address``: not a
        restart, but a second daemon with that id (a cloned machine). Were it let in, each of the two would end the
        other's sessions for ever. A node that moved gets in as soon as its silent former self is lost."""
        live = self.live(node)
        if live is None or live.boot == boot or _host(live.address) == _host(address):
            return
        text = f"two daemons go by the id {node}: one at {live.address}, connected, and one at {address}, refused"
        self._records.rival(node, text)
        raise AlreadyExists(f"{text}; give each its own node.id", peer=node, address=address, other=live.address)

    def add(self, session: PeerSession) -> None:
        """Take a new session in, in place of those that it replaces."""
        self.end_earlier_runs(session.node, session.boot)
        for other in self._sessions.get(session.node, []):
            if other.dialled == session.dialled:
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
            address=session.address,
            dialled=session.dialled,
            fabric=session.fabric.name,
        )

    def end_earlier_runs(self, node: NodeId, boot: str) -> None:
        """End the node's sessions with other runs of its daemon than ``boot``."""
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

    def ended(self, session: PeerSession, error: KvdError) -> None:
        """A session's ``on_end``."""
        some = self._sessions[session.node]
        some.remove(session)
        if not some:
            del self._sessions[session.node]
        self._records.ended(session)
        self._log.info("peer session ended", peer=session.node, boot=session.boot, reason=str(error))
        self.lost(session)
        ending = asyncio.get_running_loop().create_task(session.wait_closed())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        try:
            self._on_lost(session, error)
        except Exception:
            self._log.exception("handling the end of a session failed", peer=session.node)

    async def wait_closed(self) -> None:
        """Return when nothing of the sessions that have ended is open any more."""
        await asyncio.gather(*self._ending)


def _host(address: str) -> str:
    try:
        return split_address(address)[0].partition("%")[0]
    except ValueError:  # what a peer says of itself
        return address
