"""Frames that the kernel gets as a whole: headers, descriptors and messages in an arena, payloads where they lie."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvd.fabric.frames import (
    HEADER_BYTES,
    MAX_CHECK_BYTES,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    MAX_RUNS,
    RUN_BYTES,
    Header,
    pack_header,
    pack_runs,
)
from kvd.fabric.iovec import Vector
from kvd.fabric.records import RecordWriter
from kvd.fabric.regions import address_of
from kvd.fabric.seals import Buffer, Seal, pieces
from kvd.types import Descriptors

Column = npt.NDArray[np.int64]

ARENA_BYTES = 2 * (MAX_MESSAGE + HEADER_BYTES + MAX_RUNS * RUN_BYTES + 3 * MAX_CHECK_BYTES)
"""Room for the headers, descriptors and messages of a batch."""
_zeros = mmap.mmap(-1, MAX_PAYLOAD)
"""Sent in place of what a grant held when the grant is revoked in the middle of an answer. Never written."""
_ZEROS_ADDRESS = address_of(memoryview(_zeros))


class Batch:
    """Begin it, add frames part by part (header, runs, then a message or payload), finish it, and send what the kernel
    takes until nothing of it is pending."""

    def __init__(self, seal: Seal, records: RecordWriter | None = None) -> None:
        self.frames = 0
        """Headers ever added, of every kind: the number that the last one's checks are made with."""
        self._seal = seal
        self._check_bytes = seal.check_bytes
        self.head_bytes = HEADER_BYTES + 2 * seal.check_bytes
        self._records = records
        self._vector = Vector()
        self._arena = bytearray(ARENA_BYTES)
        self._arena_address = address_of(self._arena)
        self._used = self._added = 0
        """Bytes of the arena that are taken, and those of them that the vector has."""

    # --- building -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the frames of the batch before, all of which have left."""
        self._vector.clear()
        self._used = self._added = 0

    def has_room(self, heads: int, nbytes: int = 0) -> bool:
        """Whether there is room for so many headers and a message of ``nbytes``."""
        return self._used + heads * self.head_bytes + nbytes <= ARENA_BYTES and self._vector.room > 1

    def has_room_for_runs(self, most: int = MAX_RUNS) -> bool:
        """Whether there is room for a header with ``most`` descriptors."""
        return self.has_room(1, most * RUN_BYTES + self._check_bytes)

    def most_runs(self, wanted: int) -> int:
        """How many descriptors a frame can have whose payload is added as well; -1 where that is less than
        ``wanted``, and less than a frame may have."""
        most = min(MAX_RUNS, self._vector.room - 2)
        return most if most >= min(MAX_RUNS, wanted) and self.has_room_for_runs(most) else -1

    def add_header(self, header: Header, body: Iterator[Buffer] | Sequence[Buffer] = ()) -> int:
        """Append a header; ``body`` is the payload, if the frame has one. Returns where the header lies."""
        self.frames += 1
        at = self._used
        self._pack_header(at, self.frames, header, body)
        self._used += self.head_bytes
        return at

    def add_message(self, message: bytes) -> None:
        """Append a message that the header's frame carries."""
        self._arena[self._used : self._used + len(message)] = message
        self._used += len(message)

    def add_runs(self, rows: Descriptors) -> None:
        """Append the header's descriptors, and their check."""
        start = self._used
        self._used = pack_runs(self._arena, start, rows)
        if self._check_bytes:
            check = self._seal.runs(self.frames, bytes(self._arena[start : self._used]))
            self._arena[self._used : self._used + self._check_bytes] = check
            self._used += self._check_bytes

    def add_payload(self, base: int, offsets: Column, lengths: Column) -> tuple[int, int]:
        """Append memory at ``base``; it is read when it is sent. Returns the first of its pieces and the one behind."""
        self._flush()
        first = self._vector.count
        self._vector.add_runs(base, offsets, lengths)
        return first, self._vector.count

    def pieces(self, memory: memoryview, offsets: Column, lengths: Column) -> Iterator[Buffer] | Sequence[Buffer]:
        """A payload as :meth:`add_header` wants it."""
        return pieces(memory, offsets, lengths) if self._check_bytes else ()

    def finish(self) -> int:
        """Bytes of the batch."""
        self._flush()
        return self._vector.nbytes

    def _flush(self) -> None:
        if self._used > self._added:
            self._vector.add(self._arena_address + self._added, self._used - self._added)
            self._added = self._used

    def _pack_header(self, at: int, frame: int, header: Header, body: Iterator[Buffer] | Sequence[Buffer]) -> None:
        pack_header(self._arena, at, header)
        if self._check_bytes:
            middle = at + HEADER_BYTES + self._check_bytes
            check = self._seal.body(frame, body) if body else bytes(self._check_bytes)
            self._arena[at + HEADER_BYTES : middle] = check
            self._arena[middle : at + self.head_bytes] = self._seal.head(frame, bytes(self._arena[at:middle]))

    # --- sending --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something of the batch has not been handed over."""
        return self._vector.remaining > 0 or (self._records is not None and self._records.pending)

    def send(self, fd: int) -> int:
        """Hand over what the kernel takes; the number of bytes, -1 for none. Raises OSError."""
        n = self._vector.send(fd) if self._records is None else self._records.send(fd, self._vector)
        if not self.pending:
            self._vector.clear()
        return n

    def withdraw(self, first: int, stop: int, at: int, frame: int, header: Header) -> None:
        """Zeros instead of pieces ``first`` to ``stop``, and ``header`` instead of the one at ``at``, which was number
        ``frame`` and is the last of the batch. Nothing, where that one has begun to leave."""
        if self._vector.remaining > self.head_bytes:
            self._vector.redirect(first, stop, _ZEROS_ADDRESS)
            # The check that is replaced has not been sent, so the frame's nonce is used once all the same.
            self._pack_header(at, frame, header, ())

    def drop(self) -> None:
        """Send nothing more of it."""
        self._vector.clear()
