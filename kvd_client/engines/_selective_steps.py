"""One decode step after the other over selected entries: what :mod:`kvd_client.engines.selective` decodes with."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvd_client.counters import ALWAYS_LAYERS, SelectionCounters
from kvd_client.engines import _transformers_adapter as adapter
from kvd_client.engines.local import shape_from
from kvd_client.engines.transformers import spec_of
from kvd_client.errors import DeadlineExceeded, InvalidArgument
from kvd_client.lanes import NOTHING
from kvd_client.protocol import MODES
from kvd_client.selection import Pending, select_many
from kvd_client.selectors.base import Index, Selector, Shape


class SelectiveOrigin(Protocol):
    """What :func:`decode_selective` reads from; ``kvd_client.DecodeTransfer`` is one."""

    lengths: tuple[int, ...]

    def wait_ready(self, layer: int | None = None, timeout_s: float | None = None) -> None: ...
    def wait_metadata(self, layer: int | None = None, timeout_s: float | None = None) -> None: ...
    def layer(self, layer: int) -> npt.NDArray[np.uint8]: ...
    def metadata(self, layer: int, name: str) -> npt.NDArray[np.uint8]: ...
    def idle(self, layer: int) -> None: ...
    def prepare_select(self, layer: int, index: Index, *, slot: int = 0, parallel: bool = True) -> Any: ...
    def selection_counters(self) -> SelectionCounters: ...


def entries_of(lengths: Sequence[int], share: float) -> list[int]:
    """How many entries of each row are selected: ``share`` of its tokens (0 to 1), rounded up, at least one."""
    if not 0 <= share <= 1:
        raise InvalidArgument(f"share is {share}; it must be between 0 and 1", share=share)
    # A product such as 0.07 * 100 is a hair above the number that is meant.
    return [min(max(math.ceil(share * length - 1e-9), 1), length) for length in lengths]


@dataclasses.dataclass(slots=True)
class _Begun:
    """A layer's selection, from its query to its entries."""

    query: torch.Tensor | None
    indices: list[Index] = dataclasses.field(default_factory=list)
    """Of each transfer."""
    some: list[int] = dataclasses.field(default_factory=list)
    """The transfers of which anything was selected; what is pending is of these."""
    pending: Iterator[tuple[int, Pending]] | None = None
    """None until it was asked for."""


class SelectiveSteps:
    """State of one decode batch: what its steps have made, and which rows belong to which transfer."""

    def __init__(
        self,
        model: Any,
        transfers: Sequence[SelectiveOrigin],
        selector: Selector,
        share: float,
        mode: str,
        max_new_tokens: int,
        timeout_s: float | None,
        on_select: Callable[[int, Index], None] | None,
        clock: Callable[[], float],
    ) -> None:
        if mode not in MODES:
            raise InvalidArgument(f"there is no mode {mode!r}; give one of {', '.join(MODES)}", mode=mode)
        if not transfers:
            raise InvalidArgument("decode needs at least one transfer")
        self.clock, self.eager = clock, adapter.is_eager(model)
        self.waited = self.select_s = 0.0
        self._model, self._transfers, self._selector = model, transfers, selector
        self._mode, self._timeout_s, self._on_select = mode, timeout_s, on_select
        spec = spec_of(model)
        self._spec, self._dtype, self._device = spec, getattr(torch, spec.dtype), model.device
        self._windows = adapter.windows(model)
        self._shapes = [shape_from(spec, transfer.lengths) for transfer in transfers]
        self._dim = self._shapes[0].head_dim
        self._wanted = [entries_of(transfer.lengths, share) for transfer in transfers]
        self.lengths = [length for transfer in transfers for length in transfer.lengths]
        ends = np.cumsum([len(transfer.lengths) for transfer in transfers]).tolist()
        self._rows = [slice(end - len(t.lengths), end) for end, t in zip(ends, transfers, strict=True)]
        self._arrays = [[array.name for array in selector.metadata(shape)] for shape in self._shapes]
        self._complete: dict[int, torch.Tensor] = {}
        """Layers 0 and 1: (rows, heads, longest row, 2 * head dim), zeros behind shorter rows."""
        self._arrived: set[int] = set()
        """Selecting layers for which nothing need be waited for any more."""
        self._made: list[torch.Tensor | None] = [None] * spec.layers
        """Per layer (rows, heads, max_new_tokens - 1, 2 * head dim): K and V of the new tokens."""
        self._room = max(max_new_tokens - 1, 0)
        self._count = 0
        self._ahead = adapter.Ahead(model, selector.query) if selector.ahead else None
        self._begun: dict[int, _Begun] = {}
        """Layers whose selection was begun while the one before computed; emptied as they are reached."""
        self._cache = adapter.DecodeCache(spec.layers, lambda layer, k, v: (k, v), self._seen)
        for shape in self._shapes:
            selector.check(shape, spec.layers)
        for transfer in transfers:
            self._check(transfer)

    def _seen(self) -> int:
        return max(self.lengths) + max(self._count - 1, 0)

    def _check(self, transfer: SelectiveOrigin) -> None:
        rows, _, heads, entry = transfer.layer(0).shape
        want = (len(transfer.lengths), self._spec.kv_heads, self._spec.entry_bytes)
        if (rows, heads, entry) != want:
            raise InvalidArgument(
                f"a transfer has {rows} rows, {heads} KV heads and {entry} bytes an entry, the model needs {want[0]}, "
                f"{want[1]} and {want[2]}; open it with spec_of(model)"
            )

    def counters(self) -> list[SelectionCounters]:
        return [transfer.selection_counters() for transfer in self._transfers]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append ``tokens``, one a row; return the logits behind them."""
        self.waited = self.select_s = 0.0
        self._begun.clear()
        positions = torch.tensor([length + self._count for length in self.lengths], device=self._device)[:, None]
        self._count += 1
        ids = torch.tensor(tokens, dtype=torch.long, device=self._device)[:, None]
        ahead = self._ahead.watching(positions, self._begin_next) if self._ahead is not None else None
        with ahead or contextlib.nullcontext():
            return adapter.call_step(self._model, ids, positions, self._cache, self)

    def look(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What attention of this layer sees: entries of the prompt in ascending order, then the new tokens."""
        made = self._made[layer]
        if made is None:
            shape = (len(self.lengths), self._spec.kv_heads, self._room, 2 * self._dim)
            made = self._made[layer] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        made[:, :, self._count - 1] = torch.cat([key, value], -1)[:, :, 0]
        window = self._windows[layer]
        if layer < ALWAYS_LAYERS:
            entries, sees = self._all(layer, window)
        else:
            entries, sees = self._selected(layer, query, window)
        # In the first step nearly every layer fetches: the link is never idle for long, and the user waits for it.
        if self._mode == "speculative" and self._count > 1:
            for transfer in self._transfers:
                transfer.idle(layer)
        made = made[:, :, max(self._count - window, 0) if window else 0 : self._count]
        both = torch.cat([entries, made], 2)
        mask = None
        if sees is not None:
            new = torch.ones((len(self.lengths), made.shape[2]), dtype=torch.bool, device=self._device)
            mask = torch.cat([sees, new], 1)[:, None, None, :]
        return both[..., : self._dim], both[..., self._dim :], mask

    def _first(self, length: int, window: int) -> int:
        """The first prompt token that a layer's query sees."""
        return min(max(length + self._count - window, 0), length) if window else 0

    def _all(self, layer: int, window: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        entries = self._complete.get(layer)
        if entries is None:
            shape = (len(self.lengths), self._spec.kv_heads, max(self.lengths), 2 * self._dim)
            entries = torch.zeros(shape, dtype=self._dtype)
            for transfer, rows in zip(self._transfers, self._rows, strict=True):
                self._wait(transfer.wait_ready, layer)
                memory = torch.as_tensor(transfer.layer(layer)).view(self._dtype)
                for at, (row, length) in enumerate(zip(entries[rows], transfer.lengths, strict=True)):
                    row[:, :length] = memory[at, :length].transpose(0, 1)
            entries = self._complete[layer] = entries.to(self._device)
        firsts = [self._first(length, window) for length in self.lengths]
        token = np.arange(min(firsts), max(self.lengths))
        sees = (token >= np.array(firsts)[:, None]) & (token < np.array(self.lengths)[:, None])
        return entries[:, :, min(firsts) :], self._mask(sees)

    def _begin_next(self, layer: int, query_of: Callable[[int], torch.Tensor]) -> None:
        """Attention of ``layer`` is about to begin: choose for the next one by the query that it is going to have, and
        ask for what is missing."""
        following = layer + 1
        if not ALWAYS_LAYERS <= following < self._spec.layers:
            return
        window = self._windows[following]
        query = None if window else query_of(following)
        begun = self._begun[following] = _Begun(query)
        # Metadata that isn't there is no reason to hold up this layer; in mode full the entries come by themselves.
        if self._mode != "full" and self._is_there(following, window):
            self._begin(following, begun)

    def _is_there(self, layer: int, window: int) -> bool:
        """Whether the layer's metadata has arrived everywhere."""
        if layer in self._arrived or window:
            return True
        try:
            for transfer, names in zip(self._transfers, self._arrays, strict=True):
                if names:
                    transfer.wait_metadata(layer, timeout_s=0.0)
        except DeadlineExceeded:
            return False
        self._arrived.add(layer)
        return True

    def _selected(self, layer: int, query: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer not in self._arrived:
            for transfer, names in zip(self._transfers, self._arrays, strict=True):
                if self._mode == "full":
                    self._wait(transfer.wait_ready, layer)
                if names and not window:
                    self._wait(transfer.wait_metadata, layer)
            self._arrived.add(layer)
        begun = self._begun.pop(layer, None) or _Begun(query)
        if begun.pending is None:
            self._begin(layer, begun)
        return self._collected(begun)

    def _begin(self, layer: int, begun: _Begun) -> None:
        """Choose entries, and ask for what is missing of them."""
        window = self._windows[layer]
        if window:
            begun.indices = [self._visible(shape, window) for shape in self._shapes]
        else:
            assert begun.query is not None
            query, since = begun.query, self.clock()
            begun.indices = [self._select(i, layer, query[rows]) for i, rows in enumerate(self._rows)]
            self.select_s += self.clock() - since
        # A window may have left the prompt behind.
        begun.some = [i for i, index in enumerate(begun.indices) if index.shape[1]]
        slot = layer % 2 if self._ahead is not None else 0  # the previous layer's entries are still to be taken
        requests = [(self._transfers[i], layer, begun.indices[i], slot) for i in begun.some]
        parallel = self._mode not in ("partial", "profile")
        begun.pending = select_many(requests, parallel=parallel, timeout_s=self._timeout_s)

    def _collected(self, begun: _Begun) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait for what was begun; the entries in ascending token order, and what each row sees of them."""
        assert begun.pending is not None
        indices, heads = begun.indices, self._spec.kv_heads
        entries = torch.zeros(
            (len(self.lengths), heads, max(index.shape[1] for index in indices), 2 * self._dim), dtype=self._dtype
        )
        sees = np.zeros((len(self.lengths), entries.shape[2]), bool)
        for at, pending in begun.pending:
            i = begun.some[at]
            found = torch.from_numpy(pending.wait(self._timeout_s)).view(self._dtype)
            index = pending.index
            order = np.where(index == NOTHING, np.iinfo(np.int32).max, index)
            if (order[:, 1:] < order[:, :-1]).any():
                found = found[torch.arange(len(index))[:, None], torch.from_numpy(order.argsort(axis=1))]
            k = index.shape[1]
            entries[self._rows[i], :, :k] = found.reshape(-1, heads, k, 2 * self._dim)
            sees[self._rows[i], :k] = indices[i][::heads] != NOTHING
        return entries.to(self._device), self._mask(sees)

    def _select(self, i: int, layer: int, query: torch.Tensor) -> Index:
        arrays = {name: self._transfers[i].metadata(layer, name) for name in self._arrays[i]}
        index = self._selector.select(self._shapes[i], query, arrays, self._wanted[i], layer=layer, step=self._count)
        if self._on_select is not None:
            self._on_select(layer, index)
        return index

    def _visible(self, shape: Shape, window: int) -> Index:
        """A KV index of the tokens in the window."""
        firsts = [self._first(length, window) for length in shape.lengths]
        most = max(length - first for first, length in zip(firsts, shape.lengths, strict=True))
        index = np.full((shape.rows, shape.kv_heads, most), NOTHING, np.int32)
        for row, (first, length) in enumerate(zip(firsts, shape.lengths, strict=True)):
            index[row, :, : length - first] = np.arange(first, length)
        return index.reshape(shape.rows * shape.kv_heads, most)

    def _mask(self, sees: npt.NDArray[np.bool_]) -> torch.Tensor | None:
        return None if sees.all() else torch.from_numpy(sees).to(self._device)

    def _wait(self, wait: Callable[..., None], layer: int) -> None:
        since = self.clock()
        wait(layer, timeout_s=self._timeout_s)
        self.waited += self.clock() - since
