"""Moving tensors between layouts: regroup into staging memory, then a batch of large requests (HAWK, section 4.3).

Staging memory is leased for one batch and given back at its end, whatever that is. Mask bytes are written, or marked,
only after every byte of the batch is in place. The batch goes into several grants: where the fabric writes into several
as one operation, the mask bytes go behind its bytes; where it does not, they wait until these are confirmed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from kvd.errors import Aborted, InvalidArgument, RemoteAccessError
from kvd.fabric.base import Fabric, Grant, Operation, Region
from kvd.layout.execute import in_turns
from kvd.layout.steps import RegroupPlan
from kvd.mask import mark, mask_views
from kvd.memory.leases import Lease
from kvd.memory.pool import Pool
from kvd.memory.tensors import within
from kvd.plan import plan_masks
from kvd.tensors import Layers, Route, in_lease
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.parties import Record, Session
from kvd.transfer.serving import STAGING
from kvd.types import Descriptors, Lane, TransferId
from kvd.wire.messages import LayerRanges, Staged, TensorsArrived
from kvd_client.layouts import ChannelGrant
from kvd_client.spec import MASK_LOCAL

INLINE_BYTES = 4 << 20
"""Regrouped on the event loop's thread, in about a millisecond, although another processor is free: another thread
would wait as long for each turn of the interpreter's lock while this one is busy sending, and has several to take."""
TURN_BYTES = 2 << 20
"""Of what is regrouped on the loop's thread at once where no processor is free for another thread: a quarter of a
millisecond, for which a socket with half a megabyte keeps a link of 10 Gbit/s busy."""
FEW = 64
"""Requests of a batch that are sorted one by one. Most batches have one for each channel."""
PROCESSORS = 3
"""From so many on another thread regroups while the loop sends. With two, the loop and a peer or an inference process
on the same host have both: the thread would be given the interpreter's lock without a processor to run on, and the loop
wait for both."""


@dataclasses.dataclass(slots=True, eq=False)
class Move:
    """One batch on its way. ``operations`` are the fabric's; a cancelled move starts nothing new."""

    operations: set[Operation] = dataclasses.field(default_factory=set)
    cancelled: bool = False
    staging: Lease | None = None
    grant: tuple[Fabric, Grant] | None = None
    """Of staging memory that the sink reads."""
    requests: int = 0
    nbytes: int = 0
    regroup_us: int = 0

    def cancel(self) -> None:
        self.cancelled = True
        for operation in list(self.operations):
            operation.cancel()

    async def run(self, operations: Iterable[Operation]) -> None:
        """Start a batch and wait for all of it; raises the first error once nothing of it touches memory any more."""
        started: list[Operation] = []
        failed: BaseException | None = None
        try:
            for operation in operations:
                started.append(operation)
                self.operations.add(operation)
        except Exception as error:  # whatever it is, what has been started must end first
            failed = error
        if failed is not None or self.cancelled:
            self.cancel()
        try:
            ended = await asyncio.gather(*(operation.done for operation in started), return_exceptions=True)
        finally:
            self.operations.difference_update(started)
        failed = failed or next((error for error in ended if error is not None), None)
        if failed is not None:
            raise failed
        self.check()

    def account(self, transfer: TransferId) -> ev.Moved:
        """What it took."""
        return ev.Moved(transfer, self.requests, self.nbytes, self.regroup_us)

    def check(self) -> None:
        if self.cancelled:
            raise Aborted("the move of tensors was cancelled")


async def stage(pool: Pool, move: Move, record: Record, layers: Layers, masks: int = 0) -> list[RegroupPlan]:
    """Regroup tokens of a source part into ``move.staging``; returns the plans, whose staging memory lies end to end.
    Behind it are so many mask bytes of local tokens.

    Raises :class:`~kvd.errors.OutOfMemory` where there is no room for it, and what planning says.
    """
    assert record.route is not None
    plans = record.route.plan(layers)
    nbytes = sum(plan.staging_bytes for plan in plans)
    move.staging = await pool.lease_soon(nbytes + masks, STAGING, limited=False)
    move.check()
    sources = record.tensors.memory.buffers() if record.tensors is not None else [record.lease.memory]
    staging = move.staging.memory
    staging[nbytes : nbytes + masks] = bytes([MASK_LOCAL]) * masks

    def turns(turn_bytes: int) -> Iterator[None]:
        at = done = 0
        for plan in plans:
            if done >= turn_bytes:
                yield
                done = 0
            yield from in_turns(plan, sources, staging[at : at + plan.staging_bytes], turn_bytes)
            at += plan.staging_bytes
            done += plan.staging_bytes

    def work(turn_bytes: int = sys.maxsize) -> Iterator[None]:
        """Regroup, and account for the time that it takes and its turns don't."""
        began = time.perf_counter()
        for _ in turns(turn_bytes):
            move.regroup_us += int((time.perf_counter() - began) * 1e6)
            yield
            began = time.perf_counter()
        move.regroup_us += int((time.perf_counter() - began) * 1e6)

    if few_processors() and not any(plan.decode or plan.encode for plan in plans):
        for _ in work(TURN_BYTES):
            await asyncio.sleep(0)
            move.check()
    elif nbytes <= INLINE_BYTES:
        collections.deque(work(), maxlen=0)
    else:
        await asyncio.to_thread(collections.deque, work(), 0)
    move.nbytes = nbytes
    move.check()
    return plans


def few_processors() -> bool:
    """Whether a thread of this process that only regroups would be in the way of the one that sends."""
    return len(os.sched_getaffinity(0)) < PROCESSORS


@dataclasses.dataclass(slots=True, eq=False)
class Masks:
    """Where the mask bytes of a batch go, and the notification behind them."""

    rows: Descriptors
    notify: bytes
    nbytes: int
    """Of the longest row: all are copied from the same bytes, since all say the same."""

    def copied_from(self, offset: int) -> Descriptors:
        rows = self.rows.copy()
        rows[:, 0] = offset
        return rows


def masks_of(record: Record, instruction: do.WriteTensors) -> Masks:
    """What is to be written once a batch is in place."""
    assert record.sink is not None
    rows = plan_masks(record.layout, record.sink.layout, instruction.layers)
    arrived = [LayerRanges(layer, list(ranges)) for layer, ranges in instruction.layers]
    notify = msgspec.msgpack.encode(TensorsArrived(record.sink.sink, arrived, instruction.path.value))
    return Masks(rows, notify, int(rows[:, 2].max(initial=0)))


async def push(move: Move, record: Record, session: Session, plans: Sequence[RegroupPlan], masks: Masks) -> bool:
    """Write what is staged as one batch into the sink's buffers. Raises :class:`RemoteAccessError`, before a byte is
    written, where the sink has not granted what the plans need. Returns whether its masks are written, too; else
    :func:`mark_far` is to do that."""
    assert record.sink is not None
    assert move.staging is not None
    target = record.sink.target
    grants = target.grants if target is not None else [ChannelGrant(0, 0, record.sink.layout.nbytes, record.sink.grant)]
    region = move.staging.region(session.fabric.name)
    writes = writes_to(grants, plans, move.staging.offset)
    move.requests += sum(len(rows) for _, rows in writes)
    endpoint = session.endpoint
    if session.fabric.capabilities.several_grants:
        then = record.sink.grant, masks.copied_from(move.staging.offset + move.nbytes)
        await move.run([endpoint.write_parts(Lane.BULK, region, writes, then=then, notify=masks.notify)])
        return True
    await move.run(endpoint.write(Lane.BULK, region, token, rows) for token, rows in writes)
    return False


def writes_to(
    grants: Sequence[ChannelGrant], plans: Sequence[RegroupPlan], offset: int
) -> list[tuple[bytes, Descriptors]]:
    """The plans' requests by the grant's token, their staging memory end to end from ``offset`` on. Raises
    :class:`RemoteAccessError` for what lies in none."""
    if sum(len(plan.requests) for plan in plans) <= FEW and (few := _few_writes(grants, plans, offset)) is not None:
        return few
    writes: list[tuple[bytes, Descriptors]] = []
    for channel, descriptors in by_channel(plans, offset).items():
        found = 0
        for grant in grants:
            if grant.channel == channel:
                inside = within(descriptors, grant.start, grant.nbytes)
                found += len(inside)
                if len(inside):
                    writes.append((grant.token, inside))
        if found != len(descriptors):
            raise RemoteAccessError(
                f"{len(descriptors) - found} pieces of channel {channel} lie outside of what the sink has granted; "
                "nothing was written",
                channel=channel,
            )
    return writes


def _few_writes(
    grants: Sequence[ChannelGrant], plans: Sequence[RegroupPlan], offset: int
) -> list[tuple[bytes, Descriptors]] | None:
    """As :func:`writes_to`, for a quarter of what NumPy's calls cost; None where a request lies in no grant."""
    of_channel: dict[int, list[tuple[int, int, bytes, list[tuple[int, int, int]]]]] = {}
    for grant in grants:
        of_channel.setdefault(grant.channel, []).append((grant.start, grant.start + grant.nbytes, grant.token, []))
    for plan in plans:
        for source, channel, target, nbytes in plan.requests.tolist():
            for start, stop, _, rows in of_channel.get(channel, ()):
                if start <= target and target + nbytes <= stop:
                    rows.append((source + offset, target - start, nbytes))
                    break
            else:
                return None
        offset += plan.staging_bytes
    found = (one for each in of_channel.values() for one in each)
    return [(token, np.array(rows, np.int64)) for _, _, token, rows in found if rows]


async def mark_far(move: Move, record: Record, session: Session, masks: Masks) -> None:
    """Every byte of a batch is in place: write its mask bytes, and tell the sink's daemon. On the urgent lane, since on
    the other one they would wait behind the next batch."""
    assert record.sink is not None
    assert move.staging is not None
    region, rows = move.staging.region(session.fabric.name), masks.copied_from(move.staging.offset + move.nbytes)
    await move.run([session.endpoint.write(Lane.URGENT, region, record.sink.grant, rows, notify=masks.notify)])


def offer(move: Move, session: Session) -> bytes:
    """Let the sink read what is staged; returns the grant's token."""
    assert move.staging is not None
    region = move.staging.region(session.fabric.name)
    grant = session.fabric.grant(region, move.staging.offset, move.nbytes, writable=False, readable=True)
    move.grant = (session.fabric, grant)
    return grant.token


async def withdraw(move: Move) -> None:
    """Give a move's staging memory back; nothing leaves it from then on. Idempotent."""
    grant, move.grant = move.grant, None
    staging, move.staging = move.staging, None
    try:
        if grant is not None:
            await grant[0].revoke(grant[1])
    finally:
        if staging is not None:
            staging.release()


async def pull(move: Move, record: Record, session: Session, message: Staged) -> None:
    """Read a stage into a sink part's buffers, then mark its tokens. The caller holds the part's memory.

    Raises :class:`InvalidArgument` where the source says another size than the plan does.
    """
    assert record.tensors is not None
    layers = [(one.layer, one.ranges) for one in message.layers]
    mine = record.tensors
    if record.route is None:  # the regroup is the source's own affair: staging memory follows from the target alone
        plain = msgspec.structs.replace(record.layout, placed=False)
        form = in_lease(plain, record.lengths, record.head_start, mine.placement)
        record.route = Route(form, mine.tensors, form.heads)
    plans = record.route.plan(layers)
    nbytes = sum(plan.staging_bytes for plan in plans)
    if nbytes != message.nbytes:
        raise InvalidArgument(
            f"the source has staged {message.nbytes} bytes for tokens that take {nbytes} here",
            need=nbytes,
            size=message.nbytes,
        )
    reads: list[tuple[Region, Descriptors]] = []
    for channel, rows in by_channel(plans, 0).items():
        region, begin = mine.memory.region(channel, session.fabric.name)
        rows = rows[:, [1, 0, 2]]
        rows[:, 0] += begin
        reads.append((region, np.ascontiguousarray(rows)))
        move.requests += len(rows)
    move.nbytes = nbytes
    await move.run(session.endpoint.read(Lane.BULK, region, message.grant, rows) for region, rows in reads)
    views = mask_views(record.lease.memory, record.layout)
    for layer, ranges in layers:
        mark(views[layer], ranges)


def by_channel(plans: Sequence[RegroupPlan], offset: int) -> dict[int, Descriptors]:
    """The plans' requests, (staging offset, offset in the channel, length), their staging memory end to end from
    ``offset`` on."""
    parts: dict[int, list[Descriptors]] = {}
    for plan in plans:
        if not len(plan.requests):
            continue
        rows = plan.requests[:, [0, 2, 3]]
        rows[:, 0] += offset
        channels = plan.requests[:, 1]  # sorted
        edges = np.flatnonzero(np.diff(channels)) + 1
        for channel, piece in zip(channels[[0, *edges]].tolist(), np.split(rows, edges), strict=True):
            parts.setdefault(channel, []).append(piece)
        offset += plan.staging_bytes
    return {channel: rows[0] if len(rows) == 1 else np.concatenate(rows) for channel, rows in parts.items()}


def bind(record: Record) -> None:
    """A source part is paired: how its tensors lie here and at the sink. Nothing where both have them in leases."""
    assert record.sink is not None
    mine, target = record.tensors, record.sink.target
    if mine is None and target is None:
        return
    if mine is not None:
        form, placement = mine.tensors, mine.placement
    else:
        assert target is not None
        form, placement = in_lease(record.layout, record.lengths, record.head_start, target.placement), target.placement
    if record.sink.tensors is not None:
        theirs = record.sink.tensors
    else:
        theirs = in_lease(record.sink.layout, record.lengths, record.head_start, placement)
    record.route = Route(form, theirs, (record.head_start, record.head_start + record.layout.heads))
