"""Carries out the core's instructions about fetches for the engine: a source serves, a sink fills and keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvd.errors import KvdError, NotFound
from kvd.memory.pool import Pool
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.mover import as_kvd_error
from kvd.transfer.parties import Record, Session
from kvd.transfer.serving import INLINE_BYTES, fill_fetch, keep_fetched, serve_fetch
from kvd.types import TransferId


class Fetcher:
    """Part of the :class:`~kvd.transfer.engine.Engine`; ``submit``, ``start`` and ``sent`` as the
    :class:`~kvd.transfer.mover.Mover` has them."""

    def __init__(
        self,
        pool: Pool,
        records: Mapping[TransferId, Record],
        sessions: Mapping[ev.SessionId, Session],
        submit: Callable[[ev.Event], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
        sent: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._records, self._sessions = records, sessions
        self._submit, self._start, self._sent = submit, start, sent

    def serve(self, instruction: do.ServeFetch) -> None:
        record = self._records.get(instruction.transfer)
        session = self._sessions.get(instruction.session)
        self._start(self._serve(instruction, record, session))

    async def _serve(self, instruction: do.ServeFetch, record: Record | None, session: Session | None) -> None:
        transfer, message, sink = instruction.transfer, instruction.message, instruction.sink
        nbytes = 0
        failed: KvdError | None = None
        if record is None or session is None or record.sink is None:
            failed = NotFound("the source has no such transfer any more", transfer=transfer)
        else:
            try:
                with record.lease.holding():
                    nbytes = await serve_fetch(
                        self._pool,
                        session,
                        message,
                        layout=record.layout,
                        lengths=record.lengths,
                        lease=record.lease,
                        token=record.sink.grant,
                        sink=sink,
                    )
                self._sent(nbytes)
            except Exception as error:
                failed = as_kvd_error(error)
        self._submit(ev.FetchServed(transfer, instruction.session, message.fetch, sink, nbytes, failed))

    def fill(self, instruction: do.FillFetch) -> None:
        record, request = self._records[instruction.transfer], instruction.request
        failed = None
        try:
            tensors = record.tensors.view(record.layout) if record.tensors is not None else None
            fill_fetch(request, layout=record.layout, lengths=record.lengths, lease=record.lease, tensors=tensors)
        except Exception as error:
            failed = as_kvd_error(error)
        record.process.fetched(instruction.transfer, request.fetch, failed)

    def keep(self, instruction: do.KeepFetched) -> None:
        record = self._records[instruction.transfer]
        if len(instruction.places) * record.layout.entry_bytes > INLINE_BYTES:
            self._start(self._keep_in_thread(instruction, record))
            return
        failed = None
        try:
            keep_fetched(instruction, layout=record.layout, lease=record.lease)
        except Exception as error:
            failed = as_kvd_error(error)
        self._submit(ev.FetchKept(instruction.transfer, instruction.fetch, failed))

    async def _keep_in_thread(self, instruction: do.KeepFetched, record: Record) -> None:
        failed = None
        try:
            with record.lease.holding():
                await asyncio.to_thread(keep_fetched, instruction, layout=record.layout, lease=record.lease)
        except Exception as error:
            failed = as_kvd_error(error)
        self._submit(ev.FetchKept(instruction.transfer, instruction.fetch, failed))

    def ended(self, instruction: do.FetchEnded) -> None:
        record = self._records.get(instruction.transfer)
        if record is not None:
            record.process.fetched(instruction.transfer, instruction.fetch, instruction.error)
