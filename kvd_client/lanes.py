"""The sink's half of the on-demand path: a KV index becomes KV entries, wherever they are.

SmartGen, section 4.2, algorithm 1: the mask values at the index split it into a remote and a local lane, remote
entries first in each row. The source is asked for the remote lane, which lands at the head of each row of a landing
slot; the local lane is gathered from the lease into the rest of each row meanwhile. Fetched entries are then copied to
their place in the lease, and are local from there on.

A mask that is one for all heads of a token can't say what a fetch brings, which is single heads. So that is put in
place and remembered here, by layer, row, head and token; the daemon goes on with the mask, and may send the token's
block later: the same bytes. Where a row has one head, the daemon has put fetched entries in place and into the mask
before it answers, and the source does not send them again.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
from kvd_kernels import accumulate_blocks, gather, partition

from kvd_client.arguments import whole
from kvd_client.arrays import Bytes
from kvd_client.counters import SelectionCounters, no_selections
from kvd_client.decode import DecodeTransfer
from kvd_client.errors import Busy, DeadlineExceeded, InvalidArgument, KvdError
from kvd_client.fetch import FetchHandle
from kvd_client.pending import NOTHING, PendingSelection
from kvd_client.protocol import COUNT_CELLS, MAX_FRAME, ReportSelections
from kvd_client.spec import MASK_LOCAL, MASK_REMOTE
from kvd_client.transfer import Index

__all__ = ["NOTHING", "Lanes", "PendingSelection"]

_FRAME_ROOM = MAX_FRAME - 4096
_SOON_S = 0.001
_COUNT_AT_ONCE = 1 << 18
"""Bytes of KV indices that are counted together."""


class Lanes:
    """What the selections of one :class:`DecodeTransfer` share. Any thread may use it; two selections at a time need
    two slots."""

    def __init__(self, transfer: DecodeTransfer, count_blocks: int = 0) -> None:
        self.layout, self.lengths = transfer.layout, transfer.row_lengths
        self._transfer = transfer
        self._lock = threading.RLock()  # a signal handler may release
        self._known: dict[int, npt.NDArray[np.int8]] = {}
        """Per layer int8 (rows * heads, capacity), as a mask, of what is local for each head; once one was fetched."""
        self._fetches: dict[int, FetchHandle] = {}
        """The last fetch into each slot."""
        self._owners: dict[int, PendingSelection | None] = {}
        """The selection that uses each slot."""
        self._counters = no_selections(self.layout.layers)
        self._blocks: npt.NDArray[np.int64] | None = None
        """(layers, M) selections, since the last report."""
        self._counted = np.zeros(self.layout.layers, np.int64)
        self._uncounted: list[tuple[int, Index]] = []
        """Layers that follow each other and the indices of their selections, of one shape, to be counted at once."""
        self._asked = False
        """Whether the process wants these counts, and not only the daemon."""
        self._lengths = np.asarray(self.lengths, np.int64)
        self._cells: npt.NDArray[np.int64] | None = None
        """(layers, KV heads, cells): what is counted by head beside the blocks."""
        if count_blocks:
            self._begin_counting(count_blocks)

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory(self, layer: int) -> Bytes:
        p = self.layout
        start = p.layer_offset(layer)
        return self._transfer._memory[start : start + p.layer_bytes]

    def load(self, layer: int, slot: int, entries: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> None:
        """Copy entries of a layer, wherever it lies, to their places in a landing slot."""
        p, landing = self.layout, self.landing(slot)
        if p.placed:
            landing.reshape(-1, p.entry_bytes)[places] = self._transfer.tensors.gather(layer, entries)
        else:
            gather(self.memory(layer), p.entry_bytes, entries, landing, places)

    def landing(self, slot: int) -> Bytes:
        p = self.layout
        start = p.landing_offset(slot)
        return self._transfer._memory[start : start + p.rows * p.heads * p.landing_row_bytes]

    def landing_rows(self, slot: int, k: int) -> Bytes:
        """The first ``k`` entries of each row of a slot: uint8 (rows * heads, k, entry_bytes), a view."""
        p = self.layout
        return self.landing(slot).reshape(p.rows * p.heads, p.landing_entries, p.entry_bytes)[:, :k]

    def check(self, layer: int) -> None:
        self._transfer._check(layer)

    # --- the two lanes --------------------------------------------------------------------------------------------

    def split(self, layer: int, index: Index, slot: int, parallel: bool) -> PendingSelection:
        """Check an index and put its remote entries first; see :meth:`DecodeTransfer.select`."""
        p = self.layout
        slot = self._check_slot(slot)
        rows = p.rows * p.heads
        if not isinstance(index, np.ndarray) or index.dtype != np.int32 or index.ndim != 2 or len(index) != rows:
            raise InvalidArgument(
                f"layer {layer}: a KV index of this transfer is an int32 array of shape ({rows}, k)", layer=layer
            )
        if index.shape[1] > p.landing_entries:
            raise InvalidArgument(
                f"layer {layer}: the KV index has {index.shape[1]} entries a row, and landing slots were opened for "
                f"{p.landing_entries}; open the transfer with more landing_entries",
                layer=layer,
                entries=index.shape[1],
                limit=p.landing_entries,
            )
        self._check_free(slot)
        index = np.ascontiguousarray(index)
        short = bool((index == NOTHING).any())
        if short:
            self._check_short(layer, index)
        try:
            with self._lock:
                ordered, counts = self._partition(layer, index, short)
        except (IndexError, ValueError) as error:
            self.check(layer)  # the zero pages of a lease that has ended look like padding
            raise InvalidArgument(f"layer {layer}: {error}", layer=layer) from None
        # From here on the mask has been read, and the lock's barrier keeps the reads of entries behind that.
        selection = self._owners[slot] = PendingSelection(self, layer, slot, ordered, counts, short, parallel)
        return selection

    def _partition(self, layer: int, index: Index, short: bool) -> tuple[Index, Index]:
        p = self.layout
        mask = self._transfer._mask(layer)
        known = self._known.get(layer)
        ordered: Index
        counts: Index
        if known is None and not short:
            ordered, counts = partition(index, mask, p.heads)
            return ordered, counts
        by_head = np.broadcast_to(mask[:, None], (p.rows, p.heads, p.capacity))
        if known is not None:
            # Padding < local < remote, and a token only ever goes from remote to local: the smaller one is the news.
            view = known.reshape(by_head.shape)
            np.minimum(view, by_head, out=view)
            by_head = view
            if not (mask == MASK_REMOTE).any():
                del self._known[layer]  # the mask says it all
            if not short:
                ordered, counts = partition(index, known, 1)
                return ordered, counts
        # One column more, which is local: that is where nothing goes, so that it ends up behind the row's entries.
        wider = np.full((p.rows * p.heads, p.capacity + 1), MASK_LOCAL, np.int8)
        wider[:, :-1] = by_head.reshape(len(wider), p.capacity)
        ordered, counts = partition(np.where(index == NOTHING, np.int32(p.capacity), index), wider, 1)
        ordered[ordered == p.capacity] = NOTHING
        return ordered, counts

    def _check_short(self, layer: int, index: Index) -> None:
        entry = index != NOTHING
        if (entry[:, 1:] > entry[:, :-1]).any():
            raise InvalidArgument(
                f"layer {layer}: -1 stands before an entry in the KV index; put the entries of a row first", layer=layer
            )
        if (index >= self.layout.capacity).any():
            raise InvalidArgument(
                f"layer {layer}: the KV index names token {index.max()}; the part has room for {self.layout.capacity}",
                layer=layer,
            )

    def keep(
        self,
        layer: int,
        slot: int,
        index: Index,
        entries: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        which: npt.NDArray[np.bool_],
    ) -> None:
        """Copy fetched entries to their place in the lease, or in the device's tensors, and remember them; unless the
        daemon has done so."""
        p = self.layout
        if p.keeps_fetched:
            return
        if p.placed:
            values = self.landing(slot).reshape(-1, p.entry_bytes)[places[which]]
            self._transfer.tensors.scatter(layer, entries[which], values)
        else:
            gather(self.landing(slot), p.entry_bytes, places[which], self.memory(layer), entries[which])
        with self._lock:
            known = self._known.get(layer)
            if known is None:
                mask = self._transfer._mask(layer)
                known = self._known[layer] = np.repeat(mask, p.heads, axis=0)
            known[np.nonzero(which)[0], index[which]] = MASK_LOCAL

    def all_local(self, layer: int, index: Index, which: npt.NDArray[np.bool_]) -> bool:
        """Whether the mask has turned local for all of these by now."""
        mask = self._transfer._mask(layer)
        rows = np.nonzero(which)[0] // self.layout.heads
        with self._lock:
            return bool((mask[rows, index[which]] == MASK_LOCAL).all())

    # --- fetches --------------------------------------------------------------------------------------------------

    def begin_fetch(self, layer: int, slot: int, counts: Index, index: Index) -> FetchHandle:
        """See :meth:`DecodeTransfer.begin_fetch`."""
        slot = self._check_slot(slot)
        handle = self.fetch(layer, slot, counts, index)
        self._owners[slot] = None
        return handle

    def fetch(self, layer: int, slot: int, counts: Index, index: Index) -> FetchHandle:
        """Check and send a fetch."""
        self._check_fetch(layer, counts, index)
        self._check_free(slot)
        transfer = self._transfer
        handle = FetchHandle(transfer._connection, transfer._part, layer, slot, counts, index)
        self._fetches[slot] = handle
        return handle

    def end(self) -> None:
        """The transfer has been released: nobody will wait for its fetches."""
        for fetch in self._fetches.values():
            fetch.forget()

    def check_owner(self, slot: int, selection: PendingSelection) -> None:
        """Raise :class:`InvalidArgument` where a slot has been given to somebody else, whose bytes are there now."""
        if self._owners.get(slot) is not selection:
            raise InvalidArgument(
                f"landing slot {slot} has been used for something else since; wait for a selection before its slot is "
                "used again",
                slot=slot,
            )

    def _check_slot(self, slot: int) -> int:
        slots = self.layout.landing_slots
        slot = whole("slot", slot)
        if not 0 <= slot < slots:
            raise InvalidArgument(
                f"landing slot {slot} does not exist; the transfer was opened with "
                + (f"{slots} of them" if slots else "none: give landing_entries"),
                slot=slot,
                slots=slots,
            )
        return slot

    def _check_free(self, slot: int) -> None:
        fetch = self._fetches.get(slot)
        if fetch is None or fetch.done:
            return
        try:
            fetch.wait(_SOON_S)  # reads what may have come already
        except DeadlineExceeded:
            raise Busy(
                f"landing slot {slot} still awaits an earlier fetch; wait for it, or use another slot",
                slot=slot,
                retry_after_s=_SOON_S,
            ) from None
        except KvdError:
            return  # it has been answered, if not well

    def _check_fetch(self, layer: int, counts: Index, index: Index) -> None:
        p = self.layout
        rows = p.rows * p.heads
        for name, array in (("counts", counts), ("index", index)):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                raise InvalidArgument(f"layer {layer}: {name} of a fetch is an int32 array of one axis", layer=layer)
        if len(counts) != rows or int(counts.sum()) != len(index) or (counts < 0).any():
            raise InvalidArgument(
                f"layer {layer}: a fetch of this transfer has {rows} counts, whose sum is the number of indices",
                layer=layer,
            )
        if (counts > p.landing_entries).any():
            raise InvalidArgument(
                f"layer {layer}: a fetch of {counts.max()} entries in a row; landing slots were opened for "
                f"{p.landing_entries}",
                layer=layer,
                limit=p.landing_entries,
            )
        if counts.nbytes + index.nbytes > _FRAME_ROOM:
            raise InvalidArgument(
                f"layer {layer}: a fetch of {len(index)} entries is too large for one request; select fewer, or open "
                "one transfer for each row",
                layer=layer,
                entries=len(index),
            )
        limits = np.repeat(np.repeat(np.asarray(self.lengths, np.int64), p.heads), counts)
        bad = (index < 0) | (index >= limits)
        if bad.any():
            at = int(bad.argmax())
            raise InvalidArgument(
                f"layer {layer}: a fetch of token {index[at]} of a row that has {limits[at]}; name others",
                layer=layer,
            )

    # --- counting -------------------------------------------------------------------------------------------------

    def counters(self) -> SelectionCounters:
        with self._lock:
            return self._counters.plus(no_selections(self.layout.layers))

    def count(self, selection: PendingSelection, waited: float) -> None:
        """Count a selection that is complete."""
        layer, index = selection.layer, selection.index
        with self._lock:
            counters = self._counters
            counters.selects[layer] += 1
            counters.selected[layer] += int((index != NOTHING).sum())
            counters.fetched[layer] += int(selection.counts.sum())
            counters.wait_s[layer] += waited
            counters.fetch_s[layer] += selection.fetch.took_s if selection.fetch is not None else 0.0
            if self._blocks is None:
                return
            if selection.short:
                index = np.where(index == NOTHING, np.iinfo(np.int32).max, index).astype(np.int32)
            waiting = self._uncounted
            if waiting and (layer != waiting[-1][0] + 1 or index.shape != waiting[-1][1].shape):
                self._count_waiting()
            self._uncounted.append((layer, index))
            self._counted[layer] += 1
            if len(self._uncounted) * index.nbytes >= _COUNT_AT_ONCE:
                self._count_waiting()

    def _count_waiting(self) -> None:
        """Count the layers of a step at once: a call for each costs several times as much, in the middle of decode."""
        waiting, self._uncounted = self._uncounted, []
        if not waiting or self._blocks is None:
            return
        first, rows = waiting[0][0], len(self._lengths)
        target = self._blocks[first : first + len(waiting)]
        counts = target if rows == 1 else np.zeros((len(waiting) * rows, target.shape[1]), np.int64)
        index = np.concatenate([index for _, index in waiting])
        accumulate_blocks(index, counts, np.tile(self._lengths, len(waiting)), beyond="skip")
        if rows > 1:
            target += counts.reshape(len(waiting), rows, -1).sum(axis=1)
        if self._cells is not None:
            heads = self._cells.shape[1]
            by_row = np.zeros((len(index), COUNT_CELLS), np.int64)
            lengths = np.tile(np.repeat(self._lengths, self.layout.heads), len(waiting))
            accumulate_blocks(index, by_row, lengths, beyond="skip")
            by_head = by_row.reshape(len(waiting), self.layout.sequences, heads, COUNT_CELLS).sum(axis=1)
            self._cells[first : first + len(waiting)] += by_head

    def _begin_counting(self, blocks: int) -> None:
        layers, heads = self.layout.layers, self.layout.kv_heads
        self._blocks = np.zeros((layers, blocks), np.int64)
        fits = heads > 1 and 4 * layers * (blocks + heads * COUNT_CELLS) <= _FRAME_ROOM
        self._cells = np.zeros((layers, heads, COUNT_CELLS), np.int64) if fits else None

    def count_blocks(self, blocks: int) -> None:
        layers, blocks = self.layout.layers, whole("blocks", blocks)
        if not 1 <= blocks <= _FRAME_ROOM // (4 * layers):
            raise InvalidArgument(
                f"selections can't be counted in {blocks} blocks; give 1 to {_FRAME_ROOM // (4 * layers)} for "
                f"{layers} layers",
                blocks=blocks,
            )
        with self._lock:
            self._uncounted.clear()
            self._begin_counting(blocks)
            self._counted[:] = 0
            self._asked = True

    def report(self) -> None:
        with self._lock:
            self._count_waiting()
            steps = int(self._counted.max())
            if self._blocks is None or not steps:
                return
            counts, cells = self._blocks, self._cells
            self._begin_counting(counts.shape[1])
            self._counted[:] = 0
        message = ReportSelections(
            transfer=self._transfer.id,
            blocks=counts.shape[1],
            steps=steps,
            counts=counts.astype("<f4").tobytes(),
            by_head=b"" if cells is None else cells.astype("<f4").tobytes(),
            asked=self._asked,
        )
        self._transfer._connection.request(message)
