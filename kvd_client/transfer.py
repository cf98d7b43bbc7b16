"""Transfers, as the inference process holds them: the source's side and the sink's side.

Neither copies KV bytes on its own account: arrays are views of the lease, which both processes and their daemons
address by :class:`kvd_client.spec.PartLayout`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvd_client.arrays import Bytes, check_fits, items_of
from kvd_client.connection import Connection, Part, raise_if_failed
from kvd_client.errors import DaemonLost, DeadlineExceeded, InvalidArgument, KvdError, LeaseExpired, NotFound
from kvd_client.protocol import (
    ALL_ROWS,
    EVENT_IDLE,
    EVENT_LAYER_READY,
    EVENT_METADATA_READY,
    SLOT_DELIVERED,
    Abort,
    Finish,
)
from kvd_client.spec import MASK_LOCAL, MASK_REMOTE, PartLayout, TokenRange

if TYPE_CHECKING:
    from kvd_client.counters import SelectionCounters
    from kvd_client.fetch import FetchHandle
    from kvd_client.lanes import Lanes, PendingSelection

Index = npt.NDArray[np.int32]
Mask = npt.NDArray[np.int8]
Self = TypeVar("Self", bound="Transfer")


class Transfer:
    """What both sides have in common. Any thread may use a transfer.

    Every method raises what ended the transfer: the error that the daemon reported, :class:`DaemonLost`, or
    :class:`LeaseExpired` after :meth:`release`. Arrays that were taken from it stay readable after that, as zeros,
    or, where the daemon died, with their bytes until :meth:`release`.
    """

    def __init__(self, connection: Connection, part: Part, layout: PartLayout, lengths: Sequence[int]) -> None:
        self._connection, self._part = connection, part
        self.layout = layout
        self.lengths = tuple(lengths)
        self.handle = part.handle
        """Names the transfer across nodes; give it to the other side where the request ids differ."""
        self._memory: Bytes = np.asarray(part.mapping)
        self._longest = max(lengths)
        self._equal = min(lengths) == self._longest
        self._told = False
        """The caller has aborted, or a finish has raised."""

    @property
    def id(self) -> int:
        """The daemon's number of this part, as ``kvd status`` shows it."""
        return self._part.transfer

    def layer(self, layer: int) -> Bytes:
        """Layer ``layer`` of the lease: uint8 (rows, capacity, heads, entry_bytes), writable, not a copy."""
        self._check(layer)
        return self._layer(layer)

    def _layer(self, layer: int) -> Bytes:
        p = self.layout
        start = p.layer_offset(layer)
        flat = self._memory[start : start + p.layer_bytes]
        return flat.reshape(p.rows, p.capacity, p.heads, p.entry_bytes)

    def metadata(self, layer: int, name: str) -> Bytes:
        """A metadata array of a layer: uint8 (bytes of the layer,), writable, not a copy."""
        self._check(layer)
        start, nbytes = self.layout.metadata_array(layer, name)
        return self._memory[start : start + nbytes]

    def abort(self, reason: str = "") -> None:
        """End the transfer on both sides with ``ABORTED``; the memory stays until :meth:`release`. Idempotent."""
        if self._part.released:
            return
        self._told = True
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
        with contextlib.suppress(KvdError):
            self.abort(f"{type(error).__name__}: {error}"[:200])
        with contextlib.suppress(KvdError):
            self.release()

    def _leave(self) -> None:
        """What a with-block does at its end before it releases."""

    def _check(self, layer: int) -> None:
        self._connection.check_part(self._part)
        if not 0 <= layer < self.layout.layers:
            raise InvalidArgument(f"layer {layer} of {self.layout.layers} does not exist", layer=layer)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.layout.rows:
            raise InvalidArgument(f"row {row} of {self.layout.rows} does not exist", row=row)


class PrefillTransfer(Transfer):
    """A transfer at its source: put each layer's entries in place, ring, and :meth:`finish`.

    As a context manager it finishes and releases at the end of the block, and aborts if the block raises.
    """

    def put_layer(
        self,
        layer: int,
        entries: Any = None,
        *,
        k: Any = None,
        v: Any = None,
        row: int | None = None,
        start: int = 0,
    ) -> None:
        """Copy tokens ``start`` and following of a layer into the lease, and tell the daemon that they are there.

        Either ``k`` and ``v``, each (rows, heads, tokens, dim) of a dtype whose ``dim`` values fill half an entry
        (K first); or ``entries``, (rows, tokens, heads, entry_bytes) of bytes. NumPy arrays and torch tensors, on
        any device, of any dtype. With ``row`` the arrays are one sequence's, without the first axis or with 1 there.
        Rows are padded on the right: tokens beyond a row's length are neither copied nor sent.

        Raises :class:`InvalidArgument` for a shape that does not fit, before anything is copied.
        """
        self._check(layer)
        p = self.layout
        if row is not None:
            self._check_row(row)
        rows = p.rows if row is None else 1
        if start < 0:
            raise InvalidArgument(f"start is {start}; it must not be negative", start=start)
        # Opaque items of half an entry, or a whole one, copy faster than bytes do, and need no common dtype.
        if entries is not None and k is None and v is None:
            sources = [items_of(entries, "entries", row, p.entry_bytes)]
            expected = (rows, -1, p.heads)
        elif entries is None and k is not None and v is not None:
            if p.entry_bytes % 2:
                raise InvalidArgument(f"entries of {p.entry_bytes} bytes have no K and V of equal size; give entries")
            half = p.entry_bytes // 2
            sources = [items_of(x, name, row, half).transpose(0, 2, 1) for name, x in (("k", k), ("v", v))]
            expected = (rows, -1, p.heads)
        else:
            raise InvalidArgument("put_layer needs either entries, or both k and v")
        tokens = sources[0].shape[1]
        for source in sources:
            if source.shape != (rows, tokens, p.heads):
                raise InvalidArgument(
                    f"put_layer got (rows, tokens, heads) = {source.shape} where "
                    f"({expected[0]}, {tokens}, {p.heads}) is needed",
                    layer=layer,
                    got=list(source.shape),
                )
        target = self._layer(layer).view(sources[0].dtype)
        for i, source in enumerate(sources):
            self._copy(target[..., i], source, row, start, tokens)
        self._ring(layer, start, min(start + tokens, self._longest), row)

    def _copy(
        self, target: npt.NDArray[Any], source: npt.NDArray[Any], row: int | None, start: int, tokens: int
    ) -> None:
        if row is None and self._equal:
            stop = min(start + tokens, self._longest)
            if stop > start:
                target[:, start:stop] = source[:, : stop - start]
            return
        for i, r in enumerate(range(self.layout.rows) if row is None else (row,)):
            stop = min(start + tokens, self.lengths[r])
            if stop > start:
                target[r, start:stop] = source[i, : stop - start]

    def layer_ready(self, layer: int, start: int = 0, stop: int | None = None, row: int | None = None) -> None:
        """Tell the daemon that tokens ``[start, stop)`` of a layer are in place, in ``row`` or in every row.

        ``stop`` defaults to the end; ranges are clipped to each row's length. Only needed where the bytes were
        written through :meth:`layer`. Raises :class:`Busy` if the daemon takes no events for the client's timeout.
        """
        self._check(layer)
        if row is not None:
            self._check_row(row)
        last = self._longest if stop is None else min(stop, self._longest)
        if start < 0 or (stop is not None and stop < start):
            raise InvalidArgument(f"tokens [{start}, {stop}) are no range", start=start, stop=stop)
        self._ring(layer, start, last, row)

    def _ring(self, layer: int, start: int, stop: int, row: int | None) -> None:
        if row is not None:
            stop = min(stop, self.lengths[row])
        if stop > start:
            self._connection.ring(self._part, EVENT_LAYER_READY, layer, ALL_ROWS if row is None else row, start, stop)

    def metadata_ready(self, layer: int) -> None:
        """Tell the daemon that the metadata arrays of a layer are complete; they travel ahead of its entries."""
        self._check(layer)
        if not self.layout.metadata:
            raise InvalidArgument(f"transfer {self.id} was opened without metadata", layer=layer)
        self._connection.ring(self._part, EVENT_METADATA_READY, layer, ALL_ROWS, 0, 0)

    def finish(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """Say that every token of every layer has been rung, and wait until all is delivered.

        Raises the error with which the transfer failed; :class:`InvalidArgument` if something has not been rung;
        :class:`DeadlineExceeded` after ``timeout_s`` seconds, with the transfer going on.
        """
        try:
            if self._delivered():
                return  # whether or not the daemon still lives
            self._check(0)
            self._connection.request(Finish(transfer=self._part.transfer))
            if wait:
                self.wait_delivered(timeout_s)
        except KvdError:
            self._told = True
            raise

    def wait_delivered(self, timeout_s: float | None = None) -> None:
        """Wait until the sink has everything; raises as :meth:`finish`."""
        connection, part = self._connection, self._part

        def delivered() -> bool | None:
            if part.released:
                raise released_error(part)
            raise_if_failed(part)
            return self._delivered() or None

        self._connection.check()
        if not connection.wait(delivered, deadline_of(timeout_s)):
            raise DeadlineExceeded(
                f"transfer {part.transfer} was not delivered within {timeout_s:g} s; it goes on, wait again or abort",
                transfer=part.transfer,
                timeout_s=timeout_s,
            )

    def _delivered(self) -> bool:
        part = self._part
        if part.released:
            return False
        ended = part.ended is not None and part.ended.code == "OK"
        return ended or self._connection.doorbell.state(part.slot) == SLOT_DELIVERED

    def _leave(self) -> None:
        # Whoever has caught the error of a finish, or has aborted, need not hear of it again at the end of the block.
        if not self._told:
            self.finish()


class DecodeTransfer(Transfer):
    """A transfer at its sink: masks say which tokens are in place, :meth:`wait_ready` waits for them.

    As a context manager it releases at the end of the block, and aborts if the block raises.
    """

    def __init__(
        self,
        connection: Connection,
        part: Part,
        layout: PartLayout,
        lengths: Sequence[int],
        held: Sequence[TokenRange],
    ) -> None:
        super().__init__(connection, part, layout, lengths)
        self._held = tuple(held)
        self._lock = threading.Lock()
        self._puts = 0
        self._missing = dict.fromkeys(range(layout.layers))  # an ordered set of the layers not known to be complete
        self._lanes: Lanes | None = None

    def mask(self, layer: int) -> Mask:
        """The layer's mask: int8 (rows, capacity), 0 padding, 1 local, 2 remote; a view that changes as data comes."""
        self._check(layer)
        return self._mask(layer)

    def _mask(self, layer: int) -> Mask:
        p = self.layout
        start = p.mask_offset(layer)
        return self._memory[start : start + p.mask_bytes].view(np.int8).reshape(p.rows, p.capacity)

    def k(self, layer: int, dtype: Any, *, as_torch: bool = False) -> Any:
        """The K half of a layer's entries: (rows, capacity, heads, dim) of ``dtype``, a view without a copy.

        A NumPy dtype, or, with ``as_torch``, a torch dtype or its name (``"bfloat16"``); torch is imported only then.
        """
        return self._half(layer, 0, dtype, as_torch)

    def v(self, layer: int, dtype: Any, *, as_torch: bool = False) -> Any:
        """The V half of a layer's entries, as :meth:`k`."""
        return self._half(layer, 1, dtype, as_torch)

    def _half(self, layer: int, which: int, dtype: Any, as_torch: bool) -> Any:
        self._check(layer)
        half, odd = divmod(self.layout.entry_bytes, 2)
        if odd:
            raise InvalidArgument(f"entries of {self.layout.entry_bytes} bytes have no K and V of equal size")
        view = self._layer(layer)[..., which * half : (which + 1) * half]
        if not as_torch:
            kind = np.dtype(dtype)
            check_fits(half, kind.itemsize, kind)
            return view.view(kind)
        import torch

        name = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        check_fits(half, name.itemsize, name)
        return torch.from_numpy(view).view(name)

    def poll_ready(self, layer: int) -> bool:
        """Whether every token of the layer is in place; without a system call, and without waiting."""
        self._check(layer)
        ready = self._complete(layer)
        self._check(layer)  # a daemon that takes the memory away says so first: only now does the answer count
        return ready

    def wait_ready(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Wait until no token of the layer (default: of any layer) is remote.

        Raises the error with which the transfer failed, unless all of the layer is in place anyway;
        :class:`DeadlineExceeded` after ``timeout_s`` seconds, with the transfer going on.
        """
        what = "the transfer" if layer is None else f"layer {layer}"
        self._wait_until(
            lambda: self._all_complete() if layer is None else self._complete(layer), layer, what, timeout_s
        )

    def wait_metadata(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Wait until the layer's metadata (default: every layer's) is in place; raises as :meth:`wait_ready`."""
        p = self.layout
        start = p.metadata_mask_offset
        mask = self._memory[start : start + (p.layers if p.metadata else 0)]

        def complete() -> bool:
            wanted = mask if layer is None else mask[layer : layer + 1]
            return bool((wanted == MASK_LOCAL).all())

        what = "metadata" if layer is None else f"metadata of layer {layer}"
        self._wait_until(complete, layer, what, timeout_s)

    def _wait_until(self, complete: Callable[[], bool], layer: int | None, what: str, timeout_s: float | None) -> None:
        connection, part = self._connection, self._part
        if layer is not None and not 0 <= layer < self.layout.layers:
            raise InvalidArgument(f"layer {layer} of {self.layout.layers} does not exist", layer=layer)
        connection.check()
        seen = (-1, -1)

        def ready() -> bool | None:
            nonlocal seen
            if part.released:
                raise released_error(part)
            # Scanning masks costs more than reading the numbers that tell whether they have changed.
            now = (connection.doorbell.progress(part.slot), self._puts)
            if now != seen or part.ended is not None:
                seen = now
                if complete() and not connection.doorbell.closed and not connection.lost:
                    return True
            raise_if_failed(part)
            return None

        if not connection.wait(ready, deadline_of(timeout_s)):
            raise DeadlineExceeded(
                f"{what} of transfer {part.transfer} was not complete within {timeout_s:g} s; it goes on",
                transfer=part.transfer,
                layer=layer,
                timeout_s=timeout_s,
            )

    def _all_complete(self) -> bool:
        return all(self._complete(layer) for layer in list(self._missing))

    def _complete(self, layer: int) -> bool:
        if layer not in self._missing:
            return True
        mask = self._mask(layer)
        if self._equal:
            remote = bool((mask[:, : self._longest] == MASK_REMOTE).any())
        else:
            remote = any((mask[row, :n] == MASK_REMOTE).any() for row, n in enumerate(self.lengths))
        # Tokens never become remote again, but zero pages of a lease that has ended would look complete, too.
        if remote or self._part.mapping.retired or self._connection.doorbell.closed:
            return False
        with self._lock:
            self._missing.pop(layer, None)
        return True

    def put_held(self, layer: int, row: int, start: int, entries: Any) -> None:
        """Put tokens in place that were announced as held: copies ``entries``, then sets their mask bytes.

        ``entries``: (tokens, heads, entry_bytes) of bytes. Raises :class:`InvalidArgument` for tokens that were not
        announced, since the source may be sending them.
        """
        self._check(layer)
        self._check_row(row)
        items = items_of(entries, "entries", row, self.layout.entry_bytes)
        if items.shape != (1, items.shape[1], self.layout.heads):
            raise InvalidArgument(
                f"put_held got (tokens, heads) = {items.shape[1:]} where {self.layout.heads} heads are needed",
                layer=layer,
                row=row,
            )
        stop = start + items.shape[1]
        self._check_held(row, start, stop)
        self._layer(layer).view(items.dtype)[row, start:stop, :, 0] = items[0]
        self._mark((layer,), row, start, stop)

    def mark_held(self, row: int, start: int, stop: int) -> None:
        """Set the mask bytes of announced tokens in every layer; their bytes were written through :meth:`layer`."""
        self._check(0)
        self._check_row(row)
        self._check_held(row, start, stop)
        self._mark(range(self.layout.layers), row, start, stop)

    def _mark(self, layers: Sequence[int], row: int, start: int, stop: int) -> None:
        for layer in layers:
            self._mask(layer)[row, start:stop] = MASK_LOCAL
        with self._lock:
            self._puts += 1
        self._connection.nudge()  # a thread may be waiting for these very tokens

    def _check_held(self, row: int, start: int, stop: int) -> None:
        at = start
        for held in sorted(self._held, key=lambda r: r.start):
            if held.row == row and held.start <= at:
                at = max(at, held.stop)
        if not 0 <= start <= stop <= min(at, self.lengths[row]):
            raise InvalidArgument(
                f"tokens [{start}, {stop}) of row {row} were not announced as held; the source may be sending them",
                row=row,
                start=start,
                stop=stop,
            )

    def idle(self, layer: int) -> None:
        """Say that this layer's attention begins and leaves the network unused. Costs nothing if nothing is queued."""
        self._check(layer)
        if self._connection.doorbell.wants_idle:
            self._connection.ring(self._part, EVENT_IDLE, layer, ALL_ROWS, 0, 0)

    # --- selective transfer, see kvd_client.lanes -----------------------------------------------------------------

    @property
    def lanes(self) -> Lanes:
        """What selections of this transfer share; made by the first one."""
        if self._lanes is None:
            from kvd_client.lanes import Lanes  # here, since it loads the kernels

            with self._lock:
                self._lanes = self._lanes or Lanes(self)
        return self._lanes

    def begin_fetch(self, layer: int, slot: int, counts: Index, index: Index) -> FetchHandle:
        """Ask the source for KV entries without waiting for them.

        ``counts``: int32 (rows * heads,), how many entries of each (row, head); ``index``: int32 (sum of counts,),
        their token positions, row after row. They land at the head of each row of landing slot ``slot``. Any number
        of slots can be under way; answers come in any order.

        Raises :class:`InvalidArgument` before anything is sent for a layer, slot or index that does not fit, and
        :class:`Busy` while an earlier fetch into the slot has not been answered. The handle's ``wait`` raises what
        the daemon answers.
        """
        self._check(layer)
        return self.lanes.begin_fetch(layer, slot, counts, index)

    def select(
        self,
        layer: int,
        index: Index,
        *,
        slot: int = 0,
        parallel: bool = True,
        timeout_s: float | None = None,
        order: Index | None = None,
    ) -> Bytes:
        """The KV entries that ``index`` names, wherever they are (SmartGen, section 4.2, algorithm 1).

        ``index``: int32 (rows * heads, k), distinct token positions of each (row, head); a row that has fewer ends
        with -1. Returns uint8 (rows * heads, k, entry_bytes), a view of landing slot ``slot`` that is good until the
        slot is used again: in each row first the entries that had to be fetched, then the local ones, both in the
        order of the index; zeros behind a row that is shorter. ``order``, int32 of the index's shape, receives the
        token positions in that order.

        The remote lane is on its way while the local one is loaded; with ``parallel`` false one follows the other.
        Fetched entries are kept: a later select finds them local.

        Raises :class:`InvalidArgument` for an index that is out of range or names padding, before anything is
        touched; :class:`Busy` while the slot awaits an earlier answer; :class:`DeadlineExceeded` after ``timeout_s``
        seconds, and what ended the transfer.
        """
        pending = self.prepare_select(layer, index, slot=slot, parallel=parallel)
        pending.submit()
        entries = pending.wait(timeout_s)
        if order is not None:
            order[...] = pending.index
        return entries

    def prepare_select(self, layer: int, index: Index, *, slot: int = 0, parallel: bool = True) -> PendingSelection:
        """The first part of :meth:`select`: check and split the index; :mod:`kvd_client.lanes` has the rest."""
        self._check(layer)
        return self.lanes.split(layer, index, slot, parallel)

    def selection_counters(self) -> SelectionCounters:
        """What selections have cost so far, by layer."""
        return self.lanes.counters()

    def count_selections(self, blocks: int) -> None:
        """From now on count how often the entries of each of ``blocks`` KV blocks are selected, for profiles; the
        counts go to the daemon with :meth:`report_selections`, or at release."""
        self._check(0)
        self.lanes.count_blocks(blocks)

    def report_selections(self) -> None:
        """Send the counts so far to the daemon, and begin anew. Does nothing where nothing has been counted."""
        self._check(0)
        self.lanes.report()

    def release(self) -> None:
        """As :meth:`Transfer.release`; what :meth:`count_selections` has counted is sent before."""
        if self._lanes is not None and not self._part.released:
            with contextlib.suppress(KvdError):  # counts are worth an attempt, not an error
                self._lanes.report()
        super().release()
        if self._lanes is not None:
            self._lanes.end()


def released_error(part: Part) -> LeaseExpired:
    return LeaseExpired(f"transfer {part.transfer} has been released; its memory is gone", transfer=part.transfer)


def deadline_of(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
