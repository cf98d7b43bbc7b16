"""Sessions between nodes, parts as their engines know them, and writes on their way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.errors import RemoteAccessError
from kvd.transfer import events as ev
from kvd.types import Role
from kvd.wire.messages import Arrived
from kvd_client.spec import MASK_LOCAL, TokenRange

from .memory import Grant, Lease

if TYPE_CHECKING:
    from .node import Node
    from .requests import Attempt

CONTROL, DATA = 0, 1
"""The two connections of a session; each delivers in order, neither waits for the other."""


class Violation(AssertionError):
    """A rule was broken. ``request`` names whose story to tell, if that is known."""

    def __init__(self, message: str, request: str = "") -> None:
        super().__init__(message)
        self.request = request


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """A connected pair of ends."""

    ends: tuple[End, End] = ()  # type: ignore[assignment]
    broken: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class End:
    """One node's side of a session."""

    session: Session
    node: Node
    life: int
    number: ev.SessionId
    last: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """When the last thing sent on each connection arrives."""
    operations: dict[int, Operation] = dataclasses.field(default_factory=dict)
    in_flight: int = 0

    @property
    def peer(self) -> End:
        first, second = self.session.ends
        return second if first is self else first


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """What this node's engine and the judge know of a part."""

    transfer: int
    role: Role
    attempt: Attempt
    lease: Lease
    lengths: tuple[int, ...]
    deadline: float
    code: str = ""
    released: bool = False
    freed: bool = False
    grant: Grant | None = None
    bound: ev.SessionId | None = None
    token: bytes = b""
    sink_transfer: int = 0
    sink: Lease | None = None
    """Source: the lease that it writes into, if it still existed when the two were paired."""
    source: Record | None = None
    """Sink: who writes into it."""
    operations: set[int] = dataclasses.field(default_factory=set)

    @property
    def request(self) -> str:
        return self.attempt.plan.request


@dataclasses.dataclass(slots=True, eq=False)
class Operation:
    """A write on its way: its bytes, then its mask bytes, then its notification, in order on the data connection."""

    record: Record
    end: End
    write: int
    layer: int
    ranges: tuple[TokenRange, ...]
    nbytes: int
    started: bool = False
    dead: bool = False

    def stages(self) -> list[Callable[[], None]]:
        halves = [self.place_first_half, self.place_second_half] if len(self.ranges) > 1 else [self.place_first_half]
        return [*halves, self.place_mask, self.notify]

    def place_first_half(self) -> None:
        self._place_data(self.ranges[: (len(self.ranges) + 1) // 2])

    def place_second_half(self) -> None:
        self._place_data(self.ranges[(len(self.ranges) + 1) // 2 :])

    def _place_data(self, ranges: tuple[TokenRange, ...]) -> None:
        lease = self._lease()
        if lease is not None:
            for r in ranges:
                lease.data[self.layer, r.row, r.start : r.stop] = self.record.lease.data[
                    self.layer, r.row, r.start : r.stop
                ]

    def place_mask(self) -> None:
        lease = self._lease()
        if lease is not None:
            for r in self.ranges:
                lease.mask[self.layer, r.row, r.start : r.stop] = MASK_LOCAL

    def notify(self) -> None:
        node, peer = self.end.node, self.end.peer
        if self.dead or self._lease() is None:
            return
        arrived = Arrived(self.record.sink_transfer, self.layer, list(self.ranges))
        if peer.node.life == peer.life:
            peer.node.feed(ev.TokensArrived(peer.number, arrived))
        node.later(node.world.delay(), node.complete, self, None)

    def _lease(self) -> Lease | None:
        """The granted memory, or None: then the fabric has refused the write."""
        peer = self.end.peer
        grant = peer.node.memory.grants.get(self.record.token) if peer.node.life == peer.life else None
        if grant is None or grant.revoked:
            self.dead = True
            error = RemoteAccessError("the far side refused a write: the memory is not granted any more")
            node = self.end.node
            node.later(node.world.delay(), node.complete, self, error)
            return None
        self.end.node.world.dirty.append(grant.lease.slab)
        return grant.lease
