"""Whom the engine deals with: sessions with peers, the processes that opened parts, and what it keeps of a part."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from kvd.errors import KvdError
from kvd.fabric.base import Endpoint, Fabric, Grant, Operation
from kvd.memory.leases import Lease
from kvd.transfer import instructions as do
from kvd.types import NodeId, TransferId
from kvd.wire.messages import PeerMessage
from kvd_client.spec import PartLayout


class Session(Protocol):
    """A connection to a peer, as :mod:`kvd.peers` makes it."""

    @property
    def node(self) -> NodeId: ...

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def fabric(self) -> Fabric:
        """The fabric that ``endpoint`` belongs to."""
        ...

    @property
    def error(self) -> KvdError | None:
        """Why it has ended; None while it lives."""
        ...

    def send(self, message: PeerMessage) -> None: ...

    def close(self, error: KvdError) -> None: ...


class Process(Protocol):
    """The inference process that opened a part."""

    def progress(self, transfer: TransferId, bytes_done: int) -> None:
        """Masks of the part have changed."""

    def ended(self, transfer: TransferId, code: str, message: str, fields: dict[str, Any]) -> None:
        """The part has ended; ``code`` is ``OK`` or an error's. Its memory is still there."""

    def freed(self, transfer: TransferId) -> None:
        """The part is forgotten: the process has released it, or is gone."""

    def fetched(self, transfer: TransferId, fetch: int, error: KvdError | None) -> None:
        """A fetch has ended; without an error its entries are in place."""

    def want_windows(self, transfer: TransferId, wanted: bool) -> None:
        """Whether idle windows of this part's decode are of use."""


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """What the engine knows of a part besides what the core does."""

    process: Process
    layout: PartLayout
    lengths: tuple[int, ...]
    lease: Lease
    grant: tuple[Fabric, Grant] | None = None
    sink: do.BindSink | None = None
    """Source: where its writes go."""
    operations: set[Operation] = dataclasses.field(default_factory=set)
