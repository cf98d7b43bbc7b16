"""Sessions with other nodes."""

from kvd.peers.config import PeersConfig
from kvd.peers.manager import Peers
from kvd.peers.session import PeerSession

__all__ = ["PeerSession", "Peers", "PeersConfig"]
