"""One node: the real core, and what carries out its instructions, as the daemon's engine does, on modelled links."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvd.errors import Aborted, FabricError, KvdError, PeerLost, PeerUnreachable
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings, TransferCore
from kvd.types import Role
from kvd.wire import messages as wire
from kvd.wire.messages import WireMessage
from kvd_client.spec import MASK_LOCAL

from . import checks, selective, tensors
from .links import BULK, CONTROL, End, FetchAnswer, Operation, Record, Violation, Write, in_order
from .memory import Bytes, Grant, Memory, every

if TYPE_CHECKING:
    from .world import World


TIMELESS = frozenset(
    (ev.LayerReady, ev.MetadataReady, ev.BlocksRanked, ev.IdleWindow, ev.FetchRequested, ev.FetchServed,
     ev.FetchArrived, ev.FetchKept, ev.TokensArrived, ev.MetadataArrived, ev.Regrouped, ev.Staged, wire.Delivered,
     wire.Idle, wire.Fetch, wire.FetchFailed, wire.Staged, wire.Pulled)
)  # fmt: skip
"""Events and messages after which nothing waits for a time that it did not wait for before."""


class Node:
    """``life`` grows with each start; what was meant for an earlier life never happens."""

    def __init__(self, world: World, name: str, settings: Settings, slabs: int) -> None:
        self.world = world
        self.name = name
        self.settings = settings
        self.slabs = slabs
        self.life = 0
        self.up = False
        self.next_session = 1
        self.execute: dict[type, Callable[[Any], None]] = {
            do.Connect: self._connect,
            do.SendMessage: self._send_message,
            do.SendOpen: self._send_open,
            do.BindSink: self._bind_sink,
            do.WriteTokens: self._write_tokens,
            do.WriteTensors: partial(tensors.write_tensors, self),
            do.EndStage: partial(tensors.end_stage, self),
            do.PullTensors: partial(tensors.pull_tensors, self),
            do.WriteMetadata: partial(selective.write_metadata, self),
            do.ServeFetch: partial(selective.serve_fetch, self),
            do.FillFetch: partial(selective.fill_fetch, self),
            do.KeepFetched: partial(selective.keep_fetched, self),
            do.FetchEnded: partial(selective.fetch_ended, self),
            do.WantWindows: partial(selective.want_windows, self),
            do.CancelWrites: self._cancel_writes,
            do.Publish: self._publish,
            do.ReportEnd: self._report_end,
            do.FreeMemory: self._free_memory,
            do.CloseSession: self._close_session,
        }
        self.start()

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.boot = f"{self.world.rng.getrandbits(64):016x}"
        self.core = TransferCore(self.name, self.boot, self.settings)
        self.memory = Memory(self.world.rng, self.slabs)
        self.records: dict[int, Record] = {}
        self.ends: dict[ev.SessionId, End] = {}
        self.connecting: dict[str, list[int]] = {}
        self.writes: set[int] = set()
        self.stages: dict[bytes, tensors.Batch] = {}
        self.next_transfer = 1
        self.next_fetch = 1
        self.tick_at: float | None = None
        self.instructions = 0
        """How many have been carried out."""
        self.failed: list[Record] = []

    def crash(self) -> None:
        """Gone at once, with all its memory; peers learn of it in their own time."""
        self.up = False
        self.life += 1
        for end in list(self.ends.values()):
            self.world.break_session(end.session)

    # --- events -----------------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Do it at a time, if this life lasts so long."""
        self.world.at(time, self._if_alive, self.life, action, args)

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        self.world.at(self.world.now + delay, self._if_alive, self.life, action, args)

    def _if_alive(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life == self.life:
            action(*args)

    def feed(self, event: ev.Event) -> None:
        world = self.world
        told = world.story is not None
        if told:
            world.note(self, "<-", event)
        for instruction in self.core.handle(event, world.now):
            if told:
                world.note(self, "  ->", instruction)
            self.instructions += 1
            self.execute[type(instruction)](instruction)
        if self.failed:
            checks.siblings(self)
        if type(event.message if isinstance(event, ev.MessageReceived) else event) in TIMELESS:
            return
        due = self.core.next_timer()
        checks.timers(self, due)
        if due is not None and isinstance(event, ev.Tick) and due <= world.now:
            raise Violation(f"{self.name}: a tick at {world.now} leaves a timer of {due}")
        if due is not None and (self.tick_at is None or due < self.tick_at):
            self.tick_at = due
            self.later(max(0.0, due - world.now), self._tick, due)

    def _tick(self, due: float) -> None:
        if self.tick_at == due:
            self.tick_at = None
            self.feed(ev.Tick())

    # --- instructions -----------------------------------------------------------------------------------------------

    def live(self, transfer: int, what: str) -> Record:
        record = self.records.get(transfer)
        if record is None or record.freed or record.code:
            state = "unknown" if record is None else "freed" if record.freed else "ended"
            raise Violation(
                f"{self.name}: {what} for part {transfer}, which is {state}", record.request if record else ""
            )
        return record

    def _connect(self, instruction: do.Connect) -> None:
        self.live(instruction.transfer, "Connect")
        waiting = self.connecting.get(instruction.node)
        if waiting is not None:
            waiting.append(instruction.transfer)
            return
        self.connecting[instruction.node] = [instruction.transfer]
        known = any(end.peer.node.name == instruction.node for end in self.ends.values())
        slow = self.world.delay() * (0.1 if known else self.world.rng.choice((1, 1, 10)))
        self.later(slow, self._connected, instruction.node)

    def _connected(self, name: str) -> None:
        world = self.world
        transfers = self.connecting.pop(name)
        end = next((e for e in self.ends.values() if e.peer.node.name == name and not e.session.broken), None)
        if end is None:
            peer = world.nodes[name]
            if not peer.up or world.chance(world.connect_failure):
                for transfer in transfers:
                    world.disturb(self.records[transfer].attempt.plan, "connect failed")
                    self.feed(ev.ConnectFailed(transfer, PeerUnreachable(f"node {name!r} can't be reached", peer=name)))
                return
            end = world.join(self, peer)
        for transfer in transfers:
            self.feed(ev.SessionReady(transfer, end.number, name))

    def transmit(self, end: End, message: WireMessage) -> None:
        arrival = in_order(end.last, CONTROL, self.world.now + self.world.delay())
        self.world.at(arrival, self._deliver, end, message)

    def _deliver(self, end: End, message: WireMessage) -> None:
        peer = end.peer
        if not end.session.broken and peer.node.life == peer.life:
            peer.node.feed(ev.MessageReceived(peer.number, self.name, message))  # type: ignore[arg-type]

    def _send_message(self, instruction: do.SendMessage) -> None:
        end = self.ends.get(instruction.session)
        if end is not None:
            self.transmit(end, instruction.message)

    def _send_open(self, instruction: do.SendOpen) -> None:
        record = self.live(instruction.transfer, "SendOpen")
        end = self.ends.get(instruction.session)
        if end is None:
            raise Violation(f"{self.name}: SendOpen on session {instruction.session}, which is lost", record.request)
        if record.grant is not None:
            raise Violation(f"{self.name}: part {record.transfer} is granted twice", record.request)
        token = f"{self.name}/{self.life}/{record.transfer}".encode()
        record.grant = Grant(record.lease, token)
        self.memory.grants[token] = record.grant
        self.transmit(end, msgspec.structs.replace(instruction.message, grant=token))

    def _bind_sink(self, instruction: do.BindSink) -> None:
        record = self.live(instruction.transfer, "BindSink")
        if record.bound is not None:
            raise Violation(f"{self.name}: part {record.transfer} is bound twice", record.request)
        end = self.ends.get(instruction.session)
        if end is None:
            raise Violation(f"{self.name}: part {record.transfer} is bound to a session that is lost", record.request)
        record.bound, record.token = instruction.session, instruction.grant
        record.sink_transfer = instruction.sink
        sink_node = end.peer.node
        grant = sink_node.memory.grants.get(instruction.grant)
        if grant is None:
            return
        sink: Record = grant.lease.owner
        if sink.source is not None:
            raise Violation(f"{sink_node.name}: two sources write into part {sink.transfer}", sink.request)
        sink.source, record.sink = record, grant.lease
        lease, shared = grant.lease, min(record.lease.layout.capacity, grant.lease.layout.capacity)
        mine: Bytes = record.lease.expected[:, :, :shared]
        theirs: Bytes = lease.expected[:, :, :shared]
        np.copyto(theirs, mine, where=~lease.known[:, :, :shared, None])
        if record.lease.metadata.shape != lease.metadata.shape:
            raise Violation(f"{self.name}: part {record.transfer} is paired with other metadata", record.request)
        lease.metadata_expected[:] = record.lease.metadata_expected

    def _write_tokens(self, instruction: do.WriteTokens) -> None:
        record = self.live(instruction.transfer, "WriteTokens")
        layout, name = record.lease.layout, self.name
        # A turn may concern several layers, a write each; the window must have been open when the turn began.
        end = checks.write(self, record, instruction, turn=max(self.settings.chunk, layout.token_bytes))
        tokens = sum(r.stop - r.start for r in instruction.ranges)
        selective.check_tokens(self, record, end, instruction.path, instruction.layer, tokens)
        for r in instruction.ranges:
            checks.sent(self, record, instruction.layer, r, np.s_[instruction.layer, r.row, r.start : r.stop])
        if instruction.nbytes != tokens * layout.token_bytes:
            raise Violation(f"{name}: {instruction} says the wrong number of bytes", record.request)
        if instruction.nbytes > max(self.settings.chunk, layout.token_bytes):
            raise Violation(f"{name}: {instruction} exceeds a chunk", record.request)
        self.begin(
            Operation(
                record,
                end,
                instruction.write,
                instruction.nbytes,
                instruction.layer,
                instruction.ranges,
                instruction.path,
            )
        )

    def begin(self, operation: Write) -> None:
        """Set a write on its way."""
        self.register(operation)
        self.schedule(operation)

    def register(self, operation: Write) -> None:
        self.writes.add(operation.write)
        operation.record.operations.add(operation.write)
        operation.end.operations[operation.write] = operation

    def schedule(self, operation: Write) -> None:
        world, end = self.world, operation.end
        if operation.connection >= BULK and world.queue_pairs > 1:
            operation.connection = BULK + world.rng.randrange(world.queue_pairs)
        for number, stage in enumerate(operation.stages()):
            soon = world.now + (0.001 if number else world.delay() + world.stall())
            world.at(in_order(end.last, operation.connection_of(stage), soon), self._advance, operation, stage)

    def _advance(self, operation: Write, stage: Callable[[], None]) -> None:
        if not operation.dead and not operation.end.session.broken:
            operation.started = True
            stage()

    def complete(self, operation: Write, error: KvdError | None) -> None:
        """Feed a write's end back, once."""
        end, record = operation.end, operation.record
        if operation.write not in self.writes:
            return
        operation.dead = True
        self.writes.discard(operation.write)
        end.operations.pop(operation.write, None)
        if not isinstance(operation, FetchAnswer):
            end.in_flight -= operation.nbytes
        record.operations.discard(operation.write)
        if isinstance(operation, tensors.Batch):
            self.stages.pop(operation.token, None)
        if record.freed and not record.operations:
            self.give_back(record)
        self.feed(operation.ended(error))

    def _cancel_writes(self, instruction: do.CancelWrites) -> None:
        record = self.records[instruction.transfer]
        if record.freed:
            raise Violation(f"{self.name}: CancelWrites for part {record.transfer}, which is freed", record.request)
        for end in self.ends.values():
            for operation in end.operations.values():
                mine = operation.record is record and not isinstance(operation, FetchAnswer)
                if mine and not operation.started and not operation.dead:
                    operation.dead = True
                    self.later(0.0, self.complete, operation, Aborted("the write was cancelled"))

    def _publish(self, instruction: do.Publish) -> None:
        record = self.live(instruction.transfer, "Publish")
        lease = record.lease
        here = (lease.sent & (lease.mask == MASK_LOCAL)).tobytes().count(1) * lease.layout.token_bytes
        if instruction.bytes_done > here or not 0 <= instruction.new_bytes <= instruction.bytes_done:
            raise Violation(f"{self.name}: {instruction}, but {here} bytes are in place", record.request)
        record.attempt.on_progress()

    def _report_end(self, instruction: do.ReportEnd) -> None:
        record = self.records.get(instruction.transfer)
        if record is None or record.code or record.freed:
            raise Violation(
                f"{self.name}: part {instruction.transfer} ends twice: {record.code if record else 'unknown'}, then "
                f"{instruction.code}",
                record.request if record else "",
            )
        record.code = instruction.code
        if self.world.now > record.deadline + 0.001:
            raise Violation(f"{self.name}: part {record.transfer} ends past its deadline", record.request)
        if record.role is Role.SINK and record.code == "OK" and not record.released:
            for row, length in enumerate(record.lengths):
                if not every(record.lease.mask[:, row, :length] == MASK_LOCAL):
                    raise Violation(
                        f"{self.name}: part {record.transfer} is delivered, and row {row} is not all here",
                        record.request,
                    )
            if not every(record.lease.metadata_mask == MASK_LOCAL):
                raise Violation(f"{self.name}: part {record.transfer} is delivered without metadata", record.request)
        if record.code != "OK":
            self.failed.append(record)
            if not instruction.message:
                raise Violation(f"{self.name}: part {record.transfer} fails without a sentence", record.request)
        record.attempt.plan.paths.update(instruction.part.paths)
        record.attempt.on_end(record)

    def _free_memory(self, instruction: do.FreeMemory) -> None:
        record = self.records.get(instruction.transfer)
        if record is None or record.freed or not record.code:
            raise Violation(
                f"{self.name}: FreeMemory for part {instruction.transfer}, "
                f"{'which has not ended' if record and not record.code else 'again'}",
                record.request if record else "",
            )
        record.freed = True
        if record.attempt.pending:
            raise Violation(
                f"{self.name}: part {record.transfer} is freed and fetches {list(record.attempt.pending)} were never "
                "answered",
                record.request,
            )
        if record.grant is not None:
            self.memory.revoke(record.grant)
        if not record.operations:
            self.give_back(record)
        record.attempt.on_freed(record)

    def give_back(self, record: Record) -> None:
        """The memory is free, and often somebody else's at once, with other bytes in it."""
        self.memory.give_back(record.lease)
        if self.world.chance(0.5):
            stranger = self.memory.take_for_stranger(self.world.rng.randrange(256), record)
            self.later(self.world.rng.random() * 2, self.memory.give_back, stranger)

    def _close_session(self, instruction: do.CloseSession) -> None:
        end = self.ends.get(instruction.session)
        if end is not None:
            self.world.break_session(end.session)

    def lose(self, end: End) -> None:
        """This side learns that the session is gone: its writes fail, then (or before) the core is told."""
        if self.world.chance(0.5):
            self._tell_lost(end)
        while end.operations:  # a core that has not been told may start others
            self.complete(next(iter(end.operations.values())), FabricError("the connection broke"))
        if end.number in self.ends:
            self._tell_lost(end)

    def _tell_lost(self, end: End) -> None:
        del self.ends[end.number]
        self.feed(ev.SessionLost(end.number, PeerLost(f"the session with {end.peer.node.name!r} ended")))
