"""The sending half of a lane of the tcp fabric: operations become frames, frames become system calls.

Operations of a lane go out in the order of submission, each as consecutive frames. Frames are collected into a *batch*
that is handed to the kernel as a whole; what is in the batch counts as started, everything else can still be
dropped. Answers to the peer's READs take turns with the lane's own operations; acknowledgements go before both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvd.errors import KvdError, ProtocolError
from kvd.fabric.base import EndpointCounters, Grant
from kvd.fabric.batch import Batch
from kvd.fabric.frames import MAX_MESSAGE, MAX_READS, MAX_RUNS, MAX_UNACKED, Header, Kind
from kvd.fabric.records import RecordWriter
from kvd.fabric.regions import Refusal, RegionTable, access_error
from kvd.fabric.runs import Runs
from kvd.fabric.seals import Seal
from kvd.fabric.tcp_work import Answer, ReadPart, TcpOperation
from kvd.types import Descriptors, Lane

MAX_BATCH_FRAMES = 64

_NOTHING: Descriptors = np.empty((0, 3), np.int64)


class _Unacked(NamedTuple):
    number: int
    nbytes: int
    op: TcpOperation
    last: bool


class LaneOut:
    """Sends on one connection. Nothing here blocks; ``wake`` is called when there is something new to send."""

    def __init__(
        self,
        lane: Lane,
        fd: int,
        loop: asyncio.AbstractEventLoop,
        table: RegionTable,
        counters: EndpointCounters,
        wake: Callable[[], None],
        *,
        frame_bytes: int,
        inflight_bytes: int,
        seal: Seal,
        records: RecordWriter | None = None,
    ) -> None:
        self.lane = lane
        self.fd = fd
        self._batch = Batch(seal, records)
        self.loop = loop
        self.reads: deque[ReadPart] = deque()
        """READs that have been sent, oldest first."""
        self.answers: deque[Answer] = deque()
        self.dirty = False
        """Something may have to be sent; cleared when there turns out to be nothing."""
        self.on_stopped: Callable[[TcpOperation], None] = lambda op: None
        """Called for a read whose memory must not be written any more."""
        self._table = table
        self._counters = counters
        self._wake = wake
        self._frame_bytes = frame_bytes
        self._inflight_bytes = inflight_bytes
        self._queue: deque[TcpOperation] = deque()
        self._last_op = 0
        self._sent = 0
        """Frames sent that get an ACK, and so the number of the last one."""
        self._acked = 0
        self._unacked: deque[_Unacked] = deque()
        self._in_flight = 0
        self._unurged = 0
        """Bytes sent since the last frame that urged for its ACK."""
        self._refusals: deque[tuple[int, Refusal]] = deque()
        self._owed = 0
        """The number to acknowledge, and below it the one acknowledged last."""
        self._paid = 0
        self._own_turn = False
        self._batch_ops: list[TcpOperation] = []
        self._batch_frames = 0
        self._answering: tuple[Grant, int, int, int, int, int] | None = None
        """Of the answer in the batch: grant, first and last piece, its ANSWER's place in the arena, its operation, its
        ANSWER's number among the frames."""

    # --- what the owner and the receiving half ask for ----------------------------------------------------------------

    def submit(self, op: TcpOperation) -> TcpOperation:
        self._queue.append(op)
        self._touch()
        return op

    def _touch(self) -> None:
        self.dirty = True
        self._wake()

    def stop(self, op: TcpOperation, error: KvdError) -> None:
        """Send nothing more of ``op`` and fail it, at the latest when the batch has left."""
        if op.settled or op.stopped is not None:
            return
        op.stopped = error
        op.stages.clear()
        self.on_stopped(op)
        if op.what == "read" or op not in self._batch_ops:
            op.settle(error)

    def acknowledge(self, number: int) -> None:
        """Tell the peer that its frames up to ``number`` are dealt with."""
        self._owed = number
        self.dirty = True

    def refuse(self, op: int, refusal: Refusal) -> None:
        """Tell the peer that its write ``op`` is refused; call it before the ``acknowledge`` that covers the frame."""
        self._refusals.append((op, refusal))
        self._touch()

    def answer(self, answer: Answer) -> None:
        """Send back what the peer's READ asks for."""
        self.answers.append(answer)
        self.dirty = True

    @property
    def refusals(self) -> int:
        """Refusals that have not been sent yet."""
        return len(self._refusals)

    def revoke(self, grant: Grant) -> None:
        """Let no more bytes of ``grant`` leave: what is left of an answer becomes zeros, and the answer negative."""
        if self._answering is None or self._answering[0] is not grant:
            return
        _, first, stop, at, op, frame = self._answering
        self._batch.withdraw(first, stop, at, frame, Header(Kind.ANSWER, op=op, number=Refusal.REVOKED))
        self._answering = None

    def acknowledged(self, number: int) -> None:
        """The peer's ACK; raises :class:`ProtocolError` for frames that were never sent."""
        if not self._acked <= number <= self._sent:
            raise ProtocolError(
                f"the peer acknowledged frame {number} of {self._sent}; the connection is closed", number=number
            )
        self._acked = number
        self.dirty = True  # the window has room again
        while self._unacked and self._unacked[0].number <= number:
            frame = self._unacked.popleft()
            self._in_flight -= frame.nbytes
            if frame.last:
                self._complete(frame.op)
        self._counters.bytes_in_flight[self.lane] = self._in_flight

    def refused(self, op_id: int, refusal: Refusal) -> None:
        """The peer's REFUSED."""
        op = next((frame.op for frame in self._unacked if frame.op.id == op_id), None)
        if op is None:
            raise ProtocolError(f"the peer refused operation {op_id}, which is not under way; the connection is closed")
        self.stop(op, access_error(op.what, refusal, op.low, op.high))

    def answered(self, op_id: int, refusal: Refusal | None) -> None:
        """The peer's ANSWER."""
        part = self.reads[0] if self.reads else None
        if part is None or part.op.id != op_id or (refusal is None and part.nbytes > 0 and not part.filled):
            raise ProtocolError(f"the peer answered read {op_id} out of turn; the connection is closed")
        self.reads.popleft()
        self.dirty = True
        self._in_flight -= part.nbytes
        self._counters.bytes_in_flight[self.lane] = self._in_flight
        op = part.op
        op.parts -= 1
        if refusal is None and part.damaged:
            refusal = Refusal.DAMAGED
        if refusal is not None:
            self.stop(op, access_error(op.what, refusal, op.low, op.high))
        elif not op.parts and not op.stages:
            self._complete(op)

    def end(self, error: KvdError) -> None:
        """Fail everything; nothing is sent any more."""
        pending = [frame.op for frame in self._unacked] + [part.op for part in self.reads] + list(self._queue)
        for op in pending:
            op.settle(op.stopped or error)
        for op in self._batch_ops:
            op.settle(op.stopped or error)
        for queue in (self._unacked, self.reads, self._queue, self.answers, self._refusals, self._batch_ops):
            queue.clear()
        self._answering = None
        self._batch.drop()

    # --- batches --------------------------------------------------------------------------------------------------

    @property
    def sending(self) -> bool:
        """Whether a batch has been begun and not handed over wholly."""
        return self._batch.pending

    @property
    def has_control(self) -> bool:
        return bool(self._refusals) or self._owed > self._paid

    @property
    def has_payload(self) -> bool:
        """Whether an answer, or a frame that the window permits, waits to be sent."""
        return bool(self.answers) or self._next_op() is not None

    def build(self, limit: int, payload: bool = True) -> int:
        """Begin a batch of about ``limit`` payload bytes, or of control frames only; its size, 0 if there is none."""
        op = self._next_op() if payload else None
        if op is None and not (payload and self.answers) and not self.has_control:
            return 0
        self._batch.begin()
        self._batch_frames = 0
        self._add_control()
        if payload:
            if self.answers and not (self._own_turn and op is not None):
                self._own_turn = True
                self._add_answer()
            else:
                self._own_turn = False
                added = 0
                while op is not None:
                    n = self._add_read(op, limit) if op.stages[0][0] is Kind.READ else self._add_frame(op, limit)
                    if n < 0:
                        break
                    added += n
                    room = added <= limit // 2 and self._batch_frames < MAX_BATCH_FRAMES
                    op = self._next_op() if room else None
        nbytes = self._batch.finish()
        self._counters.bytes_in_flight[self.lane] = self._in_flight
        # What the window or the rate holds back is looked at again when they permit it.
        self.dirty = bool(self._queue or self.answers or self._refusals or self._owed > self._paid)
        return nbytes

    def send(self) -> int:
        """Hand over what the kernel takes of the batch; the number of bytes, -1 for none. Raises OSError."""
        n = self._batch.send(self.fd)
        if not self._batch.pending:
            self._answering = None
            for op in self._batch_ops:
                if op.stopped is not None:
                    op.settle(op.stopped)
            self._batch_ops.clear()
        return n

    def _next_op(self) -> TcpOperation | None:
        """The operation that the next frame belongs to, if a frame may go out."""
        while self._queue and not self._queue[0].stages:
            self._queue.popleft()
        if not self._queue or self._in_flight >= self._inflight_bytes:
            return None
        op = self._queue[0]
        full = len(self.reads) >= MAX_READS if op.stages[0][0] is Kind.READ else len(self._unacked) >= MAX_UNACKED
        return None if full else op

    def _add_control(self) -> None:
        batch = self._batch
        while self._refusals and batch.has_room(1):
            op, refusal = self._refusals.popleft()
            batch.add_header(Header(Kind.REFUSED, op=op, number=refusal))
        if not self._refusals and self._owed > self._paid and batch.has_room(1):
            self._paid = self._owed
            batch.add_header(Header(Kind.ACK, number=self._paid))

    def _add_answer(self) -> None:
        batch = self._batch
        if not batch.has_room(2):
            return
        op, access, runs, nbytes = self.answers.popleft()
        if isinstance(access, Grant) and not self._table.is_open(access):
            access = Refusal.REVOKED
        first = stop = 0
        if isinstance(access, Grant) and nbytes:
            offsets = runs[:, 0] + access.offset
            body = batch.pieces(access.region.memory, offsets, runs[:, 1])
            batch.add_header(Header(Kind.DATA, op=op, payload=nbytes), body)
            first, stop = batch.add_payload(self._table.address(access.region), offsets, runs[:, 1])
            self._counters.bytes_sent += nbytes
        at = batch.add_header(Header(Kind.ANSWER, op=op, number=access if isinstance(access, Refusal) else 0))
        if isinstance(access, Grant):
            self._answering = (access, first, stop, at, op, batch.frames)

    def _add_frame(self, op: TcpOperation, limit: int) -> int:
        """Cut the next WRITE, THEN, MESSAGE or NOTIFY; its payload bytes, or -1 if the batch has no room for it."""
        batch = self._batch
        kind, body, token, low, high = op.stages[0]
        rows, nbytes = _NOTHING, 0
        if isinstance(body, bytes):
            nbytes = len(body)
            if not batch.has_room(1, nbytes):
                return -1
        else:
            most = batch.most_runs(len(body.rows))
            if most < 0:
                return -1
            if body.nbytes:
                size = min(self._frame_bytes, limit)
                rows, nbytes = body.cut(op.position, min(size, MAX_MESSAGE) if kind is Kind.THEN else size, most)
        self._begin(op)
        self._sent += 1
        self._unurged += nbytes
        whole = len(body) if isinstance(body, bytes) else body.nbytes
        last = len(op.stages) == 1 and op.position + nbytes == whole
        # In time for the window not to close while the far side waits for more to acknowledge.
        urge = last or self._unurged >= self._inflight_bytes // 4 or self._sent % (MAX_UNACKED // 4) == 0
        if urge:
            self._unurged = 0
        header = Header(kind, len(rows), op.id, nbytes, low, high, token, self._sent, urge)
        if isinstance(body, bytes):
            batch.add_header(header, (body,))
            batch.add_message(body)
        elif not nbytes:
            batch.add_header(header)
        else:
            assert op.region is not None
            batch.add_header(header, batch.pieces(op.region.memory, rows[:, 0], rows[:, 2]))
            batch.add_runs(rows)
            batch.add_payload(op.base, rows[:, 0], rows[:, 2])
            self._counters.bytes_sent += nbytes
        self._progress(op, nbytes, whole)
        self._unacked.append(_Unacked(self._sent, nbytes, op, last))
        return nbytes

    def _add_read(self, op: TcpOperation, limit: int) -> int:
        batch = self._batch
        body = op.stages[0][1]
        assert isinstance(body, Runs)
        if not batch.has_room_for_runs():
            return -1
        rows, nbytes = _NOTHING, 0
        if body.nbytes:
            rows, nbytes = body.cut(op.position, min(self._frame_bytes, limit), MAX_RUNS)
        self._begin(op)
        batch.add_header(Header(Kind.READ, len(rows), op.id, nbytes, op.low, op.high, op.token))
        if nbytes:
            batch.add_runs(rows)
        self._progress(op, nbytes, body.nbytes)
        op.parts += 1
        self.reads.append(ReadPart(op, rows, nbytes))
        return nbytes

    def _begin(self, op: TcpOperation) -> None:
        if not op.id:
            self._last_op += 1
            op.id = self._last_op
        if not self._batch_ops or self._batch_ops[-1] is not op:
            self._batch_ops.append(op)

    def _progress(self, op: TcpOperation, nbytes: int, stage_bytes: int) -> None:
        op.position += nbytes
        self._in_flight += nbytes
        self._batch_frames += 1
        if op.position >= stage_bytes:
            op.stages.popleft()
            op.position = 0

    def _complete(self, op: TcpOperation) -> None:
        if op.settled:
            return
        if op.stopped is not None:
            op.settle(op.stopped)
            return
        op.settle()
        self._counters.writes += op.what == "write"
        self._counters.reads += op.what == "read"
        self._counters.messages_sent += op.speaks
