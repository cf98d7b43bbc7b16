"""A process's ring as its session uses it: who is told when it lies, and what is taken when."""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import AsyncIterator

import pytest

from kvd.api.client_ring import EVENTS_A_PASS, ClientRing
from kvd.errors import ProtocolError
from kvd_client.ring import (
    EVENT_LAYER_READY,
    RING_BYTES,
    RING_EVENT,
    RING_EVENTS,
    RING_EVENTS_OFFSET,
    RING_HEAD_OFFSET,
    WAKE_IDLE,
)


class Process:
    """The far side of a ring, and what the near side was told."""

    def __init__(self) -> None:
        self.events: list[int] = []
        """Transfers of the events taken."""
        self.wrong: list[ProtocolError] = []
        self.held = False
        self.ring = ClientRing(
            asyncio.get_running_loop(),
            take=lambda events: self.events.extend(event[2] for event in events),
            held=lambda: self.held,
            violated=self.violated,
        )
        self.memory = mmap.mmap(self.ring.open()[0], RING_BYTES)

    def violated(self, error: ProtocolError) -> None:
        self.wrong.append(error)
        self.ring.close()

    def write_head(self, head: int) -> None:
        struct.pack_into("=Q", self.memory, RING_HEAD_OFFSET, head)

    def fill(self, count: int) -> None:
        """Append this many events to a ring that is empty still, their transfers counted from 0."""
        for at in range(count):
            RING_EVENT.pack_into(
                self.memory, RING_EVENTS_OFFSET + at * RING_EVENT.size, EVENT_LAYER_READY, 0, at, 0, 0, 1
            )
        self.write_head(count)


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    process = Process()
    yield process
    process.ring.close()
    process.memory.close()


async def test_a_ring_that_lies_ends_its_own_connection_whoever_looks(process: Process) -> None:
    """What asks for idle windows is a peer's message, say: that peer has nothing to do with it."""
    process.write_head(RING_EVENTS + 1)
    process.ring.set_wake(WAKE_IDLE)
    (error,) = process.wrong
    assert error.fields == {"pending": RING_EVENTS + 1}
    process.ring.sweep()
    process.ring.catch_up()
    assert (process.events, len(process.wrong)) == ([], 1)


async def test_a_request_is_preceded_by_all_events_and_a_turn_by_a_bounded_number(process: Process) -> None:
    count = EVENTS_A_PASS + 100
    process.fill(count)
    process.ring.sweep()
    assert process.events == list(range(EVENTS_A_PASS))
    process.ring.catch_up()
    assert process.events == list(range(count))


async def test_what_one_pass_leaves_is_taken_in_the_next_turn(process: Process) -> None:
    process.fill(EVENTS_A_PASS + 100)
    process.ring.sweep()
    await asyncio.sleep(0)
    assert process.events == list(range(EVENTS_A_PASS + 100))


async def test_nothing_is_taken_of_a_process_over_its_rate(process: Process) -> None:
    process.held = True
    process.fill(3)
    process.ring.sweep()
    process.ring.arm()
    await asyncio.sleep(0)
    assert process.events == []
    process.held = False
    process.ring.arm()
    await asyncio.sleep(0)
    assert process.events == [0, 1, 2]
