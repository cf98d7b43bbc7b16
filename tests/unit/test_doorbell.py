"""Both ends of the shared ring on real memfds and eventfds, without a socket in between."""

from __future__ import annotations

import os
import select
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.api.doorbell import Ring
from kvd_client.doorbell import Doorbell
from kvd_client.errors import ProtocolError
from kvd_client.ring import (
    EVENT_IDLE,
    EVENT_LAYER_READY,
    RING_BYTES,
    RING_EVENTS,
    RING_HEAD_OFFSET,
    RING_HEADER,
    RING_MAGIC,
    RING_SLOTS,
    SLOT_DELIVERED,
    WAKE_IDLE,
    WAKE_LAYER_READY,
)


@pytest.fixture
def pair():
    ring = Ring()
    doorbell = Doorbell(ring.descriptors[0], ring.wake_daemon_fd)
    yield ring, doorbell
    ring.close()


def readable(fd: int, timeout_s: float = 0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_events_arrive_in_order_with_all_fields(pair):
    ring, doorbell = pair
    sent = [(EVENT_LAYER_READY, 65535, 2**32 - 1, 7, 5, 9), (EVENT_IDLE, 0, 1, 2**32 - 1, 0, 0)]
    for event in sent:
        assert doorbell.ring(*event)
    assert ring.pending() == 2
    assert ring.take(2) == sent
    assert ring.pending() == 0


@settings(max_examples=30)
@given(st.lists(st.integers(1, RING_EVENTS), min_size=1, max_size=8), st.integers(1, RING_EVENTS))
def test_batches_of_any_size_wrap_around(batches, most):
    ring = Ring()
    doorbell = Doorbell(ring.descriptors[0], ring.wake_daemon_fd)
    try:
        number, got = 0, []
        for batch in batches:
            for _ in range(batch):
                if not doorbell.ring(EVENT_LAYER_READY, 0, number, 0, 0, 1):
                    assert ring.pending() == RING_EVENTS
                    break
                number += 1
            got += [event[2] for event in ring.take(min(ring.pending(), most))]
        while ring.pending():
            got += [event[2] for event in ring.take(min(ring.pending(), most))]
        assert got == list(range(number))
    finally:
        ring.close()


def test_a_full_ring_refuses_until_it_has_room(pair):
    ring, doorbell = pair
    for i in range(RING_EVENTS):
        assert doorbell.ring(EVENT_LAYER_READY, 0, i, 0, 0, 1)
    assert not doorbell.ring(EVENT_LAYER_READY, 0, RING_EVENTS, 0, 0, 1)
    assert not doorbell.has_room()
    assert [event[2] for event in ring.take(1)] == [0]
    assert doorbell.has_room()
    assert doorbell.ring(EVENT_LAYER_READY, 0, RING_EVENTS, 0, 0, 1)
    assert [event[2] for event in ring.take(ring.pending())] == list(range(1, RING_EVENTS + 1))


@pytest.mark.parametrize(
    ("flags", "kind", "woken"),
    [
        (0, EVENT_LAYER_READY, False),
        (0, EVENT_IDLE, False),
        (WAKE_LAYER_READY, EVENT_LAYER_READY, True),
        (WAKE_LAYER_READY, EVENT_IDLE, False),
        (WAKE_IDLE, EVENT_LAYER_READY, False),
        (WAKE_IDLE, EVENT_IDLE, True),
    ],
)
def test_the_daemon_is_woken_for_what_it_asked(pair, flags, kind, woken):
    ring, doorbell = pair
    ring.set_wake(flags)
    doorbell.ring(kind, 0, 1, 0, 0, 1)
    assert readable(ring.wake_daemon_fd) is woken
    ring.clear_daemon_wake()
    assert not readable(ring.wake_daemon_fd)


def test_idle_is_wanted_while_its_bit_is_set(pair):
    ring, doorbell = pair
    assert not doorbell.wants_idle
    ring.set_wake(WAKE_IDLE | WAKE_LAYER_READY)
    assert doorbell.wants_idle


def test_slots_carry_state_and_numbers(pair):
    ring, doorbell = pair
    for slot in (0, RING_SLOTS - 1):
        ring.set_slot(slot, SLOT_DELIVERED, 2**32 - 1, 2**63, 2**40)
        assert doorbell.state(slot) == SLOT_DELIVERED
        assert doorbell.generation(slot) == 2**32 - 1
        assert doorbell.progress(slot) == 2**63
        assert doorbell.nbytes(slot) == 2**40
    assert doorbell.state(1) == 0


def test_the_closing_mark(pair):
    ring, doorbell = pair
    assert not doorbell.closed
    ring.mark_closed()
    assert doorbell.closed


def test_waking_and_being_woken_never_block_on_a_full_counter(pair):
    ring, doorbell = pair
    most = 2**64 - 2
    os.eventfd_write(ring.descriptors[1], most)
    doorbell.wake()
    os.eventfd_write(ring.descriptors[2], most)
    ring.wake_process()
    assert os.eventfd_read(ring.descriptors[1]) == most
    assert os.eventfd_read(ring.descriptors[2]) == most


@pytest.mark.parametrize("head", [RING_EVENTS + 1, 2**63, 2**64 - 1])
def test_a_head_out_of_bounds_is_noticed(pair, head):
    ring, doorbell = pair
    doorbell._u64[RING_HEAD_OFFSET // 8] = head
    with pytest.raises(ProtocolError, match="head"):
        ring.pending()


@given(st.binary(min_size=1, max_size=512), st.integers(0, RING_BYTES - 512))
def test_the_daemon_survives_any_bytes_in_the_ring(garbage, at):
    ring = Ring()
    doorbell = Doorbell(ring.descriptors[0], ring.wake_daemon_fd)
    try:
        doorbell.ring(EVENT_LAYER_READY, 0, 1, 0, 0, 1)
        doorbell._bytes[at : at + len(garbage)] = garbage
        try:
            pending = ring.pending()
        except ProtocolError:
            return
        assert pending <= RING_EVENTS
        assert len(ring.take(pending)) == pending
    finally:
        ring.close()


def test_the_memfd_can_neither_shrink_nor_grow(pair):
    ring, _ = pair
    for size in (0, RING_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.descriptors[0], size)


def test_a_ring_that_is_not_sealed_or_foreign_is_refused(tmp_path):
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    memfd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    other = Ring()
    try:
        os.ftruncate(plain, RING_BYTES)
        os.ftruncate(memfd, RING_BYTES)
        for fd in (plain, memfd):
            with pytest.raises(ProtocolError, match="sealed"):
                Doorbell(fd, -1)
        RING_HEADER.pack_into(other._bytes, 0, RING_MAGIC, 99, RING_EVENTS, RING_SLOTS)
        with pytest.raises(ProtocolError, match="version"):
            Doorbell(other.descriptors[0], -1)
    finally:
        os.close(plain)
        os.close(memfd)
        other.close()


def test_no_wake_up_is_lost_between_threads(pair):
    # The consumer sleeps on the eventfd alone; a lost wake-up would leave it there.
    ring, doorbell = pair
    total = 20_000
    got: list[int] = []
    stuck = threading.Event()

    def consume() -> None:
        while len(got) < total:
            ring.set_wake(0)
            got.extend(event[2] for event in ring.take(ring.pending()))
            ring.set_wake(WAKE_LAYER_READY)
            if ring.pending():
                continue
            if len(got) < total and not readable(ring.wake_daemon_fd, 20):
                stuck.set()
                return
            ring.clear_daemon_wake()

    consumer = threading.Thread(target=consume)
    consumer.start()
    number = 0
    while number < total and not stuck.is_set():
        if doorbell.ring(EVENT_LAYER_READY, 0, number, 0, 0, 1):
            number += 1
        else:
            doorbell.wake()
    consumer.join()
    assert not stuck.is_set()
    assert got == list(range(total))


def test_threads_ring_one_doorbell(pair):
    ring, doorbell = pair
    each, threads = 200, 8

    def ring_some(thread: int) -> None:
        for i in range(each):
            assert doorbell.ring(EVENT_LAYER_READY, thread, i, 0, 0, 1)

    running = [threading.Thread(target=ring_some, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    events = ring.take(ring.pending())
    for thread in range(threads):
        assert [event[2] for event in events if event[1] == thread] == list(range(each))
