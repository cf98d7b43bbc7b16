"""Moves bytes between two fabrics of one process: transfers within a node, and tests.

Deterministic: work runs in the order of submission, the urgent lane's first, in pieces of at most ``PIECE_BYTES``
between which the event loop gets its turn.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvd_kernels import copy_runs

from kvd.errors import FabricError, KvdError
from kvd.fabric.base import Bringup, Capabilities, Endpoint, EndpointCounters, Fabric, Grant, Operation, Region
from kvd.fabric.operations import PendingOperation, aborted, check_message, check_parts, closed_error
from kvd.fabric.regions import Refusal, RegionTable, access_error
from kvd.fabric.runs import Runs, checked_runs
from kvd.types import Descriptors, Lane

PIECE_BYTES = 1 << 20
PIECE_RUNS = 4096
STEP_OPERATIONS = 64
"""Most operations that are begun before the event loop gets its turn."""
MAX_MESSAGE = 64 << 10

_waiting: dict[bytes, LoopbackEndpoint] = {}
"""Endpoints whose ``connect`` is under way, by the token that they sent to the other side."""


class LoopbackFabric(Fabric):
    """See the module; takes no options."""

    name = "loopback"
    capabilities = Capabilities(one_sided=True, max_message=MAX_MESSAGE, max_scatter=0, several_grants=True)

    def __init__(self) -> None:
        self.table = RegionTable()
        self.endpoints: set[LoopbackEndpoint] = set()

    def register(self, memory: memoryview) -> Region:
        return self.table.register(memory)

    def deregister(self, region: Region) -> None:
        self.table.deregister(region)

    def grant(
        self, region: Region, offset: int, length: int, *, writable: bool = True, readable: bool = False
    ) -> Grant:
        return self.table.grant(region, offset, length, writable=writable, readable=readable)

    async def revoke(self, grant: Grant) -> None:
        self.table.revoke(grant)  # each piece of a copy looks its grant up, and no piece is under way now

    async def connect(self, bringup: Bringup) -> Endpoint:
        endpoint = LoopbackEndpoint(self, asyncio.get_running_loop())
        token = secrets.token_bytes(16)
        _waiting[token] = endpoint
        try:
            peer = _waiting.get(await bringup.exchange(token))
            if peer is None or peer is endpoint or peer.loop is not endpoint.loop:
                raise FabricError(
                    "the peer's loopback fabric is not in this process and event loop; use tcp between processes"
                )
            endpoint.peer = peer
            # The second exchange keeps both entries until both sides have looked.
            await bringup.exchange(b"")
        except BaseException:
            endpoint.close()
            raise
        finally:
            del _waiting[token]
        if not endpoint.ended:
            self.endpoints.add(endpoint)
        return endpoint

    async def close(self) -> None:
        for endpoint in list(self.endpoints):
            endpoint.close()
        self.table.clear()


class _Part(NamedTuple):
    """Bytes that go into a grant; all of the operation's in it lie from ``low`` to ``high``."""

    runs: Runs
    token: bytes
    low: int
    high: int


class _Work(PendingOperation):
    """A queued operation; ``parts`` and ``message`` are what remains of it."""

    def __init__(
        self,
        endpoint: LoopbackEndpoint,
        kind: str,
        region: Region | None,
        parts: list[_Part],
        message: bytes | None,
    ) -> None:
        super().__init__(endpoint.loop)
        self.kind = kind
        self.region = region
        self.parts = parts
        self.message = message
        self.position = 0
        self.begun = b""
        """The token of the grant that bytes have been copied to, or from."""

    def settle(self, error: KvdError | None = None) -> None:
        self.region = None
        self.parts = []
        super().settle(error)

    def cancel(self) -> None:
        self.settle(aborted(self.kind))


def _of_one_grant(token: bytes, bodies: Sequence[Runs]) -> list[_Part]:
    filled = [runs for runs in bodies if runs.nbytes]
    low, high = min((runs.low for runs in filled), default=0), max((runs.high for runs in filled), default=0)
    return [_Part(runs, token, low, high) for runs in bodies]


class LoopbackEndpoint(Endpoint):
    """One end of a connection within the process."""

    def __init__(self, fabric: LoopbackFabric, loop: asyncio.AbstractEventLoop) -> None:
        self.fabric = fabric
        self.loop = loop
        self.peer: LoopbackEndpoint | None = None
        self.counters = EndpointCounters()
        self.on_lost: Callable[[KvdError], None] = lambda error: None
        self._on_message: Callable[[Lane, bytes], None] | None = None
        self._queues: dict[Lane, deque[_Work]] = {lane: deque() for lane in Lane}
        self._scheduled = False
        self.ended = ""
        self._closed = asyncio.Event()

    @property
    def on_message(self) -> Callable[[Lane, bytes], None]:
        return self._on_message or (lambda lane, message: None)

    @on_message.setter
    def on_message(self, callback: Callable[[Lane, bytes], None]) -> None:
        self._on_message = callback
        if self.peer is not None:
            self.peer._schedule()

    def write(
        self,
        lane: Lane,
        region: Region,
        token: bytes,
        descriptors: Descriptors,
        *,
        then: Descriptors | None = None,
        notify: bytes | None = None,
    ) -> Operation:
        self._check_usable(region)
        runs = [checked_runs(region, descriptors)]
        if then is not None:
            runs.append(checked_runs(region, then))
        message = None if notify is None else check_message(notify, MAX_MESSAGE)
        return self._submit(lane, _Work(self, "write", region, _of_one_grant(token, runs), message))

    def write_parts(
        self,
        lane: Lane,
        region: Region,
        parts: Sequence[tuple[bytes, Descriptors]],
        *,
        then: tuple[bytes, Descriptors] | None = None,
        notify: bytes | None = None,
    ) -> Operation:
        self._check_usable(region)
        check_parts(parts)
        checked: list[_Part] = []
        for token, rows in parts if then is None else [*parts, then]:
            checked += _of_one_grant(token, [checked_runs(region, rows)])
        message = None if notify is None else check_message(notify, MAX_MESSAGE)
        return self._submit(lane, _Work(self, "write", region, checked, message))

    def read(self, lane: Lane, region: Region, token: bytes, descriptors: Descriptors) -> Operation:
        self._check_usable(region)
        parts = _of_one_grant(token, [checked_runs(region, descriptors)])
        return self._submit(lane, _Work(self, "read", region, parts, None))

    def send(self, lane: Lane, message: bytes) -> Operation:
        self._check_usable(None)
        return self._submit(lane, _Work(self, "message", None, [], check_message(message, MAX_MESSAGE)))

    def close(self) -> None:
        self._end("this side closed it")

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def _check_usable(self, region: Region | None) -> None:
        if self.ended:
            raise closed_error(self.ended)
        if region is not None:
            self.fabric.table.address(region)

    def _submit(self, lane: Lane, work: _Work) -> _Work:
        self._queues[lane].append(work)
        self._schedule()
        return work

    def _schedule(self) -> None:
        if not self._scheduled and not self.ended:
            self._scheduled = True
            self.loop.call_soon(self._step)

    def _step(self) -> None:
        self._scheduled = False
        peer = self.peer
        if self.ended or peer is None or peer.ended or peer._on_message is None:
            return
        budget = PIECE_BYTES
        for _ in range(STEP_OPERATIONS):
            lane = next((lane for lane in Lane if self._queues[lane]), None)
            if lane is None or budget <= 0 or self.ended or peer.ended:
                break
            work = self._queues[lane][0]
            budget -= self._advance(peer, lane, work, budget)
            if work.settled and not self.ended:
                self._queues[lane].popleft()
        if any(self._queues.values()):
            self._schedule()

    def _advance(self, peer: LoopbackEndpoint, lane: Lane, work: _Work, budget: int) -> int:
        """Do a piece of ``work``, settle it after its last one; the number of bytes copied."""
        if work.settled:
            return 0
        copied = 0
        while work.parts:
            if copied:
                return copied
            runs, token, low, high = work.parts[0]
            access = peer.fabric.table.check(token, low, high, write=work.kind == "write")
            if isinstance(access, Refusal):
                if access is Refusal.UNKNOWN_TOKEN and work.begun == token:
                    access = Refusal.REVOKED
                peer.counters.access_errors += 1
                work.settle(access_error(work.kind, access, low, high))
                return 0
            if runs.nbytes:
                copied = self._copy(peer, access, work, budget)
                if work.position < runs.nbytes:
                    return copied
            del work.parts[0]
            work.position = 0
        if work.kind == "write":
            self.counters.writes += 1
        elif work.kind == "read":
            self.counters.reads += 1
        message = work.message
        work.settle()
        if message is not None:
            self.counters.messages_sent += 1
            peer._deliver(lane, message)
        return copied

    def _copy(self, peer: LoopbackEndpoint, grant: Grant, work: _Work, budget: int) -> int:
        assert work.region is not None
        rows, nbytes = work.parts[0].runs.cut(work.position, budget, PIECE_RUNS)
        rows[:, 1] += grant.offset
        if work.kind == "write":
            copy_runs(work.region.memory, grant.region.memory, rows)
            source, target = self, peer
        else:
            copy_runs(grant.region.memory, work.region.memory, rows[:, [1, 0, 2]].copy())
            source, target = peer, self
        source.counters.bytes_sent += nbytes
        target.counters.bytes_received += nbytes
        work.position += nbytes
        work.begun = work.parts[0].token
        return nbytes

    def _deliver(self, lane: Lane, message: bytes) -> None:
        self.counters.messages_received += 1
        try:
            self.on_message(lane, message)
        except Exception as error:  # the receiver's mistake must not stop the sender's work
            self.loop.call_exception_handler(
                {"message": "on_message of a loopback endpoint failed", "exception": error}
            )

    def _end(self, reason: str, lost: bool = False) -> None:
        if self.ended:
            return
        self.ended = reason
        error = closed_error(reason)
        for queue in self._queues.values():
            for work in queue:
                work.settle(error)
            queue.clear()
        self.fabric.endpoints.discard(self)
        if self.peer is not None:
            self.loop.call_soon(self.peer._end, "the peer closed it", True)
        if lost:
            self.loop.call_soon(self.on_lost, error)  # after the operations' own callbacks
        self._closed.set()
