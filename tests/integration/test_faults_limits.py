"""What runs out: the pool's memory, and the daemon's descriptors."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client import Client
from tests.integration.daemons import DaemonProcess, two_daemons
from tests.integration.fault_helpers import (
    LONG,
    RATE,
    SHORT,
    SPEC,
    WAIT_S,
    Both,
    Pair,
    all_is_well,
    connected,
    descriptors,
    eventually,
    idle,
    saw,
    served,
    tell,
)

POOL = "64MiB"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config: dict[str, dict[str, Any]] = {
        "memory": {"pool": POOL, "arena": "32MiB"},
        "peers": {"heartbeat_s": 0.5, "timeout_s": 5.0, "handshake_timeout_s": 2.0},
        "transfer": {"rendezvous_s": 5.0},
        "fabric": {"rate": RATE},
    }
    with two_daemons(tmp_path_factory.mktemp("limits"), **config) as daemons:
        yield Pair(*daemons)


@pytest.fixture(scope="module")
def pair(fresh: Pair) -> Pair:
    return fresh.settle()


# --- descriptors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_more_descriptors(daemon: DaemonProcess, spare: int = 0) -> Iterator[None]:
    """The daemon can open ``spare`` descriptors at most."""
    used = {int(name.name) for name in Path(f"/proc/{daemon.pid}/fd").iterdir()}
    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    # The limit is on numbers, and the lowest free one is given out.
    limit = [number for number in range(len(used) + spare + 1) if number not in used][spare]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_session_needs_descriptors(fresh: Pair) -> None:
    """With none left at either end, a transfer that needs a session is told PEER_UNREACHABLE: at once where they are
    missing here, else within the handshake's time. With descriptors, the next one finds its peer."""
    for daemon in fresh.both[::-1]:
        assert not connected(fresh.decode, "prefill")
        with fresh.decode.client("sink") as client:
            client.status()
            with no_more_descriptors(daemon), client.decode("session", SPEC, [SHORT], source="prefill") as sink:
                told = tell(lambda sink=sink: sink.wait_ready(timeout_s=WAIT_S))  # type: ignore[misc]
                sink.abort()
        saw(f"{daemon.node} without descriptors", "dialling", sink=told)
        assert told.code == "PEER_UNREACHABLE"
        if daemon is fresh.decode:
            assert "LimitNOFILE" in told.fields["reason"]
        eventually("idle", idle(daemon))
    served(fresh)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_daemon_without_descriptors_serves_on_and_recovers(pair: Pair, victim: str) -> None:
    """Transfers that run go on; new processes are told BUSY, never half served; raising the limit
    is all that it takes."""
    daemon: DaemonProcess = getattr(pair, victim)
    with Both(pair, f"descriptors {victim}", tokens=LONG // 2) as both:
        both.bring_to("mid-way")
        with no_more_descriptors(daemon), Client(daemon.socket, name="late", timeout_s=1.0) as late:
            since = time.monotonic()
            refused = tell(late.status)
            assert refused.code == "BUSY"
            assert refused.fields["retry_after_s"] > 0
            told = both.ends(since)
            assert {answer.code for answer in told.values()} == {"OK"}
            # Who is connected already can open transfers: they need no descriptor that the pool does not have.
            client = both.source_client if victim == "prefill" else both.sink_client
            opened = tell(lambda: client.prefill("small", SPEC, [SHORT]).release())
            assert opened.code == "OK"
            # A larger one finds no room in the arena that there is, and another one needs a descriptor.
            need = tell(lambda: client.prefill("arena", SPEC, [3800]).release())
            assert need.code == "OUT_OF_MEMORY", need
            assert need.fields["errno"] == "EMFILE"
            assert "LimitNOFILE" in need.fields["fix"]
        saw(f"{victim} without descriptors", "mid-way", **told, refused=refused)
        eventually("a new process is served again", lambda: tell(lambda: ask_once(daemon)).code == "OK")
    all_is_well(pair)


@pytest.mark.parametrize("spare", range(1, 6))
def test_a_daemon_with_a_few_descriptors_left_refuses_and_leaks_none(pair: Pair, spare: int) -> None:
    """Each step of admitting a process takes descriptors; wherever they run out, all of them come back."""
    daemon = pair.decode
    with no_more_descriptors(daemon, spare):
        told = tell(lambda: ask_once(daemon))
        assert told.code in ("OK", "BUSY")
        saw(f"{spare} descriptors left", "connecting", refused=told)
    eventually("all descriptors are back", lambda: 0 < descriptors(daemon) <= pair.descriptors["decode"])


def ask_once(daemon: DaemonProcess) -> None:
    with Client(daemon.socket, name="late", timeout_s=1.0) as client:
        client.status()


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_full_pool_refuses_the_next_open_and_harms_no_transfer(pair: Pair, side: str) -> None:
    """OUT_OF_MEMORY at once, with what is needed and what there is; a transfer under way gets every byte; the pool is
    usable as soon as something goes back."""
    daemon: DaemonProcess = getattr(pair, side)
    with Both(pair, f"full {side}", tokens=LONG // 2) as both, daemon.client("greedy") as greedy:
        both.bring_to("mid-way")
        registered = greedy.status().memory.registered
        held = []
        since = time.monotonic()
        while (refused := tell(lambda: held.append(greedy.prefill(f"{len(held)}", SPEC, [1024])))).code == "OK":
            assert len(held) < 64 << 10
        assert refused.code == "OUT_OF_MEMORY"
        assert refused.fields["need"] > refused.fields["largest_free"] >= 0
        assert refused.fields["limit"] == 64 << 20
        assert refused.fields["retry_after_s"] > 0
        told = both.ends(since)
        saw(f"pool of {side} full", "mid-way", **told, refused=refused)
        assert {answer.code for answer in told.values()} == {"OK"}
        # The pool keeps its arenas, each with two descriptors: its own, and that of Python's mapping.
        pair.descriptors[side] += 2 * ((greedy.status().memory.registered - registered) // (32 << 20))
        held.pop().release()
        greedy.prefill("fits again", SPEC, [1024]).release()
        # A lease that can never fit says so, too, and takes nothing.
        too_large = tell(lambda: greedy.prefill("too large", SPEC, [1 << 17]))
        assert too_large.code == "OUT_OF_MEMORY"
    all_is_well(pair)
