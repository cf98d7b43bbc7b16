"""What the operations of the software fabrics have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvd.errors import Aborted, FabricError, InvalidArgument, KvdError
from kvd.fabric.base import Operation
from kvd.types import Descriptors


class PendingOperation(Operation):
    """An operation whose end is told to it once; further ends are ignored."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done = loop.create_future()

    @property
    def settled(self) -> bool:
        return self.done.done()

    def settle(self, error: KvdError | None = None) -> None:
        """Resolve ``done``."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # whoever drops the operation without a look must not cause a warning


def aborted(what: str) -> Aborted:
    return Aborted(f"the {what} was cancelled before it was complete")


def closed_error(reason: str) -> FabricError:
    """What an operation fails with on an endpoint that ended because of ``reason``."""
    return FabricError(f"the connection to the peer has ended: {reason}; connect again", reason=reason)


def check_parts(parts: Sequence[tuple[bytes, Descriptors]]) -> None:
    """Raise :class:`InvalidArgument` for a write into several grants that names none."""
    if not parts:
        raise InvalidArgument("a write into several grants has no parts; give it one for each grant, if without rows")


def check_message(message: bytes, most: int) -> bytes:
    """A private copy of ``message``; raises :class:`InvalidArgument` if it has more than ``most`` bytes."""
    if len(message) > most:
        raise InvalidArgument(
            f"a message of {len(message)} bytes exceeds the fabric's limit of {most}; split it, or write it to memory",
            size=len(message),
            limit=most,
        )
    return bytes(message)
