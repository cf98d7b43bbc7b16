from __future__ import annotations

import logging

import pytest
import structlog

from kvd.lograte import FAILED, KINDS, SAME, WINDOW_S, Repeated


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Said:
    """What gets through, of lines given as :meth:`say` does."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.repeated = Repeated(self.clock)
        self.lines: list[dict[str, object]] = []

    def say(self, method: str, event: str, logger: str = "kvd.peers", **fields: object) -> None:
        try:
            self.lines.append(dict(self.repeated(logging.getLogger(logger), method, {"event": event, **fields})))
        except structlog.DropEvent:
            return


@pytest.fixture
def said() -> Said:
    return Said()


def test_a_port_scanner_leaves_a_few_lines_and_their_number(said: Said) -> None:
    for port in range(5000):
        said.say("warning", "connection of a peer refused", source=f"10.0.0.1:{port}", reason="no")
    assert len(said.lines) == SAME
    assert [line.get("more") is not None for line in said.lines] == [False] * (SAME - 1) + [True]
    said.clock.now = WINDOW_S
    said.say("warning", "connection of a peer refused", source="10.0.0.1:1", reason="no")
    assert said.lines[-1]["left_out"] == 5000 - SAME
    said.clock.now = 2 * WINDOW_S
    said.say("warning", "connection of a peer refused", source="10.0.0.1:1", reason="no")
    assert "left_out" not in said.lines[-1]


def test_a_day_of_a_peer_that_is_down_is_bounded_and_other_peers_are_heard(said: Said) -> None:
    for second in range(86400):
        said.clock.now = float(second)
        said.say("warning", "no session with peer", peer="b", reason="refused", attempts=second)
    assert len(said.lines) == SAME * 86400 / WINDOW_S
    said.say("warning", "no session with peer", peer="c", reason="refused", attempts=1)
    assert said.lines[-1]["peer"] == "c"


def test_ends_of_transfers_are_left_out_only_where_they_fail_alike(said: Said) -> None:
    for number in range(2 * FAILED):
        said.say("info", "transfer ended", "kvd.transfer", request=f"r{number}", peer="b", code="OK")
        said.say("info", "transfer ended", "kvd.transfer", request=f"s{number}", peer="b", code="PEER_LOST")
    said.say("info", "transfer ended", "kvd.transfer", request="t", peer="b", code="ABORTED")
    codes = [line["code"] for line in said.lines]
    assert (codes.count("OK"), codes.count("PEER_LOST"), codes.count("ABORTED")) == (2 * FAILED, FAILED, 1)


@pytest.mark.parametrize(("method", "logger"), [("info", "kvd.daemon"), ("debug", "kvd.peers"), ("info", "kvd.api")])
def test_what_is_no_complaint_passes(said: Said, method: str, logger: str) -> None:
    for _ in range(10 * SAME):
        said.say(method, "ready", logger)
    assert len(said.lines) == 10 * SAME


def test_the_kinds_that_are_told_apart_are_bounded(said: Said) -> None:
    for number in range(3 * KINDS):
        said.say("warning", "no session with peer", peer=f"node-{number}")
    assert len(said.lines) == 3 * KINDS
    assert len(said.repeated._kinds) == KINDS
