"""What the local API's requests mean: from a process's messages to the engine's events, and back."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from kvd.api.checks import check_fetch, check_open, checked_ranking, source_node
from kvd.api.server import Answer, ClientSession
from kvd.errors import Aborted, AlreadyExists, InvalidArgument, KvdError, NotFound
from kvd.placing import Placing
from kvd.profiles import MAX_FILE, Profiles
from kvd.transfer import events as ev
from kvd.transfer.engine import Engine
from kvd.transfer.handle import parse_handle
from kvd.transfer.matching import check_held
from kvd.transfer.part import SourcePart
from kvd.transfer.parties import Session
from kvd.types import NodeId, Role, TransferId
from kvd.wire.messages import RejectHandle
from kvd_client import protocol as api
from kvd_client import ring
from kvd_client.spec import PartLayout, TokenRange, part_layout

log = structlog.get_logger("kvd.service")

PROFILE_PIECE = 512 << 10
"""Bytes of a profile file in one message."""


@dataclasses.dataclass(slots=True)
class _Opened:
    """A part that a client has open."""

    client: ClientSession
    slot: int
    generation: int
    progress: int = 0
    state: int = ring.SLOT_OPEN
    bytes_done: int = 0
    request: api.OpenSource | api.OpenSink | None = None
    layout: PartLayout | None = None
    wants_windows: bool = False


def rows_of(layout: PartLayout, sequence: int) -> range:
    """The rows of a sequence, as processes count them."""
    return range(sequence * layout.sequence_rows, (sequence + 1) * layout.sequence_rows)


class Service:
    """Serves the clients of :class:`kvd.api.server.ApiServer`; also the engine's view of their processes."""

    def __init__(
        self,
        *,
        engine: Engine,
        connect: Callable[[NodeId], Awaitable[Session]],
        deadline_s: float,
        status: Callable[[], api.Status],
        profiles: Profiles,
        placing: Placing,
    ) -> None:
        self._engine = engine
        self._placing = placing
        self._connect = connect
        self._deadline_s = deadline_s
        self._status = status
        self._opened: dict[TransferId, _Opened] = {}
        self._lost: set[int] = set()
        self._profiles = profiles
        self._fetches: dict[int, asyncio.Future[None]] = {}
        self._next_fetch = 1
        self._uploads: dict[int, bytearray] = {}
        """Profile files on their way in, by client."""
        self._downloads: dict[int, bytes] = {}
        """Profile files on their way out, by client: what is recorded meanwhile must not get into later pieces."""

    # --- for the API server -----------------------------------------------------------------------------------------

    def handle(self, client: ClientSession, request: api.Request) -> Answer | Awaitable[Answer]:
        """Answer one request; raises KvdError for what becomes a Failure. Only what must wait is a coroutine."""
        match request:
            case api.OpenSource() | api.OpenSink():
                return self._open(client, request)
            case api.Fetch():
                return self._fetch(client, request)
            case api.OpenCache():
                return self._placing.open_cache(client.id, request)
            case api.CloseCache():
                self._placing.close_cache(client.id, request.cache)
            case api.Reject():
                return self._reject(request)
            case api.RankBlocks():
                return self._rank_blocks(client, request)
            case api.InstallProfile():
                self._install_profile(client, request)
            case api.ReportSelections():
                self._report_selections(client, request)
            case api.ExportProfile():
                return self._export_profile(client, request)
            case api.GetStatus():
                return self._status()
            case api.Finish():
                self._opening_of(client, request.transfer)
                self._engine.core.check_finish(request.transfer)
                self._engine.submit(ev.SourceFinished(request.transfer))
            case api.Release():
                if self._mine(client, request.transfer):
                    self._engine.submit(ev.ReleaseRequested(request.transfer))
            case api.Abort():
                if self._mine(client, request.transfer):
                    reason = request.reason[:1000] or "no reason given"
                    error = Aborted(f"process {client.name!r} (pid {client.pid}) gave the transfer up: {reason}")
                    self._engine.submit(ev.AbortRequested(request.transfer, error))
            case _:
                raise InvalidArgument(f"{type(request).__name__} can't be asked now; it is the first message only")
        return api.Ok()

    def ring_event(
        self, client: ClientSession, kind: int, layer: int, transfer: int, row: int, start: int, stop: int
    ) -> None:
        """One event of a client's ring; those of transfers it does not have (any more) are dropped."""
        if not self._mine(client, transfer):
            return
        if kind == ring.EVENT_LAYER_READY:
            layout = self._opened[transfer].layout
            rows = [None] if row == ring.ALL_ROWS or layout is None else rows_of(layout, row)
            for each in rows:
                self._engine.submit(ev.LayerReady(transfer, layer, each, start, stop))
        elif kind == ring.EVENT_IDLE:
            self._engine.submit(ev.IdleWindow(transfer, layer))
        elif kind == ring.EVENT_METADATA_READY:
            self._engine.submit(ev.MetadataReady(transfer, layer))

    def client_lost(self, client: ClientSession) -> None:
        """The process is gone: everything it had comes back."""
        self._lost.add(client.id)
        self._uploads.pop(client.id, None)
        self._downloads.pop(client.id, None)
        self._engine.submit(ev.ClientLost(client.id))
        self._placing.client_lost(client.id)

    # --- for the engine ---------------------------------------------------------------------------------------------

    def progress(self, transfer: TransferId, bytes_done: int) -> None:
        """Masks have changed: count it in the slot and wake the process."""
        opened = self._opened.get(transfer)
        if opened is not None:
            opened.progress += 1
            opened.bytes_done = bytes_done
            self._show(opened)

    def ended(self, transfer: TransferId, code: str, message: str, fields: dict[str, Any]) -> None:
        """Tell the process how its transfer ended."""
        opened = self._opened.get(transfer)
        if opened is not None:
            opened.state = ring.SLOT_DELIVERED if code == "OK" else ring.SLOT_FAILED
            opened.progress += 1
            opened.client.push(api.Ended(transfer=transfer, code=code, message=message, fields=fields))
            self._show(opened)

    def freed(self, transfer: TransferId) -> None:
        """The part is forgotten; its slot may be used again."""
        opened = self._opened.pop(transfer, None)
        if opened is not None:
            opened.client.free_slot(opened.slot)
            if opened.request is not None:
                self._placing.left(opened.request.cache)
            self._set_wake(opened.client)

    def fetched(self, transfer: TransferId, fetch: int, error: KvdError | None) -> None:
        """Answer a fetch."""
        waiting = self._fetches.pop(fetch, None)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    def want_windows(self, transfer: TransferId, wanted: bool) -> None:
        """Let the process ring its idle windows, or spare it the trouble."""
        opened = self._opened.get(transfer)
        if opened is not None:
            opened.wants_windows = wanted
            self._set_wake(opened.client)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _open(self, client: ClientSession, request: api.OpenSource | api.OpenSink) -> Answer:
        heads = check_open(request)
        layout = part_layout(
            request.spec,
            heads=heads,
            rows=len(request.lengths),
            capacity=request.capacity,
            metadata=request.metadata,
            landing_entries=0 if isinstance(request, api.OpenSource) else request.landing_entries,
            landing_slots=0 if isinstance(request, api.OpenSource) else request.landing_slots,
            placed=request.placement is not None or request.cache != 0,
            mask=request.mask,
        )
        held: list[TokenRange] = []
        if isinstance(request, api.OpenSource):
            role, peer, handle = Role.SOURCE, request.sink, ""
        else:
            role, peer, handle = Role.SINK, source_node(request), request.handle
            check_held(tuple(request.held), tuple(request.lengths))
            held = [TokenRange(row, r.start, r.stop) for r in request.held for row in rows_of(layout, r.row)]
        tensors, target = await self._placing.open(client.id, request, layout)
        open_part = functools.partial(
            self._engine.open,
            role=role,
            process=self,
            client=client.id,
            request=request.request,
            rank=request.rank,
            ranks=request.ranks,
            head_start=request.head_start,
            spec=request.spec,
            layout=layout,
            lengths=[length for length in request.lengths for _ in range(layout.sequence_rows)],
            peer=peer,
            handle=handle,
            held=held,
            deadline_s=request.deadline_s or self._deadline_s,
            mode=request.mode,
            selector=request.selector,
            prefill_s=request.prefill_s if isinstance(request, api.OpenSource) else 0.0,
            tensors=tensors,
            target=target,
            still_there=lambda: client.id not in self._lost,
            opened=lambda transfer, generation: self._remember(client, transfer, generation),
        )
        try:
            while True:
                try:
                    transfer, handle, lease = await open_part()
                    break
                except AlreadyExists:
                    # Of a process that has gone, and whose requests are just being ended: its successor is welcome.
                    holder = self._holder(request)
                    if holder is None or not holder.leaving:
                        raise
                    await holder.wait_gone()
        except BaseException:
            if tensors is not None:
                tensors.give_back()
                self._placing.left(request.cache)
            raise
        opened = self._opened[transfer]
        opened.request, opened.layout = request, layout
        reply = api.Opened(
            transfer=transfer,
            handle=handle,
            slot=opened.slot,
            offset=lease.offset,
            nbytes=lease.nbytes,
            generation=lease.generation,
            count_blocks=self._count_blocks(request),
        )
        fds = [lease.fd]
        if tensors is not None and tensors.owned:  # a cache's own mapping serves its transfers, too
            reply.tensors = tensors.map
            fds += tensors.memory.descriptors
            reply.descriptors = len(fds)
        return reply, fds

    def _holder(self, request: api.OpenSource | api.OpenSink) -> ClientSession | None:
        """The process that has a transfer of this name open."""
        for opened in self._opened.values():
            other = opened.request
            if type(other) is type(request) and (other.request, other.rank) == (request.request, request.rank):
                return opened.client
        return None

    def _count_blocks(self, request: api.OpenSource | api.OpenSink) -> int:
        """In how many blocks a process is to count what it selects; 0: it need not."""
        learner = self._profiles.learner
        if learner is None or not isinstance(request, api.OpenSink) or not request.landing_entries:
            return 0
        return learner.blocks_of(request.spec.layers)

    def _remember(self, client: ClientSession, transfer: TransferId, generation: int) -> None:
        opened = _Opened(client, client.take_slot(), generation)
        self._opened[transfer] = opened
        self._show(opened)

    async def _fetch(self, client: ClientSession, request: api.Fetch) -> Answer:
        _, layout = self._opening_of(client, request.transfer)
        check_fetch(layout, request)
        number, self._next_fetch = self._next_fetch, self._next_fetch + 1
        waiting = self._fetches[number] = asyncio.get_running_loop().create_future()
        self._engine.submit(
            ev.FetchRequested(
                transfer=request.transfer,
                fetch=number,
                layer=request.layer,
                counts=request.counts,
                index=request.index,
                offset=layout.landing_offset(request.slot),
                stride=layout.landing_row_bytes,
            )
        )
        try:
            await waiting
        finally:
            self._fetches.pop(number, None)
        return api.Ok()

    def _rank_blocks(self, client: ClientSession, request: api.RankBlocks) -> api.Ranked:
        _, layout = self._opening_of(client, request.transfer)
        shares = checked_ranking(layout, request)
        self._engine.submit(ev.BlocksRanked(request.transfer, request.layer, shares, request.weight))
        part = self._engine.core.parts.get(request.transfer)
        if not isinstance(part, SourcePart) or part.ended:
            return api.Ranked(wanted=False)
        return api.Ranked(wanted=part.queue is None or part.queue.policy.rankable)

    def _install_profile(self, client: ClientSession, request: api.InstallProfile) -> None:
        if request.offset == 0:
            self._uploads[client.id] = bytearray()  # whatever an earlier attempt left
        data = self._uploads.setdefault(client.id, bytearray())
        if request.offset != len(data) or len(data) + len(request.data) > MAX_FILE:
            del self._uploads[client.id]
            raise InvalidArgument(
                f"a profile file comes in order and has at most {MAX_FILE} bytes; this piece is at {request.offset}, "
                f"after {len(data)} bytes",
                offset=request.offset,
            )
        data += request.data
        if request.last:
            del self._uploads[client.id]
            profile = self._profiles.install(bytes(data))
            log.info("profile installed", model=profile.model, selector=profile.selector, groups=len(profile.groups))

    def _export_profile(self, client: ClientSession, request: api.ExportProfile) -> api.ProfileData:
        data = self._downloads.pop(client.id, b"") if request.offset > 0 else b""
        data = data or self._profiles.export(request.model, request.selector, learnt=request.learnt)
        stop = max(0, request.offset) + PROFILE_PIECE
        if stop < len(data):
            self._downloads[client.id] = data
        return api.ProfileData(data=data[max(0, request.offset) : stop], total=len(data))

    def _report_selections(self, client: ClientSession, request: api.ReportSelections) -> None:
        opening, layout = self._opening_of(client, request.transfer)
        self._profiles.record(
            opening.spec,
            opening.selector,
            tuple(opening.lengths),
            heads=layout.kv_heads,
            steps=request.steps,
            counts=request.counts,
            by_head=request.by_head,
            blocks=request.blocks,
            asked=request.asked,
            source=self._engine.core.parts[request.transfer].peer,
            now=time.time(),
        )

    def _set_wake(self, client: ClientSession) -> None:
        wanted = any(opened.wants_windows for opened in self._opened.values() if opened.client is client)
        client.set_wake(ring.WAKE_LAYER_READY | (ring.WAKE_IDLE if wanted else 0))

    async def _reject(self, request: api.Reject) -> Answer:
        node = parse_handle(request.handle).node if request.handle else request.source
        if not node or (not request.handle and not request.request):
            raise InvalidArgument("a rejection needs a handle, or a request id and the source's node id")
        session = await self._connect(node)
        session.send(RejectHandle(handle=request.handle, request=request.request, reason=request.reason[:1000]))
        return api.Ok()

    def _opening_of(
        self, client: ClientSession, transfer: TransferId
    ) -> tuple[api.OpenSource | api.OpenSink, PartLayout]:
        """How a client has opened a transfer; raises :class:`NotFound` where it has not."""
        opened = self._opened.get(transfer)
        if opened is None or opened.client is not client or opened.request is None or opened.layout is None:
            raise NotFound(
                f"transfer {transfer} is not open on this connection; it was released, or another process opened it",
                transfer=transfer,
            )
        return opened.request, opened.layout

    def _mine(self, client: ClientSession, transfer: TransferId) -> bool:
        opened = self._opened.get(transfer)
        return opened is not None and opened.client is client

    @staticmethod
    def _show(opened: _Opened) -> None:
        opened.client.set_slot(
            opened.slot, opened.state, opened.generation & 0xFFFFFFFF, opened.progress, opened.bytes_done
        )
        opened.client.wake()
