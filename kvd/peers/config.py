"""What peer sessions are configured with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from kvd.types import NodeId


@dataclasses.dataclass(frozen=True, slots=True)
class PeersConfig:
    """Addresses are ``host:port``, IPv6 in brackets; times in seconds."""

    listen: str = ""
    """Empty: accept nobody. Port 0: any free one."""
    advertise: str = ""
    """Empty: where it listens."""
    peers: Mapping[NodeId, str] = dataclasses.field(default_factory=dict)
    """Where each node can be dialled."""
    keys: Sequence[bytes] = dataclasses.field(default=(), repr=False)
    """The first proves, each is accepted. Empty: no authentication, allowed on loopback only."""
    level: Literal["plain", "authentic", "secret"] = "plain"
    """How the bytes of transfers are protected; the same on all nodes. Above plain, keys are needed."""
    messages_s: float = 0.0
    """Control messages a second that are taken of one peer; more wait in its connection. 0: no limit."""
    connect_timeout_s: float = 5.0
    handshake_timeout_s: float = 5.0
    """For everything between the TCP connection and the live session."""
    heartbeat_s: float = 1.0
    timeout_s: float = 5.0
    """Silence after which a peer is lost."""
    redial_s: float = 0.0
    """How soon a configured peer that was lost, or could not be reached, is dialled again though nobody asks; each
    further attempt waits twice as long, up to :data:`kvd.peers.dialling.REDIAL_MOST_S`. 0: only when somebody asks."""
    max_unauthenticated: int = 64
    """Connections at a time that have not proven themselves."""
