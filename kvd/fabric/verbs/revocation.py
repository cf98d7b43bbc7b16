"""Revocations in both directions: of this side's grants, which the peer must leave alone, and of the peer's."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from kvd.fabric.regions import Refusal, access_error
from kvd.fabric.verbs.lane import VerbsLane
from kvd.fabric.verbs.operation import VerbsOperation
from kvd.fabric.verbs.wire import Kind
from kvd.types import Lane

KEPT = 1 << 16
"""Revoked grants of the peer that are remembered. An access by an older one is refused by the peer's device."""


class Revocations:
    """Of one endpoint. ``send`` posts what was put before a lane's queue; ``count`` is told of each operation that
    ends under a revocation, and ``refused`` of how many there are."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: Mapping[Lane, VerbsLane],
        send: Callable[[], None],
        count: Callable[[VerbsOperation], None],
        refused: Callable[[int], None],
    ) -> None:
        self.revoked: OrderedDict[bytes, None] = OrderedDict()
        """Grants of the peer that must not be used any more."""
        self._loop, self._lanes = loop, lanes
        self._send, self._count, self._refused = send, count, refused
        self._asked: dict[bytes, asyncio.Future[None]] = {}

    def ask(self, grant_id: bytes) -> asyncio.Future[None]:
        """Tell the peer; the future is done when it uses the grant no more, or when the endpoint has ended."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._asked[grant_id] = future
        self._put(Kind.REVOKE, grant_id)
        return future

    def answered(self, grant_id: bytes) -> None:
        """The peer uses it no more."""
        if (waiter := self._asked.pop(grant_id, None)) and not waiter.done():
            waiter.set_result(None)

    def refuse(self, grant_id: bytes) -> None:
        """The peer's device knows a grant no more: what else is under way on it would fail the same way, each time at
        the cost of a queue pair."""
        self._stop(grant_id, lambda: None)

    def obey(self, grant_id: bytes) -> None:
        """Stop using a grant of the peer, and say so when nothing of it is under way."""
        self._stop(grant_id, lambda: self._put(Kind.REVOKED, grant_id))

    def _stop(self, grant_id: bytes, then: Callable[[], None]) -> None:
        self.revoked[grant_id] = None
        if len(self.revoked) > KEPT:
            self.revoked.popitem(last=False)
        waiting: set[VerbsOperation] = set()

        def ended(operation: VerbsOperation) -> None:
            self._count(operation)
            waiting.discard(operation)
            if not waiting:
                then()

        concerned = {
            operation
            for lane in self._lanes.values()
            for operation in lane.live()
            if operation.token is not None and operation.token.id == grant_id
        }
        for operation in concerned:
            operation.fail(access_error(operation.kind, Refusal.REVOKED, operation.low, operation.high))
            if not operation.settled:
                waiting.add(operation)
                operation.on_end = ended
        self._refused(len(concerned))
        if not waiting:
            then()

    def end(self) -> None:
        """The endpoint has ended: nobody uses anything over it any more."""
        for future in self._asked.values():
            if not future.done():
                future.set_result(None)
        self._asked.clear()

    def _put(self, kind: Kind, grant_id: bytes) -> None:
        self._lanes[Lane.URGENT].controls.append((kind, grant_id))
        self._send()
