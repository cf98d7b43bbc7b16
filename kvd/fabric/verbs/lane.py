"""One lane of an endpoint: its queue pair, the work that waits for it, and what is outstanding on it.

Messages go into receive buffers that the peer keeps posted. A frame that needs a credit is posted only while the peer
has one of its ``slots`` buffers for it; as many again are for the frames that need none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from kvd.errors import ProtocolError
from kvd.fabric.base import EndpointCounters
from kvd.fabric.regions import address_of
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.device import INLINE_BYTES, SEND_DEPTH, Device
from kvd.fabric.verbs.operation import VerbsOperation
from kvd.fabric.verbs.pace import Pace
from kvd.fabric.verbs.window import MOST, Window
from kvd.fabric.verbs.wire import HEADER, WITHOUT_CREDIT, Header, Kind
from kvd.types import Lane

SLOTS = 64
"""Frames with a credit that may be on their way."""
SLOT_BYTES = 4096 + HEADER.size
CHUNK_BYTES = 1 << 20
"""Longest work request, so that a cancelled operation ends soon."""

_Posted: TypeAlias = "tuple[int, VerbsOperation | Kind, ib.Item, int, int]"
"""Sequence, what it was posted for, the request, the send buffer (-1: data), and the frame's number (0: no credit)."""


class VerbsLane:
    """See the module. ``fill_header`` completes a frame's header with the endpoint's totals."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: Lane,
        device: Device,
        cq: Any,
        chain: ib.Chain,
        counters: EndpointCounters,
        fill_header: Callable[[Kind, int, VerbsLane], Header],
        pace: Pace | None,
    ) -> None:
        self.lane = lane
        self._pace = pace
        self.queue: deque[VerbsOperation] = deque()
        self.controls: deque[tuple[Kind, bytes]] = deque()
        """Frames that go before the queue."""
        self.consumed = 0
        """Frames with a credit of the peer that were taken out of their buffers."""
        self.state_due = False
        self.state_posted = False
        self.bye_posted = False
        self.bye: Kind | None = None
        """Once set, nothing else is posted."""
        self.bye_done = False
        self.undelivered: deque[VerbsOperation] = deque()
        self._counters = counters
        self._fill_header = fill_header
        self._chain = chain
        self._chunk = min(CHUNK_BYTES, device.max_message)
        self._span = device.max_region
        self._sent_frames = 0
        self._peer_consumed = 0
        self._peer_slots = 0
        self._peer_body = 0
        self._window = Window()
        self._now = loop.time
        self._sequence = 0
        self._completed = 0
        """The sequence of the last request that the device gave back, well or not."""
        self._posted: deque[_Posted] = deque()
        self._again: deque[_Posted] = deque()
        """What is to be posted again, since the queue pair failed under it."""
        self.up = False
        """Whether requests may be posted."""
        self.received = 0
        """Frames with a credit of the peer that have come."""
        self._receiving = False
        self._receives_out = 0
        self._broken = False
        self.receive_slots = 2 * SLOTS
        self.qp = device.queue_pair(cq, self.receive_slots)
        self.memory = memoryview(bytearray((self.receive_slots + SLOTS) * SLOT_BYTES))
        self._base = address_of(self.memory)
        self._free = list(range(self.receive_slots, self.receive_slots + SLOTS))
        self._mr = device.register(self._base, self.memory.nbytes)
        self._receives: list[Any] = []
        for slot in range(self.receive_slots):
            entry = ib.SGE(self._base + slot * SLOT_BYTES, SLOT_BYTES, self._mr.lkey)
            request = ib.RecvWR(wr_id=slot << 2 | lane << 1 | 1, num_sge=1, sg=[entry])
            entry.close()  # copied by the request
            self._receives.append(request)
        self.post_receives()

    def connected(self, slots: int, slot_bytes: int) -> None:
        """The peer keeps buffers for ``slots`` frames with a credit, of ``slot_bytes`` each."""
        self._peer_slots, self._peer_body = slots, min(slot_bytes, SLOT_BYTES) - HEADER.size
        self.up = True

    def receive(self, slot: int, nbytes: int) -> memoryview:
        """The frame in a receive buffer; copy it before :meth:`recycle`."""
        self._receives_out -= 1
        return self.memory[slot * SLOT_BYTES : slot * SLOT_BYTES + nbytes]

    def recycle(self, slot: int) -> None:
        if self._receiving:
            self.qp.post_recv(self._receives[slot])
            self._receives_out += 1

    def post_receives(self) -> None:
        """Give all receive buffers to the queue pair, which must be in INIT."""
        for request in self._receives:
            self.qp.post_recv(request)
        self._receives_out = len(self._receives)
        self._receiving = True

    def acknowledged(self, consumed: int) -> None:
        """The peer has taken ``consumed`` frames in all."""
        self._peer_consumed = max(self._peer_consumed, consumed)
        while self.undelivered and self.undelivered[0].delivery <= self._peer_consumed:
            operation = self.undelivered.popleft()
            operation.delivery = 0
            operation.finish()

    def live(self) -> list[VerbsOperation]:
        """All operations that have not ended, in no particular order, some perhaps twice."""
        posted = [entry[1] for entry in (*self._posted, *self._again) if isinstance(entry[1], VerbsOperation)]
        return [operation for operation in (*posted, *self.queue, *self.undelivered) if not operation.settled]

    def retire(self, sequence: int) -> None:
        """The requests up to ``sequence`` are done."""
        self._completed = sequence
        while self._posted and self._posted[0][0] <= sequence:
            self._done(self._posted.popleft())

    def _done(self, entry: _Posted) -> None:
        _, what, item, slot, _ = entry
        if slot >= 0:
            self._free.append(slot)
        if what is Kind.STATE:
            self.state_posted = False
        elif what is Kind.BYE:
            self.bye_done = True
        elif isinstance(what, VerbsOperation):
            what.outstanding -= 1
            if slot < 0:
                self._window.completed(item[3], self._now())
                self._counters.bytes_in_flight[self.lane] -= item[3]
                if what.kind == "read":
                    self._counters.bytes_received += item[3]
                else:
                    self._counters.bytes_sent += item[3]
            else:
                what.arrived = True
            what.finish()

    # --- a queue pair that failed (kvd.fabric.verbs.recovery) -----------------------------------------------------

    def send_failed(self, sequence: int) -> tuple[VerbsOperation | Kind, bool] | None:
        """The device gave a request back unexecuted. For the first one: what it was for, and whether it was data."""
        first = not self._broken
        if first:
            self._broken = True
            self.retire(sequence - 1)
        self._completed = sequence
        if not first or not self._posted:
            return None
        _, what, _, slot, _ = self._posted[0]
        return what, slot < 0

    def receive_failed(self) -> None:
        """The device gave a receive buffer back unused."""
        self._receives_out -= 1

    def stop(self) -> None:
        """Post nothing more; the queue pair fails."""
        self.up = self._receiving = False

    def forget_receives(self) -> None:
        """The queue pair was reset, and has given nothing back."""
        self._receiving = False
        self._receives_out = 0

    @property
    def drained(self) -> bool:
        """Whether the device has given back all that was posted, so that nothing of it can still happen."""
        return self._completed == self._sequence and self._receives_out == 0

    def check(self, received: int) -> None:
        """Raises :class:`ProtocolError` for a number of frames that the peer can't have got."""
        if not self._peer_consumed <= received <= self._sent_frames:
            raise ProtocolError(
                f"the peer says that it got {received} messages on lane {self.lane.name.lower()}, of which it took "
                f"{self._peer_consumed} and {self._sent_frames} were sent; run the same release of kvd at both ends"
            )

    def restore(self, received: int) -> None:
        """Sort what was outstanding when the queue pair failed, the peer having got ``received`` frames in all.

        A lane works in order: what was posted before a frame that came is done, but for reads, whose answers come
        back on their own. What was not is posted again, unless its operation has failed.
        """
        entries = list(self._posted)
        self._posted.clear()
        entries += self._again
        self._again.clear()
        came = [at for at, entry in enumerate(entries) if 0 < entry[4] <= received]
        before = came[-1] + 1 if came else 0
        for at, entry in enumerate(entries):
            _, what, item, slot, _ = entry
            if at < before and item[0] != ib.READ:
                self._done(entry)
            elif what is Kind.STATE:
                self._free.append(slot)
                self.state_posted = False
            elif isinstance(what, VerbsOperation) and what.error is not None and not what.arrived:
                self._drop(what, item, slot)
            else:
                self._again.append(entry)
        self._sent_frames = received
        self._broken = False
        self.state_due = True  # so that something goes out, whose completion shows that the lane works

    def _drop(self, operation: VerbsOperation, item: ib.Item, slot: int) -> None:
        operation.outstanding -= 1
        if slot < 0:
            self._window.dropped(item[3])
            self._counters.bytes_in_flight[self.lane] -= item[3]
        else:
            self._free.append(slot)
            if operation.message is None and operation.begun:
                self._counters.messages_sent -= 1
            operation.begun = False
            operation.delivery = 0
            if operation in self.undelivered:
                self.undelivered.remove(operation)
        operation.finish()

    def start(self) -> None:
        """The queue pair works again."""
        self.up = True

    # --- posting --------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Post what the queue pair, the window and the credits allow."""
        while self.up:
            room = min(len(self._chain), SEND_DEPTH - len(self._posted))
            items = self._next_items(room) if room > 0 else []
            if not items:
                return
            first = self._sequence - len(items) + 1
            self._chain.post(self.qp, items, first << 2 | self.lane << 1, 4)

    def _next_items(self, room: int) -> list[ib.Item]:
        items: list[ib.Item] = []
        while self._again and len(items) < room:
            items.append(self._repeat(*self._again.popleft()))
        if self.bye is not None:
            if self._free and len(items) < room:
                items.append(self._frame(self.bye, b"", self.bye))
                self.bye = None
                self.controls.clear()
            return items
        if self.bye_posted:
            return items
        while len(items) < room and self._free:
            if self.controls and self._credit:
                kind, body = self.controls.popleft()
                items.append(self._frame(kind, body, kind))
            elif self.state_due and not self.state_posted:
                self.state_posted = True
                items.append(self._frame(Kind.STATE, b"", Kind.STATE))
            else:
                break
        while self.queue and len(items) < room:
            operation = self.queue[0]
            if not operation.dropped and not operation.posted:
                if operation.parts:
                    budget = min(self._window.room, self._allowance())
                    if budget <= 0:
                        break
                    items += self._data(operation, room - len(items), budget)
                    continue
                if operation.message is not None:
                    if not self._free or not self._credit:
                        break
                    items.append(self._piece(operation))
                    continue
                operation.posted = True
            self.queue.popleft()
            operation.finish()
        return items

    def _allowance(self) -> int:
        """Bytes that the rate limit permits now; if none, the lane is pumped again when it does."""
        if self._pace is None:
            return MOST
        return self._pace.allowance(self.pump)

    def _data(self, operation: VerbsOperation, room: int, budget: int) -> list[ib.Item]:
        items, nbytes = operation.take(room, budget, self._chunk, self._span)
        for item in items:
            self._sequence += 1
            self._posted.append((self._sequence, operation, item, -1, 0))
        operation.outstanding += len(items)
        self._window.posted(nbytes, self._now())
        self._counters.bytes_in_flight[self.lane] += nbytes
        if self._pace is not None:
            self._pace.sent(nbytes)
        return items

    def _piece(self, operation: VerbsOperation) -> ib.Item:
        """The next piece of an operation's message."""
        assert operation.message is not None
        body = operation.message[operation.sent : operation.sent + self._peer_body]
        operation.sent += len(body)
        operation.begun = True
        operation.outstanding += 1
        last = operation.sent == len(operation.message)
        item = self._frame(Kind.MESSAGE if last else Kind.PART, body, operation)
        if last:
            operation.message = None
            self._counters.messages_sent += 1
            if operation.kind == "message":
                operation.delivery = self._sent_frames
                self.undelivered.append(operation)
        return item

    def _repeat(self, _: int, what: VerbsOperation | Kind, item: ib.Item, slot: int, ordinal: int) -> ib.Item:
        """Post as before, with new numbers."""
        if ordinal:
            self._sent_frames += 1
            ordinal = self._sent_frames
            if isinstance(what, VerbsOperation) and what.delivery:
                what.delivery = ordinal
        self._sequence += 1
        self._posted.append((self._sequence, what, item, slot, ordinal))
        return item

    def _frame(self, kind: Kind, body: bytes, what: VerbsOperation | Kind) -> ib.Item:
        slot = self._free.pop()
        ordinal = 0
        if kind not in WITHOUT_CREDIT:
            self._sent_frames += 1
            ordinal = self._sent_frames
        at, size = slot * SLOT_BYTES, HEADER.size + len(body)
        self._fill_header(kind, len(body), self).pack_into(self.memory, at)
        self.memory[at + HEADER.size : at + size] = body
        self.state_due = False
        self.bye_posted = self.bye_posted or kind is Kind.BYE
        self._sequence += 1
        item = (ib.SEND, ib.INLINE if size <= INLINE_BYTES else 0, self._base + at, size, self._mr.lkey, 0, 0)
        self._posted.append((self._sequence, what, item, slot, ordinal))
        return item

    @property
    def _credit(self) -> bool:
        return self._sent_frames - self._peer_consumed < self._peer_slots

    def destroy(self) -> list[VerbsOperation]:
        """Destroy the queue pair, after which the device touches no memory; the operations that were not done."""
        left = self.live()
        self.qp.close()
        for request in self._receives:
            request.close()
        self._receives.clear()
        self._mr.close()
        self.memory.release()  # at once: the rest of an endpoint waits for the collector, and this is most of it
        self._posted.clear()
        self._again.clear()
        self.queue.clear()
        self.undelivered.clear()
        self._counters.bytes_in_flight[self.lane] = 0
        return left
