"""Turns and windows of one link."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.transfer.rate import MIN_SAMPLE_BYTES, Fill
from kvd.transfer.scheduler import AFTERMATH, FIRST_WINDOW, MIN_CHUNK, SHORT_WINDOW, Link


def test_turns_go_round_and_newcomers_wait_for_theirs() -> None:
    link = Link(window=100)
    link.add(1)
    link.add(2)
    link.add(1)
    assert [link.next_turn() for _ in range(3)] == [1, 2, 1]
    link.add(3)
    assert [link.next_turn() for _ in range(4)] == [2, 1, 3, 2]


def test_a_part_without_work_loses_its_turn() -> None:
    link = Link(window=100)
    for transfer in (1, 2, 3):
        link.add(transfer)
    link.remove(2)
    link.remove(7)
    assert [link.next_turn() for _ in range(3)] == [1, 3, 1]
    link.remove(1)
    link.remove(3)
    assert not link.open


def test_the_window_closes_when_full_and_opens_when_something_ends() -> None:
    link = Link(window=100)
    assert not link.open
    link.add(1)
    assert link.open
    link.submitted(10, 99, "proactive", 0.0)
    assert link.open
    link.submitted(11, 40, "proactive", 0.0)
    assert (link.in_flight, link.open) == (139, False)
    assert link.completed(11, 1.0)[0] == 40
    assert link.open
    assert link.completed(10, 1.0)[0] == 99
    assert link.in_flight == 0


def test_a_write_ends_once() -> None:
    link = Link(window=100)
    link.submitted(10, 60, "proactive", 0.0)
    assert link.completed(10, 1.0)[0] == 60
    assert link.completed(10, 1.0)[0] == 0
    assert link.completed(11, 1.0)[0] == 0
    assert link.in_flight == 0


def test_a_single_chunk_may_exceed_the_window() -> None:
    link = Link(window=100)
    link.add(1)
    link.submitted(10, 1000, "proactive", 0.0)
    assert not link.open
    link.completed(10, 1.0)
    assert link.open


# --- two classes, fetches, and the link's rate ------------------------------------------------------------------------


def test_late_work_waits_for_all_that_is_not() -> None:
    link = Link(window=100)
    link.add(1, late=True)
    link.add(2)
    link.add(3)
    assert [link.next_turn() for _ in range(3)] == [2, 3, 2]
    link.remove(2)
    link.remove(3)
    assert [link.next_turn() for _ in range(2)] == [1, 1]
    link.remove(1)
    assert not link.open


def test_a_part_is_in_one_queue_only() -> None:
    link = Link(window=100)
    for late in (True, False, False, True, True):
        link.add(1, late=late)
        assert (list(link.turns), list(link.late)) == (([], [1]) if late else ([1], []))


def test_late_work_stops_while_fetches_are_served_and_other_work_does_not() -> None:
    link = Link(window=100)
    link.add(1, late=True)
    link.urgent = 1
    assert not link.open
    link.add(2)
    assert link.open
    assert link.next_turn() == 2
    link.remove(2)
    assert not link.open
    link.urgent = 0
    assert link.open


class Clocked:
    """A link that carries ``rate`` bytes a second and is kept busy."""

    def __init__(self, link: Link, rate: float) -> None:
        self.link = link
        self.rate = rate
        self.now = 100.0
        self.number = 0

    def run(self, seconds: float, piece: int = 64 << 10, rate: float = 0.0) -> None:
        """Keep four pieces under way; each takes its time."""
        self.rate = rate or self.rate
        stop = self.now + seconds
        first = self.number
        for _ in range(4):
            self.submit(piece)
        while self.now < stop:
            self.now += piece / self.rate
            self.link.completed(first, self.now)
            first += 1
            self.submit(piece)
        while self.link.writes:
            self.now += piece / self.rate
            self.link.completed(first, self.now)
            first += 1

    def submit(self, piece: int) -> None:
        self.link.submitted(self.number, piece, "proactive", self.now)
        self.number += 1


def test_the_rate_is_what_a_busy_link_carries() -> None:
    link = Link(window=8 << 20, delay_s=0.01)
    assert link.rate == 0.0
    clocked = Clocked(link, 40e6)
    clocked.run(1.0)
    assert link.rate == pytest.approx(40e6, rel=0.05)
    clocked.now += 30.0  # a pause says nothing about the link
    clocked.run(0.2)
    assert link.rate == pytest.approx(40e6, rel=0.05)


def test_the_rate_follows_a_link_that_changes() -> None:
    link = Link(window=8 << 20, delay_s=0.01)
    clocked = Clocked(link, 40e6)
    clocked.run(1.0)
    clocked.run(2.0, rate=10e6)
    assert link.rate == pytest.approx(10e6, rel=0.1)
    clocked.run(2.0, rate=60e6)
    assert link.rate == pytest.approx(60e6, rel=0.1)


def test_writes_that_never_went_over_do_not_count_as_speed() -> None:
    link = Link(window=64 << 20, delay_s=0.01)
    clocked = Clocked(link, 10e6)
    clocked.run(1.0)
    for number in range(1000, 1064):
        link.submitted(number, 1 << 20, "proactive", clocked.now)
    for number in range(1000, 1064):
        link.completed(number, clocked.now + 0.02, placed=False)
    assert link.in_flight == 0
    assert link.rate == pytest.approx(10e6, rel=0.1)


def test_short_samples_are_not_believed() -> None:
    link = Link(window=8 << 20)
    link.submitted(1, 1 << 20, "proactive", 5.0)
    link.completed(1, 5.009)  # under 10 ms
    assert link.rate == 0.0
    link.submitted(2, MIN_SAMPLE_BYTES - 1, "proactive", 6.0)
    link.completed(2, 6.5)
    assert link.rate == 0.0
    link.submitted(3, MIN_SAMPLE_BYTES, "proactive", 7.0)
    link.completed(3, 7.5)
    assert link.rate == MIN_SAMPLE_BYTES / 0.5


def test_without_a_bound_on_delay_the_window_is_the_limit() -> None:
    assert Link(window=8 << 20).limit == 8 << 20
    assert Link(window=8 << 20, chunk=1 << 20).piece == 1 << 20


def test_limits_before_anything_is_known() -> None:
    link = Link(window=8 << 20, delay_s=0.01)
    assert (link.limit, link.piece) == (FIRST_WINDOW, MIN_CHUNK)
    link.add(1)
    link.submitted(1, link.piece, "proactive", 0.0)
    assert not link.open
    link.completed(1, 0.001)
    link.submitted(2, link.piece, "proactive", 0.001)
    assert link.open
    assert link.piece == FIRST_WINDOW // 3
    small = Link(window=1000, chunk=1000, delay_s=0.01)
    assert (small.limit, small.piece) == (1000, 1000)


class Queue:
    """A link that takes a fixed time besides, and whose sender always has more to send."""

    def __init__(self, link: Link, rate: float, trip_s: float) -> None:
        self.link, self.rate, self.trip_s = link, rate, trip_s
        self.now = self.free_at = 50.0
        self.number = 0
        self.under_way: list[tuple[float, int]] = []
        link.add(1)

    def run(self, seconds: float) -> float:
        """Keep it busy; the longest that a write waited in the queue during the second half."""
        stop, worst, start = self.now + seconds, 0.0, self.now
        while self.now < stop:
            while self.link.open:
                piece = self.link.piece
                self.link.submitted(self.number, piece, "proactive", self.now)
                queued = max(0.0, self.free_at - self.now)
                if self.now > start + seconds / 2:
                    worst = max(worst, queued)
                self.free_at = max(self.free_at, self.now) + piece / self.rate
                self.under_way.append((self.free_at + self.trip_s, self.number))
                self.number += 1
            self.now, number = self.under_way.pop(0)
            self.link.completed(number, self.now)
        return worst


@pytest.mark.parametrize("rate", [3e6, 25e6, 125e6, 1.25e9])
@pytest.mark.parametrize("trip_s", [0.0002, 0.005])
def test_bytes_under_way_wait_about_the_bound_and_the_link_stays_busy(rate: float, trip_s: float) -> None:
    link = Link(window=32 << 20, delay_s=0.01)
    queue = Queue(link, rate, trip_s)
    waited = queue.run(4.0)
    smallest = link.room.least / rate if link.room else 0.0
    assert waited <= max(0.015, 1.5 * smallest)
    assert link.rate >= 0.9 * rate


def test_a_link_that_slows_down_gets_less_and_gets_it_back() -> None:
    link = Link(window=8 << 20, delay_s=0.01)
    queue = Queue(link, 125e6, 0.0005)
    queue.run(2.0)
    fast = link.limit
    queue.rate = 25e6
    assert queue.run(4.0) <= 0.02
    assert link.limit < fast / 2
    queue.rate = 125e6
    queue.run(4.0)
    assert link.limit > 0.7 * fast


def test_little_to_send_does_not_change_the_limit() -> None:
    link = Link(window=8 << 20, delay_s=0.01)
    queue = Queue(link, 125e6, 0.0005)
    queue.run(2.0)
    limit, now = link.limit, queue.now + 1.0
    queue.link.writes.clear()
    link.in_flight = 0
    for number in range(10_000, 10_020):
        link.submitted(number, 1000, "proactive", now)
        now += 0.001
        link.completed(number, now)
    assert link.limit == limit


class Beside:
    """Bulk work that holds back while a fetch is served, and fetches one after the other, through one queue.

    Some of what arrives is noticed late, by ``late_s`` on average: by a processor that is busy with something else.
    """

    FETCH = 64 << 10

    def __init__(self, rate: float, trip_s: float = 0.0005, late_s: float = 0.0) -> None:
        self.link = Link(window=32 << 20, delay_s=0.01)
        self.link.add(1)
        self.rate, self.trip_s, self.late_s = rate, trip_s, late_s
        self.now = self.free_at = 50.0
        self.carried = 0
        self.waits: list[float] = []
        """How long each fetch waited for the bulk before it."""
        self._events: list[tuple[float, int, int, int]] = []
        self._numbers = itertools.count()
        self._random = random.Random(1)

    def run(self, seconds: float, *, fetches: bool = True) -> None:
        stop = self.now + seconds
        self._fill()
        if fetches:
            self._schedule(self.now + 0.1, 0, 0)
        while self.now < stop:
            at, _, nbytes, write = heapq.heappop(self._events)
            self.now = max(self.now, at)
            if nbytes:
                self.link.completed(write, self.now)
                self.carried += nbytes
            elif self.link.urgent:
                self.link.fetch_ended()
                self._schedule(self.now + 0.001, 0, 0)
            else:
                self.link.fetch_begins(self.now)
                self.waits.append(max(0.0, self.free_at - self.now))
                self._schedule(self._through(self.FETCH), 0, 0)
            self._fill()

    def _fill(self) -> None:
        while self.link.open and not self.link.paused(self.now):
            piece, write = self.link.piece, next(self._numbers)
            self.link.submitted(write, piece, "proactive", self.now)
            self._schedule(self._through(piece), piece, write)

    def _through(self, nbytes: int) -> float:
        self.free_at = max(self.free_at, self.now) + nbytes / self.rate
        return self.free_at + self.trip_s

    def _schedule(self, at: float, nbytes: int, write: int) -> None:
        late = self._random.expovariate(1 / self.late_s) if self.late_s and self._random.random() < 0.3 else 0.0
        heapq.heappush(self._events, (at + late, next(self._numbers), nbytes, write))


@pytest.mark.parametrize("rate", [25e6, 125e6, 1.25e9])
@pytest.mark.parametrize("trip_s", [0.0005, 0.005])
def test_a_fetch_waits_for_no_more_bulk_than_the_bound_allows(rate: float, trip_s: float) -> None:
    beside = Beside(rate, trip_s)
    beside.run(3.0)
    assert len(beside.waits) > 100
    assert max(beside.waits) <= 0.011  # of the first ones, too
    # A quarter of the queue, and what the path itself holds.
    assert max(beside.waits[len(beside.waits) // 2 :]) <= 0.003 + trip_s


@pytest.mark.parametrize("rate", [25e6, 125e6, 1.25e9])
def test_bursts_between_fetches_leave_the_room_as_it_is_without_them(rate: float) -> None:
    """The first writes of a burst find an empty queue, and don't pass for a sign that there is room for more."""
    alone, beside = Beside(rate), Beside(rate)
    alone.run(3.0, fetches=False)
    beside.run(3.0)
    assert alone.link.room is not None
    assert beside.link.room is not None
    assert 0.6 <= beside.link.room.nbytes / alone.link.room.nbytes <= 1.3
    assert alone.carried >= 0.97 * 3.0 * rate


@pytest.mark.parametrize("rate", [125e6, 1.25e9])
def test_a_busy_processor_does_not_pass_for_a_queue(rate: float) -> None:
    alone, beside = Beside(rate, late_s=0.01), Beside(rate, late_s=0.003)
    alone.run(3.0, fetches=False)
    assert alone.carried >= 0.85 * 3.0 * rate
    beside.run(3.0)
    assert sorted(beside.waits)[int(0.95 * len(beside.waits))] <= 0.01


def test_the_first_write_measures_the_path_and_not_itself() -> None:
    """Else a slow link's room would be as large as the time of the first, large writes allows, and these stay large."""
    beside = Beside(25e6)
    beside.run(0.15, fetches=False)
    assert beside.link.in_flight / beside.rate <= 0.01


def test_the_first_turn_is_small_behind_a_fetch_only() -> None:
    """A small turn moves the ends of all that follow away from those of layers: each layer then takes two writes."""
    numbers = itertools.count()
    link = Link(window=8 << 20, chunk=1 << 20, delay_s=0.01)

    def burst(turns: int) -> int:
        """Bytes of the first of so many turns on the idle link."""
        writes = list(itertools.islice(numbers, turns))
        for write in writes:
            link.submitted(write, link.piece, "proactive", 0.0)
        sizes = [link.completed(write, 0.001)[0] for write in writes]
        return sizes[0]

    assert burst(1) == MIN_CHUNK  # measures the path
    assert burst(1) == FIRST_WINDOW // 3
    link.fetch_begins(0.002)
    link.fetch_ended()
    assert (burst(1), burst(4)) == (MIN_CHUNK, MIN_CHUNK)
    for _ in range(20):
        burst(4)
    assert burst(1) >= FIRST_WINDOW // 3  # no fetch has come for a while


def test_while_fetches_come_a_quarter_of_the_queue_remains() -> None:
    link = Link(window=8 << 20, chunk=1 << 20, delay_s=0.01)
    assert link.room is not None
    link.room.nbytes = 1 << 20
    link.fetch_begins(0.0)
    assert link.limit == (1 << 20) // 4  # of the path nothing is known
    link.room.completed(0, 0.005, Fill.NONE)
    assert link.limit == (1 << 20) * 5 // 8  # half of the room is the path
    link.fetch_ended()
    assert link.limit == (1 << 20) * 5 // 8
    for write in range(2 * AFTERMATH):
        link.submitted(write, 1 << 19, "proactive", 1.0)
        link.completed(write, 1.01)
        assert (link.limit == int(link.room.nbytes)) is (write == 2 * AFTERMATH - 1)
    link.room.nbytes = 1.0
    link.fetch_begins(2.0)
    assert link.limit == SHORT_WINDOW


@pytest.mark.parametrize("trip_s", [0.0002, 0.005])
def test_a_short_queue_keeps_the_link_busy(trip_s: float) -> None:
    """A quarter of the room would not, on the longer path: half of the room is the path itself."""
    link = Link(window=32 << 20, delay_s=0.01)
    queue = Queue(link, 125e6, trip_s)
    queue.run(2.0)
    worst = 0.0
    for _ in range(100):  # fetches that are served before anybody notices
        link.fetch_begins(queue.now)
        link.fetch_ended()
        worst = max(worst, queue.run(0.01))
    assert link.rate >= 0.9 * 125e6
    assert worst <= 0.003


def test_a_link_that_slows_down_while_fetches_come_gets_less() -> None:
    beside = Beside(125e6)
    beside.run(2.0)
    assert beside.link.room is not None
    fast, beside.rate = beside.link.room.nbytes, 20e6
    beside.run(3.0)
    assert beside.link.room.nbytes < fast / 2
    assert max(beside.waits[-50:]) <= 0.008


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_under_way_stays_below_the_limit_and_one_turn(data: st.DataObject) -> None:
    """As the core uses it: a turn is taken while the link is open, whatever completes when."""
    link = Link(
        window=data.draw(st.sampled_from([200_000, 8 << 20])),
        chunk=data.draw(st.sampled_from([1000, 100_000, 1 << 20])),
        delay_s=data.draw(st.sampled_from([0.0, 0.005, 0.05])),
    )
    link.add(1)
    now, number = 0.0, 0
    for _ in range(data.draw(st.integers(1, 60))):
        while link.open:
            before, limit, piece = link.in_flight, link.limit, link.piece
            link.submitted(number, piece, "proactive", now)
            number += 1
            assert link.in_flight < limit + piece
            assert before < limit
        now += data.draw(st.sampled_from([0.0, 0.001, 0.05]))
        write = data.draw(st.sampled_from(sorted(link.writes)))
        nbytes = link.writes[write][0]
        assert link.completed(write, now, placed=data.draw(st.booleans())) == (nbytes, "proactive")
        assert link.in_flight == sum(nbytes for nbytes, _ in link.writes.values())
        assert link.rate >= 0
