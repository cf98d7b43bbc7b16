"""Sessions with other nodes."""

from kvd.peers.manager import Peers, PeersConfig
from kvd.peers.session import PeerSession

__all__ = ["PeerSession", "Peers", "PeersConfig"]
