"""A daemon in this process for the sink's half of the on-demand path: real memory and messages, no socket.

:class:`FakeDaemon` holds the source's bytes of one transfer and the sink's lease. It moves a token only when a test
says so, and answers a fetch only when a test, or a wait that would block otherwise, says so.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvd_client.decode import DecodeTransfer
from kvd_client.errors import KvdError, LeaseExpired
from kvd_client.parts import Part, raise_if_failed
from kvd_client.protocol import Ended, Failure, Fetch, Ok, Opened, Release, ReportSelections
from kvd_client.spec import MASK_LOCAL, MASK_REMOTE, KVSpec, MetadataSpec, part_layout

GARBAGE = 0xEE


class Memory:
    """Stands for a mapping."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, GARBAGE, np.uint8)
        self.retired = False
        self.__array_interface__ = self.bytes.__array_interface__

    def retire(self) -> None:
        self.retired = True
        self.bytes[:] = 0


class Doorbell:
    wants_idle = True
    closed = False

    def __init__(self) -> None:
        self.seen = 0

    def progress(self, slot: int) -> int:
        self.seen += 1
        return self.seen

    def state(self, slot: int) -> int:
        return 1

    def ring(self, kind: int, layer: int, transfer: int, row: int, start: int, stop: int) -> bool:
        return True


class FakeConnection:
    """What :class:`kvd_client.connection.Connection` does for transfers. A wait that finds nothing ready makes
    ``on_block`` happen, again and again; None there means that time passes until the deadline."""

    def __init__(self) -> None:
        self.doorbell = Doorbell()
        self.lost = False
        self.daemons: dict[int, FakeDaemon] = {}
        self.sent: list[Any] = []
        self.replies: dict[int, Any] = {}
        self.events: list[tuple[int, int]] = []
        self.numbers = itertools.count(1)
        self.locked = False
        """As with the real one, whose lock is held while a wait's condition is looked at."""
        self.on_block: Callable[[], Any] | None = self.answer_next
        self.unanswered: deque[Fetch] = deque()

    def check(self) -> None:
        pass

    def check_part(self, part: Part) -> None:
        if part.released or part.mapping.retired:
            raise LeaseExpired("released", transfer=part.transfer)
        raise_if_failed(part)

    def submit(self, message: Any) -> int:
        message.id = next(self.numbers)
        self.sent.append(message)
        self.replies[message.id] = None
        if isinstance(message, Fetch):
            self.unanswered.append(message)
        return int(message.id)

    def answer(self, number: int) -> Any:
        return self.replies.get(number)

    def forget(self, number: int) -> None:
        assert not self.locked
        self.replies.pop(number, None)

    def request(self, message: Any) -> Any:
        self.sent.append(message)
        return Ok(), []

    def release(self, part: Part) -> None:
        self.sent.append(Release(transfer=part.transfer))
        part.released = True
        part.mapping.retire()

    def ring(self, part: Part, kind: int, layer: int, row: int, start: int, stop: int) -> None:
        self.events.append((kind, layer))

    def nudge(self) -> None:
        pass

    def wait(self, ready: Callable[[], Any], deadline: float | None) -> Any:
        while True:
            self.locked = True
            try:
                got = ready()
            finally:
                self.locked = False
            if got is not None:
                return got
            if self.on_block is None or self.on_block() is False:
                assert deadline is not None, "it would wait for ever"
                return None

    def answer_next(self) -> bool:
        """Serve the oldest fetch; False where there is none."""
        if not self.unanswered:
            return False
        self.serve(self.unanswered.popleft())
        return True

    def serve(self, fetch: Fetch, error: KvdError | None = None) -> None:
        if fetch.id not in self.replies:
            return
        if error is not None:
            self.replies[fetch.id] = Failure(id=fetch.id, code=error.code, message=error.message, fields=error.fields)
            return
        self.daemons[fetch.transfer].land(fetch)
        self.replies[fetch.id] = Ok(id=fetch.id)

    @property
    def fetches(self) -> list[Fetch]:
        return [message for message in self.sent if isinstance(message, Fetch)]

    @property
    def reports(self) -> list[ReportSelections]:
        return [message for message in self.sent if isinstance(message, ReportSelections)]


class FakeDaemon:
    """One transfer: the source's bytes, the sink's lease, and :attr:`transfer`, the real thing under test."""

    def __init__(
        self,
        lengths: list[int],
        *,
        connection: FakeConnection | None = None,
        layers: int = 3,
        heads: int = 2,
        entry_bytes: int = 32,
        landing_entries: int = 8,
        slots: int = 2,
        capacity: int | None = None,
        metadata: tuple[MetadataSpec, ...] = (),
        count_blocks: int = 0,
        mask: str = "token",
    ) -> None:
        self.connection = connection or FakeConnection()
        number = len(self.connection.daemons) + 1
        self.connection.daemons[number] = self
        self.layout = p = part_layout(
            KVSpec(layers=layers, kv_heads=heads, entry_bytes=entry_bytes, dtype="uint8", model="test"),
            heads=heads,
            rows=len(lengths),
            capacity=capacity or max(lengths),
            metadata=metadata,
            landing_entries=min(landing_entries, capacity or max(lengths)),
            landing_slots=slots,
            mask=mask,
        )
        self.lengths, self.heads = lengths, heads
        shape = (layers, len(lengths), p.capacity, heads, entry_bytes)
        self.source = np.random.default_rng(number).integers(0, 200, shape, dtype=np.uint8)
        self.memory = Memory(p.nbytes)
        opened = Opened(transfer=number, handle="", slot=0, offset=0, nbytes=p.nbytes, generation=1)
        self.part = Part(opened, self.memory)  # type: ignore[arg-type]
        self.transfer = DecodeTransfer(
            self.connection,  # type: ignore[arg-type]
            self.part,
            p,
            lengths,
            (),
            count_blocks=count_blocks,
        )
        for layer in range(layers):
            mask = self.mask(layer)
            mask[:] = 0
            for row, length in enumerate(self.transfer.row_lengths):
                mask[row, :length] = MASK_REMOTE
        if metadata:
            at = p.metadata_mask_offset
            self.memory.bytes[at : at + layers] = MASK_REMOTE

    def mask(self, layer: int) -> Any:
        p = self.layout
        start = p.mask_offset(layer)
        return self.memory.bytes[start : start + p.mask_bytes].view(np.int8).reshape(p.rows, p.capacity)

    def mask_by_head(self, layer: int) -> Any:
        """What the mask says of each head: (rows, capacity, heads)."""
        mask = self.transfer.mask(layer)
        if mask.ndim == 2:
            mask = np.broadcast_to(mask[:, None], (len(mask), self.heads, self.layout.capacity))
        return mask.transpose(0, 2, 1)

    def push(self, layer: int, row: int, start: int, stop: int) -> None:
        """What a source's write does: the bytes, then the mask. With a mask by head the heads take turns."""
        stop = min(stop, self.lengths[row])
        if stop > start:
            heads = [(start + stop + layer) % self.heads] if self.transfer.by_head else slice(None)
            self.transfer._layer(layer)[row, start:stop, heads] = self.source[layer, row, start:stop, heads]
            rows = row * self.heads + heads[0] if isinstance(heads, list) else row
            self.mask(layer)[rows, start:stop] = MASK_LOCAL

    def land(self, fetch: Fetch) -> None:
        p = self.layout
        counts, index = np.frombuffer(fetch.counts, np.int32), np.frombuffer(fetch.index, np.int32)
        slot = self.transfer.lanes.landing_rows(fetch.slot, p.landing_entries)
        at = 0
        for i, n in enumerate(counts):
            row, head, tokens = i // self.heads, i % self.heads, index[at : at + n]
            slot[i, :n] = self.source[fetch.layer, row, tokens, head]
            if p.keeps_fetched:
                self.transfer._layer(fetch.layer)[row, tokens, head] = slot[i, :n]
                self.mask(fetch.layer)[i, tokens] = MASK_LOCAL
            at += n

    def fail(self, error: KvdError) -> None:
        self.part.ended = Ended(transfer=self.part.transfer, code=error.code, message=error.message)

    def expected(self, layer: int, index: Any) -> Any:
        """What the entries of a KV index are at the source, zeros for -1."""
        rows = np.arange(len(index))[:, None]
        entries = self.source[layer][rows // self.heads, index, rows % self.heads]
        entries[index == -1] = 0
        return entries


def index_of(*rows: list[int]) -> Any:
    """A KV index of these rows, the shorter ones with -1 at their end."""
    k = max(len(row) for row in rows)
    return np.array([row + [-1] * (k - len(row)) for row in rows], np.int32)
