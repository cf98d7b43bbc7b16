"""Every limit in time that a transfer has: its deadline, and the waits of both sides for each other."""

from __future__ import annotations

import pytest

from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.wire import messages as wire
from tests.unit.transfer_helpers import (
    STATES,
    TOKEN,
    TOLD,
    Node,
    kinds,
    only,
    open_message,
    sent,
    source_waiting,
)


@pytest.mark.parametrize("state", ["source waiting", "source running", "sink running"])
def test_the_deadline(state: str) -> None:
    node = STATES[state]()
    assert node.core.next_timer() == 100.0
    assert node.tick(99.9) == []
    out = node.tick(100.0)
    assert kinds(out) == [*TOLD[state], "ReportEnd"]
    (end,) = only(out, do.ReportEnd)
    assert end.code == "DEADLINE_EXCEEDED"
    assert f"0 of {8 * TOKEN} bytes" in end.message
    assert node.core.next_timer() is None


def test_the_source_keeps_the_sinks_deadline_if_that_is_earlier() -> None:
    node = source_waiting()
    node.now = 10.0
    node.hear(open_message(deadline_s=5.0))
    assert node.core.next_timer() == 15.0
    node = source_waiting()
    node.hear(open_message(deadline_s=1e9))
    assert node.core.next_timer() == 100.0
    node = source_waiting()
    node.hear(open_message(deadline_s=float("nan")))
    assert node.core.next_timer() == 100.0


@pytest.mark.parametrize("state", ["sink waiting", "sink connecting", "sink opening"])
def test_a_sink_waits_for_its_source_so_long(state: str) -> None:
    node = STATES[state]()
    assert node.core.next_timer() == 10.0
    assert node.tick(9.9) == []
    out = node.tick(10.0)
    assert kinds(out) == [*TOLD[state], "ReportEnd"]
    (end,) = only(out, do.ReportEnd)
    assert (end.code, end.fields["missing"]) == ("RENDEZVOUS_TIMEOUT", "source")
    assert ("on node 'p'" in end.message) == (state != "sink waiting")


def test_a_source_waits_for_its_sink_from_finish_on() -> None:
    node = source_waiting()
    node.now = 50.0
    assert node(ev.SourceFinished(1)) == []
    assert node(ev.SourceFinished(1)) == []
    assert node.core.next_timer() == 60.0
    (end,) = node.tick(60.0)
    assert isinstance(end, do.ReportEnd)
    assert (end.code, end.fields["missing"]) == ("RENDEZVOUS_TIMEOUT", "sink")


@pytest.mark.parametrize("finish", ["before", "after"])
def test_a_source_that_runs_has_met_its_sink(finish: str) -> None:
    node = source_waiting()
    if finish == "before":
        node(ev.SourceFinished(1))
    node.hear(open_message())
    if finish == "after":
        node(ev.SourceFinished(1))
    assert node.core.next_timer() == 100.0
    assert node.tick(50.0) == []


def test_an_open_waits_for_its_source_so_long_and_no_longer_than_its_own_deadline() -> None:
    node = Node()
    node.hear(open_message(sink=21, deadline_s=4.0))
    node.hear(open_message(sink=22))
    assert node.core.next_timer() == 4.0
    (refused,) = sent(node.tick(4.0), wire.Refused)
    assert (refused.transfer, refused.code) == (21, "RENDEZVOUS_TIMEOUT")
    (refused,) = sent(node.tick(10.0), wire.Refused)
    assert (refused.transfer, refused.fields["missing"]) == (22, "source")
    assert node.left == []
    assert node.core.next_timer() is None
