"""A batch of tensors: regrouped beside a busy event loop, written by its grants, its masks behind all of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.errors import Aborted, RemoteAccessError
from kvd.fabric.base import Operation
from kvd.layout.execute import regroup
from kvd.memory.pool import Pool
from kvd.tensors import Route, in_lease, on_device
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer import moving
from kvd.transfer.mover import Mover
from kvd.transfer.moving import Move
from kvd.types import Lane, Path
from kvd.wire.messages import LayerRanges, Notification, TensorsArrived
from kvd_client.layouts import ChannelGrant, Placement
from kvd_client.spec import MASK_LOCAL, PartLayout, TokenRange

LAYOUT = PartLayout(layers=2, heads=2, entry_bytes=256, rows=1, capacity=96)
LAYERS = [(layer, (TokenRange(0, 0, 90),)) for layer in range(2)]


@pytest.fixture
def record() -> Any:
    tiles = Placement(layout="tenstorrent")
    table = np.arange(3)[None]
    target = on_device(LAYOUT, (90,), 0, tiles, channels=3, alignment=64, blocks=3, table=table)
    memory = np.random.default_rng(1).integers(0, 256, LAYOUT.nbytes, np.uint8)
    lease = SimpleNamespace(memory=memoryview(memory).cast("B"))
    return SimpleNamespace(tensors=None, lease=lease, route=Route(in_lease(LAYOUT, (90,), 0, tiles), target))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(moving, "INLINE_BYTES", 0)
    monkeypatch.setattr(moving, "TURN_BYTES", 4096)
    pool = Pool(1 << 20, 1 << 20, "never")
    pool.prepare(1 << 20)  # which a thread would do later
    yield pool
    pool.close()


def regrouped(record: Any) -> bytes:
    (plan,) = record.route.plan(LAYERS)
    staging = bytearray(plan.staging_bytes)
    regroup(plan, [record.lease.memory], staging)
    return bytes(staging)


@pytest.mark.parametrize("few", [True, False], ids=["in turns", "in a thread"])
async def test_all_is_staged(record: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    monkeypatch.setattr(moving, "few_processors", lambda: few)
    threads: list[Any] = []
    monkeypatch.setattr(moving.asyncio, "to_thread", recording(asyncio.to_thread, threads))
    move, turns = Move(), 0

    async def others() -> None:
        nonlocal turns
        while move.nbytes == 0:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await moving.stage(pool, move, record, LAYERS)
    await other
    assert move.staging is not None
    assert bytes(move.staging.memory[: move.nbytes]) == regrouped(record)
    assert move.regroup_us > 0
    assert bool(threads) == (not few)
    # K and V of two layers, 90 tokens, 2 heads of 64 elements in bfloat16: 90 KiB in turns of 4 KiB and a bit
    assert turns >= (16 if few else 1)


async def test_turns_end_between_plans_too(record: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small plans, as of a batch of many rows, are not regrouped at once because each of them would be."""
    monkeypatch.setattr(moving, "few_processors", lambda: True)
    (plan,) = record.route.plan(LAYERS)
    record.route = SimpleNamespace(plan=lambda layers: [plan] * 5)
    done: list[int] = []
    monkeypatch.setattr(moving, "in_turns", lambda plan, *more: iter(done.append(plan.staging_bytes) or ()))
    monkeypatch.setattr(moving, "TURN_BYTES", 2 * plan.staging_bytes)
    move = Move()
    staged = asyncio.create_task(moving.stage(pool, move, record, LAYERS))
    seen = set()
    while not staged.done():
        await asyncio.sleep(0)
        seen.add(len(done))
    assert seen == {2, 4, 5}
    assert move.nbytes == 5 * plan.staging_bytes
    await moving.withdraw(move)


async def test_a_move_that_is_cancelled_between_turns_stops(
    record: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "few_processors", lambda: True)
    move = Move()

    async def cancel() -> None:
        for _ in range(6):  # of about twenty turns
            await asyncio.sleep(0)
        assert move.regroup_us
        move.cancel()

    with pytest.raises(Aborted):
        await asyncio.gather(moving.stage(pool, move, record, LAYERS), cancel())
    assert move.staging is not None
    staged, whole = bytes(move.staging.memory), regrouped(record)
    assert staged[: len(whole)] != whole
    await moving.withdraw(move)
    assert pool.in_use == 0


async def test_block_formats_are_regrouped_in_a_thread(
    record: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding has no turns: it would hold the loop up for as long as it takes."""
    tiles = Placement(layout="tenstorrent", codec="bfp8_b")
    table = np.arange(3)[None]
    target = on_device(LAYOUT, (90,), 0, tiles, channels=3, alignment=64, blocks=3, table=table)
    record.route = Route(in_lease(LAYOUT, (90,), 0, tiles), target)
    monkeypatch.setattr(moving, "few_processors", lambda: True)
    threads: list[Any] = []
    monkeypatch.setattr(moving.asyncio, "to_thread", recording(asyncio.to_thread, threads))
    await moving.stage(pool, Move(), record, LAYERS)
    assert threads


@pytest.mark.parametrize("granted", ["whole", "in pieces", "not all"])
def test_requests_go_by_the_grants_that_they_lie_in(record: Any, monkeypatch: pytest.MonkeyPatch, granted: str) -> None:
    """A few of them one by one, many at once, with the same result."""
    plans = [record.route.plan([(layer, (TokenRange(0, 0, 90),))])[0] for layer in range(2)]
    grants = [ChannelGrant(channel, 0, 1 << 20, bytes([channel])) for channel in range(3)]
    if granted == "in pieces":  # of one tensor each
        size = record.route.target.rows[0].geometry.tensor_stride
        grants = [ChannelGrant(c, size * n, size, bytes([c, n])) for c in range(3) for n in range(4)]
    elif granted == "not all":
        del grants[1]
    if granted == "in pieces":  # a run of two tensors lies in no grant of one
        plans = [record.route.plan([(0, (TokenRange(0, 0, 32),))])[0]]
    found = []
    for few in (64, 0):
        monkeypatch.setattr(moving, "FEW", few)
        if granted == "not all":
            with pytest.raises(RemoteAccessError, match="pieces of channel 1 lie outside") as caught:
                moving.writes_to(grants, plans, 4096)
            assert caught.value.fields["channel"] == 1
        else:
            found.append([(token, rows.tolist()) for token, rows in moving.writes_to(grants, plans, 4096)])
    if found:
        assert sorted(found[0]) == sorted(found[1])
        assert sum(length for _, rows in found[0] for *_, length in rows) == sum(plan.staging_bytes for plan in plans)


async def test_what_has_been_started_ends_before_a_batch_fails() -> None:
    started = Started()

    def operations() -> Iterator[Operation]:
        yield started
        assert not started.cancelled
        raise ValueError("of no fabric")

    with pytest.raises(ValueError, match="of no fabric"):
        await Move().run(operations())
    assert started.cancelled
    assert started.done.done()


class Started(Operation):
    """An operation that ends a while after it has been cancelled."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.done.get_loop().call_soon(self.done.set_exception, Aborted("cancelled"))


def recording(function: Any, calls: list[Any]) -> Any:
    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call


class Wire:
    """A session whose writes end when the test says so."""

    def __init__(self, several_grants: bool) -> None:
        self.fabric = SimpleNamespace(name="wire", capabilities=SimpleNamespace(several_grants=several_grants))
        self.endpoint = self
        self.calls: list[tuple[Any, ...]] = []
        self.operations: list[Started] = []

    def write(self, lane: Lane, region: Any, token: bytes, rows: Any, *, notify: bytes | None = None) -> Operation:
        return self._started(lane, [(token, rows.tolist())], None, notify)

    def write_parts(self, lane: Lane, region: Any, parts: Any, *, then: Any, notify: bytes) -> Operation:
        return self._started(lane, [(token, rows.tolist()) for token, rows in parts], then, notify)

    def _started(self, *call: Any) -> Operation:
        self.calls.append(call)
        self.operations.append(Started())
        return self.operations[-1]


@pytest.mark.parametrize("several", [True, False], ids=["one operation", "an operation for each grant"])
async def test_masks_follow_all_bytes_of_a_batch(record: Any, pool: Pool, several: bool) -> None:
    grants = [ChannelGrant(channel, 0, 1 << 20, bytes([channel])) for channel in range(3)]
    record.layout, record.lengths = LAYOUT, (90,)
    record.sink = SimpleNamespace(target=SimpleNamespace(grants=grants), layout=LAYOUT, sink=7, grant=b"lease")
    instruction = do.WriteTensors(3, 1, 5, Path.PROACTIVE, tuple(LAYERS), 1)
    masks, move, wire = moving.masks_of(record, instruction), Move(), Wire(several)
    plans = await moving.stage(pool, move, record, LAYERS, masks.nbytes)
    staging = move.staging
    assert staging is not None
    assert bytes(staging.memory[: move.nbytes]) == regrouped(record)
    session: Any = wire
    move.staging = SimpleNamespace(offset=4096, region=lambda name: None)  # type: ignore[assignment]
    pushed = asyncio.create_task(moving.push(move, record, session, plans, masks))
    await asyncio.sleep(0)
    assert {lane for lane, *_ in wire.calls} == {Lane.BULK}
    parts = [part for _, each, *_ in wire.calls for part in each]
    assert sorted(parts) == sorted((token, rows.tolist()) for token, rows in moving.writes_to(grants, plans, 4096))
    told = msgspec.msgpack.decode(masks.notify, type=Notification)
    assert told == TensorsArrived(7, [LayerRanges(layer, list(ranges)) for layer, ranges in LAYERS], "proactive")
    if several:
        ((_, _, then, notify),) = wire.calls
    else:
        assert len(wire.calls) == 3
        assert {call[2:] for call in wire.calls} == {(None, None)}
        for operation in wire.operations[:2]:
            operation.done.set_result(None)
            await asyncio.sleep(0)
        assert not pushed.done()
        wire.operations[2].done.set_result(None)
        assert await pushed is False
        marked = asyncio.create_task(moving.mark_far(move, record, session, masks))
        await asyncio.sleep(0)
        lane, ((token, rows),), _, notify = wire.calls[3]
        then = token, np.array(rows)
        assert lane is Lane.URGENT
    assert notify == masks.notify
    # Every byte from which a mask byte is copied says that its token is local.
    assert then[0] == b"lease"
    assert {row[1:] for row in map(tuple, then[1].tolist())} == {(LAYOUT.mask_offset(n), 90) for n in range(2)}
    for at, _, length in (then[1] - (4096, 0, 0)).tolist():
        assert bytes(staging.memory[at : at + length]) == bytes([MASK_LOCAL]) * length
    wire.operations[-1].done.set_result(None)
    assert await (pushed if several else marked) is (True if several else None)
    staging.release()


async def test_what_was_sent_counts_though_the_sink_releases_before_it_is_confirmed(
    record: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, events, tasks = asyncio.Event(), [], []

    async def push(move: Move, *_: Any) -> bool:
        move.requests = 3
        sending.set()
        await move.run([Started()])
        return True

    monkeypatch.setattr(moving, "push", push)
    record.layout, record.lengths, record.moves, record.holding = LAYOUT, (90,), {}, contextlib.nullcontext
    record.sink = SimpleNamespace(target=SimpleNamespace(pull=False), layout=LAYOUT, sink=7, grant=b"lease")
    session: Any = SimpleNamespace()
    mover = Mover(
        pool, {3: record}, {1: session}, events.append, lambda coro: tasks.append(asyncio.create_task(coro)), int
    )
    mover.write(do.WriteTensors(3, 1, 5, Path.PROACTIVE, tuple(LAYERS), 1))
    await sending.wait()
    mover.cancel(3, record)
    await asyncio.gather(*tasks)
    (moved,) = [event for event in events if isinstance(event, ev.Moved)]
    assert (moved.requests, moved.nbytes) == (3, len(regrouped(record)))
    (completed,) = [event for event in events if isinstance(event, ev.WriteCompleted)]
    assert isinstance(completed.error, Aborted)
