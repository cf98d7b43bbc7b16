"""The receiving half of a lane of the tcp fabric: from the byte stream straight into granted memory.

Headers, descriptors and small payloads go through a staging buffer; the rest of a payload is received where it
belongs, in the same system call as the beginning of what follows it. Nothing is placed before the token and
all descriptors of its frame have been checked; what is refused goes to scratch memory.

A payload that does not pass its check is refused too: what has been placed of it stays unmarked, since the operation's
THEN and NOTIFY do not follow. A header or descriptors that don't pass end the connection, for nothing says any more
where the next frame begins.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from time import monotonic

import numpy as np
from kvd_kernels import copy_runs

from kvd.errors import FabricError, ProtocolError
from kvd.fabric.base import EndpointCounters, Grant
from kvd.fabric.checks import Checks
from kvd.fabric.frames import (
    HEADER_BYTES,
    MAX_CHECK_BYTES,
    MAX_MESSAGE,
    MAX_READS,
    MAX_RUNS,
    MAX_UNACKED,
    RUN_BYTES,
    Header,
    Kind,
    inside,
    refusal_of,
    unpack_header,
    unpack_runs,
)
from kvd.fabric.iovec import Vector
from kvd.fabric.records import RecordReader
from kvd.fabric.regions import Refusal, RegionTable, address_of
from kvd.fabric.seals import Offsets, Seal
from kvd.fabric.tcp_send import LaneOut
from kvd.fabric.tcp_work import Answer, ReadPart, TcpOperation
from kvd.types import Descriptors, Lane

STAGING_BYTES = 2 * (HEADER_BYTES + MAX_RUNS * RUN_BYTES + 3 * MAX_CHECK_BYTES)
"""Room for the longest header with descriptors, and more."""
LOOKAHEAD_BYTES = 4096
"""How much is received of what follows a payload: enough for a header, little to copy if it is payload again."""
BURST_BYTES, BURST_S = 1 << 20, 0.001
"""How much is received before the event loop gets its turn, and about how long that may take."""

LOW_WATER_BYTES, LEAST_LOW_WATER_BYTES = 1 << 20, 64 << 10
"""How much of a payload is waited for (SO_RCVLOWAT), and the least for which that is worth a system call."""

_scratch = bytearray(64 << 10)
"""Where refused payload goes; never read."""
_SCRATCH_ADDRESS = address_of(_scratch)


class LaneIn:
    """Receives on one connection."""

    def __init__(
        self,
        lane: Lane,
        sock: socket.socket,
        table: RegionTable,
        counters: EndpointCounters,
        out: LaneOut,
        deliver: Callable[[Lane, bytes], None],
        *,
        seal: Seal,
        records: RecordReader | None = None,
    ) -> None:
        self.lane = lane
        self._sock = sock
        self._fd = sock.fileno()
        self._table = table
        self._counters = counters
        self._out = out
        self._deliver = deliver
        self._checks = Checks(seal, counters)
        self._head_bytes = HEADER_BYTES + 2 * seal.check_bytes
        self._records = records
        self._ended = False
        self._low_water = 1
        self._staging = bytearray(STAGING_BYTES)
        self._staging_address = address_of(self._staging)
        self._start = self._end = 0
        self._bounce = bytearray(MAX_MESSAGE)
        self._bounce_address = address_of(self._bounce)
        self._bounce_view = memoryview(self._bounce)
        self._vector = Vector()
        self._header: Header | None = None
        """Of the frame whose payload is being received, or whose descriptors are."""
        self._frames = 0
        self._acknowledged = 0
        self._urged = False
        """The peer waits for an ACK."""
        self._body: tuple[memoryview, Offsets, Offsets] | None = None
        """Memory, offsets and lengths of the payload that is being received, and of which the check matters."""
        self._grant: Grant | None = None
        """Where the current frame's payload goes; None for a refused one. Keeps the memory alive."""
        self._then: Descriptors | None = None
        self._part: ReadPart | None = None
        self._accepted = (0, b"")
        """The operation, and the grant's token, of the write that was accepted last."""
        self._refused_op = 0
        out.on_stopped = self._abandon

    def receive(self) -> None:
        """Take what has arrived, within bounds. Raises OSError, FabricError at the stream's end, ProtocolError."""
        if self._records is not None:
            self._receive_records(self._records)
            return
        budget, stop = BURST_BYTES, monotonic() + BURST_S
        while budget > 0 and not self._ended:
            if self._vector.remaining:
                asked = self._vector.remaining + LOOKAHEAD_BYTES
                n, self._end = self._vector.receive(self._fd, self._staging_address, LOOKAHEAD_BYTES)
            else:
                self._compact()
                asked = STAGING_BYTES - self._end
                self._vector.clear()
                n, fresh = self._vector.receive(self._fd, self._staging_address + self._end, asked)
                self._end += fresh
            if n < 0:
                break
            if n == 0:
                raise FabricError("the peer closed the connection")
            budget -= n
            self._parse()
            if n < asked or monotonic() >= stop:
                break  # in the first case the socket is drained, most likely
        self._set_low_water(self._vector.remaining)

    def _receive_records(self, records: RecordReader) -> None:
        budget, stop = BURST_BYTES, monotonic() + BURST_S
        while budget > 0 and not self._ended:
            n, more = records.receive(self._fd)
            if n < 0:
                break
            if n == 0:
                raise FabricError("the peer closed the connection")
            budget -= n
            while not self._ended and (nbytes := records.open()):
                self._take(records.address, nbytes)
            if not more or monotonic() >= stop:
                break
        self._set_low_water(records.missing)

    def _take(self, address: int, nbytes: int) -> None:
        """Bytes of the stream that lie in memory."""
        while nbytes and not self._ended:
            if self._vector.remaining and self._start == self._end:
                n = self._vector.fill_from(address, nbytes)
            else:
                self._compact()
                n = min(nbytes, STAGING_BYTES - self._end)
                ctypes.memmove(self._staging_address + self._end, address, n)
                self._end += n
            address += n
            nbytes -= n
            self._parse()

    def revoke(self, grant: Grant) -> None:
        """Let no more bytes land in ``grant``."""
        if self._grant is not grant or self._header is None:
            return
        self._grant = self._body = None
        if self._header.kind is Kind.WRITE:
            self._drain(self._vector.remaining)
        self._refuse(self._header.op, Refusal.REVOKED)

    def end(self) -> None:
        """Receive nothing any more and let go of all memory."""
        self._ended = True
        self._vector.clear()
        self._grant = self._body = None
        self._part = None

    def _set_low_water(self, left: int) -> None:
        """Be woken when a good part of the ``left`` bytes that are waited for is there, not for each segment: a turn of
        the loop costs more."""
        mark = min(left, LOW_WATER_BYTES) if left >= LEAST_LOW_WATER_BYTES else 1
        if mark != self._low_water and not self._ended:
            self._low_water = mark
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)

    # --- frames ---------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        if self._start:
            left = self._end - self._start
            self._staging[:left] = self._staging[self._start : self._end]
            self._start, self._end = 0, left

    def _parse(self) -> None:
        while not self._ended:
            if self._vector.remaining:
                taken = self._vector.fill_from(self._staging_address + self._start, self._end - self._start)
                self._start += taken
                if self._vector.remaining:
                    break
            elif self._header is None:
                if self._end - self._start < self._head_bytes:
                    break
                self._checks.head(self._staging, self._start)
                header = unpack_header(self._staging, self._start)
                runs_bytes = header.runs * RUN_BYTES
                need = self._head_bytes + (runs_bytes + self._checks.nbytes if runs_bytes else 0)
                if self._end - self._start < need:
                    break
                runs_at = self._start + self._head_bytes
                self._checks.frames += 1
                self._checks.runs(self._staging, runs_at, runs_bytes)
                self._begin(header, runs_at)
                self._header = header
                self._start += need
                continue
            complete, self._header = self._header, None
            assert complete is not None
            self._finish(complete)
        if self._start == self._end:
            self._start = self._end = 0
        # Not for each frame: an ACK costs both sides a system call and a turn of the loop. At the latest when
        # nothing more is on its way.
        if self._frames > self._acknowledged and (self._urged or not (self._end or self._vector.remaining)):
            self._urged = False
            self._acknowledged = self._frames
            self._out.acknowledge(self._frames)

    def _damaged(self) -> bool:
        """Whether the payload that is in does not pass its check."""
        body, self._body = self._body, None
        return self._checks.damaged(body)

    def _begin(self, header: Header, runs_at: int) -> None:
        """Decide where the frame's payload goes."""
        self._vector.clear()
        kind = header.kind
        if kind <= Kind.NOTIFY and header.number != self._frames + 1:
            raise ProtocolError(
                f"frame {self._frames + 1} of the lane came with the number {header.number}; the connection is closed"
            )
        if kind is Kind.WRITE or kind is Kind.THEN:
            self._begin_write(header, runs_at)
        elif kind is Kind.MESSAGE or kind is Kind.NOTIFY:
            self._to_bounce(header.payload)
        elif kind is Kind.READ:
            self._begin_read(header, runs_at)
        elif kind is Kind.DATA:
            self._begin_data(header)

    def _begin_write(self, header: Header, runs_at: int) -> None:
        runs = unpack_runs(self._staging, runs_at, header)
        grant = self._granted(header, runs)
        if grant is None:
            self._drain(header.payload)
            return
        self._accepted = header.op, header.token
        if header.kind is Kind.WRITE:
            if header.runs:
                offsets = runs[:, 0] + grant.offset
                self._vector.add_runs(self._table.address(grant.region), offsets, runs[:, 1])
                self._body = (grant.region.memory, offsets, runs[:, 1])
        else:
            self._then = np.empty((header.runs, 3), np.int64)
            self._then[:, 0] = np.cumsum(runs[:, 1]) - runs[:, 1]
            self._then[:, 1] = runs[:, 0] + grant.offset
            self._then[:, 2] = runs[:, 1]
            self._to_bounce(header.payload)
        self._grant = grant

    def _granted(self, header: Header, runs: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Grant | None:
        if header.op == self._refused_op:
            return None
        access = self._table.check(header.token, header.low, header.high, write=True)
        if isinstance(access, Grant):
            if inside(runs, header.low, header.high):
                return access
            access = Refusal.OUT_OF_RANGE
        elif access is Refusal.UNKNOWN_TOKEN and self._accepted == (header.op, header.token):
            access = Refusal.REVOKED
        self._bound_refusals()
        self._refuse(header.op, access)
        return None

    def _bound_refusals(self) -> None:
        if self._out.refusals >= MAX_UNACKED:
            raise ProtocolError(f"the peer let more than {MAX_UNACKED} refusals pile up; the connection is closed")

    def _begin_read(self, header: Header, runs_at: int) -> None:
        if len(self._out.answers) >= MAX_READS:
            raise ProtocolError(f"the peer asked for more than {MAX_READS} reads at once; the connection is closed")
        runs = unpack_runs(self._staging, runs_at, header)
        access = self._table.check(header.token, header.low, header.high, write=False)
        if isinstance(access, Grant) and not inside(runs, header.low, header.high):
            access = Refusal.OUT_OF_RANGE
        if isinstance(access, Refusal) and header.op != self._refused_op:
            self._refused_op = header.op
            self._counters.access_errors += 1
        self._out.answer(Answer(header.op, access, runs, header.payload))

    def _begin_data(self, header: Header) -> None:
        part = self._out.reads[0] if self._out.reads else None
        if (
            part is None
            or part.op.id != header.op
            or part.nbytes != header.payload
            or not header.payload
            or part.filled
        ):
            raise ProtocolError(
                f"the peer sent {header.payload} bytes for read {header.op}, which did not ask for them; the "
                "connection is closed"
            )
        self._part = part
        if part.op.settled:
            self._drain(header.payload)
        else:
            assert part.op.region is not None
            self._vector.add_runs(part.op.base, part.rows[:, 0], part.rows[:, 2])
            self._body = (part.op.region.memory, part.rows[:, 0], part.rows[:, 2])

    def _finish(self, header: Header) -> None:
        """The frame's payload is in: act on it."""
        kind, out = header.kind, self._out
        if kind is Kind.ACK:
            out.acknowledged(header.number)
        elif kind is Kind.REFUSED:
            refusal = refusal_of(header)
            assert refusal is not None
            out.refused(header.op, refusal)
        elif kind is Kind.ANSWER:
            out.answered(header.op, refusal_of(header))
        elif kind is Kind.DATA:
            assert self._part is not None
            self._part.filled = True
            self._part.damaged = not self._part.op.settled and self._damaged()
            if not self._part.op.settled:
                self._counters.bytes_received += header.payload
            self._part = None
        elif kind is not Kind.READ:
            if self._damaged() and header.op != self._refused_op:
                self._grant = None
                self._bound_refusals()
                self._refused_op = header.op
                out.refuse(header.op, Refusal.DAMAGED)
            grant, self._grant = self._grant, None
            if grant is not None:
                if self._then is not None:
                    # Only now: no reader of the memory may see these bytes before those of the WRITEs.
                    copy_runs(self._bounce, grant.region.memory, self._then)
                self._counters.bytes_received += header.payload
            self._then = None
            self._frames += 1
            self._urged |= header.urge
            if kind in (Kind.MESSAGE, Kind.NOTIFY) and header.op != self._refused_op:
                self._counters.messages_received += 1
                self._deliver(self.lane, bytes(self._bounce[: header.payload]))

    def _refuse(self, op: int, refusal: Refusal) -> None:
        self._refused_op = op
        self._counters.access_errors += 1
        self._out.refuse(op, refusal)

    def _abandon(self, op: TcpOperation) -> None:
        if self._part is not None and self._part.op is op:
            self._drain(self._vector.remaining)

    def _to_bounce(self, nbytes: int) -> None:
        self._vector.clear()
        if nbytes:
            self._vector.add(self._bounce_address, nbytes)
            self._body = (self._bounce_view, np.zeros(1, np.int64), np.array([nbytes]))

    def _drain(self, nbytes: int) -> None:
        self._body = None
        self._vector.clear()
        while nbytes > 0:
            self._vector.add(_SCRATCH_ADDRESS, min(nbytes, len(_scratch)))
            nbytes -= len(_scratch)
