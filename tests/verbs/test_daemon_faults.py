"""The fault matrix's rows that a fabric can tell apart, over verbs: what both sides are told, and that all comes back.

The helpers are those of the matrix over tcp (tests/integration); here the daemons have a soft-RoCE device each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvd_client.errors import FabricError
from tests.integration.daemons import DaemonProcess, free_port
from tests.integration.fault_helpers import (
    SPEC,
    WAIT_S,
    Both,
    Pair,
    Told,
    all_is_well,
    destroyed,
    entries,
    eventually,
    kill_and_start,
    saw,
    start,
    stopped,
    tell,
)
from tests.verbs.conftest import SMALL
from tests.verbs.devices import DEVICES, link_down, needs_devices, packets_vanish
from tests.verbs.forked import ForkedDaemon

pytestmark = [needs_devices, pytest.mark.two_cpus, pytest.mark.timeout(240)]

TOKENS = 1024
"""6 MiB: a second and a half at :data:`RATE`."""
RATE = "32mbit"
TIMEOUT_S = 4.0
"""``peers.timeout_s``: an emulated CPU that others share must not make a peer look dead."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("faults")
    ports = {node: free_port() for node in ("prefill", "decode")}
    made = [
        ForkedDaemon(
            folder,
            node,
            listen=f"127.0.0.1:{port}",
            peers={other: f"127.0.0.1:{ports[other]}" for other in ports if other != node},
            config={
                "fabric": {"name": "verbs", "device": device, "rate": RATE},
                "peers": {"heartbeat_s": 1.0, "timeout_s": TIMEOUT_S, "handshake_timeout_s": 30},
                "memory": SMALL,
            },
        )
        for (node, port), device in zip(ports.items(), DEVICES, strict=True)
    ]
    with destroyed(*made):
        start(*made)
        yield Pair(made[0], made[1]).settle(TOKENS)


@pytest.mark.parametrize(("victim", "mode"), [("prefill", "speculative"), ("decode", "full")])
def test_a_killed_daemon(pair: Pair, victim: str, mode: str) -> None:
    """The far side is told at once, since the session's own connection ends with the process."""
    kill_and_start(pair, victim, mode, "mid-way" if mode == "full" else "paired", TOKENS)


@contextlib.contextmanager
def inference_process(daemon: DaemonProcess, side: str, request: str) -> Iterator[int]:
    """A process of its own that has opened its side of a transfer, and computed all of it at the source."""
    opened, tell_opened = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException), daemon.client(side) as client:
            transfer: Any
            if side == "source":
                transfer = client.prefill(request, SPEC, [TOKENS])
                for layer in range(SPEC.layers):
                    transfer.put_layer(layer, entries=entries(layer, TOKENS))
                transfer.finish(wait=False)
            else:
                transfer = client.decode(request, SPEC, [TOKENS], source="prefill")
            os.write(tell_opened, b"!")
            signal.pause()
        os._exit(1)
    os.close(tell_opened)
    try:
        assert os.read(opened, 1) == b"!"
        yield pid
    finally:
        os.close(opened)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_killed_process(pair: Pair, side: str) -> None:
    """kill -9 with bulk under way: the other process is told PROCESS_LOST at once."""
    request = f"killed {side}"
    daemon = pair.prefill if side == "source" else pair.decode
    with contextlib.ExitStack() as stack:
        both = stack.enter_context(Both(pair, request, tokens=TOKENS))
        with inference_process(daemon, side, request):
            if side == "source":
                both.open_sink()
                both.sink.wait_ready(0, timeout_s=WAIT_S)
            else:
                both.open_source()
                both.put(range(SPEC.layers))
                both.source.finish(wait=False)
                moved = _bytes_sent(pair.prefill)
                eventually("some of it is across", lambda: _bytes_sent(pair.prefill) > moved)
            since = time.monotonic()
        if side == "source":
            told = {"sink": tell(lambda: both.sink.wait_ready(timeout_s=WAIT_S), since)}
            both.check_bytes(complete=False)
        else:
            told = {"source": tell(lambda: both.source.wait_delivered(timeout_s=WAIT_S), since)}
        saw(f"{side}'s process killed", "full mid-way", **told)
        assert {answer.code for answer in told.values()} == {"PROCESS_LOST"}
    all_is_well(pair)


def _bytes_sent(daemon: DaemonProcess) -> int:
    with daemon.client("look") as client:
        return sum(peer.bytes_sent for peer in client.status().peers)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_daemon_stopped_for_longer_than_the_timeout(pair: Pair, victim: str) -> None:
    """PEER_LOST while it stands still, though its device goes on answering. A sink's device goes on taking writes, so
    that its process may well have everything by then, mask and all: it is told so, and every byte is right."""
    with Both(pair, f"stopped {victim}", "full", TOKENS) as both:
        both.bring_to("mid-way")
        with stopped(getattr(pair, victim)) as since:
            far_wait = both.sink.wait_ready if victim == "prefill" else both.source.wait_delivered
            assert tell(lambda: far_wait(timeout_s=WAIT_S)).code == "PEER_LOST"
        told = both.ends(since)
        saw(f"{victim} stopped past timeout_s", "full mid-way", **told)
        assert told["source"].code == "PEER_LOST"
        assert told["sink"].code in (("PEER_LOST",) if victim == "prefill" else ("PEER_LOST", "OK"))
    all_is_well(pair)


def test_a_link_that_stays_down(pair: Pair) -> None:
    """The queue pairs don't recover; the sessions' own connections, over the loopback interface here, live on, so it
    is the fabric that ends the session, and the logs name the verb's status."""
    with Both(pair, "link down", "full", TOKENS) as both:
        both.bring_to("mid-way")
        with link_down():
            told = both.ends(time.monotonic())
        saw("RoCE link down", "full mid-way", **told)
        assert {answer.code for answer in told.values()} == {"PEER_LOST"}
        for daemon in pair.both:
            named = "IBV_WC_" in daemon.log.read_text()  # not in the assertion, which would show the log
            assert named
    all_is_well(pair)


def test_a_path_that_carries_nothing(pair: Pair) -> None:
    """Before any transfer: whoever insists on verbs is told what is wrong with the path."""
    pair.decode.destroy()
    pair.decode.start()
    with packets_vanish(), Both(pair, "vanish", "full", TOKENS) as both:
        both.open_sink()
        since = time.monotonic()
        with pytest.raises(FabricError, match=r"carries nothing: .*UDP port 4791"):
            both.sink.wait_ready(timeout_s=WAIT_S)
        saw("RoCE packets dropped", "dialling", sink=Told("FABRIC", time.monotonic() - since))
    all_is_well(pair)


@pytest.mark.parametrize(("side", "mode"), [("source", "speculative"), ("sink", "full")])
def test_an_abort(pair: Pair, side: str, mode: str) -> None:
    """With bulk, or a fetch, under way: both are told ABORTED, and the queue pairs live on."""
    stage = "mid-way" if mode == "full" else "paired"
    with Both(pair, f"abort {side}", mode, TOKENS) as both:
        both.bring_to(stage)
        since = time.monotonic()
        getattr(both, side).abort("no longer wanted")
        told = both.ends(since)
        saw(f"abort by the {side}", f"{mode} {stage}", **told)
        assert {answer.code for answer in told.values()} == {"ABORTED"}
    all_is_well(pair)
