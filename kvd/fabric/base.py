"""The contract of a fabric: one-sided writes and reads into granted memory, and messages, over two lanes.

Words: a :class:`Region` is local memory registered with the fabric. A :class:`Grant` opens a slice of a region to
the peers that are told its ``token``. An :class:`Endpoint` is a connection to one peer. Work is handed over as an
:class:`Operation`.

What every implementation promises (``kvd.fabric.conformance`` tests it):

* Order. On one lane, a write's ``then`` part becomes visible at the far side only after all bytes of the write, and
  its ``notify`` message is delivered after both. Messages of a lane arrive in the order of submission, after every
  write submitted before them on that lane. Lanes are not ordered against each other. Where a write goes into several
  grants (``write_parts``) it is one operation all the same: refused, damaged or stopped in any of them, nothing that
  comes behind becomes visible, and so neither does its ``then`` part.
* Bounds. A write or read with an unknown or revoked token, without the right access, or reaching outside the grant,
  touches no byte at the far side and fails with :class:`~kvd.errors.RemoteAccessError`; the endpoint and all other
  operations live on.
* Integrity. Where the fabric checks it, bytes that arrive otherwise than they were sent fail their operation with
  :class:`~kvd.errors.ChecksumMismatch`: its ``then`` part does not become visible and its ``notify`` is not delivered.
* Completion. An operation is done once its bytes are *placed* at the far side (not merely handed to the kernel), or
  once it has failed or been cancelled; from then on its local memory is not touched any more.
* End. When the connection breaks, every unfinished operation fails with :class:`~kvd.errors.FabricError`, then
  ``on_lost`` is called once. ``close()`` does the same, without ``on_lost``.
* No blocking. Nothing here blocks the event loop; large copies are cut into pieces.

All methods must be called on the event loop's thread unless they say otherwise.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvd.errors import FabricError, KvdError
from kvd.types import Descriptors, Lane


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What a fabric can do. Sizes in bytes; 0 means no limit of its own."""

    one_sided: bool
    """The far CPU takes no part in a write: the sink learns of data only by ``notify`` and the mask."""
    max_message: int
    """Largest ``send`` or ``notify``."""
    max_scatter: int
    """Most pieces that one device request can have; longer descriptor lists are split by the fabric."""
    lanes_need_streams: tuple[Lane, ...] = ()
    """Lanes for which ``connect`` needs a connected, authenticated byte stream."""
    several_grants: bool = False
    """There is ``write_parts``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Registered local memory. The registrar keeps ``memory`` alive until ``deregister``."""

    id: int
    memory: memoryview
    """Writable, C-contiguous, format ``B``."""

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """A slice of a region that peers holding ``token`` may use."""

    region: Region
    offset: int
    length: int
    writable: bool
    readable: bool
    token: bytes
    """Opaque, at most 64 bytes, unguessable; what crosses the wire to the peer that shall use the grant."""


@dataclasses.dataclass(slots=True)
class EndpointCounters:
    """Totals since the endpoint was connected. Payload bytes only: no headers, no descriptors.

    Where ``one_sided`` holds, what the peer did in this side's memory is counted when this side learns of it.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    writes: int = 0
    reads: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    access_errors: int = 0
    """Operations of the peer that were refused."""
    checksum_errors: int = 0
    """Frames that arrived damaged."""
    bytes_in_flight: dict[Lane, int] = dataclasses.field(default_factory=lambda: {Lane.URGENT: 0, Lane.BULK: 0})


class Operation(abc.ABC):
    """A write, read or send that has been submitted."""

    done: asyncio.Future[None]
    """Resolves as the contract's "completion" says; carries the error if there is one. Never cancel it directly."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Drop whatever has not been started; ``done`` then fails with :class:`~kvd.errors.Aborted` once no byte
        of the local memory is in use any more, even if all of the operation had been started and it succeeds at the
        far side. Does nothing on an operation that is done; safe to call twice."""


class Bringup(Protocol):
    """What the peer session offers a fabric for connecting: authenticated streams and a way to exchange a blob."""

    @property
    def streams(self) -> Mapping[Lane, socket.socket]:
        """Connected, authenticated, non-blocking sockets, one for each lane in ``lanes_need_streams``.
        The endpoint owns them from the call of ``connect`` on."""

    @property
    def secret(self) -> bytes:
        """32 bytes that only the two ends know, for this connection alone; empty without authentication."""

    @property
    def dialled(self) -> bool:
        """Whether this end opened the connection: the one thing in which the two ends differ."""

    async def exchange(self, blob: bytes) -> bytes:
        """Send up to 4 KiB to the peer's fabric and return what it sent. Both sides call this equally often."""

    def tell(self, blob: bytes) -> None:
        """Send up to 4 KiB outside the fabric's own connection, after the last :meth:`exchange`: in order, and for as
        long as the session lives; nothing happens when it has ended."""

    def listen(self, told: Callable[[bytes], None]) -> None:
        """From now on, ``told`` gets what the peer's fabric tells, from the event loop; what came before comes first.
        A :class:`~kvd.errors.KvdError` that it raises ends the session."""


class Endpoint(abc.ABC):
    """A connection to one peer. Both sides are equal: either may write, read and send."""

    counters: EndpointCounters
    on_message: Callable[[Lane, bytes], None]
    """Called for each ``send`` and ``notify`` of the peer. The endpoint serves its peer from the moment that the owner
    sets it, which is right after ``connect`` returned; nothing that arrives before is lost. What it raises goes
    to the event loop's exception handler."""
    on_lost: Callable[[KvdError], None]
    """Called once when the connection has broken: with :class:`~kvd.errors.ProtocolError` if the peer sent what is not
    the protocol, else with :class:`~kvd.errors.FabricError`. Set it before ``on_message``."""

    @abc.abstractmethod
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
        """Copy ``descriptors`` (local offset in ``region``, remote offset in the grant, length) to the peer, then
        ``then`` (the same form and grant: mask bytes), then deliver ``notify``. The arrays are the caller's again when
        the call returns. Rows of length 0 move nothing, and their remote offset is not checked; the token always is.

        ``then``'s local bytes are read no earlier than the call and no later than completion. Raises
        :class:`~kvd.errors.InvalidArgument` for offsets outside ``region`` or negative lengths, and
        :class:`~kvd.errors.FabricError` on a closed endpoint; all other failures are in ``done``.
        """

    def write_parts(
        self,
        lane: Lane,
        region: Region,
        parts: Sequence[tuple[bytes, Descriptors]],
        *,
        then: tuple[bytes, Descriptors] | None = None,
        notify: bytes | None = None,
    ) -> Operation:
        """As :meth:`write`, into several grants, each part and ``then`` with its token: the parts one after the other,
        then ``then``, then ``notify``. What is refused touches no byte of its own part and of those behind it; parts
        before it may be in place. Raises as :meth:`write`, and :class:`~kvd.errors.InvalidArgument` without parts.

        A fabric with ``capabilities.several_grants`` has it; the others raise :class:`~kvd.errors.FabricError`.
        """
        raise FabricError(
            f"{type(self).__name__} can't write into several grants as one operation; write into each, and ask "
            "capabilities.several_grants first"
        )

    @abc.abstractmethod
    def read(self, lane: Lane, region: Region, token: bytes, descriptors: Descriptors) -> Operation:
        """Copy from the peer's grant (remote offset) into ``region`` (local offset); errors as in :meth:`write`."""

    @abc.abstractmethod
    def send(self, lane: Lane, message: bytes) -> Operation:
        """Deliver ``message`` to the peer's ``on_message``; at most ``max_message`` bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Break the connection at once. Idempotent."""

    @abc.abstractmethod
    async def wait_closed(self) -> None:
        """Return when nothing touches registered memory or descriptors of this endpoint any more."""


class Fabric(abc.ABC):
    """One way to move bytes; made once per daemon."""

    name: str
    capabilities: Capabilities
    details: str = ""
    """What it runs on, for people: device, port, address."""

    @property
    def checksum_errors(self) -> int:
        """Frames that arrived damaged, on all endpoints since the start."""
        return 0

    @abc.abstractmethod
    def register(self, memory: memoryview) -> Region:
        """Make memory usable for operations. Raises :class:`~kvd.errors.FabricError` with the limit, the need and
        the fix where the device or the system refuses."""

    @abc.abstractmethod
    def deregister(self, region: Region) -> None:
        """Forget a region. Raises :class:`~kvd.errors.InvalidArgument` while a grant of it is open. Idempotent."""

    @abc.abstractmethod
    def grant(
        self, region: Region, offset: int, length: int, *, writable: bool = True, readable: bool = False
    ) -> Grant:
        """Open ``[offset, offset + length)`` of ``region`` to peers that are told the grant's token."""

    @abc.abstractmethod
    async def revoke(self, grant: Grant) -> None:
        """Close a grant. On return no peer's byte lands in it (or leaves it) any more: a transmission that is
        under way is drained elsewhere or finished first. Idempotent; cancellation leaves the grant closed."""

    @abc.abstractmethod
    async def connect(self, bringup: Bringup) -> Endpoint:
        """Connect to the peer whose own ``connect`` runs at the same time at the other end of ``bringup``.
        Raises :class:`~kvd.errors.FabricError`; the streams are closed then."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all endpoints and forget all regions. Idempotent."""
