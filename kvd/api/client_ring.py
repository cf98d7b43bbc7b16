"""The ring of one process as its session uses it: events in passes of bounded length, slots, and who wakes whom."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kvd.api.doorbell import Event, Ring
from kvd.errors import Busy, ProtocolError
from kvd_client.ring import RING_EVENTS, RING_SLOTS, SLOT_FREE, WAKE_LAYER_READY

RETRY_S = 0.1
"""When to come back to a limit that the process itself keeps."""
EVENTS_A_PASS = 512
"""Events of one ring taken in one turn of the loop; others get theirs in between."""


class ClientRing:
    """Nothing before :meth:`open` and after :meth:`close`: all other methods do nothing then.

    ``take`` gets the events, oldest first; it may raise :class:`ProtocolError`, and it may close this. Nothing is
    taken while ``held`` says so. ``violated`` is told what is wrong with the ring, and must close this.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        take: Callable[[Sequence[Event]], None],
        held: Callable[[], bool],
        violated: Callable[[ProtocolError], None],
    ) -> None:
        self._loop = loop
        self._take, self._held, self._violated = take, held, violated
        self._ring: Ring | None = None
        self._free_slots: deque[int] = deque()
        self._wake_flags = WAKE_LAYER_READY
        self._draining = False
        """Another pass follows in the next turn of the loop."""

    # --- its life -------------------------------------------------------------------------------------------------

    def open(self) -> list[int]:
        """Make the ring; returns the descriptors that the process needs, the ring's own. Raises ``OSError`` where the
        system has no descriptor or memory left."""
        ring = self._ring = Ring()
        self._free_slots.extend(range(RING_SLOTS))
        ring.set_wake(self._wake_flags)
        self._loop.add_reader(ring.wake_daemon_fd, self._rung)
        return ring.descriptors

    def passed(self) -> None:
        """The process has its descriptors."""
        if self._ring is not None:
            self._ring.drop_memfd()

    def close(self) -> None:
        """Tell the process that its leases are being taken back, and unmap. Idempotent."""
        if self._ring is not None:
            ring, self._ring = self._ring, None
            ring.mark_closed()
            self._loop.remove_reader(ring.wake_daemon_fd)
            ring.close()

    # --- slots ----------------------------------------------------------------------------------------------------

    def take_slot(self) -> int:
        """An unused one; raises :class:`Busy` when all are in use."""
        if not self._free_slots:
            raise Busy(
                f"this process has {RING_SLOTS} transfers open, the most that one connection can have; release some",
                slots=RING_SLOTS,
                retry_after_s=RETRY_S,
            )
        return self._free_slots.popleft()

    def free_slot(self, index: int) -> None:
        """Give one back. The longest unused one is taken next, so that a late look finds it free."""
        if self._ring is not None:
            self._ring.set_slot(index, SLOT_FREE, 0, 0, 0)
            self._free_slots.append(index)

    def set_slot(self, index: int, state: int, generation: int, progress: int, nbytes: int) -> None:
        """As :meth:`kvd.api.doorbell.Ring.set_slot`."""
        if self._ring is not None:
            self._ring.set_slot(index, state, generation, progress, nbytes)

    # --- waking ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make whoever waits in the process look at its slots and masks."""
        if self._ring is not None:
            self._ring.wake_process()

    def set_wake(self, flags: int) -> None:
        """For which events the process is to wake the daemon."""
        if flags != self._wake_flags and self._ring is not None:
            self._wake_flags = flags
            self.arm()

    def arm(self) -> None:
        """Ask to be woken, and see to the events that came before the process could know."""
        # Flags first, then the look at the head: an event between the two is seen by one side or the other.
        if self._ring is None or self._draining or self._held():
            return
        self._ring.set_wake(self._wake_flags)
        try:
            pending = self._ring.pending()
        except ProtocolError as error:  # not for whoever happens to ask for events
            self._violated(error)
            return
        if pending:
            self._draining = True
            self._loop.call_soon(self._drain_more)

    # --- events ---------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Take all that is in the ring now. Raises :class:`ProtocolError`."""
        if self._ring is not None and self._ring.pending():
            self._drain(RING_EVENTS)

    def sweep(self) -> None:
        """Take what is in the ring, a bounded number of events in this turn of the loop."""
        if self._draining or self._ring is None or self._held():
            return
        try:
            self._drain(EVENTS_A_PASS)
        except ProtocolError as error:
            self._violated(error)

    def _rung(self) -> None:
        if self._ring is not None:
            self._ring.clear_daemon_wake()
            self.sweep()

    def _drain_more(self) -> None:
        self._draining = False
        self.sweep()

    def _drain(self, most: int) -> None:
        ring = self._ring
        if ring is None:
            return
        pending = ring.pending()
        if pending:
            if self._wake_flags & WAKE_LAYER_READY:
                ring.set_wake(self._wake_flags & ~WAKE_LAYER_READY)  # awake already; IDLE says what is wanted
            events = ring.take(min(pending, most))
            # Whoever found the ring full did so at a moment when at least half of it shows up in one of these passes.
            if pending >= RING_EVENTS // 2:
                ring.wake_process()
            self._take(events)
        self.arm()
