"""A connection to one peer: two queue pairs, one for each lane, on one completion queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvd.errors import FabricError, KvdError, ProtocolError
from kvd.fabric.base import Bringup, Endpoint, EndpointCounters, Operation, Region
from kvd.fabric.operations import check_message, closed_error
from kvd.fabric.regions import Refusal, access_error
from kvd.fabric.runs import Runs, checked_runs
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.bringup import greeting, resolved
from kvd.fabric.verbs.completions import Completions
from kvd.fabric.verbs.device import SEND_DEPTH
from kvd.fabric.verbs.inbox import Inbox
from kvd.fabric.verbs.lane import SLOTS, VerbsLane
from kvd.fabric.verbs.operation import VerbsOperation
from kvd.fabric.verbs.pace import Pace
from kvd.fabric.verbs.path import packet_bytes, path_error, unpack_finding
from kvd.fabric.verbs.probe import Probe
from kvd.fabric.verbs.recovery import Recovery
from kvd.fabric.verbs.revocation import Revocations
from kvd.fabric.verbs.totals import Notes, Totals
from kvd.fabric.verbs.wire import (
    WITHOUT_CREDIT,
    Gone,
    Header,
    Kind,
    Told,
    unpack_frame,
    unpack_hello,
    unpack_token,
    unpack_told,
)
from kvd.types import Descriptors, Lane
from kvd.wire.hello import MAX_REASON, printable

if TYPE_CHECKING:
    from kvd.fabric.verbs.fabric import VerbsFabric

MAX_MESSAGE = 64 << 10
FAREWELL_S = 1.0
"""How long a closing endpoint tries to say so to its peer."""


class VerbsEndpoint(Endpoint):
    """See :class:`kvd.fabric.base.Endpoint`. What is known to be refused never gets to the device; what its device
    refuses or loses costs the lane's queue pair, which is rebuilt (:mod:`kvd.fabric.verbs.recovery`)."""

    def __init__(self, fabric: VerbsFabric, loop: asyncio.AbstractEventLoop) -> None:
        self.fabric = fabric
        self.loop = loop
        self.counters = EndpointCounters()
        self.on_lost: Callable[[KvdError], None] = lambda error: None
        self.ended = ""
        self._inbox = Inbox(loop, self.counters, self._taken, lambda: bool(self.ended))
        self._key = b""
        self._bringup: Bringup | None = None
        self._recoveries: dict[Lane, Recovery] = {}
        self._connected = False
        self._scheduled = False
        self._destroyed = False
        self._lost = False
        self._totals = Totals(self.counters)
        self._notes = Notes(loop, self._totals, self._tell_totals, lambda: bool(self.ended))
        self._farewell: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        device = fabric.device
        self._pace = Pace(loop, fabric.rate) if fabric.rate else None
        depth = len(Lane) * (SEND_DEPTH + 2 * SLOTS)
        self._completions = Completions(loop, device.context, depth, self._complete, self._on_batch, self._break)
        self._lanes: dict[Lane, VerbsLane] = {}
        self._revocations = Revocations(loop, self._lanes, self._schedule, self._count, self._totals.refuse)
        try:
            for lane in Lane:
                self._lanes[lane] = VerbsLane(
                    loop, lane, device, self._completions.queue, fabric.chain, self.counters, self._header, self._pace
                )
        except (FabricError, ib.PyverbsError):
            for made in self._lanes.values():
                made.destroy()
            self._completions.close()
            raise
        self._probe: Probe | None = None

    # --- bring-up -------------------------------------------------------------------------------------------------

    async def connect(self, bringup: Bringup) -> None:
        """Raises :class:`FabricError`, with a field ``path`` where the path does not carry what it must, or what
        ``bringup`` raises; the caller closes the endpoint then."""
        device = self.fabric.device
        probe = self._probe = Probe(device, self._post_probe)
        mine = greeting(device, self._lanes, self.fabric.key, probe.offer)
        peer = unpack_hello(await bringup.exchange(mine.pack()))
        self._check_open()
        self._key = peer.key
        await resolved(device, peer, self._check_open)
        for name, lane in self._lanes.items():
            device.connect(lane.qp, name, mine, peer)
            lane.connected(peer.slots, peer.slot_bytes)
            self._recoveries[name] = Recovery(
                self.loop, device, lane, mine, peer, self._tell_peer, self._schedule, self._break
            )
        # The second exchange tells both sides that the other one can receive.
        await bringup.exchange(b"")
        self._check_open()
        self._completions.start()
        found = await probe.run(peer.scratch, packet_bytes(mine, peer), self._completions.poll)
        self._check_open()
        theirs = unpack_finding(await bringup.exchange(found.pack()))
        self._check_open()
        if (trouble := path_error(mine, peer, found, theirs)) is not None:
            raise trouble
        probe.close()
        self._probe = None
        self._bringup = bringup
        self._connected = True
        self._schedule()
        bringup.listen(self._told)

    def _post_probe(self, lane: Lane, item: ib.Item) -> None:
        """Before anything else, so that the sequence 0 is free for it."""
        try:
            self.fabric.chain.post(self._lanes[lane].qp, [item], lane << 1, 0)
        except ib.PyverbsError as error:
            self._break(f"the device {self.fabric.device.name!r} takes no work request: {error}")

    @property
    def on_message(self) -> Callable[[Lane, bytes], None]:
        return self._inbox.on_message or (lambda lane, message: None)

    @on_message.setter
    def on_message(self, callback: Callable[[Lane, bytes], None]) -> None:
        self._inbox.open(callback)

    # --- submission -----------------------------------------------------------------------------------------------

    def write(
        self,
        lane: Lane,
        region: Region,
        token: bytes,
        descriptors: Descriptors,
        *,
        then: Descriptors | None = None,
        notify: bytes | None = None,
    ) -> Operation:
        self._check_open()
        parts = [checked_runs(region, descriptors)]
        if then is not None:
            parts.append(checked_runs(region, then))
        message = None if notify is None else check_message(notify, MAX_MESSAGE)
        return self._submit_access("write", lane, region, token, parts, message)

    def read(self, lane: Lane, region: Region, token: bytes, descriptors: Descriptors) -> Operation:
        self._check_open()
        return self._submit_access("read", lane, region, token, [checked_runs(region, descriptors)], None)

    def send(self, lane: Lane, message: bytes) -> Operation:
        self._check_open()
        return self._submit(lane, VerbsOperation(self.loop, "message", message=check_message(message, MAX_MESSAGE)))

    def _submit_access(
        self, kind: str, lane: Lane, region: Region, packed: bytes, parts: list[Runs], message: bytes | None
    ) -> Operation:
        address, lkeys = self.fabric.local(region)
        token = unpack_token(packed, self._key)
        operation = VerbsOperation(
            self.loop, kind, token=token, address=address, lkeys=lkeys, parts=parts, message=message
        )
        operation.inline = region.id not in self.fabric.exports
        refusal = operation.refusal(self._revocations.revoked)  # the device's would break the connection
        if refusal is None:
            return self._submit(lane, operation)
        self._totals.refused += 1
        self._notes.soon()
        operation.settle(access_error(kind, refusal, operation.low, operation.high))
        return operation

    def _submit(self, lane: Lane, operation: VerbsOperation) -> VerbsOperation:
        operation.on_end = self._count
        self._lanes[lane].queue.append(operation)
        self._schedule()
        return operation

    def _count(self, operation: VerbsOperation) -> None:
        if operation.done.exception() is None:
            self.counters.writes += operation.kind == "write"
            self.counters.reads += operation.kind == "read"

    def _check_open(self) -> None:
        if self.ended:
            raise closed_error(self.ended)

    def _schedule(self) -> None:
        """Post in the event loop's next turn, so that what is submitted together is posted together."""
        if not self._scheduled and not self._destroyed:
            self._scheduled = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._destroyed or not self._connected:
            return
        try:
            for lane in self._lanes.values():
                lane.pump()
        except ib.PyverbsError as error:
            self._break(f"the device {self.fabric.device.name!r} takes no work request: {error}")

    # --- completions ----------------------------------------------------------------------------------------------

    def _on_batch(self) -> None:
        self._notes.progress()
        self._pump()

    def _complete(self, wr_id: int, status: int, nbytes: int) -> None:
        lane, number = self._lanes[Lane(wr_id >> 1 & 1)], wr_id >> 2
        if not number and not wr_id & 1:
            if self._probe is not None:
                self._probe.completed(lane.lane, status)
        elif not self._connected and status != ib.SUCCESS:
            if self._probe is not None and self._probe.passed:  # else it is the probe that failed the queue pair
                self._break(f"a receive buffer came back with {ib.describe_status(status)} at the start", status)
        elif status != ib.SUCCESS:
            self._failed(lane, number, status, bool(wr_id & 1))
        elif wr_id & 1:
            self._received(lane, number, nbytes)
        else:
            self._recoveries[lane.lane].progress()
            lane.retire(number)
            if lane.bye_done:
                self._destroy()

    def _failed(self, lane: VerbsLane, number: int, status: int, receive: bool) -> None:
        reason = ib.describe_status(status)
        if receive:
            lane.receive_failed()
        elif (first := lane.send_failed(number)) is not None and status != ib.FLUSHED:
            what, data = first
            kind = what.kind if isinstance(what, VerbsOperation) else "message"
            reason = f"a {kind} failed with {reason}"
            if status in ib.REQUEST_ERRORS and data and isinstance(what, VerbsOperation):
                what.fail(self._request_error(what, reason, status))
                if status == ib.REMOTE_ACCESS and what.token is not None:
                    self._revocations.refuse(what.token.id)
            elif status in ib.REQUEST_ERRORS or status == ib.FATAL:
                self._break(reason, status)
                return
        if self.ended:  # while it says goodbye
            self._tell_peer(Gone(self.ended))
            self._destroy()
            return
        self._recoveries[lane.lane].failed(reason, status)

    def _request_error(self, operation: VerbsOperation, reason: str, status: int) -> KvdError:
        error: KvdError
        if status == ib.REMOTE_ACCESS:
            error = access_error(operation.kind, Refusal.REVOKED, operation.low, operation.high)
        else:
            error = FabricError(f"{reason}; report it, since kvd should not have posted it")
        error.fields["status"] = status
        return error

    def _tell_peer(self, message: Told) -> None:
        if self._bringup is not None:
            self._bringup.tell(msgspec.msgpack.encode(message))

    def _told(self, blob: bytes) -> None:
        if self._destroyed:
            return
        message = unpack_told(blob)
        if isinstance(message, Gone):
            own = "".join(f"{recovery.why}; " for recovery in self._recoveries.values() if recovery.why)
            self._break(f"{own}the peer gave it up: {printable(message.reason)}", tell=False)
        elif not self.ended:
            self._recoveries[Lane(message.lane)].told(message)

    def _received(self, lane: VerbsLane, slot: int, nbytes: int) -> None:
        try:
            header, body = unpack_frame(lane.receive(slot, nbytes))
        except ValueError as error:
            self._end(
                f"the peer sent what is no frame: {error}",
                ProtocolError(f"the peer sent what is no frame: {error}; run the same release of kvd at both ends"),
            )
            return
        lane.recycle(slot)
        self._recoveries[lane.lane].progress()
        self._totals.learn(header)
        lane.acknowledged(header.consumed)
        if header.kind not in WITHOUT_CREDIT:
            lane.received += 1
        if header.kind is Kind.BYE:
            self._break("the peer closed it", tell=False)
        elif header.kind in (Kind.MESSAGE, Kind.PART):
            self._inbox.put(lane, header.kind, body)
        elif header.kind is not Kind.STATE:
            self._taken(lane)
            if header.kind is Kind.REVOKE:
                self._revocations.obey(body)
            else:
                self._revocations.answered(body)

    def _taken(self, lane: VerbsLane) -> None:
        lane.consumed += 1
        lane.state_due = True
        self._schedule()

    # --- what the peer is told ------------------------------------------------------------------------------------

    def _header(self, kind: Kind, length: int, lane: VerbsLane) -> Header:
        return self._totals.header(kind, length, lane.consumed)

    def _tell_totals(self) -> None:
        self._lanes[Lane.URGENT].state_due = True
        self._schedule()

    # --- revocation -----------------------------------------------------------------------------------------------

    def revoke(self, grant_id: bytes) -> asyncio.Future[None]:
        """Tell the peer; the future is done when it uses the grant no more, or when the endpoint has ended."""
        if self._destroyed or not self._connected:
            future: asyncio.Future[None] = self.loop.create_future()
            future.set_result(None)
            return future
        return self._revocations.ask(grant_id)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.ended:
            return
        self.ended = "this side closed it"
        if not self._connected or not self._lanes[Lane.URGENT].up:
            self._tell_peer(Gone(self.ended))
            self._destroy()
            return
        self._lanes[Lane.URGENT].bye = Kind.BYE
        self._lanes[Lane.BULK].bye_posted = True
        self._farewell = self.loop.call_later(FAREWELL_S, self._destroy)
        self._schedule()

    def device_lost(self) -> None:
        """The device says that it is gone, or that nothing works any more."""
        self._break(f"the RDMA device {self.fabric.device.name!r} was removed or has failed; look at the kernel log")

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def _break(self, reason: str, status: int = 0, *, tell: bool = True) -> None:
        if self._destroyed:
            return
        error = closed_error(reason)
        if status:
            error.fields["status"] = status
        if tell:
            self._tell_peer(Gone(reason[:MAX_REASON]))
        self._end(reason, error)

    def _end(self, reason: str, error: KvdError) -> None:
        """The connection is broken."""
        if not self.ended:
            self.ended = reason
            self._lost = True
        self._destroy(error)

    def _destroy(self, error: KvdError | None = None) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        self._notes.close()
        if self._farewell is not None:
            self._farewell.cancel()
        if self._pace is not None:
            self._pace.close()
        for recovery in self._recoveries.values():
            recovery.close()
        left = [operation for lane in self._lanes.values() for operation in lane.destroy()]
        self._completions.close()
        if self._probe is not None:
            self._probe.abort(self.ended)
            self._probe.close()
        self.fabric.endpoints.discard(self)
        reason = closed_error(self.ended)
        for operation in left:
            operation.settle(operation.error or reason)
        self._revocations.end()
        if self._lost:
            self.loop.call_soon(self.on_lost, error or reason)  # after the operations' own callbacks
        self._closed.set()
