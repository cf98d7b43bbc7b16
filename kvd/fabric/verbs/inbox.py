"""The peer's messages of one endpoint: put together from their pieces, and kept until somebody takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.fabric.base import EndpointCounters
from kvd.fabric.verbs.lane import VerbsLane
from kvd.fabric.verbs.wire import Kind
from kvd.types import Lane


class Inbox:
    """``taken`` is told of each frame that was taken, which gives the peer its credit back; ``ended`` says whether the
    endpoint has ended, after which nothing is delivered."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        counters: EndpointCounters,
        taken: Callable[[VerbsLane], None],
        ended: Callable[[], bool],
    ) -> None:
        self.on_message: Callable[[Lane, bytes], None] | None = None
        self._loop, self._counters, self._taken, self._ended = loop, counters, taken, ended
        self._early: list[tuple[VerbsLane, Kind, bytes]] = []
        self._parts: dict[Lane, list[bytes]] = {lane: [] for lane in Lane}

    def open(self, on_message: Callable[[Lane, bytes], None]) -> None:
        """From now on ``on_message`` gets the messages; what came before comes first, from the event loop."""
        self.on_message = on_message
        if self._early:
            self._loop.call_soon(self._deliver_early)

    def put(self, lane: VerbsLane, kind: Kind, body: bytes) -> None:
        """A frame of kind MESSAGE or PART has come."""
        if self.on_message is None or self._early:
            self._early.append((lane, kind, body))
        else:
            self._deliver(self.on_message, lane, kind, body)

    def _deliver(self, on_message: Callable[[Lane, bytes], None], lane: VerbsLane, kind: Kind, body: bytes) -> None:
        parts = self._parts[lane.lane]
        parts.append(body)
        if kind is Kind.PART:
            self._taken(lane)
            return
        message = body if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._ended():
            return
        self._counters.messages_received += 1
        try:
            on_message(lane.lane, message)
        except Exception as error:  # the receiver's mistake must not stop the connection
            self._loop.call_exception_handler({"message": "on_message of a verbs endpoint failed", "exception": error})
        self._taken(lane)

    def _deliver_early(self) -> None:
        while self._early and not self._ended() and self.on_message is not None:
            self._deliver(self.on_message, *self._early[0])
            del self._early[0]
