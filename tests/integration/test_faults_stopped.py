"""Processes that stand still (SIGSTOP) for less and for longer than each time-out, and readers that don't read."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvd_client import Client
from kvd_client.framing import encode
from kvd_client.protocol import PROTOCOL_VERSION, GetStatus, Hello
from tests.integration.daemons import DaemonProcess, free_port
from tests.integration.fault_helpers import (
    LONG,
    RATE,
    SHORT,
    SPEC,
    STAGES,
    WAIT_S,
    Both,
    Pair,
    Told,
    all_is_well,
    connected,
    destroyed,
    eventually,
    idle,
    kill_and_start,
    one_transfer,
    saw,
    served,
    start,
    stopped,
    tell,
)

TIMEOUT_S = 1.5
"""``peers.timeout_s`` of the daemons: as short as a busy machine allows."""


class Three(Pair):
    """A bystander, ``other``, is a second sink of ``prefill``."""

    other: DaemonProcess


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    folder = tmp_path_factory.mktemp("stopped")
    ports = {node: free_port() for node in ("prefill", "decode", "other")}
    daemons = [
        DaemonProcess(
            folder,
            node,
            listen=f"127.0.0.1:{port}",
            peers={name: f"127.0.0.1:{ports[name]}" for name in ports if name != node},
            config={
                "peers": {"heartbeat_s": 0.3, "timeout_s": TIMEOUT_S, "handshake_timeout_s": 2.0},
                "transfer": {"rendezvous_s": 2.0},
                "memory": {"arena": "128MiB"},  # one is enough for all tests: an arena has a descriptor
                "fabric": {"rate": RATE},
            },
        )
        for node, port in ports.items()
    ]
    with destroyed(*daemons):
        start(*daemons)
        pair = Three(daemons[0], daemons[1])
        pair.other = daemons[2]
        one_transfer(Pair(pair.prefill, pair.other), "settle")
        pair.settle()
        yield pair


CASES = [("prefill", "full", stage) for stage in STAGES] + [
    ("prefill", "speculative", "paired"),
    ("decode", "full", "paired"),
    ("decode", "full", "mid-way"),
    ("decode", "speculative", "paired"),
]


@pytest.mark.parametrize(("victim", "mode", "stage"), CASES)
def test_a_daemon_stopped_for_longer_than_the_timeout(three: Three, victim: str, mode: str, stage: str) -> None:
    """The far side is told PEER_LOST while it stands still, and its own side when it goes on."""
    far = "sink" if victim == "prefill" else "source"
    tokens = LONG if stage == "mid-way" else SHORT
    with Both(three, f"stop-{victim}-{mode}-{stage}", mode, tokens) as both:
        both.bring_to(stage)
        with stopped(getattr(three, victim)) as since:
            if stage in ("paired", "mid-way"):
                far_wait = both.sink.wait_ready if far == "sink" else both.source.wait_delivered
                assert tell(lambda: far_wait(timeout_s=WAIT_S)).code == "PEER_LOST"
            else:
                alive, name = (three.decode, "prefill") if victim == "prefill" else (three.prefill, "decode")
                eventually(f"{name} is given up", lambda: not connected(alive, name))
        told = both.ends(since)
        saw(f"{victim} stopped past timeout_s", f"{mode} {stage}", **told)
        codes = {side: answer.code for side, answer in told.items()}
        if stage in ("paired", "mid-way"):
            assert set(codes.values()) == {"PEER_LOST"}
        elif stage == "delivered":
            assert codes == {"source": "OK", "sink": "OK"}
        else:
            assert codes == {"sink": "PEER_LOST"}
    all_is_well(three)


@pytest.mark.parametrize(("mode", "stage"), [("full", "mid-way"), ("speculative", "paired")])
@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_process_that_is_gone(three: Three, side: str, mode: str, stage: str) -> None:
    """With bulk or a fetch under way: the other one is told PROCESS_LOST at once, and holds no wrong byte."""
    with Both(three, f"gone {side} {mode}", mode, LONG if stage == "mid-way" else SHORT) as both:
        both.bring_to(stage)
        since = time.monotonic()
        if side == "source":
            both.source_client.close()
            told = {"sink": tell(lambda: both.sink.wait_ready(timeout_s=WAIT_S), since)}
            if both.fetch is not None:
                told["fetch"] = tell(lambda: both.fetch.wait(WAIT_S), since)
            both.check_bytes(complete=False)
        else:
            both.sink_client.close()
            told = {"source": tell(lambda: both.source.wait_delivered(timeout_s=WAIT_S), since)}
        saw(f"{side}'s process gone", f"{mode} {stage}", **told)
        assert {answer.code for answer in told.values()} == {"PROCESS_LOST"}
    all_is_well(three)


@pytest.mark.parametrize(
    ("victim", "mode", "stage"), [("prefill", "speculative", "paired"), ("decode", "full", "mid-way")]
)
def test_a_killed_daemon_with_work_under_way(three: Three, victim: str, mode: str, stage: str) -> None:
    """With a fetch, or bulk, under way."""
    kill_and_start(three, victim, mode, stage, LONG if stage == "mid-way" else SHORT)


def test_a_daemon_stopped_for_a_moment_is_not_given_up(three: Three) -> None:
    """Shorter than every time-out: both sides get all bytes. (On a machine so busy that the moment lasted longer than
    the time-out, both are told so.)"""
    with Both(three, "moment", tokens=LONG // 2) as both:
        both.bring_to("mid-way")
        with stopped(three.decode) as since:
            meanwhile = tell(lambda: both.source.wait_delivered(timeout_s=0.2))
        short = time.monotonic() - since < TIMEOUT_S / 2
        told = both.ends(since)
        saw("decode stopped for a moment", "full mid-way", **told)
        assert {answer.code for answer in told.values()} == {"OK"} or not short
        assert meanwhile.code in ("DEADLINE_EXCEEDED", "OK") or not short
    all_is_well(three)


def test_a_daemon_that_stands_still_while_it_is_dialled(three: Three) -> None:
    """The kernel takes the connection, and nobody speaks: PEER_UNREACHABLE when the handshake's time is over."""
    assert not connected(three.decode, "other")
    with (
        stopped(three.other) as since,
        three.decode.client() as client,
        client.decode("dial", SPEC, [SHORT], source="other") as sink,
    ):
        told = tell(lambda: sink.wait_ready(timeout_s=WAIT_S), since)
        saw("peer stopped", "dialling", sink=told)
        assert told.code == "PEER_UNREACHABLE"
        assert told.fields["peer"] == "other"
        assert "handshake" in told.fields["reason"]
    eventually("the peer is idle", idle(three.other))
    all_is_well(three)


def test_ones_own_daemon_stands_still(three: Three) -> None:
    """The client's own time-out, and the very next call works when the daemon goes on; what the daemon opened
    meanwhile for a caller that had given up is not kept."""
    with Client(three.decode.socket, name="patient", timeout_s=1.0) as client:
        before = client.status().counters["transfers_opened_sink"]
        with stopped(three.decode) as since:
            told = tell(lambda: client.decode("late", SPEC, [SHORT]), since)
            saw("own daemon stopped", "opening", sink=told)
            assert told.code == "DAEMON_UNREACHABLE"

        def given_back() -> bool:
            told = tell(lambda: seen.append(client.status()))  # the open's reply is read with this one's
            if told.code != "OK":
                return False
            return bool(seen[-1].counters["transfers_opened_sink"] > before and seen[-1].memory.in_use == 0)

        seen: list[Any] = []
        eventually("the late open has been carried out and given back", given_back)
    all_is_well(three)


@pytest.mark.parametrize("stage", ["opened", "paired"])
def test_a_process_that_stands_still_meets_the_deadline(three: Three, stage: str) -> None:
    """The source's process computes nothing any more: both are told DEADLINE_EXCEEDED, or, before the source is there,
    the sink RENDEZVOUS_TIMEOUT."""
    with Both(three, f"deadline-{stage}", deadline_s=2.5) as both:
        both.bring_to(stage)
        told = both.ends(time.monotonic())
        saw("source process stands still", f"full {stage}", **told)
        want = "RENDEZVOUS_TIMEOUT" if stage == "opened" else "DEADLINE_EXCEEDED"
        assert {answer.code for answer in told.values()} == {want}
        for answer in told.values():
            assert "timeout_s" not in answer.fields  # the daemon's word, not the end of this test's patience
    all_is_well(three)


def test_bulk_queued_for_a_peer_that_does_not_read_harms_nobody_else(three: Three) -> None:
    """64 MiB wait for a daemon that stands still: transfers and fetches to another one go on meanwhile, and the source
    holds no copy of what waits."""
    bystanders = Pair(three.prefill, three.other)
    before = three.prefill.resources()[1]
    with contextlib.ExitStack() as stack:
        queued = [stack.enter_context(Both(three, f"queued-{n}", tokens=LONG)) for n in range(3)]
        for both in queued:
            both.open_sink()
            both.open_source()
            both.put([0])
        queued[0].sink.wait_ready(0, timeout_s=WAIT_S)
        with stopped(three.decode) as since:
            for both in queued:
                both.put(range(1, 6))
            told = tell(lambda: one_transfer(bystanders, "bystander"))
            with Both(bystanders, "urgent", "partial") as urgent:
                urgent.bring_to("paired")
                urgent.put(range(1, 6))
                fetched = tell(lambda: urgent.fetch.wait(WAIT_S))
                urgent.check_bytes(complete=False)
            grown = three.prefill.resources()[1] - before
            ended = [tell(lambda b=both: b.source.wait_delivered(timeout_s=WAIT_S), since) for both in queued]  # type: ignore[misc]
            assert {answer.code for answer in ended} == {"PEER_LOST"}
        saw("slow peer, 72 MiB queued", "mid-way", source=ended[-1], bystander=told, fetch=fetched)
        assert (told.code, fetched.code) == ("OK", "OK")
        assert grown < 24 << 20, f"{grown >> 20} MiB more memory for bytes that wait"
        for both in queued:
            both.check_bytes(complete=False)
    eventually("the bystander is idle", idle(three.other))
    all_is_well(three)


def test_a_client_that_does_not_read_its_replies(three: Three) -> None:
    """Its connection ends when too much waits for it; nobody else notices, and memory is bounded."""
    before = three.prefill.resources()[1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT_S)
        sock.connect(three.prefill.socket)
        sock.sendall(encode(Hello(id=1, version=PROTOCOL_VERSION, name="deaf")))
        asks = b"".join(encode(GetStatus(id=number)) for number in range(2, 102))

        since = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < since + WAIT_S:
                sock.sendall(asks)
        saw("client reads no replies", "-", source=Told("(closed)", time.monotonic() - since))
    assert three.prefill.resources()[1] - before < 24 << 20
    served(three)
    all_is_well(three)
