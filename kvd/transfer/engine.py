"""Carries out the core's instructions on memory, fabrics and sessions, and feeds what happens back as events.

The only place where transfers meet IO. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import structlog

from kvd.errors import DeadlineExceeded, FabricError, KvdError, PeerLost
from kvd.mask import init_masks
from kvd.memory.leases import Lease
from kvd.memory.pool import Pool
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import TransferCore
from kvd.transfer.fetcher import Fetcher
from kvd.transfer.handle import make_handle
from kvd.transfer.mover import Mover
from kvd.transfer.moving import bind
from kvd.transfer.parties import PartTensors, Process, Record, Session
from kvd.transfer.writer import Writer
from kvd.types import Lane, NodeId, Role, TransferId
from kvd.wire.messages import Arrived, MetadataArrived, Notification, PeerMessage, TensorsArrived
from kvd_client.layouts import ChannelGrant, Target
from kvd_client.spec import MASK_REMOTE, KVSpec, PartLayout, TokenRange

log = structlog.get_logger("kvd.transfer")

_NOTIFICATION = msgspec.msgpack.Decoder(Notification)

TICK_S = 0.1
"""How exactly deadlines are kept."""


class Engine:
    """One per daemon. ``connect`` gives a session with a node (``node`` itself included), or raises a KvdError."""

    def __init__(
        self,
        *,
        core: TransferCore,
        node: NodeId,
        boot: str,
        pool: Pool,
        connect: Callable[[NodeId], Awaitable[Session]],
    ) -> None:
        self.core = core
        self.bytes_sent = 0
        """Payload bytes that sinks have confirmed."""
        self.bytes_received = 0
        """Payload bytes that sources have written here."""
        self._node = node
        self._boot = boot
        self._pool = pool
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._records: dict[TransferId, Record] = {}
        self._next_transfer = 1
        self._session_ids: dict[Session, ev.SessionId] = {}
        self._sessions: dict[ev.SessionId, Session] = {}
        self._next_session = 1
        self._events: collections.deque[ev.Event] = collections.deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        writer = Writer(self._records, self._sessions, self.submit, self._count_sent)
        fetcher = Fetcher(pool, self._records, self._sessions, self.submit, self._start, self._count_sent)
        self._mover = Mover(pool, self._records, self._sessions, self.submit, self._start, self._count_sent)
        self._execute: dict[type, Callable[[Any], None]] = {
            do.Connect: self._do_connect,
            do.SendMessage: self._do_send_message,
            do.SendOpen: self._do_send_open,
            do.BindSink: self._do_bind_sink,
            do.WriteTokens: writer.write_tokens,
            do.WriteTensors: self._mover.write,
            do.EndStage: self._mover.end_stage,
            do.PullTensors: self._mover.pull,
            do.WriteMetadata: writer.write_metadata,
            do.ServeFetch: fetcher.serve,
            do.FillFetch: fetcher.fill,
            do.KeepFetched: fetcher.keep,
            do.FetchEnded: fetcher.ended,
            do.WantWindows: self._do_want_windows,
            do.CancelWrites: self._do_cancel_writes,
            do.Publish: self._do_publish,
            do.ReportEnd: self._do_report_end,
            do.FreeMemory: self._do_free_memory,
            do.CloseSession: self._do_close_session,
        }

    # --- from the local processes ---------------------------------------------------------------------------------

    async def open(
        self,
        *,
        role: Role,
        process: Process,
        client: ev.ClientId,
        request: str,
        rank: int,
        ranks: int,
        head_start: int,
        spec: KVSpec,
        layout: PartLayout,
        lengths: Iterable[int],
        peer: NodeId,
        handle: str = "",
        held: Iterable[TokenRange] = (),
        deadline_s: float,
        mode: str = "",
        selector: str = "",
        prefill_s: float = 0.0,
        tensors: PartTensors | None = None,
        target: Target | None = None,
        still_there: Callable[[], bool],
        opened: Callable[[TransferId, int], None],
    ) -> tuple[TransferId, str, Lease]:
        """Reserve memory for a part and open it; returns its number, its handle and its lease.

        Raises what :meth:`TransferCore.check_open` and :meth:`Pool.lease_soon` raise, with nothing left behind.
        ``tensors`` become the part's, but not where this raises; ``target`` describes a sink's to its source.
        ``still_there`` tells whether the process lives, once memory is there for it; ``opened`` gets the part's
        number and its lease's generation before anything can happen to it, and may raise.
        """
        transfer = self._next_transfer
        self._next_transfer += 1
        event = ev.PartOpened(
            transfer=transfer,
            role=role,
            client=client,
            request=request,
            rank=rank,
            ranks=ranks,
            head_start=head_start,
            spec=spec,
            layout=layout,
            lengths=tuple(lengths),
            handle=handle or (make_handle(self._node, self._boot, transfer) if role is Role.SOURCE else ""),
            peer=peer,
            held=tuple(held),
            deadline_s=deadline_s,
            mode=mode,
            selector=selector,
            prefill_s=prefill_s,
            placement=tensors.placement if tensors is not None else None,
            target=target,
        )
        self.core.check_open(event)
        asked = time.monotonic()
        lease = await self._pool.lease_soon(layout.nbytes, client)
        try:
            self.core.check_open(event)  # others have run while memory was being made
            event = dataclasses.replace(event, deadline_s=_left(event, time.monotonic() - asked))
            if not still_there():
                raise PeerLost("the process went away while memory was being made for it")
            init_masks(lease.memory, layout, event.lengths)
            if layout.metadata:
                start = layout.metadata_mask_offset
                lease.memory[start : start + layout.layers] = bytes([MASK_REMOTE]) * layout.layers
            opened(transfer, lease.generation)
        except BaseException:
            lease.release()
            raise
        self._records[transfer] = Record(process, layout, event.lengths, lease, head_start, tensors)
        self._idle.clear()
        self.submit(event)
        return transfer, event.handle, lease

    def submit(self, event: ev.Event) -> None:
        """Take an event and do what follows from it. Events that arise on the way are taken in order."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                # Not the loop's time, which is that of its current turn in whole milliseconds under uvloop: too coarse
                # to tell a queue of a few milliseconds.
                for instruction in self.core.handle(self._events.popleft(), time.monotonic()):
                    self._execute[type(instruction)](instruction)
        finally:
            self._handling = False
        if self._timer is None and self.core.next_timer() is not None:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        if not self.core.unfinished:
            self._idle.set()

    async def wait_unfinished(self) -> None:
        """Return when no transfer is running."""
        await self._idle.wait()

    # --- from the peers -------------------------------------------------------------------------------------------

    def session_message(self, session: Session, message: PeerMessage) -> None:
        if session.error is not None:
            return  # it has been reported as lost, or will be
        self.submit(ev.MessageReceived(self._session_id(session), session.node, message))

    def fabric_message(self, session: Session, lane: Lane, message: bytes) -> None:
        """A write's notification; anything else ends the session."""
        if session.error is not None:
            return
        try:
            arrived = _NOTIFICATION.decode(message)
        except msgspec.DecodeError as error:
            session.close(FabricError(f"node {session.node!r} sent a notification that can't be read: {error}"))
            return
        number = self._session_id(session)
        match arrived:
            case Arrived() | TensorsArrived():
                self.submit(ev.TokensArrived(number, arrived, self._marked(arrived)))
            case MetadataArrived():
                self.submit(ev.MetadataArrived(number, arrived, self._marked(arrived)))
            case _:
                self.submit(ev.FetchArrived(number, arrived))

    def _marked(self, arrived: Arrived | TensorsArrived | MetadataArrived) -> bool:
        record = self._records.get(arrived.transfer)
        return record is None or record.marked(arrived)

    def session_lost(self, session: Session, error: KvdError) -> None:
        number = self._session_ids.pop(session, None)
        if number is not None:
            del self._sessions[number]
            self.submit(ev.SessionLost(number, error))

    async def close(self) -> None:
        """Stop the timers and wait for what still touches memory. Sessions must have been closed before."""
        if self._timer is not None:
            self._timer.cancel()
        for record in self._records.values():
            record.give_back()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- instructions -----------------------------------------------------------------------------------------------

    def _do_connect(self, instruction: do.Connect) -> None:
        async def connect() -> None:
            try:
                session = await self._connect(instruction.node)
                if session.error is not None:
                    raise session.error  # it ended before this task got its turn
            except KvdError as error:
                self.submit(ev.ConnectFailed(instruction.transfer, error))
            else:
                self.submit(ev.SessionReady(instruction.transfer, self._session_id(session), session.node))

        self._start(connect())

    def _do_send_message(self, instruction: do.SendMessage) -> None:
        session = self._sessions.get(instruction.session)
        if session is not None and session.error is None:  # else SessionLost is on its way
            session.send(instruction.message)

    def _do_send_open(self, instruction: do.SendOpen) -> None:
        session = self._sessions.get(instruction.session)
        if session is None or session.error is not None:
            return  # SessionLost is on its way
        record = self._records[instruction.transfer]
        region = record.lease.region(session.fabric.name)
        grant = session.fabric.grant(region, record.lease.offset, record.lease.nbytes, writable=True)
        record.grants.append((session.fabric, grant))
        message = msgspec.structs.replace(instruction.message, grant=grant.token)
        if message.target is not None and record.tensors is not None and not message.target.pull:
            slices = record.tensors.memory.grant(session.fabric)
            record.grants += [(piece.fabric, piece.grant) for piece in slices]
            granted = [ChannelGrant(piece.channel, piece.start, piece.nbytes, piece.grant.token) for piece in slices]
            message.target = msgspec.structs.replace(message.target, grants=granted)
        session.send(message)

    def _do_bind_sink(self, instruction: do.BindSink) -> None:
        record = self._records[instruction.transfer]
        record.sink = instruction
        try:
            bind(record)
        except KvdError as error:
            self._events.append(ev.AbortRequested(instruction.transfer, error))

    def _do_want_windows(self, instruction: do.WantWindows) -> None:
        self._records[instruction.transfer].process.want_windows(instruction.transfer, instruction.wanted)

    def _do_cancel_writes(self, instruction: do.CancelWrites) -> None:
        record = self._records[instruction.transfer]
        for operation in list(record.operations):
            operation.cancel()
        self._mover.cancel(instruction.transfer, record)

    def _do_publish(self, instruction: do.Publish) -> None:
        self.bytes_received += instruction.new_bytes
        self._records[instruction.transfer].process.progress(instruction.transfer, instruction.bytes_done)

    def _do_report_end(self, instruction: do.ReportEnd) -> None:
        record = self._records[instruction.transfer]
        part = instruction.part
        log.info(
            "transfer ended",
            request=part.request,
            role=part.role.value,
            peer=part.peer,
            code=instruction.code,
            reason=instruction.message,
            bytes=part.bytes_done,
            seconds=round(instruction.seconds, 3),
        )
        record.process.ended(instruction.transfer, instruction.code, instruction.message, instruction.fields)

    def _do_free_memory(self, instruction: do.FreeMemory) -> None:
        record = self._records.pop(instruction.transfer)
        record.process.freed(instruction.transfer)
        for move in record.moves.values():
            move.cancel()
        if not record.grants:
            record.give_back()
            return

        async def free() -> None:
            try:
                await asyncio.gather(*(fabric.revoke(grant) for fabric, grant in record.grants))
            finally:
                record.give_back()

        self._start(free())

    def _do_close_session(self, instruction: do.CloseSession) -> None:
        session = self._sessions.get(instruction.session)
        if session is not None:
            log.warning("session closed", peer=session.node, reason=instruction.reason)
            session.close(PeerLost(f"node {session.node!r} broke the protocol: {instruction.reason}"))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _count_sent(self, nbytes: int) -> None:
        self.bytes_sent += nbytes

    def _session_id(self, session: Session) -> ev.SessionId:
        number = self._session_ids.get(session)
        if number is None:
            number, self._next_session = self._next_session, self._next_session + 1
            self._session_ids[session] = number
            self._sessions[number] = session
        return number

    def _tick(self) -> None:
        self._timer = None
        self.submit(ev.Tick())

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _left(event: ev.PartOpened, waited_s: float) -> float:
    """What is left of the transfer's deadline, which began when the process asked for it."""
    if waited_s >= event.deadline_s:
        raise DeadlineExceeded(
            f"request {event.request!r} waited {waited_s:.3g} s for memory to be made, and its deadline was "
            f"{event.deadline_s:.3g} s; raise memory.arena or the deadline",
            request=event.request,
        )
    return event.deadline_s - waited_s
