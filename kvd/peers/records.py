"""What is remembered of each peer across its sessions, for ``kvd status``."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from kvd.peers.session import PeerSession
from kvd.types import NodeId
from kvd_client.statuses import PeerStatus

RIVAL_S = 150.0
"""How long a second daemon with a peer's id is told of after its last attempt; it tries once a minute or oftener."""
MAX_STRANGERS = 4096
"""Nodes that are remembered though they are not configured; the oldest are forgotten first."""


@dataclasses.dataclass(slots=True)
class _Record:
    address: str
    boot: str = ""
    error: str = ""
    failures: int = 0
    """Attempts to connect since the last session."""
    since: float | None = None
    """When it was lost, or could not be reached for the first time; ``None``: nothing is wrong."""
    bytes_sent: int = 0
    bytes_received: int = 0
    rival: tuple[str, float] = "", 0.0
    """A second daemon that goes by this node's id, and when it came."""
    avoided: dict[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    """Fabrics that did not work on the way to it: why, and until when they are not offered to it."""


class Records:
    """One record a node, the configured ones from the start."""

    def __init__(self, addresses: Mapping[NodeId, str], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.counters = Counter(dials_failed=0, connections_refused=0, sessions_lost=0)
        self._configured = frozenset(addresses)
        self._records = {node: _Record(address) for node, address in addresses.items()}

    def connected(self, session: PeerSession) -> None:
        """A session has begun."""
        record = self._of(session.node, session.address)
        record.boot, record.error, record.failures, record.since = session.boot, "", 0, None
        record.avoided.pop(session.fabric.name, None)

    def _of(self, node: NodeId, address: str) -> _Record:
        """The node's record, made if need be."""
        record = self._records.get(node)
        if record is None:
            strangers = [known for known in self._records if known not in self._configured]
            if len(strangers) >= MAX_STRANGERS:
                del self._records[strangers[0]]
            record = self._records[node] = _Record(address)
        return record

    def error(self, node: NodeId) -> str:
        """What was wrong with the node at last."""
        return self._records[node].error

    def failed(self, node: NodeId, error: BaseException) -> int:
        """An attempt to connect has failed; how many have since the last session."""
        record = self._records[node]
        record.failures += 1
        self.counters["dials_failed"] += 1
        record.error = str(error)
        if record.since is None:
            record.since = self._now()
        return record.failures

    def rival(self, node: NodeId, text: str) -> None:
        """A connected node's id was claimed by another daemon."""
        self._records[node].rival = text, self._now()

    def avoid(self, node: NodeId, address: str, fabric: str, reason: str, until: float) -> None:
        """A fabric does not work on the way to the node, which is proven; offer it again from ``until`` on."""
        self._of(node, address).avoided[fabric] = reason, until

    def avoided(self, node: NodeId, now: float) -> list[str]:
        """The fabrics that shall not be offered to the node now."""
        record = self._records.get(node)
        return [fabric for fabric, (_, until) in record.avoided.items() if now < until] if record else []

    def forgive(self, node: NodeId) -> None:
        """Offer it all fabrics again."""
        if (record := self._records.get(node)) is not None:
            record.avoided.clear()

    def ended(self, session: PeerSession) -> None:
        """A session has ended; its counters have their last values."""
        self.counters["sessions_lost"] += 1
        record = self._records.get(session.node)
        if record is not None:
            record.bytes_sent += session.endpoint.counters.bytes_sent
            record.bytes_received += session.endpoint.counters.bytes_received
            # Nodes that only ever come to us may leave for good without anything being wrong here.
            if session.node in self._configured:
                record.error, record.since = str(session.error), self._now()
            else:
                record.error = ""

    def statuses(
        self, sessions: Mapping[NodeId, Sequence[PeerSession]], connecting: Container[NodeId]
    ) -> list[PeerStatus]:
        """All records by name; ``sessions`` are those that have not been reported to :meth:`ended`."""
        return [
            self._status(node, record, sessions.get(node, ()), node in connecting)
            for node, record in sorted(self._records.items())
        ]

    def _status(self, node: NodeId, record: _Record, sessions: Sequence[PeerSession], connecting: bool) -> PeerStatus:
        live = next((session for session in sessions if session.error is None), None)
        error = record.error
        if record.failures > 1:
            error = f"{error} ({record.failures} attempts)"
        return PeerStatus(
            node=node,
            address=live.address if live else record.address,
            state="connected" if live else "connecting" if connecting else "down",
            boot=live.boot if live else record.boot,
            fabric=live.fabric.name if live else "",
            bytes_sent=record.bytes_sent + sum(s.endpoint.counters.bytes_sent for s in sessions),
            bytes_received=record.bytes_received + sum(s.endpoint.counters.bytes_received for s in sessions),
            error="; ".join(reason for reason, _ in record.avoided.values()) if live else error,
            trouble=record.rival[0] if self._now() - record.rival[1] < RIVAL_S else "",
            down_s=0.0 if live or record.since is None else self._now() - record.since,
        )
