"""Carries out the core's instructions about tensors for the engine: each is one :class:`~kvd.transfer.moving.Move`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from kvd.errors import Aborted, FabricError, InvalidArgument, KvdError, OutOfMemory, UnsupportedLayout
from kvd.memory.pool import Pool
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer import moving
from kvd.transfer.moving import Move
from kvd.transfer.parties import Record, Session
from kvd.types import TransferId

log = structlog.get_logger("kvd.transfer")

OWN_FAULTS = (OutOfMemory, UnsupportedLayout, InvalidArgument)
"""Errors of a batch that are this side's: its peer hears of them from here."""


class Mover:
    """Part of the :class:`~kvd.transfer.engine.Engine`; ``submit`` takes events, ``start`` runs a coroutine as a task
    that the engine's end waits for, ``sent`` counts bytes that a sink has confirmed."""

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
        self._turn = asyncio.Lock()

    def write(self, instruction: do.WriteTensors) -> None:
        record = self._records.get(instruction.transfer)
        session = self._sessions.get(instruction.session)
        if record is None or record.route is None or session is None:
            gone = FabricError("the session of a write has ended" if session is None else "its transfer has ended")
            self._submit(ev.WriteCompleted(instruction.transfer, instruction.write, gone))
            return
        move = record.moves[instruction.write] = Move()
        self._start(self._write(record, session, instruction, move))

    async def _write(self, record: Record, session: Session, instruction: do.WriteTensors, move: Move) -> None:
        transfer, write = instruction.transfer, instruction.write
        target = record.sink.target if record.sink is not None else None
        pulled = target is not None and target.pull
        error: KvdError | None = None
        token = b""
        try:
            with record.holding():
                async with self._turn:
                    # The link gets what the batch before has submitted first: the loop has its own turn for that.
                    await asyncio.sleep(0)
                    move.check()
                    masks = None if pulled else moving.masks_of(record, instruction)
                    room = masks.nbytes if masks is not None else 0
                    plans = await moving.stage(self._pool, move, record, instruction.layers, room)
                self._submit(ev.Regrouped(transfer, write))
                if masks is None:
                    token = moving.offer(move, session)
                    self._submit(move.account(transfer))
                else:
                    try:
                        marked = await moving.push(move, record, session, plans, masks)
                    finally:  # a sink that has everything may release before its host confirms the last bytes
                        self._submit(move.account(transfer))
                    self._sent(instruction.nbytes)
                    self._submit(ev.WriteCompleted(transfer, write))
                    if not marked:  # the link is free for the next batch meanwhile
                        await moving.mark_far(move, record, session, masks)
        except Exception as wrong:
            error = as_kvd_error(wrong)
            if not isinstance(wrong, KvdError):
                self._submit(ev.AbortRequested(transfer, KvdError(f"moving tensors failed: {wrong!r}")))
        if pulled and error is None and not move.cancelled:
            self._submit(ev.Staged(transfer, write, token, move.nbytes))
        elif pulled or error is not None:
            await self._end(record, transfer, write, instruction.nbytes, error)
        else:
            del record.moves[write]
            await moving.withdraw(move)

    def end_stage(self, instruction: do.EndStage) -> None:
        record = self._records.get(instruction.transfer)
        if record is not None:
            self._start(
                self._end(record, instruction.transfer, instruction.write, instruction.nbytes, instruction.error)
            )

    async def _end(self, record: Record, transfer: TransferId, write: int, nbytes: int, error: KvdError | None) -> None:
        """Give a batch's staging memory back, and report its end, once."""
        move = record.moves.pop(write, None)
        if move is None:
            return
        if move.cancelled and error is None:
            error = Aborted("the move of tensors was cancelled")
        await moving.withdraw(move)
        if isinstance(error, OWN_FAULTS):
            self._submit(ev.AbortRequested(transfer, error))
        elif error is None:
            self._sent(nbytes)
        self._submit(ev.WriteCompleted(transfer, write, error))

    def cancel(self, transfer: TransferId, record: Record) -> None:
        """Start nothing new of a source part's batches, and end those that wait for the sink's word."""
        for write, move in list(record.moves.items()):
            move.cancel()
            if move.grant is not None:
                self._start(self._end(record, transfer, write, 0, None))

    def pull(self, instruction: do.PullTensors) -> None:
        record = self._records.get(instruction.transfer)
        session = self._sessions.get(instruction.session)
        if record is None or record.tensors is None or session is None:
            return  # the news of that end is on its way
        move = record.moves[instruction.message.stage] = Move()
        self._start(self._pull(record, session, instruction, move))

    async def _pull(self, record: Record, session: Session, instruction: do.PullTensors, move: Move) -> None:
        error: KvdError | None = None
        try:
            with record.holding():
                await moving.pull(move, record, session, instruction.message)
        except Exception as wrong:
            error = as_kvd_error(wrong)
        del record.moves[instruction.message.stage]
        if error is None:
            self._submit(move.account(instruction.transfer))
        self._submit(ev.PullCompleted(instruction.transfer, instruction.session, instruction.message, error))


def as_kvd_error(error: BaseException | None) -> KvdError | None:
    """What a fabric's operation ended with; anything that is not ours is a fault of kvd, and logged as one."""
    if error is None or isinstance(error, KvdError):
        return error
    log.error("an operation failed in an unforeseen way", exc_info=error)
    return FabricError(f"an operation failed in an unforeseen way: {error!r}")
