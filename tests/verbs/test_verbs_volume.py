"""Ten thousand transfers, under a reader's eyes, and connections one after the other: nothing early, nothing left."""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import os
import sys
import threading

import numpy as np
import pytest

from kvd.fabric.conformance import Pair, connected, one, open_descriptors
from kvd.types import Lane
from tests.verbs.devices import DEVICES, needs_devices
from tests.verbs.pairs import on_pair

pytestmark = needs_devices

TRANSFERS = 10_000 if os.cpu_count() == 1 else 1_000
"""Two CPUs are emulated at half the speed."""


@pytest.mark.race
@on_pair
async def test_transfers_show_no_mask_before_its_data_and_leave_nothing_behind(pair: Pair) -> None:
    """Data, the mask chained behind it and a message, in a new grant for every hundred, under a thread that polls all
    masks and data. Neither descriptors nor memory grow."""
    slots, size = 100, 256
    part = TRANSFERS // slots // 5
    source, region = pair.left.memory(slots * (size + 1), fill=0)
    target, whole = pair.right.granted(slots * (size + 1))
    # Eight bytes of data at a time, to look often: eight that are not all of a generation are less than eight that are.
    data, masks = target[: slots * size].view(np.uint64).reshape(slots, size // 8), target[slots * size :]
    early: list[int] = []
    looks, finished = 0, threading.Event()

    def poll() -> None:
        nonlocal looks
        while not finished.wait(0.01):  # leaves most of the only CPU to the writes
            generations = masks.astype(np.uint64) * 0x0101010101010101  # before the data, which may only be newer
            early.extend(np.flatnonzero(data.min(axis=1) < generations).tolist())
            looks += 1

    resident, descriptors, objects = [], [], []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for generation in range(1, TRANSFERS // slots + 1):
            source[:] = generation
            grant = pair.right.fabric.grant(whole.region, 0, len(target))
            operations = [
                pair.left.endpoint.write(
                    Lane(slot % 2),
                    region,
                    grant.token,
                    one(slot * size, slot * size, size),
                    then=one(slots * size + slot, slots * size + slot, 1),
                    notify=b"n" if slot % 10 == 0 else None,
                )
                for slot in range(slots)
            ]
            await asyncio.gather(*(operation.done for operation in operations))
            await pair.right.until(lambda: len(pair.right.messages) == slots // 10)
            pair.right.messages.clear()
            await pair.right.fabric.revoke(grant)
            if generation % part == 0:
                resident.append(_resident())
                descriptors.append(open_descriptors())
                objects.append(_verbs_objects())
    finally:
        finished.set()
        await asyncio.to_thread(poller.join)
        sys.setswitchinterval(interval)
    assert (target == TRANSFERS // slots).all()
    assert pair.left.endpoint.counters.writes == TRANSFERS
    assert early == []
    assert looks > 50
    print(f"{TRANSFERS} transfers, {looks} looks at {slots} masks")
    assert len(set(descriptors)) == 1
    assert objects[1:] == objects[:-1], "work requests, entries or registrations are left"
    # What earlier tests left to the allocator makes single steps; a leak of 16 bytes a transfer shows in every part.
    assert min(np.diff(resident)) < part * slots * 16


def _verbs_objects() -> dict[str, int]:
    """How many objects of pyverbs there are, by type."""
    gc.collect()  # what earlier tests left in cycles goes when it likes, and would look like a change
    counts = collections.Counter(map(type, gc.get_objects()))
    return {str(kind): count for kind, count in counts.items() if "pyverbs" in str(kind)}


def test_no_leak_over_connections() -> None:
    from kvd.fabric.verbs.fabric import VerbsFabric

    async def connections(count: int) -> None:
        devices = itertools.cycle(DEVICES)
        for _ in range(count):
            async with connected(lambda: VerbsFabric(device=next(devices))) as pair:
                await pair.both_live()

    async def body() -> None:
        await connections(3)
        resident, descriptors = _resident(), open_descriptors()
        await connections(10)
        assert open_descriptors() == descriptors
        assert _resident() - resident < 2 << 20, "a tenth of what a connection has"

    asyncio.run(body())


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
