"""Queue pairs that fail, are destroyed under a connection, or find no receive buffer at the peer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvd.errors import FabricError
from kvd.fabric.conformance import Pair, failure, one
from kvd.types import Lane
from tests.verbs.devices import DEVICES, needs_devices
from tests.verbs.pairs import on_pair
from tests.waiting import eventually

pytestmark = needs_devices


@pytest.mark.race
@on_pair
async def test_a_lane_that_fails_again_and_again_loses_and_repeats_nothing(pair: Pair) -> None:
    """Queue pairs are thrown into the error state on both sides and lanes amid writes, reads and messages."""
    from kvd.fabric.verbs.recovery import Phase

    count, size = 60, 20_000
    sides = (pair.left, pair.right)
    memory = {}
    for near, far in (sides, sides[::-1]):
        source, region = near.memory(count * size)
        target, grant = far.granted(count * size)
        back, back_region = near.memory(size, fill=0)
        memory[near is pair.left] = source, region, target, grant, back, back_region
    operations = []
    for number in range(count):
        wave = []
        for near in sides:
            source, region, target, grant, back, back_region = memory[near is pair.left]
            for lane in Lane:
                row = one(number * size + lane * size // 2, number * size + lane * size // 2, size // 2)
                wave.append(near.endpoint.write(lane, region, grant.token, row, notify=bytes([number])))
            wave.append(near.endpoint.read(Lane.BULK, back_region, grant.token, one(0, 0, size // 2)))
            wave.append(near.endpoint.send(Lane.URGENT, bytes([number]) * 5000))
        operations += wave
        if number % 8 == 7:
            await asyncio.wait([operation.done for operation in wave], return_when=asyncio.FIRST_COMPLETED)
            side, lane = sides[number // 8 % 2], Lane(number // 16 % 2)
            if side.endpoint._recoveries[lane].phase is Phase.LIVE:  # a queue pair in RESET can't fail
                side.fabric.device.fail(side.endpoint._lanes[lane].qp)
    await asyncio.gather(*(operation.done for operation in operations))
    for near, far in (sides, sides[::-1]):
        source, _, target, _, back, _ = memory[near is pair.left]
        assert (source == target).all()
        assert (back[: size // 2] == source[: size // 2]).all()
        await far.until(lambda far=far: len(far.messages) == 3 * count)
        bulk = [body for lane, body in far.messages if lane is Lane.BULK]
        urgent = [body for lane, body in far.messages if lane is Lane.URGENT]
        assert bulk == [bytes([number]) for number in range(count)]
        assert urgent == [body for number in range(count) for body in (bytes([number]), bytes([number]) * 5000)]
        assert far.lost == []
        assert far.endpoint.counters.bytes_in_flight == {Lane.URGENT: 0, Lane.BULK: 0}
    assert sum(recovery.epoch for recovery in pair.left.endpoint._recoveries.values()) >= 3
    await pair.both_live()


@on_pair
async def test_a_device_that_is_lost_ends_its_connections(pair: Pair) -> None:
    """Soft-RoCE devices can't be removed under a process, so the event is played; what follows is real."""
    from kvd.fabric.verbs import binding as ib

    _, region = pair.left.memory(1000)
    _, grant = pair.right.granted(1000)
    operation = pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, 1000))
    device = pair.left.fabric.device
    assert not ib.device_lost(device.context)

    class Fatal:
        event_type = ib.EVENT_DEVICE_FATAL

        def ack(self) -> None:
            device.context = context

    class Failed:
        """One event, then none."""

        def get_async_event(self) -> Fatal:
            if device.context is context:
                raise ib.PyverbsRDMAError("Failed to get async event", 11)
            return Fatal()

    context, device.context = device.context, Failed()
    pair.left.fabric._on_event()
    assert device.context is context
    assert type(await failure(operation)) is FabricError
    await pair.left.until(lambda: len(pair.left.lost) > 0)
    assert "was removed or has failed" in pair.left.lost[0].message
    await pair.right.until(lambda: len(pair.right.lost) > 0)
    assert "was removed or has failed" in pair.right.lost[0].message


class DestroyedQueuePair:
    """What is left of a queue pair that somebody else destroyed: each call fails."""

    def _fail(self, *_: object) -> None:
        from kvd.fabric.verbs import binding as ib

        raise ib.PyverbsRDMAError("Failed to modify QP", 22)

    modify = post_send = post_recv = to_init = _fail

    def close(self) -> None:
        pass


@on_pair
async def test_a_destroyed_queue_pair_ends_the_connection(pair: Pair) -> None:
    _, region = pair.left.memory(1000)
    _, grant = pair.right.granted(1000)
    lane = pair.right.endpoint._lanes[Lane.BULK]
    lane.qp.close()
    lane.qp = DestroyedQueuePair()
    error = await failure(pair.left.endpoint.write(Lane.BULK, region, grant.token, one(0, 0, 1000)))
    assert type(error) is FabricError
    await pair.left.until(lambda: len(pair.left.lost) > 0)
    assert "IBV_WC_RETRY_EXC_ERR" in pair.left.lost[0].message
    assert "can't be rebuilt" in pair.left.lost[0].message
    await pair.right.until(lambda: len(pair.right.lost) > 0)


def rnr_naks() -> int:
    """How often the left device was told that the receiver is not ready."""
    return int(Path(f"/sys/class/infiniband/{DEVICES[0]}/ports/1/hw_counters/rcvd_rnr_err").read_text())


@pytest.mark.parametrize("held", ["messages", "buffers"])
def test_a_receiver_that_does_not_receive_is_waited_for(held: str) -> None:
    """Credits: exactly as many messages go out as the peer has buffers for, and the rest waits on this side. Where the
    buffers are gone all the same, the device waits, for ever (the session's heartbeat decides), and nothing is lost."""

    @on_pair
    async def body(pair: Pair) -> None:
        from kvd.fabric.verbs.lane import SLOTS

        count = 3 * SLOTS
        near, far = (side.endpoint._lanes[Lane.BULK] for side in (pair.left, pair.right))
        left_out: list[int] = []
        completions = pair.right.endpoint._completions
        if held == "messages":  # the right side's process does not look at its completions
            completions._loop.remove_reader(completions._descriptor)
        else:  # it takes the messages out of their buffers and does not give these back
            far.recycle = left_out.append
        naks = rnr_naks()
        messages = [number.to_bytes(2) for number in range(count)]
        operations = [pair.left.endpoint.send(Lane.BULK, message) for message in messages]
        if held == "messages":
            # Until the device has acknowledged them.
            await asyncio.to_thread(
                eventually, "all credits are used", lambda: near._sent_frames >= SLOTS and not near._posted
            )
            assert near._sent_frames == SLOTS
            assert rnr_naks() == naks
            completions._loop.add_reader(completions._descriptor, completions._on_event)
            completions._on_event()
        else:
            await asyncio.to_thread(
                eventually, "the device waits", lambda: rnr_naks() > naks and far._receives_out == 0
            )
            del far.recycle
            for slot in left_out:
                far.recycle(slot)
        await asyncio.gather(*(operation.done for operation in operations))
        assert [body for _, body in pair.right.messages] == messages
        assert [recovery.epoch for recovery in pair.left.endpoint._recoveries.values()] == [0, 0]
        await pair.both_live()

    body()


def test_a_receiver_without_buffers_is_named_and_recovered_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that gives up waiting after one try: RNR is named, the queue pair is rebuilt with all its buffers,
    and every message arrives once and in order."""
    from kvd.fabric.verbs import device

    monkeypatch.setattr(device, "RNR_FOREVER", 1)

    @on_pair
    async def body(pair: Pair) -> None:
        far = pair.right.endpoint._lanes[Lane.BULK]
        recovery = pair.left.endpoint._recoveries[Lane.BULK]
        reasons: list[str] = []
        begin = recovery._begin

        def begins() -> None:
            reasons.append(recovery._reason)
            begin()

        monkeypatch.setattr(recovery, "_begin", begins)
        monkeypatch.setattr(far, "recycle", lambda slot: None)
        messages = [number.to_bytes(2) for number in range(3 * far.receive_slots)]
        operations = [pair.left.endpoint.send(Lane.BULK, message) for message in messages]
        await asyncio.gather(*(operation.done for operation in operations))
        await pair.right.until(lambda: len(pair.right.messages) >= len(messages))
        assert [body for _, body in pair.right.messages] == messages
        assert recovery.epoch >= 2
        assert any(
            "IBV_WC_RNR_RETRY_EXC_ERR" in reason and "no receive buffer at the peer" in reason for reason in reasons
        )
        assert pair.left.lost == pair.right.lost == []

    body()
