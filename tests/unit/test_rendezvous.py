"""Opens and announcements that wait for a local process."""

from __future__ import annotations

import pytest

from kvd.errors import Busy
from kvd.transfer import rendezvous
from kvd.transfer.rendezvous import Rendezvous, WaitingOpen
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
