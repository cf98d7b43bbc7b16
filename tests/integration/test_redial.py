"""What an operator sees of a peer that goes and comes back while nobody needs it."""

from __future__ import annotations

from pathlib import Path

from kvd_client.statuses import PeerStatus
from tests.integration.daemons import DaemonProcess, two_daemons
from tests.integration.fault_helpers import Pair, one_transfer
from tests.waiting import eventually


def test_a_daemon_that_is_back_is_no_longer_down_on_either_side(tmp_path: Path) -> None:
    """The one that dialled notices by itself, and so does the one that was dialled: its peer has forgotten it."""
    with two_daemons(tmp_path, peers={"redial_s": 0.1}) as (prefill, decode):
        one_transfer(Pair(prefill, decode), "first")
        for gone, left in ((prefill, decode), (decode, prefill)):
            gone.destroy()
            eventually("the loss is seen", lambda d=left: health(d)[0] == "degraded")  # type: ignore[misc]
            _, peer = health(left)
            assert (peer.node, peer.down_s > 0) == (gone.node, True)
            assert peer.error
            gone.start()
            eventually("it is well again", lambda d=left: health(d)[0] == "ok")  # type: ignore[misc]
            _, peer = health(left)
            assert (peer.state, peer.error, peer.down_s) == ("connected", "", 0.0)
        one_transfer(Pair(prefill, decode), "last")


def health(daemon: DaemonProcess) -> tuple[str, PeerStatus]:
    with daemon.client("look") as client:
        status = client.status()
    return status.health, status.peers[0]
