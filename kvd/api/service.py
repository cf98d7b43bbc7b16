"""The contract between the API server and the daemon behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvd_client.protocol import Reply, Request

if TYPE_CHECKING:
    from kvd.api.session import ClientSession

Answer: TypeAlias = Reply | tuple[Reply, list[int]]
"""A reply, and descriptors to pass with it; those stay the service's, and may be closed once ``handle`` returned."""


class Service(Protocol):
    """What the server asks of the daemon. All calls come on the event loop's thread."""

    def handle(self, client: ClientSession, request: Request) -> Answer | Awaitable[Answer]:
        """Carry out a request; :class:`Hello` never comes here. The events that the process rang before it sent the
        request have been handed over.

        An ``async def`` serves; but what can be answered at once should be returned by a plain ``def``, since that
        saves a task. The reply's ``id`` is set by the server. A :class:`KvdError` becomes a :class:`Failure`;
        anything else is logged and becomes one with code ``INTERNAL``. When the client is lost, running handlers
        are cancelled.
        """

    def ring_event(
        self, client: ClientSession, kind: int, layer: int, transfer: int, row: int, start: int, stop: int
    ) -> None:
        """An event from the ring, of a known kind and otherwise unchecked. The transfer may have ended or be another
        client's; raise a :class:`KvdError` only for what no honest client does, as that closes the connection."""

    def client_lost(self, client: ClientSession) -> None:
        """The client is gone: called exactly once for each client that was welcomed, after its last ``handle`` has
        returned (or was cancelled). Its ``push``, ``wake`` and slot methods do nothing any more."""


class Log(Protocol):
    """The part of a structlog logger that is used here."""

    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def exception(self, event: str, **fields: Any) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds on what clients can take. Sizes in bytes, times in seconds."""

    clients: int = 256
    requests: int = 256
    """Requests of one client in progress; more are answered with ``BUSY``."""
    requests_s: float = 0.0
    """Requests a second that are taken of one client, a second's worth at once; more wait in its socket, and its ring
    events with them. 0: no limit."""
    write_buffer: int = 4 << 20
    """Replies that a client has not read; beyond it the client is closed."""
    hello_s: float = 5.0
    """Time to the first message."""
    sweep_s: float = 1.0
    """How often all rings are looked at, whether or not they rang."""
