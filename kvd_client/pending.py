"""A selection on its way: the remote lane is asked for, the local one is gathered meanwhile, both end in one slot."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from kvd_kernels import token_entries

from kvd_client.arrays import Bytes
from kvd_client.errors import DeadlineExceeded, KvdError
from kvd_client.fetch import FetchHandle
from kvd_client.transfer import Index

if TYPE_CHECKING:
    from kvd_client.lanes import Lanes

NOTHING = -1
"""In a KV index: no entry. Only at the end of a row."""


class PendingSelection:
    """One select, part by part: :meth:`submit`, :meth:`load_local`, :meth:`wait`, in this order.

    ``index``, int32 (rows * heads, k), has the token positions in the order in which their entries will be in the
    result, and ``counts``, int32 (rows * heads,), says how many of each row are fetched.
    """

    def __init__(
        self, lanes: Lanes, layer: int, slot: int, index: Index, counts: Index, short: bool, parallel: bool
    ) -> None:
        self.layer, self.slot, self.index, self.counts = layer, slot, index, counts
        self.fetch: FetchHandle | None = None
        self._lanes, self._parallel = lanes, parallel
        self._loaded = self._complete = False
        self._error: KvdError | None = None
        self._waited = 0.0
        rows, k = index.shape
        column = np.arange(k)
        self._remote = column < counts[:, None]
        self._local = ~self._remote
        self._nothing = None
        self.short = short
        if short:
            self._nothing = index == NOTHING
            self._local &= ~self._nothing
        p = lanes.layout
        self._entries = token_entries(np.maximum(index, 0) if short else index, p.capacity, p.heads)
        self._places = np.arange(rows)[:, None] * p.landing_entries + column

    def submit(self) -> None:
        """Send the remote lane's request, if there is any. An error is kept for :meth:`wait`."""
        if not self.counts.any():
            return
        try:
            self.fetch = self._lanes.fetch(self.layer, self.slot, self.counts, self.index[self._remote])
        except KvdError as error:
            self._error = error

    def load_local(self) -> None:
        """Gather the local lane; with ``parallel`` false :meth:`wait` does it, after the fetch."""
        if self._parallel:
            self._load_local()

    def _load_local(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        lanes = self._lanes
        self._copy(self._local)
        if self._nothing is not None:
            lanes.landing_rows(self.slot, self.index.shape[1])[self._nothing] = 0

    def _copy(self, which: npt.NDArray[np.bool_]) -> None:
        self._lanes.load(self.layer, self.slot, self._entries[which], self._places[which])

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` will not have to wait for an answer."""
        return self.fetch is None or self.fetch.done

    def wait(self, timeout_s: float | None = None) -> Bytes:
        """What :meth:`kvd_client.DecodeTransfer.select` returns and raises; can be called again, after a
        :class:`DeadlineExceeded` as well."""
        if self._error is not None:
            raise self._error
        self._lanes.check_owner(self.slot, self)
        if not self._complete:
            self.load_local()
            try:
                self._arrive(timeout_s)
            except DeadlineExceeded:
                raise
            except KvdError as error:
                self._error = error
                raise
            self._load_local()
            # A daemon that takes the memory away says so first: only what was gathered before that counts.
            self._lanes.check(self.layer)
            self._complete = True
            self._lanes.count(self, self._waited)
        return self._lanes.landing_rows(self.slot, self.index.shape[1])

    def _arrive(self, timeout_s: float | None) -> None:
        if self.fetch is None:
            return
        since = time.monotonic()
        try:
            self.fetch.wait(timeout_s)
        except DeadlineExceeded:
            raise
        except KvdError:
            # Blocks kept coming meanwhile. A source that has delivered everything may be gone before it reads the
            # request, and then nothing is missing here.
            if not self._lanes.all_local(self.layer, self.index, self._remote):
                raise
            self._copy(self._remote)
            self.counts = np.zeros_like(self.counts)
            return
        finally:
            self._waited += time.monotonic() - since
        self._lanes.keep(self.layer, self.slot, self.index, self._entries, self._places, self._remote)
