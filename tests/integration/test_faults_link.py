"""A link that is cut (network namespaces): for less and for more than the time-out, both ways and one way only."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import pytest

from tests.integration.daemons import DaemonProcess
from tests.integration.fault_helpers import (
    LONG,
    RATE,
    SHORT,
    STAGES,
    WAIT_S,
    Both,
    Pair,
    all_is_well,
    connected,
    destroyed,
    eventually,
    key_file,
    saw,
    start,
    tell,
)
from tests.integration.netns import Host, needs_netns, two_hosts

pytestmark = needs_netns

PORT = 7440
TIMEOUT_S = 1.5


class Linked(Pair):
    hosts: tuple[Host, Host]


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    folder = tmp_path_factory.mktemp("link")
    names = ("prefill", "decode")
    key = key_file(folder, secrets.token_hex(32))
    with two_hosts() as hosts:
        daemons = [
            DaemonProcess(
                folder,
                node,
                listen=f"{host.address}:{PORT}",
                peers={names[1 - at]: f"{hosts[1 - at].address}:{PORT}"},
                config={
                    "peers": {"key_file": key, "heartbeat_s": 0.3, "timeout_s": TIMEOUT_S, "connect_timeout_s": 2.0},
                    "transfer": {"rendezvous_s": 4.0},
                    "fabric": {"rate": RATE},
                },
                prefix=host.prefix,
            )
            for at, (node, host) in enumerate(zip(names, hosts, strict=True))
        ]
        with destroyed(*daemons):
            start(*daemons)
            pair = Linked(daemons[0], daemons[1])
            pair.hosts = hosts
            pair.settle()
            yield pair


@contextlib.contextmanager
def cut(linked: Linked, how: str) -> Iterator[float]:
    """``both ways``: the link is down. ``from prefill`` or ``from decode``: what leaves that host is dropped, and what
    comes to it arrives. The monotonic time from which on."""
    host, other = linked.hosts if how != "from decode" else linked.hosts[::-1]
    if how == "both ways":
        down, up = ["ip", "link", "set", host.link, "down"], ["ip", "link", "set", host.link, "up"]
    else:
        down = ["ip", "route", "add", "blackhole", f"{other.address}/32"]
        up = ["ip", "route", "del", "blackhole", f"{other.address}/32"]
    host.run(*down)
    try:
        yield time.monotonic()
    finally:
        host.run(*up)


CASES = [
    ("both ways", "full", "opened"),
    ("both ways", "full", "mid-way"),
    ("both ways", "full", "delivered"),
    ("both ways", "speculative", "paired"),
    ("from prefill", "full", "mid-way"),
    ("from prefill", "speculative", "paired"),
    ("from decode", "speculative", "paired"),
]
assert {stage for _, _, stage in CASES} == set(STAGES)


@pytest.mark.parametrize(("how", "mode", "stage"), CASES)
def test_a_link_cut_for_longer_than_the_timeout(linked: Linked, how: str, mode: str, stage: str) -> None:
    """Both sides are told PEER_LOST while it is down, each by its own daemon; what was delivered stays delivered."""
    with Both(linked, f"cut {how} {mode} {stage}", mode, LONG if stage == "mid-way" else SHORT) as both:
        both.bring_to(stage)
        with cut(linked, how) as since:
            if stage == "opened":
                # The sink's daemon waits for the source's word and hears nothing at all.
                told = {"sink": tell(lambda: both.sink.wait_ready(timeout_s=WAIT_S), since)}
            else:
                for daemon, peer in ((linked.prefill, "decode"), (linked.decode, "prefill")):
                    eventually(f"{daemon.node} gives {peer} up", lambda d=daemon, p=peer: not connected(d, p))  # type: ignore[misc]
                told = both.ends(since)
        saw(f"link cut {how}", f"{mode} {stage}", **told)
        codes = {side: answer.code for side, answer in told.items()}
        assert set(codes.values()) == ({"OK"} if stage == "delivered" else {"PEER_LOST"})
    all_is_well(linked)


def test_a_path_that_drops_large_packets(linked: Linked) -> None:
    """Heartbeats pass, bytes don't: both sides are told, and the reason says what to look at."""
    with Both(linked, "mtu", tokens=LONG) as both:
        both.bring_to("mid-way")
        # One segment a packet: several at once are never too large for a pair of virtual devices.
        linked.hosts[0].run("ip", "link", "set", linked.hosts[0].link, "gso_max_segs", "1")
        linked.hosts[1].run("ip", "link", "set", linked.hosts[1].link, "mtu", "600")
        try:
            since = time.monotonic()
            told = both.ends(since)
            saw("large packets dropped", "full mid-way", **told)
            assert {answer.code for answer in told.values()} == {"PEER_LOST"}
            with linked.prefill.client("look") as client:
                (peer,) = client.status().peers
            assert "large packets" in peer.error
        finally:
            linked.hosts[1].run("ip", "link", "set", linked.hosts[1].link, "mtu", "1500")
            linked.hosts[0].run("ip", "link", "set", linked.hosts[0].link, "gso_max_segs", "65535")
    all_is_well(linked)


@pytest.mark.parametrize("how", ["both ways", "from prefill"])
def test_a_link_cut_for_a_moment_loses_nothing(linked: Linked, how: str) -> None:
    """Shorter than the time-out (unless this machine was too busy for that): every byte arrives."""
    with Both(linked, f"moment {how}", tokens=LONG // 2) as both:
        both.bring_to("mid-way")
        begin = time.monotonic()
        with cut(linked, how) as since:
            meanwhile = tell(lambda: both.source.wait_delivered(timeout_s=0.2))
        short = time.monotonic() - begin < TIMEOUT_S / 4
        told = both.ends(since)
        saw(f"link cut {how} for a moment", "full mid-way", **told)
        assert {answer.code for answer in told.values()} == {"OK"} or not short
        assert meanwhile.code in ("DEADLINE_EXCEEDED", "OK") or not short
    all_is_well(linked)


def test_a_transfer_that_is_opened_while_the_link_is_down(linked: Linked) -> None:
    """Told so within the time to connect, and named with the address; memory is back at once."""
    with cut(linked, "both ways"), Both(linked, "before", tokens=SHORT) as both:
        both.open_sink()
        lost = tell(lambda: both.sink.wait_ready(timeout_s=WAIT_S))  # the old session's end, if it still stood
        assert lost.code in ("PEER_LOST", "PEER_UNREACHABLE")
        with Both(linked, "during", tokens=SHORT) as again:
            again.open_sink()
            told = tell(lambda: again.sink.wait_ready(timeout_s=WAIT_S))
            saw("link is down", "dialling", sink=told)
            assert told.code == "PEER_UNREACHABLE"
            assert (told.fields["peer"], told.fields["address"]) == ("prefill", f"{linked.hosts[0].address}:{PORT}")
    all_is_well(linked)
