"""The daemon's end of the shared ring of one connection: consuming events, publishing slots.

The process can write every byte of it at any time. So the daemon keeps its own count of what it has consumed, copies
records before it looks at them, and bounds what it does in one go by what the ring can hold.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from typing import TypeAlias

from kvd.errors import ProtocolError
from kvd_client.protocol import PROTOCOL_VERSION
from kvd_client.ring import (
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
)

Event: TypeAlias = tuple[int, int, int, int, int, int]
"""kind, layer, transfer, row, start, stop."""

_HEAD, _TAIL = RING_HEAD_OFFSET // 8, RING_TAIL_OFFSET // 8
_WAKE, _CLOSED = RING_WAKE_OFFSET // 4, RING_CLOSED_OFFSET // 4
_SLOT_U32, _SLOT_U64 = SLOT_BYTES // 4, SLOT_BYTES // 8
_SLOTS_U32, _SLOTS_U64 = RING_SLOTS_OFFSET // 4, RING_SLOTS_OFFSET // 8
_COUNT = 1 << 64


class Ring:
    """A sealed memfd with the ring and the slots, and the two eventfds that go with it. Owns all three.

    Raises ``OSError`` where the system has no descriptor or memory left.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        """The memfd, the eventfd that wakes the daemon, the eventfd that wakes the process: what Welcome passes."""
        try:
            memfd = os.memfd_create("kvd-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.descriptors.append(memfd)
            os.ftruncate(memfd, RING_BYTES)
            # Sealed first: from here on no holder of the memfd can make the daemon fault on it.
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(memfd, RING_BYTES)
            for _ in range(2):
                self.descriptors.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError:
            self._close_descriptors()
            raise
        _, self.wake_daemon_fd, self._wake_process_fd = self.descriptors
        self._bytes = memoryview(self._map)
        # Assigning to a cast view is one aligned store; struct would write "<Q" byte by byte.
        self._u32, self._u64 = self._bytes.cast("I"), self._bytes.cast("Q")
        RING_HEADER.pack_into(self._bytes, 0, RING_MAGIC, PROTOCOL_VERSION, RING_EVENTS, RING_SLOTS)
        self._tail = 0
        self._barrier = threading.Lock()
        self._barrier.acquire()

    # --- events ---------------------------------------------------------------------------------------------------

    def pending(self) -> int:
        """Events that wait; raises :class:`ProtocolError` if the head is where no honest process puts it."""
        count: int = (self._u64[_HEAD] - self._tail) % _COUNT
        if count > RING_EVENTS:
            raise ProtocolError(
                f"the ring's head is {count} events ahead of its tail; it holds {RING_EVENTS}", pending=count
            )
        return count

    def take(self, count: int) -> list[Event]:
        """Copy the next ``count`` events, at most :meth:`pending`, out of the ring and give their room back."""
        first = self._tail % RING_EVENTS
        events = self._records(first, min(count, RING_EVENTS - first))
        if len(events) < count:
            events += self._records(0, count - len(events))
        self._tail = (self._tail + count) % _COUNT
        self._u64[_TAIL] = self._tail
        return events

    def _records(self, first: int, count: int) -> list[Event]:
        start = RING_EVENTS_OFFSET + first * RING_EVENT.size
        return list(RING_EVENT.iter_unpack(self._bytes[start : start + count * RING_EVENT.size]))

    def set_wake(self, flags: int) -> None:
        """Publish for which events the daemon wants to be woken, a sum of the ``WAKE_`` bits.

        On return any event that the process appended without seeing these flags is visible to :meth:`pending`: the
        process stores the head and then loads the flags, here the flags are stored and the head is loaded next, and
        both put a full barrier between the two (releasing and acquiring a lock; see ``kvd_client.doorbell``). So
        whoever sets flags before it sleeps looks at :meth:`pending` once more. A process that has no such barrier
        delays itself until the server's sweep, nobody else.
        """
        self._u32[_WAKE] = flags
        self._barrier.release()
        self._barrier.acquire()

    def clear_daemon_wake(self) -> None:
        """Take back the wake-ups so far, so that the eventfd is readable for new ones only."""
        try:
            os.eventfd_read(self.wake_daemon_fd)
        except BlockingIOError:
            return

    # --- slots ----------------------------------------------------------------------------------------------------

    def set_slot(self, index: int, state: int, generation: int, progress: int, nbytes: int) -> None:
        """Publish a transfer's state; the state last, so that who sees it sees the rest."""
        u32, u64 = _SLOTS_U32 + index * _SLOT_U32, _SLOTS_U64 + index * _SLOT_U64
        self._u32[u32 + 1] = generation
        self._u64[u64 + 2] = nbytes
        self._u64[u64 + 1] = progress
        self._u32[u32] = state

    def wake_process(self) -> None:
        """Make whoever waits in the process look at the slots."""
        try:
            os.eventfd_write(self._wake_process_fd, 1)
        except BlockingIOError:
            return  # the counter is full, so the process has been woken already

    # --- the end --------------------------------------------------------------------------------------------------

    def mark_closed(self) -> None:
        """Tell the process that the leases are being taken back; before they are."""
        self._u32[_CLOSED] = 1
        self._barrier.release()
        self._barrier.acquire()

    def drop_memfd(self) -> None:
        """Close the memfd once it has been sent; the mapping stays."""
        os.close(self.descriptors.pop(0))

    def close(self) -> None:
        """Unmap and close everything. Not to be called twice."""
        for view in (self._u32, self._u64, self._bytes):
            view.release()
        self._map.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())
