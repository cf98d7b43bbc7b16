"""Transfers, as the inference process holds them: what the source's side and the sink's side have in common.

Neither copies KV bytes on its own account: arrays are views of the lease, which both processes and their daemons
address by :class:`kvd_client.spec.PartLayout`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvd_client.arguments import position
from kvd_client.arrays import Bytes
from kvd_client.connection import Connection
from kvd_client.errors import DaemonLost, InvalidArgument, KvdError, NotFound
from kvd_client.forks import OfOneProcess
from kvd_client.parts import Part
from kvd_client.protocol import Abort
from kvd_client.spec import PartLayout

if TYPE_CHECKING:
    from kvd_client.cache import Cache
    from kvd_client.tensors import DeviceTensors

Index = npt.NDArray[np.int32]
Mask = npt.NDArray[np.int8]
Self = TypeVar("Self", bound="Transfer")

_MAX_REASON = 1000


class Transfer(OfOneProcess):
    """What both sides have in common. Any thread may use a transfer.

    Every method raises what ended the transfer: the error that the daemon reported, :class:`DaemonLost`, or
    :class:`LeaseExpired` after :meth:`release`. Arrays that were taken from it stay readable after that, as zeros,
    or, where the daemon died, with their bytes until :meth:`release`.
    """

    def __init__(self, connection: Connection, part: Part, layout: PartLayout, lengths: Sequence[int]) -> None:
        self._connection, self._part = connection, part
        self.layout = layout
        self.lengths = tuple(lengths)
        self.row_lengths = tuple(length for length in lengths for _ in range(layout.sequence_rows))
        """Of the layout's rows: those of the sequences, or with a mask by head each as often as it has KV heads."""
        self.handle = part.handle
        """Names the transfer across nodes; give it to the other side where the request ids differ."""
        self._memory: Bytes = np.asarray(part.mapping)
        self._longest = max(lengths)
        self._equal = min(lengths) == self._longest
        self._tensors: DeviceTensors | None = None
        self._told = False
        """The caller has aborted, or a finish has raised."""

    @property
    def id(self) -> int:
        """The daemon's number of this part, as ``kvd status`` shows it."""
        return self._part.transfer

    @property
    def by_head(self) -> bool:
        """Whether each KV head has a mask of its own; with a single head there is no difference."""
        return self.layout.sequence_rows > 1

    @property
    def mask_by(self) -> str:
        """What a mask byte stands for, one of :data:`kvd_client.spec.MASKS`; with a single head ``token``."""
        return self.layout.mask_by

    @property
    def tensors(self) -> DeviceTensors:
        """The part's tensors on its device. Raises :class:`InvalidArgument` for a part that was opened without a
        placement."""
        self._connection.check_part(self._part)
        if self._tensors is None:
            raise InvalidArgument(
                f"transfer {self.id} was opened without a placement, and has no tensors on a device; "
                "open it with one, or with a cache"
            )
        return self._tensors

    def _place(self, cache: Cache | None, blocks: Sequence[Sequence[int]], head: int | None) -> None:
        """Find the tensors of a part that has just been opened."""
        p, found = self.layout, self._part.tensors
        if cache is not None:
            self._tensors = cache.of(p, np.array(blocks, np.int64), head or 0)
        elif found is not None:
            from kvd_client.tensors import DeviceTensors

            table = np.arange(found.blocks, dtype=np.int64).reshape(p.rows, -1)
            self._tensors = DeviceTensors(found, [np.asarray(m) for m in self._part.channels], p, table)

    def layer(self, layer: int) -> Bytes:
        """Layer ``layer`` of the lease: uint8 (rows, capacity, heads, entry_bytes), writable, not a copy. Of tensors on
        a device it is a copy, in the same form. With a mask by head the memory is (rows, heads, capacity, entry_bytes),
        and this a transposed view of it."""
        return self._layer(self._check(layer))

    def _layer(self, layer: int) -> Bytes:
        p = self.layout
        if p.placed:
            return self.tensors.read(layer)
        start = p.layer_offset(layer)
        flat = self._memory[start : start + p.layer_bytes]
        if self.by_head:
            return flat.reshape(p.sequences, p.kv_heads, p.capacity, p.entry_bytes).transpose(0, 2, 1, 3)
        return flat.reshape(p.rows, p.capacity, p.heads, p.entry_bytes)

    def metadata(self, layer: int, name: str) -> Bytes:
        """A metadata array of a layer: uint8 (bytes of the layer,), writable, not a copy."""
        start, nbytes = self.layout.metadata_array(self._check(layer), name)
        return self._memory[start : start + nbytes]

    def check(self) -> None:
        """Raise what has ended the transfer, if anything has; one system call, and no waiting.

        For those who only poll: a daemon that is killed says so in no memory that it shared, but its socket closes.
        """
        self._connection.look()
        self._connection.check_part(self._part)

    def abort(self, reason: str = "") -> None:
        """End the transfer on both sides with ``ABORTED``; the memory stays until :meth:`release`. Idempotent."""
        if self._part.released:
            return
        self._told = True
        reason = str(reason)[:_MAX_REASON].encode("utf-8", "backslashreplace").decode()
        with contextlib.suppress(DaemonLost, NotFound):
            self._connection.request(Abort(transfer=self._part.transfer, reason=reason))

    def release(self) -> None:
        """Give the memory back, ending the transfer if it still runs. Idempotent; does not fail on a lost daemon.

        Arrays that were taken from the transfer read zeros from now on.
        """
        self._connection.release(self._part)

    @property
    def released(self) -> bool:
        return self._part.released

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                if not self._part.released:
                    self._leave()
            finally:
                self.release()
            return
        # The exception on its way says more than whatever goes wrong here.
        try:
            with contextlib.suppress(KvdError):
                self.abort(f"{type(error).__name__}: {error}"[:200])
        finally:
            with contextlib.suppress(KvdError):
                self.release()

    def _leave(self) -> None:
        """What a with-block does at its end before it releases."""

    def _check(self, layer: int) -> int:
        """The layer as a plain number: products of NumPy's small ones would overflow."""
        self._connection.check_part(self._part)
        return self._check_layer(layer)

    def _check_layer(self, layer: int) -> int:
        return position("layer", layer, self.layout.layers)

    def _check_row(self, row: int) -> int:
        return position("row", row, self.layout.sequences)
