"""The service of :mod:`tests.integration.api_harness`: KV entries moved inside one memfd, as the source rings."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import mmap
import os
import queue
from collections.abc import Callable
from typing import Any

from kvd.api.server import Answer, ClientSession
from kvd.errors import AlreadyExists, InvalidArgument, KvdError, NotFound, OutOfMemory
from kvd_client.protocol import (
    Abort,
    Ended,
    Finish,
    GetStatus,
    Ok,
    Opened,
    OpenSink,
    OpenSource,
    Reject,
    Release,
    Request,
    Status,
)
from kvd_client.ring import ALL_ROWS, EVENT_LAYER_READY, SLOT_DELIVERED, SLOT_FAILED, SLOT_OPEN
from kvd_client.spec import MASK_LOCAL, MASK_REMOTE, PartLayout, part_layout
from kvd_client.statuses import MemoryStatus

PAGE = mmap.PAGESIZE


@dataclasses.dataclass(eq=False)
class TestPart:
    __test__ = False
    transfer: int
    client: ClientSession
    request: str
    source: bool
    layout: PartLayout
    lengths: list[int]
    offset: int
    slot: int
    held: set[tuple[int, int]]
    rung: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)
    progress: int = 0
    ended: bool = False

    def tokens(self) -> int:
        return self.layout.layers * sum(self.lengths)


class MemfdService:
    """A same-node transfer service on one sealed memfd of ``nbytes``."""

    def __init__(self, nbytes: int = 16 << 20) -> None:
        self.memfd = os.memfd_create("kvd-test-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memfd, nbytes)
        fcntl.fcntl(self.memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.memory = mmap.mmap(self.memfd, nbytes)
        self.free = [(0, nbytes)]
        self.parts: dict[int, TestPart] = {}
        self.next = 1
        self.events: list[tuple[int, ...]] = []
        self.lost: queue.Queue[ClientSession] = queue.Queue()
        self.rejected: list[Reject] = []
        self.requests = 0
        self.hold: asyncio.Event | None = None
        """While set to an unset event, status requests wait for it."""
        self.cancelled = 0
        self.padding = ""
        """Makes the status reply as large as a test wants it."""
        self.on_event: Callable[..., None] | None = None

    # --- Service ---------------------------------------------------------------------------------------------------

    def handle(self, client: ClientSession, request: Request) -> Any:
        self.requests += 1
        return getattr(self, f"on_{type(request).__name__}")(client, request)

    def on_OpenSource(self, client: ClientSession, request: OpenSource) -> Answer:
        return self.open(client, request)

    def on_OpenSink(self, client: ClientSession, request: OpenSink) -> Answer:
        return self.open(client, request)

    def on_Finish(self, client: ClientSession, request: Finish) -> Answer:
        return self.finish(client, request)

    def on_Abort(self, client: ClientSession, request: Abort) -> Answer:
        self.fail(self.own(client, request.transfer), "ABORTED", f"one of the processes gave up: {request.reason}")
        return Ok()

    def on_Release(self, client: ClientSession, request: Release) -> Answer:
        self.drop(self.own(client, request.transfer), "ABORTED")
        return Ok()

    def on_Reject(self, client: ClientSession, request: Reject) -> Answer:
        if request.handle == "bug":
            raise ZeroDivisionError("a bug of the service")
        self.rejected.append(request)
        return Ok()

    def on_GetStatus(self, client: ClientSession, request: GetStatus) -> Any:
        return self.status() if self.hold is None else self.status_later()

    def ring_event(
        self, client: ClientSession, kind: int, layer: int, transfer: int, row: int, start: int, stop: int
    ) -> None:
        self.events.append((kind, layer, transfer, row, start, stop))
        if self.on_event is not None:
            self.on_event(client, kind, layer, transfer, row, start, stop)
        part = self.parts.get(transfer)
        if part is None or part.client is not client or kind != EVENT_LAYER_READY:
            return
        if layer >= part.layout.layers or not (row == ALL_ROWS or row < part.layout.rows):
            raise InvalidArgument(f"layer {layer}, row {row} do not exist")
        for r in range(part.layout.rows) if row == ALL_ROWS else (row,):
            for token in range(start, min(stop, part.lengths[r])):
                part.rung.add((layer, r, token))
        self.move(part.request)

    def client_lost(self, client: ClientSession) -> None:
        for part in [p for p in self.parts.values() if p.client is client]:
            self.drop(part, "PROCESS_LOST")
        self.lost.put(client)

    # --- what it does ----------------------------------------------------------------------------------------------

    def open(self, client: ClientSession, message: OpenSource | OpenSink) -> Answer:
        source = isinstance(message, OpenSource)
        if any(p.request == message.request and p.source == source for p in self.parts.values()):
            raise AlreadyExists(f"request {message.request!r} is open already", request=message.request)
        layout = part_layout(
            message.spec, heads=message.head_count, rows=len(message.lengths), capacity=message.capacity
        )
        slot = client.take_slot()
        try:
            offset = self.allocate(layout.nbytes)
        except KvdError:
            client.free_slot(slot)
            raise
        held = set()
        if isinstance(message, OpenSink):
            held = {(r.row, token) for r in message.held for token in range(r.start, r.stop)}
        part = TestPart(self.next, client, message.request, source, layout, message.lengths, offset, slot, held)
        self.next += 1
        self.parts[part.transfer] = part
        for layer in range(layout.layers):
            for row, length in enumerate(part.lengths):
                at = offset + layout.token_mask_offset(layer, row, 0)
                mask = MASK_LOCAL if source else MASK_REMOTE
                self.memory[at : at + layout.capacity] = bytes([mask] * length + [0] * (layout.capacity - length))
        client.set_slot(slot, SLOT_OPEN, part.transfer, 0, 0)
        self.move(part.request)
        opened = Opened(
            transfer=part.transfer,
            handle=f"test/{part.transfer}",
            slot=slot,
            offset=offset,
            nbytes=layout.nbytes,
            generation=part.transfer,
        )
        return opened, [self.memfd]

    def allocate(self, nbytes: int) -> int:
        need = -(-nbytes // PAGE) * PAGE
        for i, (start, length) in enumerate(self.free):
            if length >= need:
                self.free[i : i + 1] = [(start + need, length - need)] if length > need else []
                self.memory[start : start + need] = bytes(need)
                return start
        raise OutOfMemory(f"no room for {nbytes} bytes", need=nbytes, free=sum(n for _, n in self.free))

    def pair(self, request: str) -> tuple[TestPart | None, TestPart | None]:
        found = [p for p in self.parts.values() if p.request == request and not p.ended]
        return next((p for p in found if p.source), None), next((p for p in found if not p.source), None)

    def move(self, request: str) -> None:
        source, sink = self.pair(request)
        if source is None or sink is None:
            return
        changed = False
        for layer, row, token in source.rung - sink.rung:
            sink.rung.add((layer, row, token))
            changed = True
            if (row, token) in sink.held:
                continue
            start = source.offset + source.layout.token_offset(layer, row, token)
            at = sink.offset + sink.layout.token_offset(layer, row, token)
            n = sink.layout.token_bytes
            self.memory[at : at + n] = self.memory[start : start + n]
            self.memory[sink.offset + sink.layout.token_mask_offset(layer, row, token)] = MASK_LOCAL
        if changed:
            sink.progress += 1
            done = len(sink.rung) == sink.tokens()
            state = SLOT_DELIVERED if done else SLOT_OPEN
            for part in (sink, source):
                part.client.set_slot(part.slot, state, part.transfer, sink.progress, len(sink.rung))
                if done:
                    part.ended = True
                    part.client.push(Ended(transfer=part.transfer, code="OK"))
                part.client.wake()

    def finish(self, client: ClientSession, request: Finish) -> Ok:
        part = self.own(client, request.transfer)
        missing = part.tokens() - len(part.rung)
        if missing:
            raise InvalidArgument(f"{missing} tokens have not been rung", missing=missing)
        return Ok()

    def own(self, client: ClientSession, transfer: int) -> TestPart:
        part = self.parts.get(transfer)
        if part is None or part.client is not client:
            raise NotFound(f"no transfer {transfer}", transfer=transfer)
        return part

    def fail(self, part: TestPart, code: str, message: str) -> None:
        for p in self.pair(part.request):
            if p is not None:
                p.ended = True
                p.client.set_slot(p.slot, SLOT_FAILED, p.transfer, p.progress, 0)
                p.client.push(Ended(transfer=p.transfer, code=code, message=message))

    def drop(self, part: TestPart, code: str) -> None:
        if not part.ended:
            self.fail(part, code, "the other process left")
        del self.parts[part.transfer]
        part.client.free_slot(part.slot)
        self.free.append((part.offset, -(-part.layout.nbytes // PAGE) * PAGE))

    def status(self) -> Status:
        return Status(
            node="test",
            boot="boot",
            version="0",
            pid=os.getpid(),
            uptime_s=1.0,
            health="ok",
            reasons=[self.padding],
            fabric="none",
            kernels="none",
            listen="",
            socket="",
            clients=1,
            draining=False,
            memory=MemoryStatus(limit=0, registered=0, in_use=0, leases=len(self.parts), huge_pages=False),
            peers=[],
            transfers=[],
            counters={},
        )

    async def status_later(self) -> Status:
        assert self.hold is not None
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.status()
