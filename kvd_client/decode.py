"""The sink's side of a transfer: masks, waiting, and the way to KV selection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd_client.arguments import deadline_of, whole
from kvd_client.arrays import Bytes, check_fits, items_of
from kvd_client.connection import Connection
from kvd_client.counters import ALWAYS_LAYERS
from kvd_client.errors import DeadlineExceeded, InvalidArgument, KvdError
from kvd_client.parts import Part, raise_if_failed, released_error
from kvd_client.ring import ALL_ROWS, EVENT_IDLE
from kvd_client.spec import MASK_LOCAL, MASK_REMOTE, PartLayout, TokenRange

if TYPE_CHECKING:
    from kvd_client.counters import SelectionCounters
    from kvd_client.fetch import FetchHandle
    from kvd_client.lanes import Lanes, PendingSelection

from kvd_client.transfer import Index, Mask, Transfer


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
        *,
        count_blocks: int = 0,
    ) -> None:
        super().__init__(connection, part, layout, lengths)
        self._held = tuple(held)
        self._lock = threading.RLock()
        self._puts = 0
        self._missing = dict.fromkeys(range(layout.layers))  # an ordered set of the layers not known to be complete
        self._lanes: Lanes | None = None
        self._count_blocks = count_blocks
        """The daemon wants to know what is selected, in so many blocks."""

    def mask(self, layer: int) -> Mask:
        """The layer's mask: int8 (rows, capacity), 0 padding, 1 local, 2 remote; a view that changes as data comes. By
        head, where the transfer was opened so: (rows, heads, capacity)."""
        mask = self._mask(self._check(layer))
        return mask.reshape(self.layout.sequences, -1, self.layout.capacity) if self.by_head else mask

    def _mask(self, layer: int) -> Mask:
        p = self.layout
        start = p.mask_offset(layer)
        return self._memory[start : start + p.mask_bytes].view(np.int8).reshape(p.rows, p.capacity)

    def k(self, layer: int, dtype: Any, *, as_torch: bool = False) -> Any:
        """The K half of a layer's entries: (rows, capacity, heads, dim) of ``dtype``, a view without a copy.

        A NumPy dtype, or, with ``as_torch``, a torch dtype or its name (``"bfloat16"``); torch is imported only then.
        Raises :class:`InvalidArgument` for a dtype of which half an entry is no whole number.
        """
        return self._half(layer, 0, dtype, as_torch)

    def v(self, layer: int, dtype: Any, *, as_torch: bool = False) -> Any:
        """The V half of a layer's entries, as :meth:`k`."""
        return self._half(layer, 1, dtype, as_torch)

    def _half(self, layer: int, which: int, dtype: Any, as_torch: bool) -> Any:
        layer = self._check(layer)
        half, odd = divmod(self.layout.entry_bytes, 2)
        if odd:
            raise InvalidArgument(
                f"entries of {self.layout.entry_bytes} bytes have no K and V of equal size; use layer()"
            )
        view = self._layer(layer)[..., which * half : (which + 1) * half]
        if not as_torch:
            try:
                kind = np.dtype(dtype if dtype is not None else "None")
            except (TypeError, ValueError) as error:  # the second: a name that is no text
                raise InvalidArgument(f"dtype is {dtype!r}; give NumPy's or its name ({error})") from None
            if kind.hasobject or kind.subdtype is not None:
                raise InvalidArgument(
                    f"dtype is {dtype!r}, whose values are no bytes of a KV entry; give one of numbers"
                )
            check_fits(half, kind.itemsize, kind)
            return view.view(kind)
        import torch

        name = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(name, torch.dtype):
            raise InvalidArgument(f"dtype is {dtype!r}; give torch's or its name, such as 'bfloat16'")
        check_fits(half, name.itemsize, name)
        return torch.from_numpy(view).view(name)

    def poll_ready(self, layer: int) -> bool:
        """Whether every token of the layer is in place; without a system call, and without waiting."""
        layer = self._check(layer)
        ready = self._complete(layer)
        self._check(layer)  # a daemon that takes the memory away says so first: only now does the answer count
        return ready

    def wait_ready(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Wait until no token of the layer (default: of any layer) is remote.

        Raises the error with which the transfer failed, unless all of the layer is in place anyway;
        :class:`DeadlineExceeded` after ``timeout_s`` seconds, with the transfer going on. In mode ``speculative`` who
        waits for everything, or for a layer behind the first two, leaves the network unused, as :meth:`idle` says; in
        ``partial``, ``profile`` and ``parallel`` what is not pushed comes by :meth:`select` alone.
        """
        layer = None if layer is None else self._check_layer(layer)
        what = "the transfer" if layer is None else f"layer {layer}"
        doorbell, transfer = self._connection.doorbell, self._part.transfer
        first = ALWAYS_LAYERS if layer is None else layer

        def complete() -> bool:
            if self._all_complete() if layer is None else self._complete(layer):
                return True
            if doorbell.wants_idle and ALWAYS_LAYERS <= first < self.layout.layers:
                doorbell.ring(EVENT_IDLE, first, transfer, ALL_ROWS, 0, 0)  # a full ring says that windows abound
            return False

        self._wait_until(complete, layer, what, timeout_s)

    def wait_metadata(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Wait until the layer's metadata (default: every layer's) is in place; raises as :meth:`wait_ready`."""
        layer = None if layer is None else self._check_layer(layer)
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
            remote = any((mask[row, :n] == MASK_REMOTE).any() for row, n in enumerate(self.row_lengths))
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
        layer, row, start = self._check(layer), self._check_row(row), whole("start", start)
        items = items_of(entries, "entries", row, self.layout.entry_bytes)
        if items.shape != (1, items.shape[1], self.layout.kv_heads):
            raise InvalidArgument(
                f"put_held got (tokens, heads) = {items.shape[1:]}; this part has {self.layout.kv_heads} heads",
                layer=layer,
                row=row,
            )
        stop = start + items.shape[1]
        self._check_held(row, start, stop)
        if self.layout.placed:
            p = self.layout
            first, last = ((row * p.capacity + token) * p.heads for token in (start, stop))
            self.tensors.scatter(layer, np.arange(first, last), items[0].view(np.uint8))
        else:
            self._layer(layer).view(items.dtype)[row, start:stop, :, 0] = items[0]
        self._mark((layer,), row, start, stop)

    def mark_held(self, row: int, start: int, stop: int) -> None:
        """Set the mask bytes of announced tokens in every layer; their bytes were written through :meth:`layer`. Raises
        :class:`InvalidArgument` as :meth:`put_held`."""
        self._check(0)
        row, start, stop = self._check_row(row), whole("start", start), whole("stop", stop)
        self._check_held(row, start, stop)
        self._mark(range(self.layout.layers), row, start, stop)

    def _mark(self, layers: Sequence[int], row: int, start: int, stop: int) -> None:
        first = row * self.layout.sequence_rows
        for layer in layers:
            self._mask(layer)[first : first + self.layout.sequence_rows, start:stop] = MASK_LOCAL
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
        layer = self._check(layer)
        if self._connection.doorbell.wants_idle:
            self._connection.ring(self._part, EVENT_IDLE, layer, ALL_ROWS, 0, 0)

    # --- selective transfer, see kvd_client.lanes -----------------------------------------------------------------

    @property
    def lanes(self) -> Lanes:
        """What selections of this transfer share; made by the first one."""
        if self._lanes is None:
            from kvd_client.lanes import Lanes  # here, since it loads the kernels

            with self._lock:
                self._lanes = self._lanes or Lanes(self, self._count_blocks)
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
        return self.lanes.begin_fetch(self._check(layer), slot, counts, index)

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
        if order is not None and not (
            isinstance(order, np.ndarray)
            and order.dtype == np.int32
            and order.shape == index.shape
            and order.flags.writeable
        ):
            raise InvalidArgument(f"order must be an int32 array of shape {index.shape}, to write into", layer=layer)
        pending.submit()
        entries = pending.wait(timeout_s)
        if order is not None:
            order[...] = pending.index
        return entries

    def prepare_select(self, layer: int, index: Index, *, slot: int = 0, parallel: bool = True) -> PendingSelection:
        """The first part of :meth:`select`: check and split the index; :mod:`kvd_client.lanes` has the rest."""
        return self.lanes.split(self._check(layer), index, slot, parallel)

    def selection_counters(self) -> SelectionCounters:
        """What selections have cost so far, by layer."""
        return self.lanes.counters()

    def count_selections(self, blocks: int) -> None:
        """From now on count how often the entries of each of ``blocks`` KV blocks are selected, for profiles; the
        counts go to the daemon with :meth:`report_selections`, or at release. A daemon that learns has every transfer
        count for it, without this; what is asked for here can be recorded as a profile besides. Raises
        :class:`InvalidArgument` for more blocks than a message has room for."""
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
