"""Verbs endpoints on devices of this file's own: real memory, no hardware, and everything that can go wrong.

Many seeds: requests are executed, acknowledged or lost, completions and what is told out of band come late and in any
order across lanes and sides, and queue pairs fail at any moment. Each seed must end with all bytes in place and every
message delivered once and in order. Needs pyverbs, but no device.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
from collections import deque
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyverbs.device", reason="no pyverbs here: python -m tests.verbs.build links Debian's")

if "KVD_VERBS_GUEST" in os.environ:
    pytest.skip("needs no device, and an emulated CPU is slow", allow_module_level=True)

from kvd.errors import Aborted, FabricError
from kvd.fabric.conformance import Mailbox, Side, failure, one
from kvd.fabric.regions import RegionTable
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs import endpoint as endpoint_module
from kvd.fabric.verbs import lane as lane_module
from kvd.fabric.verbs import recovery as recovery_module
from kvd.fabric.verbs.endpoint import VerbsEndpoint
from kvd.fabric.verbs.wire import KEY_BYTES, Token
from kvd.types import Lane

SEEDS, A_TEST = 60, 20


class Key:
    lkey = rkey = 1

    def close(self) -> None:
        pass


class QueuePair:
    """One end. Requests are executed at the far end in order; the far end's receive buffers are used up in order."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.qp_num = world, number
        self.state = "init"
        self.peer: QueuePair | None = None
        self.psns = (0, 0)
        self.completions: Completions | None = None
        self.sends: deque[tuple[int, Any, bool]] = deque()
        """wr_id, item, whether the far end has executed it (and the acknowledgement is on its way)."""
        self.receives: deque[int] = deque()

    def post_recv(self, request: Any) -> None:
        assert self.state != "reset"
        self.receives.append(request.wr_id)
        if self.state == "error":
            self.flush()

    def fail(self, status: int = ib.FLUSHED) -> None:
        """To the error state; the first request gets ``status``."""
        assert self.state != "reset"
        self.state = "error"
        if self.sends and status != ib.FLUSHED:
            self.complete(self.sends.popleft()[0], status)
        self.flush()

    def flush(self) -> None:
        while self.sends:
            self.complete(self.sends.popleft()[0], ib.FLUSHED)
        while self.receives:
            self.complete(self.receives.popleft(), ib.FLUSHED)

    def complete(self, wr_id: int, status: int, nbytes: int = 0) -> None:
        assert self.completions is not None
        self.completions.ready.append((wr_id, status, nbytes))

    @property
    def linked(self) -> bool:
        peer = self.peer
        return (
            self.state == "live" and peer is not None and peer.state == "live" and peer.psns == (*reversed(self.psns),)
        )

    def execute(self) -> None:
        """The far end does the next request that it has not done."""
        if not self.linked:
            return
        at = next((n for n, (_, _, done) in enumerate(self.sends) if not done), None)
        if at is None:
            return
        wr_id, item, _ = self.sends[at]
        opcode, _, local, nbytes, _, remote, _ = item
        peer = self.peer
        assert peer is not None
        if opcode == ib.SEND:
            if not peer.receives:
                return
            slot = peer.receives.popleft()
            target = next(lane for lane in peer.completions.lanes.values() if lane.qp is peer)
            ctypes.memmove(target._base + (slot >> 2) * lane_module.SLOT_BYTES, local, nbytes)
            peer.complete(slot, ib.SUCCESS, nbytes)
        elif opcode == ib.WRITE:
            ctypes.memmove(remote, local, nbytes)
        else:
            ctypes.memmove(local, remote, nbytes)
        self.sends[at] = (wr_id, item, True)

    def acknowledge(self) -> None:
        if self.state == "live" and self.sends and self.sends[0][2]:
            self.complete(self.sends.popleft()[0], ib.SUCCESS)

    def close(self) -> None:
        self.state = "destroyed"
        self.sends.clear()
        self.receives.clear()


class Chain:
    def __len__(self) -> int:
        return 8

    def post(self, qp: QueuePair, items: list[Any], wr_id: int, step: int) -> None:
        for number, item in enumerate(items):
            qp.sends.append((wr_id + step * number, item, False))
        if qp.state == "error":
            qp.flush()


class Completions:
    """A queue whose completions come when the world says so."""

    def __init__(self, loop: Any, world: World, depth: int, on_completion: Any, on_batch: Any, on_failure: Any) -> None:
        self.on_completion, self.on_batch = on_completion, on_batch
        self.queue = self
        self.ready: deque[tuple[int, int, int]] = deque()
        self.closed = False
        self.lanes: Any = None
        world.completions.append(self)

    def start(self) -> None:
        pass

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.ready))):
            if not self.closed:
                self.on_completion(*self.ready.popleft())
        if not self.closed:
            self.on_batch()


class Device:
    name, gid, lid, mtu, infiniband = "model", "gid", 0, 5, False
    reads_in = 16
    max_message, max_region = 3000, 1 << 60

    def __init__(self, world: World) -> None:
        self.context = world

    def register(self, address: int, nbytes: int, **_: bool) -> Key:
        return Key()

    def queue_pair(self, cq: Completions, receives: int) -> QueuePair:
        qp = QueuePair(self.context, len(self.context.pairs))
        qp.completions = cq
        self.context.pairs.append(qp)
        return qp

    def initialise(self, qp: QueuePair) -> None:
        assert qp.state == "reset"
        qp.state = "init"

    def fail(self, qp: QueuePair) -> None:
        qp.fail()

    def reset(self, qp: QueuePair) -> None:
        if qp.state == "init":  # it could not be connected: nothing is given back
            qp.receives.clear()
        assert qp.state != "live"
        assert not qp.sends
        assert not qp.receives
        qp.state = "reset"

    def can_reach(self, peer: Any) -> bool:
        return any(qp.peer is None for qp in self.context.pairs) or self.context.random.random() < 0.7

    def connect(self, qp: QueuePair, lane: int, mine: Any, peer: Any) -> None:
        assert qp.state == "init"
        if qp.peer is not None and self.context.random.random() < 0.3:
            raise FabricError("the peer's address can't be resolved; try again", errno=errno.ETIMEDOUT)
        qp.peer = self.context.pairs[peer.qpns[lane]]
        qp.psns = (mine.psns[lane], peer.psns[lane])
        qp.state = "live"


class Fabric:
    rate = 0.0

    def __init__(self, world: World, key: bytes) -> None:
        self.device, self.chain, self.key = Device(world), Chain(), key
        self.endpoints: set[VerbsEndpoint] = set()
        self.table = RegionTable()
        self.exports: dict[int, int] = {}

    def register(self, memory: memoryview) -> Any:
        return self.table.register(memory)

    def local(self, region: Any) -> tuple[int, list[int]]:
        return self.table.address(region), [1]


class LateMailbox(Mailbox):
    """What is told comes when the world says so."""

    def __init__(self) -> None:
        super().__init__()
        self.late: deque[bytes] = deque()
        self.told: Any = None

    def put(self, blob: bytes) -> None:
        if self.told is None:
            super().put(blob)
        else:
            self.late.append(blob)

    def listen(self, told: Any) -> None:
        self.told = told


class Bringup:
    streams: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, inbox: LateMailbox, outbox: LateMailbox) -> None:
        self.inbox, self.outbox = inbox, outbox

    async def exchange(self, blob: bytes) -> bytes:
        self.outbox.put(blob)
        return await self.inbox.get()

    def tell(self, blob: bytes) -> None:
        self.outbox.put(blob)

    def listen(self, told: Any) -> None:
        self.inbox.listen(told)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pairs: list[QueuePair] = []
        self.completions: list[Completions] = []
        self.boxes = LateMailbox(), LateMailbox()
        self.failures = 0

    async def connect(self) -> tuple[Side, Side]:
        fabrics = [Fabric(self, bytes([n]) * KEY_BYTES) for n in range(2)]
        ends = [VerbsEndpoint(fabric, asyncio.get_running_loop()) for fabric in fabrics]  # type: ignore[arg-type]
        for end, completions in zip(ends, self.completions, strict=True):
            completions.lanes = end._lanes
        there, back = self.boxes
        connecting = asyncio.gather(ends[0].connect(Bringup(back, there)), ends[1].connect(Bringup(there, back)))
        while not connecting.done():  # the path is tried
            self.step(faults=False)
            await asyncio.sleep(0)
        await connecting
        return Side(fabrics[0], ends[0]), Side(fabrics[1], ends[1])  # type: ignore[arg-type]

    def step(self, faults: bool) -> None:
        """Something happens."""
        pair = self.random.choice(self.pairs)
        what = self.random.random()
        if what < 0.45:
            for _ in range(self.random.randint(1, 6)):
                pair.execute()
        elif what < 0.7:
            for _ in range(self.random.randint(1, 6)):
                pair.acknowledge()
        elif what < 0.9:
            self.random.choice(self.completions).deliver(self.random.randint(1, 10))
        elif what < 0.97:
            box = self.random.choice(self.boxes)
            if box.late and box.told is not None:
                box.told(box.late.popleft())
        elif faults and pair.state == "live" and self.failures < 12:
            self.failures += 1
            pair.fail(self.random.choice([ib.FLUSHED, 12]))  # 12: retries exceeded


@pytest.mark.parametrize("first", range(0, SEEDS, A_TEST))
def test_whatever_fails_everything_arrives_once_and_in_order(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "Completions", Completions)
    monkeypatch.setattr(recovery_module, "AGAIN_S", 0.001)
    rebuilt = 0
    for seed in range(first, first + A_TEST):
        try:
            rebuilt += asyncio.run(asyncio.wait_for(_story(seed), 60))
        except BaseException:
            print(f"seed {seed}")
            raise
    assert rebuilt > A_TEST


async def _story(seed: int) -> int:
    """How many queue pairs were rebuilt."""
    world = World(seed)
    sides = await world.connect()
    rng = world.random
    expected: dict[tuple[int, Lane], list[bytes]] = {(n, lane): [] for n in (0, 1) for lane in Lane}
    checks, cancelled, operations = [], [], []
    alive = []  # what is registered, as its registrar must keep it
    for number in range(40):
        at = rng.randrange(2)
        near, far, lane = sides[at], sides[1 - at], Lane(rng.randrange(2))
        kind, size = rng.choice(["write", "write", "read", "send", "cancel"]), rng.randint(1, 9000)
        local, region = near.memory(size + 1)
        remote = np.zeros(size + 1, np.uint8) if kind != "read" else np.full(size + 1, number + 1, np.uint8)
        alive.append((local, region, remote))
        token = Token(number.to_bytes(16), remote.ctypes.data, size + 1, 1, True, True).pack(far.fabric.key)  # type: ignore[attr-defined]
        body = number.to_bytes(2) * rng.choice([1, 10, 3000])
        if kind == "send":
            operations.append(near.endpoint.send(lane, body))
            expected[1 - at, lane].append(body)
        elif kind == "read":
            operations.append(near.endpoint.read(lane, region, token, one(0, 0, size)))
            checks.append((local, remote, size))
        else:
            operation = near.endpoint.write(lane, region, token, one(0, 0, size), then=one(size, size, 1), notify=body)
            if kind == "cancel":
                cancelled.append((operation, 1 - at, lane, body))
                if rng.random() < 0.5:
                    operation.cancel()
            else:
                operations.append(operation)
                checks.append((local, remote, size + 1))
                expected[1 - at, lane].append(body)
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 60)):
                world.step(faults=True)
                await asyncio.sleep(0)
    for operation, *_ in cancelled:
        operation.cancel()
    steps = 0
    while not all(operation.done.done() for operation in (*operations, *(one[0] for one in cancelled))):
        world.step(faults=steps < 600)
        steps += 1
        await asyncio.sleep(0)
    for operation in operations:
        await operation.done
    maybe: dict[tuple[int, Lane], list[bytes]] = {key: [] for key in expected}
    for operation, to, lane, body in cancelled:
        assert isinstance(await failure(operation), Aborted) or operation.done.exception() is None
        maybe[to, lane].append(body)
    wanted = sum(map(len, expected.values()))
    while sum(len(_without(side.messages, maybe, n)) for n, side in enumerate(sides)) < wanted:
        world.step(faults=False)
        await asyncio.sleep(0)
    for local, remote, size in checks:
        assert (local[:size] == remote[:size]).all()
    for n, side in enumerate(sides):
        kept = _without(side.messages, maybe, n)
        for lane in Lane:
            assert [body for where, body in kept if where is lane] == expected[n, lane]
        assert len(set(side.messages)) == len(side.messages), "a message came twice"
        assert side.lost == []
        assert side.endpoint.counters.bytes_in_flight == {Lane.URGENT: 0, Lane.BULK: 0}
    rebuilt = sum(recovery.epoch for recovery in sides[0].endpoint._recoveries.values())  # type: ignore[attr-defined]
    for side in sides:
        side.endpoint._destroy()  # type: ignore[attr-defined]
    return rebuilt


def _without(messages: list[Any], maybe: Any, side: int) -> list[Any]:
    """Cancelled writes may have got as far as their message."""
    return [(lane, body) for lane, body in messages if body not in maybe[side, lane]]
