"""Sessions between nodes, parts as their engines know them, and writes on their way."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kvd_kernels
import numpy as np

from kvd.errors import KvdError, RemoteAccessError
from kvd.transfer import events as ev
from kvd.types import Descriptors, Path, Role
from kvd.wire.messages import Arrived, FetchArrived, MetadataArrived
from kvd_client.spec import MASK_LOCAL, TokenRange

from .memory import Bytes, Grant, Lease

if TYPE_CHECKING:
    from .node import Node
    from .requests import Attempt

CONTROL, URGENT, BULK = 0, 1, 2
"""The connections of a session, or their queue pairs: each keeps its order, none waits for another. Bulk has as many as
the world says, from :data:`BULK` on."""


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
    last: dict[int, float] = dataclasses.field(default_factory=dict)
    """By connection: when the last thing sent on it arrives."""
    told: dict[int, float] = dataclasses.field(default_factory=dict)
    """When the peer hears of the last write that has arrived."""
    completed: dict[int, float] = dataclasses.field(default_factory=dict)
    """When the last completion is here."""
    operations: dict[int, Write] = dataclasses.field(default_factory=dict)
    in_flight: int = 0
    """Bulk bytes that were submitted and have not completed."""
    serving: int = 0
    """Fetches that this side serves."""

    @property
    def peer(self) -> End:
        first, second = self.session.ends
        return second if first is self else first


def in_order(times: dict[int, float], connection: int, time: float) -> float:
    """When something happens that may as well at ``time``, but not before what went the same way."""
    times[connection] = time = max(times.get(connection, 0.0), time)
    return time


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
    wants_windows: bool = False
    """Sink: its process has been asked to ring its idle windows."""
    speculated: int = 0
    """Source: tokens sent speculatively."""
    dropped: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)
    """Source: by fetch in service, its layer and the places that it takes out of what is to be sent."""

    @property
    def request(self) -> str:
        return self.attempt.plan.request

    def served(self, fetch: int, error: KvdError | None) -> None:
        """A fetch that was to be kept has ended: what it dropped may be sent after all where it failed."""
        layer, places = self.dropped.pop(fetch, (0, None))
        if error is not None and places is not None:
            self.lease.sent[layer].reshape(-1)[places] = False


@dataclasses.dataclass(eq=False)
class Write(abc.ABC):
    """Something on its way into a sink's memory, in stages that follow each other on one connection.

    With several queue pairs it is as with a NIC: what is on another overtakes it, and of its end the two sides are told
    each in its own time, so that a completion may be seen before the sink has heard of the data, or long after."""

    record: Record
    end: End
    write: int
    """Its number; those of answers to fetches are negative."""
    nbytes: int
    started: bool = dataclasses.field(default=False, init=False)
    dead: bool = dataclasses.field(default=False, init=False)

    connection: int = dataclasses.field(default=BULK, init=False)

    def connection_of(self, stage: Callable[[], None]) -> int:
        """On which a stage goes: all on the same, since nothing else keeps their order."""
        return self.connection

    @abc.abstractmethod
    def stages(self) -> list[Callable[[], None]]:
        """What happens, one after the other."""

    @abc.abstractmethod
    def news(self, number: ev.SessionId) -> ev.Event:
        """What the sink's core is told, of the session that has this ``number`` there."""

    def ended(self, error: KvdError | None) -> ev.Event:
        """What the source's core is told."""
        return ev.WriteCompleted(self.record.transfer, self.write, error)

    def notify(self) -> None:
        if self.dead or self._lease() is None:
            return
        world = self.end.node.world
        if world.queue_pairs == 1:
            self._tell()
        else:
            world.at(in_order(self.end.told, self.connection, world.now + world.delay()), self._tell)
        self._complete(None)

    def _tell(self) -> None:
        peer = self.end.peer
        if peer.node.life == peer.life and not self.end.session.broken:
            peer.node.feed(self.news(peer.number))

    def _complete(self, error: KvdError | None) -> None:
        node, end = self.end.node, self.end
        time = in_order(end.completed, self.connection, node.world.now + node.world.delay())
        node.at(time, node.complete, self, error)

    def _lease(self) -> Lease | None:
        """The granted memory, or None: then the fabric has refused the write."""
        peer = self.end.peer
        grant = peer.node.memory.grants.get(self.record.token) if peer.node.life == peer.life else None
        if grant is None or grant.revoked:
            self.dead = True
            self._complete(RemoteAccessError("the far side refused a write: the memory is not granted any more"))
            return None
        self.end.node.world.dirty.append(grant.lease.slab)
        return grant.lease


@dataclasses.dataclass(eq=False)
class Operation(Write):
    """Tokens: their bytes, then their mask bytes, then the notification."""

    layer: int
    ranges: tuple[TokenRange, ...]
    path: Path

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

    def news(self, number: ev.SessionId) -> ev.Event:
        arrived = Arrived(self.record.sink_transfer, self.layer, list(self.ranges), self.path.value)
        return ev.TokensArrived(number, arrived)


@dataclasses.dataclass(eq=False)
class MetadataWrite(Write):
    """A layer's metadata: its bytes, then its mask byte, then the notification."""

    layer: int

    def stages(self) -> list[Callable[[], None]]:
        return [self.place_data, self.place_mask, self.notify]

    def place_data(self) -> None:
        lease = self._lease()
        if lease is not None:
            lease.metadata[self.layer] = self.record.lease.metadata[self.layer]

    def place_mask(self) -> None:
        lease = self._lease()
        if lease is not None:
            lease.metadata_mask[self.layer] = MASK_LOCAL

    def news(self, number: ev.SessionId) -> ev.Event:
        return ev.MetadataArrived(number, MetadataArrived(self.record.sink_transfer, self.layer))


@dataclasses.dataclass(eq=False)
class FetchAnswer(Write):
    """Gathered entries on the urgent connection, in two halves, then the notification."""

    fetch: int
    sink: int
    staged: Bytes
    descriptors: Descriptors

    def __post_init__(self) -> None:
        self.connection = URGENT

    def stages(self) -> list[Callable[[], None]]:
        return [self.place_first_half, self.place_second_half, self.notify]

    def place_first_half(self) -> None:
        self._place(self.descriptors[::2])

    def place_second_half(self) -> None:
        self._place(self.descriptors[1::2])

    def _place(self, descriptors: Descriptors) -> None:
        lease = self._lease()
        if lease is not None:
            kvd_kernels.copy_runs(self.staged, lease.memory, np.ascontiguousarray(descriptors))

    def news(self, number: ev.SessionId) -> ev.Event:
        return ev.FetchArrived(number, FetchArrived(self.sink, self.fetch))

    def ended(self, error: KvdError | None) -> ev.Event:
        self.end.serving -= 1
        self.record.served(self.fetch, error)
        transfer = self.record.transfer
        return ev.FetchServed(transfer, self.end.number, self.fetch, self.sink, 0 if error else self.nbytes, error)
