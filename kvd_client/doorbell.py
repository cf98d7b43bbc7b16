"""The process's end of the shared ring: appending events, reading the slots.

One memfd holds both, made and sealed by the daemon (layout in :mod:`kvd_client.ring`). An event costs a lock,
one record and one store; a system call only where the daemon sleeps and wants to be woken.
"""

from __future__ import annotations

import mmap
import os
import threading

from kvd_client.errors import ProtocolError
from kvd_client.mapping import check_memfd
from kvd_client.protocol import PROTOCOL_VERSION
from kvd_client.ring import (
    EVENT_IDLE,
    RING_BYTES,
    RING_CLOSED_OFFSET,
    RING_EVENT,
    RING_EVENTS,
    RING_EVENTS_OFFSET,
    RING_HEAD_OFFSET,
    RING_HEADER,
    RING_MAGIC,
    RING_SLOTS,
    RING_SLOTS_OFFSET,
    RING_TAIL_OFFSET,
    RING_WAKE_OFFSET,
    SLOT_BYTES,
    WAKE_IDLE,
    WAKE_LAYER_READY,
)

_HEAD, _TAIL = RING_HEAD_OFFSET // 8, RING_TAIL_OFFSET // 8
_WAKE, _CLOSED = RING_WAKE_OFFSET // 4, RING_CLOSED_OFFSET // 4
_SLOT_U32, _SLOT_U64 = SLOT_BYTES // 4, SLOT_BYTES // 8
_SLOTS_U32, _SLOTS_U64 = RING_SLOTS_OFFSET // 4, RING_SLOTS_OFFSET // 8
_MASK = RING_EVENTS - 1


class Doorbell:
    """Writer of one connection's ring; any thread may use it. Owns no descriptor but the mapping's.

    ``wake_fd`` is the eventfd that wakes the daemon. Raises :class:`ProtocolError` where ``ring_fd`` is not a sealed
    ring of this protocol version.
    """

    def __init__(self, ring_fd: int, wake_fd: int) -> None:
        check_memfd(ring_fd, 0, RING_BYTES)
        # The views below keep the mapping; it goes back with the doorbell.
        self._bytes = memoryview(mmap.mmap(ring_fd, RING_BYTES))
        header = RING_HEADER.unpack_from(self._bytes, 0)
        if header != (RING_MAGIC, PROTOCOL_VERSION, RING_EVENTS, RING_SLOTS):
            raise ProtocolError("the daemon sent a ring of another form; client and daemon must be of one version")
        # Assigning to a cast view is one aligned store; struct would write "<Q" byte by byte.
        self._u32, self._u64 = self._bytes.cast("I"), self._bytes.cast("Q")
        self._wake_fd = wake_fd
        self._head: int = self._u64[_HEAD]
        self._tail: int = self._u64[_TAIL]
        self._lock = threading.Lock()
        self._barrier = threading.Lock()
        self._barrier.acquire()

    def ring(self, kind: int, layer: int, transfer: int, row: int, start: int, stop: int) -> bool:
        """Append an event, and wake the daemon if it asked for that. False (nothing appended) if the ring is full."""
        with self._lock:
            head = self._head
            if head - self._tail >= RING_EVENTS:
                self._tail = self._u64[_TAIL]
                if head - self._tail >= RING_EVENTS:
                    return False
            RING_EVENT.pack_into(
                self._bytes,
                RING_EVENTS_OFFSET + (head & _MASK) * RING_EVENT.size,
                kind,
                layer,
                transfer,
                row,
                start,
                stop,
            )
            self._fence()  # the daemon that sees the new head must see the record, and the KV bytes before it
            self._head = head + 1
            self._u64[_HEAD] = head + 1
            # The daemon stores its wake flag and then loads the head; here the head is stored and then the flag is
            # loaded. If either machine let the load overtake the store, both could miss each other.
            self._fence()
            wake = self._u32[_WAKE]
        if wake & (WAKE_IDLE if kind == EVENT_IDLE else WAKE_LAYER_READY):
            self.wake()
        return True

    def _fence(self) -> None:
        # Releasing and then acquiring a lock are two atomic operations that no load or store crosses both of: a full
        # barrier on x86-64 (locked instructions) and on Armv8 (a store-release is ordered before a load-acquire).
        # Nobody else touches this lock, so it never waits; and a signal handler that raises can't leave it open.
        try:
            self._barrier.release()
        finally:
            self._barrier.acquire()

    def wake(self) -> None:
        """Wake the daemon, whatever it asked for."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except BlockingIOError:
            return  # the counter is full, so the daemon has been woken already

    def has_room(self) -> bool:
        """Whether :meth:`ring` would find room now."""
        with self._lock:
            self._tail = self._u64[_TAIL]
            return self._head - self._tail < RING_EVENTS

    @property
    def wants_idle(self) -> bool:
        """Whether the daemon has work queued for idle windows."""
        return bool(self._u32[_WAKE] & WAKE_IDLE)

    @property
    def closed(self) -> bool:
        """Whether the daemon has ended this connection of its own accord and taken the leases back."""
        return bool(self._u32[_CLOSED])

    def state(self, slot: int) -> int:
        """The slot's state: a ``SLOT_`` constant."""
        return self._u32[_SLOTS_U32 + slot * _SLOT_U32]

    def generation(self, slot: int) -> int:
        return self._u32[_SLOTS_U32 + slot * _SLOT_U32 + 1]

    def progress(self, slot: int) -> int:
        """Grows whenever masks of the slot's transfer have changed."""
        return self._u64[_SLOTS_U64 + slot * _SLOT_U64 + 1]

    def nbytes(self, slot: int) -> int:
        """Bytes of the slot's transfer that have arrived (sink) or been delivered (source)."""
        return self._u64[_SLOTS_U64 + slot * _SLOT_U64 + 2]
