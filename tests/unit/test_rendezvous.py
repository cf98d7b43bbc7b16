"""Opens and announcements that wait for a local process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import Busy
from kvd.transfer import rendezvous
from kvd.transfer.rendezvous import SLACK, Rendezvous, WaitingOpen
from tests.unit.counting import operations
from tests.unit.transfer_helpers import open_message


def waiting(sink: int, session: int = 1, until: float = 10.0, request: str = "r", rank: int = 0) -> WaitingOpen:
    return WaitingOpen(session, f"node{session}", open_message(sink=sink, request=request, rank=rank), until)


def sinks(found: list[WaitingOpen]) -> list[int]:
    return [one.message.sink for one in found]


def filled() -> Rendezvous:
    one = Rendezvous()
    one.add_open(waiting(1))
    one.add_open(waiting(2, session=2, until=5.0))
    one.add_open(waiting(3, rank=1, until=7.0))
    one.add_open(waiting(4, request="s"))
    return one


def test_opens_are_taken_once_by_request_and_rank_first_come_first() -> None:
    one = filled()
    assert sinks(one.take_opens("r", 0)) == [1, 2]
    assert one.take_opens("r", 0) == []
    assert sinks(one.take_opens("r", 1)) == [3]
    assert sinks(one.take_all_opens()) == [4]
    assert one.take_all_opens() == []
    assert one.next_expiry() is None


def test_opens_expire_in_their_time() -> None:
    one = filled()
    assert one.next_expiry() == 5.0
    assert one.expire(4.9) == []
    assert sinks(one.expire(7.0)) == [2, 3]
    assert one.expire(7.0) == []
    assert one.next_expiry() == 10.0
    assert sinks(one.take_opens("r", 0)) == [1]


def test_an_open_is_withdrawn_by_the_session_that_made_it() -> None:
    one = filled()
    one.withdraw(2, 1)
    one.withdraw(1, 2)
    one.withdraw(1, 1)
    one.withdraw(1, 1)
    assert sinks(one.take_opens("r", 0)) == [2]


def test_announcements_are_taken_once_and_the_newest_counts() -> None:
    one = Rendezvous()
    one.announce("r", 0, 1, "a")
    one.announce("r", 0, 2, "b")
    one.announce("r", 1, 1, "a")
    assert one.take_announced("r", 0) == (2, "b")
    assert one.take_announced("r", 0) is None
    assert one.take_announced("r", 1) == (1, "a")
    assert one.take_announced("s", 0) is None


def test_a_session_goes_with_all_it_had_here() -> None:
    one = filled()
    one.announce("x", 0, 1, "a")
    one.announce("y", 0, 2, "b")
    one.session_lost(1)
    assert sinks(one.take_all_opens()) == [2]
    assert one.take_announced("x", 0) is None
    assert one.take_announced("y", 0) == (2, "b")
    one.session_lost(1)


def test_opens_are_bounded_per_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_WAITING", 2)
    one = Rendezvous()
    one.add_open(waiting(1))
    one.add_open(waiting(2, request="s"))
    with pytest.raises(Busy) as caught:
        one.add_open(waiting(3, request="t"))
    assert caught.value.fields == {"retry_after_s": 1.0}
    one.add_open(waiting(3, session=2, request="t"))
    one.withdraw(1, 1)
    one.add_open(waiting(4))
    assert sorted(sinks(one.take_all_opens())) == [2, 3, 4]


def test_of_too_many_announcements_the_sessions_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements that nobody wants must not keep out those that somebody will."""
    monkeypatch.setattr(rendezvous, "MAX_WAITING", 2)
    one = Rendezvous()
    one.announce("other", 0, 2, "b")
    for number in range(5):
        one.announce(f"r{number}", 0, 1, "a")
    one.announce("r3", 0, 1, "a")
    one.announce("r5", 0, 1, "a")
    assert [one.take_announced(f"r{number}", 0) for number in range(6)] == [None] * 3 + [(1, "a"), None, (1, "a")]
    assert one.take_announced("other", 0) == (2, "b")
    assert one._announced == one._announced_on == {}


def test_a_sink_waits_for_what_it_named_last() -> None:
    one = filled()
    one.add_open(waiting(1, until=3.0, request="s"))
    assert sinks(one.take_opens("r", 0)) == [2]
    assert one.next_expiry() == 3.0
    assert sinks(one.take_opens("s", 0)) == [4, 1]


STEPS = st.lists(
    st.tuples(st.sampled_from(("open", "take", "withdraw", "lose", "tick", "stop")), st.integers(0, 11)), max_size=40
)


@given(steps=STEPS)
def test_whatever_becomes_of_opens_is_what_a_list_of_them_would_say(steps: list[tuple[str, int]]) -> None:
    one, plain, now = Rendezvous(), list[WaitingOpen](), 0.0
    for what, number in steps:
        session, rank = number % 3, number % 2
        found: list[WaitingOpen] | None = None
        match what:
            case "open":
                added = waiting(number // 2, session, now + 7 * number % 11, rank=rank)
                gone = [open for open in plain if open.sink == added.sink]
                one.add_open(added)
            case "take":
                gone = [open for open in plain if open.wanted == ("r", rank)]
                found = one.take_opens("r", rank)
            case "withdraw":
                gone = [open for open in plain if open.sink == (session, number // 2)]
                one.withdraw(session, number // 2)
            case "lose":
                gone = [open for open in plain if open.session == session]
                one.session_lost(session)
            case "tick":
                now += number
                gone = [open for open in plain if open.until <= now]
                found = sorted(one.expire(now), key=plain.index)
            case _:
                gone = plain
                found = one.take_all_opens()
        assert found is None or found == gone
        plain = [open for open in plain if open not in gone] + ([added] if what == "open" else [])
        assert one.next_expiry() == min((open.until for open in plain), default=None)
        assert list(one._opens.values()) == plain
        assert {sink for these in one._opens_for.values() for sink in these} == set(one._opens)
        assert {sink for these in one._opens_on.values() for sink in these} == set(one._opens)


class Instant(float):
    """A time whose comparisons are calls that :func:`~tests.unit.counting.operations` counts, the heap's included."""

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    def __lt__(self, other: float) -> bool:
        return float(self) < other

    __hash__ = float.__hash__


def test_what_a_call_costs_does_not_grow_with_what_waits() -> None:
    def costs(many: int) -> list[int]:
        one = Rendezvous()
        for number in range(many):
            one.add_open(waiting(number, number % 2, Instant(number), f"r{number}"))
        last = waiting(many, 1, Instant(many), "last")
        return [
            operations(act)
            for act in (
                one.next_expiry,
                lambda: one.add_open(last),
                lambda: one.withdraw(1, many),
                lambda: one.take_opens("r1", 0),
                lambda: one.session_lost(7),
                lambda: one.expire(0.5),
            )
        ]

    (*few, few_expire), (*many, many_expire) = costs(40), costs(4000)
    assert few == many
    assert many_expire < 2 * few_expire, "comparisons in the heap, by the logarithm"


def test_limits_out_of_date_do_not_pile_up() -> None:
    """Opens whose source comes long before their limit, as nearly all do."""
    one = Rendezvous()
    for number in range(1000):
        one.add_open(waiting(number, request=f"r{number}"))
        one.take_opens(f"r{number}", 0)
        assert len(one._limits) <= 2 * 1 + SLACK
    assert one.next_expiry() is None
