"""Whom the engine deals with: sessions with peers, the processes that opened parts, and what it keeps of a part."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.fabric.base import Endpoint, Fabric, Grant, Operation
from kvd.memory.leases import Lease
from kvd.memory.tensors import TensorMemory
from kvd.tensors import Route, Tensors
from kvd.transfer import instructions as do
from kvd.types import NodeId, TransferId
from kvd.wire.messages import Arrived, MetadataArrived, PeerMessage, TensorsArrived
from kvd_client.layouts import Placement, TensorMap
from kvd_client.spec import MASK_LOCAL, PartLayout, TokenRange
from kvd_client.tensors import DeviceTensors

if TYPE_CHECKING:
    from kvd.transfer.moving import Move


_LOCAL = bytes([MASK_LOCAL])


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PartTensors:
    """A part's tensors where they are not in its lease."""

    placement: Placement
    tensors: Tensors
    memory: TensorMemory
    owned: bool
    """The memory ends with the part; else it is a cache's."""
    map: TensorMap
    table: npt.NDArray[np.int64]
    head: int = 0
    """The part's first, among those of its cache."""

    def view(self, layout: PartLayout) -> DeviceTensors:
        """The tensors of a part of this layout, by entries."""
        buffers = [np.frombuffer(memory, np.uint8) for memory in self.memory.buffers()]
        return DeviceTensors(self.map, [b[: self.memory.nbytes] for b in buffers], layout, self.table, self.head)

    def give_back(self) -> None:
        if self.owned:
            self.memory.release()
        else:
            self.memory.unhold()


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """What the engine knows of a part besides what the core does."""

    process: Process
    layout: PartLayout
    lengths: tuple[int, ...]
    lease: Lease
    head_start: int = 0
    tensors: PartTensors | None = None
    grants: list[tuple[Fabric, Grant]] = dataclasses.field(default_factory=list)
    sink: do.BindSink | None = None
    """Source: where its writes go."""
    route: Route | None = None
    """From the source's tensors to the sink's, where either are in a layout of their own."""
    moves: dict[int, Move] = dataclasses.field(default_factory=dict)
    """Batches of tensors on their way: a source's by write, a sink's by stage."""
    operations: set[Operation] = dataclasses.field(default_factory=set)

    def marked(self, arrived: Arrived | TensorsArrived | MetadataArrived) -> bool:
        """Whether the masks say the same as a peer's notification; a peer that only says so would leave the process
        waiting for good. What does not exist is the core's to refuse."""
        if isinstance(arrived, TensorsArrived):
            return all(self._all_local(one.layer, one.ranges) for one in arrived.layers)
        if isinstance(arrived, Arrived):
            return self._all_local(arrived.layer, arrived.ranges)
        layout, layer = self.layout, arrived.layer
        if not 0 <= layer < layout.layers or not layout.metadata:
            return True
        return self.lease.memory[layout.metadata_mask_offset + layer] == MASK_LOCAL

    def _all_local(self, layer: int, ranges: list[TokenRange]) -> bool:
        """Whether those of the tokens that exist are marked."""
        layout = self.layout
        if not 0 <= layer < layout.layers:
            return True
        memory, base, capacity = self.lease.memory, layout.mask_offset(layer), layout.capacity
        # Not by NumPy: bytes take 1 us where it takes 10, and a selective transfer has many short ranges.
        return all(
            memory[base + r.row * capacity + r.start : base + r.row * capacity + r.stop].tobytes()
            == _LOCAL * (r.stop - r.start)
            for r in ranges
            if 0 <= r.row < layout.rows and 0 <= r.start <= r.stop <= capacity
        )

    def give_back(self) -> None:
        """Release the part's memory, wherever it is."""
        self.lease.release()
        if self.tensors is not None:
            self.tensors.give_back()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the part's memory, wherever it is, for the length of a ``with`` block."""
        with contextlib.ExitStack() as holds:
            for lease in (self.lease, self.tensors.memory if self.tensors is not None else self.lease):
                lease.hold()
                holds.callback(lease.unhold)
            yield
