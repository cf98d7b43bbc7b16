"""The reference engine with KV selection: prefill that summarizes keys, decode that attends to what it selects.

Layers 0 and 1 are complete: decode waits for them and attends to every token. In each later layer a selector names the
prompt tokens that the step's query needs, and the transfer brings their entries from wherever they are. Sliding-window
layers select their whole window. Tokens that decode itself has made are kept here and are always seen.

The order of entries does not matter to attention, but it does to rounding: sums of floats differ in the last bit, and
one bit can tip a token. A transfer returns fetched entries first, so the order tells what happened to be missing.
Attention here therefore always runs over entries in ascending token order (a copy, needed only while something is
missing), and the tokens of every mode and interleaving equal those of a run with everything in one process.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvd_client.counters import ALWAYS_LAYERS, SelectionCounters
from kvd_client.engines import _transformers_adapter as adapter
from kvd_client.engines.local import LocalTransfer, shape_from
from kvd_client.engines.transformers import LocalRun, Prefilled, PrefillTarget, run_prompts, spec_of
from kvd_client.errors import InvalidArgument
from kvd_client.lanes import NOTHING
from kvd_client.protocol import MODES
from kvd_client.selection import select_many
from kvd_client.selectors.base import Index, Selector, Shape

__all__ = [
    "LocalTransfer",
    "Prefix",
    "SelectiveOrigin",
    "SelectiveStep",
    "SelectiveTarget",
    "decode_selective",
    "decode_selective_local",
    "entries_of",
    "landing_entries",
    "prefill_selective",
    "prefix_of",
    "shape_of",
]

Prefix = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, both (rows or 1, KV heads, tokens, head dim)."""


class SelectiveTarget(PrefillTarget, Protocol):
    """Where :func:`prefill_selective` puts K, V and metadata; ``kvd_client.PrefillTransfer`` is one."""

    def metadata(self, layer: int, name: str) -> npt.NDArray[np.uint8]: ...
    def metadata_ready(self, layer: int) -> None: ...


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


@dataclasses.dataclass(frozen=True, slots=True)
class SelectiveStep:
    """One step of decode: one more token for each row."""

    index: int
    """Which new token of a row this is; 1 is the second, since prefill computed number 0."""
    tokens: list[int]
    """A row that has ended repeats the token that ended it."""
    logits: torch.Tensor
    """(rows, vocabulary)"""
    at: float
    """When the tokens were known, on the given clock."""
    waited_s: float
    """How much of the step was spent waiting for layers and metadata that had not arrived."""
    selected: int
    """KV entries that were selected, all rows, heads and layers together."""
    fetched: int
    """Those of them that came on demand."""
    fetch_wait_s: float
    """How much of the step was spent waiting for them."""

    @property
    def on_demand_ratio(self) -> float:
        return self.fetched / self.selected if self.selected else 0.0


def shape_of(model: Any, lengths: Sequence[int]) -> Shape:
    """What a selector must know of a transfer of these prompts."""
    return shape_from(spec_of(model), lengths)


def entries_of(lengths: Sequence[int], share: float) -> list[int]:
    """How many entries of each row are selected: ``share`` of its tokens (0 to 1), rounded up, at least one."""
    if not 0 <= share <= 1:
        raise InvalidArgument(f"share is {share}; it must be between 0 and 1", share=share)
    # A product such as 0.07 * 100 is a hair above the number that is meant.
    return [min(max(math.ceil(share * length - 1e-9), 1), length) for length in lengths]


def landing_entries(model: Any, lengths: Sequence[int], share: float) -> int:
    """The ``landing_entries`` with which to open the sink of a transfer for :func:`decode_selective`."""
    later = adapter.windows(model)[ALWAYS_LAYERS:]
    most = max(entries_of(lengths, share))
    return max([min(window, max(lengths)) if window else most for window in later], default=0)


def prefill_selective(
    model: Any,
    prompts: Sequence[Sequence[int]],
    transfer: SelectiveTarget,
    selector: Selector,
    *,
    chunk: int | None = None,
    prefix: Any = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """As :func:`kvd_client.engines.transformers.prefill`, and summarize each layer's keys for ``selector``.

    ``transfer`` must have been opened with ``selector.metadata(shape_of(model, lengths))``. ``prefix`` is the KV cache
    of the prompts' first tokens, where the source has it from before: :data:`Prefix`, or a cache with
    ``layers[i].keys`` and ``.values``; with one row it is shared by all. It is handed over in all layers at once, and
    only the tokens behind it are computed. Raises :class:`InvalidArgument` for a prefix that does not fit the prompts
    or the model, and for a selector that is an oracle.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise InvalidArgument(f"prompts of lengths {lengths}; give at least one row and one token in each")
    shape = shape_of(model, lengths)
    if not selector.deployable and not isinstance(transfer, LocalTransfer):
        raise InvalidArgument(f"selector {selector.name!r} needs every key: use it in one process only")
    names = [array.name for array in selector.metadata(shape)]

    def put(layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        stop = start + k.shape[2]
        if names:
            # Before the layer's entries, since it is to travel ahead of them.
            selector.summarize(shape, k, start, {name: transfer.metadata(layer, name) for name in names})
            if stop >= shape.longest:
                transfer.metadata_ready(layer)
        transfer.put_layer(layer, k=k, v=v, start=start)
        if on_layer is not None:
            on_layer(layer, stop)

    cache = adapter.PrefillCache(adapter.text_config(model), put)
    cached = 0
    if prefix is not None:
        layers, cached = _prefix(model, prefix, shape)
        for layer, (k, v) in enumerate(layers):
            cache.update(k, v, layer)
    return run_prompts(model, prompts, cache, chunk=chunk, cached=cached)


def prefix_of(model: Any, tokens: Sequence[int], *, chunk: int | None = None) -> Prefix:
    """The KV cache of one row of tokens, as a source would have it from an earlier request."""
    parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def put(layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        parts.setdefault(layer, []).append((k, v))

    run_prompts(model, [tokens], adapter.PrefillCache(adapter.text_config(model), put), chunk=chunk)
    return [
        (torch.cat([k for k, _ in parts[layer]], 2), torch.cat([v for _, v in parts[layer]], 2))
        for layer in sorted(parts)
    ]


def _prefix(model: Any, prefix: Any, shape: Shape) -> tuple[Prefix, int]:
    layers = [(layer.keys, layer.values) for layer in prefix.layers] if hasattr(prefix, "layers") else list(prefix)
    count = len(adapter.windows(model))
    if len(layers) != count:
        raise InvalidArgument(f"the prefix has {len(layers)} layers, the model {count}", layers=[len(layers), count])
    tokens = int(layers[0][0].shape[2])
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, (k, v) in enumerate(layers):
        for x in (k, v):
            if tuple(x.shape[1:]) != (shape.kv_heads, tokens, shape.head_dim) or x.shape[0] not in (1, shape.rows):
                raise InvalidArgument(
                    f"layer {layer} of the prefix has the shape {tuple(x.shape)}; "
                    f"(1 or {shape.rows}, {shape.kv_heads}, {tokens}, {shape.head_dim}) is needed, in windowed layers "
                    "too",
                    layer=layer,
                )
        found.append((k.expand(shape.rows, -1, -1, -1), v.expand(shape.rows, -1, -1, -1)))
    return found, tokens


def decode_selective(
    model: Any,
    first_tokens: Sequence[int],
    transfer: SelectiveOrigin | Sequence[SelectiveOrigin],
    selector: Selector,
    *,
    share: float,
    max_new_tokens: int,
    mode: str = "speculative",
    eos: Collection[int] = (),
    timeout_s: float | None = None,
    on_step: Callable[[SelectiveStep], None] | None = None,
    on_select: Callable[[int, Index], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[SelectiveStep]:
    """Greedy decode over the entries that ``selector`` selects; yields each step as soon as its tokens are known.

    ``transfer`` is one, or several whose rows make one decode batch; all opened with one client, with the metadata of
    :func:`prefill_selective` and :func:`landing_entries`. ``share`` of each row's tokens are selected in each layer
    (:func:`entries_of`). ``mode``, as the transfers have it: ``full`` waits for whole layers, ``partial`` and
    ``profile`` fetch first and then load what is local, ``parallel`` does both at once, and ``speculative`` also says
    when each layer's attention begins. The selection is the same in all modes, and so are the tokens.

    ``timeout_s`` bounds each single wait. ``on_select(layer, index)`` sees each KV index, as it was selected, all
    transfers' rows together where they are one. Otherwise as :func:`kvd_client.engines.transformers.decode`; new
    tokens need no room in the transfers. Raises :class:`InvalidArgument` before anything is computed when a transfer
    does not fit the model, and what ended a transfer.
    """
    transfers = list(transfer) if isinstance(transfer, Sequence) else [transfer]
    state = _Selective(model, transfers, selector, share, mode, max_new_tokens, timeout_s, on_select, clock)
    tokens = list(first_tokens)
    if len(tokens) != len(state.lengths):
        raise InvalidArgument(f"{len(tokens)} first tokens for {len(state.lengths)} rows; give one a row")
    return _steps(state, tokens, max_new_tokens, frozenset(eos), on_step)


def _steps(
    state: _Selective,
    tokens: list[int],
    max_new_tokens: int,
    eos: frozenset[int],
    on_step: Callable[[SelectiveStep], None] | None,
) -> Iterator[SelectiveStep]:
    for index in range(1, max_new_tokens):
        if all(token in eos for token in tokens):
            return
        before = state.counters()
        logits = state.step(tokens)
        chosen = logits.argmax(-1).tolist()
        tokens = [old if old in eos else new for old, new in zip(tokens, chosen, strict=True)]
        spent = [now.since(then) for now, then in zip(state.counters(), before, strict=True)]
        done = SelectiveStep(
            index=index,
            tokens=tokens,
            logits=logits,
            at=state.clock(),
            waited_s=state.waited,
            selected=sum(int(c.selected.sum()) for c in spent),
            fetched=sum(int(c.fetched.sum()) for c in spent),
            # Transfers wait at the same time, layers one after the other.
            fetch_wait_s=float(np.max([c.wait_s for c in spent], axis=0).sum()),
        )
        if on_step is not None:
            on_step(done)
        yield done


def decode_selective_local(
    model: Any,
    prompts: Sequence[Sequence[int]],
    selector: Selector,
    *,
    share: float,
    max_new_tokens: int,
    chunk: int | None = None,
    prefix: Any = None,
    eos: Collection[int] = (),
    on_step: Callable[[SelectiveStep], None] | None = None,
    on_select: Callable[[int, Index], None] | None = None,
) -> LocalRun:
    """Prefill and decode in one process with the same selection, everything local: what runs through kvd must equal."""
    lengths = [len(prompt) for prompt in prompts]
    local = LocalTransfer(spec_of(model), lengths, selector)
    first = prefill_selective(model, prompts, local, selector, chunk=chunk, prefix=prefix)
    tokens, logits = [[token] for token in first.tokens], [[row] for row in first.logits]
    for step in decode_selective(
        model,
        first.tokens,
        local,
        selector,
        share=share,
        max_new_tokens=max_new_tokens,
        mode="full",
        eos=eos,
        on_step=on_step,
        on_select=on_select,
    ):
        for row in range(len(prompts)):
            tokens[row].append(step.tokens[row])
            logits[row].append(step.logits[row])
    return LocalRun(tokens=tokens, logits=[torch.stack(row) for row in logits])


class _Selective:
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
        self.clock, self.eager, self.waited = clock, adapter.is_eager(model), 0.0
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
        self._cache = adapter.DecodeCache(spec.layers, lambda layer, k, v: (k, v), self._seen)
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
        self.waited = 0.0
        positions = torch.tensor([length + self._count for length in self.lengths], device=self._device)[:, None]
        self._count += 1
        ids = torch.tensor(tokens, dtype=torch.long, device=self._device)[:, None]
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

    def _selected(self, layer: int, query: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer not in self._arrived:
            for transfer, names in zip(self._transfers, self._arrays, strict=True):
                if self._mode == "full":
                    self._wait(transfer.wait_ready, layer)
                if names and not window:
                    self._wait(transfer.wait_metadata, layer)
            self._arrived.add(layer)
        indices = [
            self._visible(shape, window) if window else self._select(i, layer, query[rows])
            for i, (shape, rows) in enumerate(zip(self._shapes, self._rows, strict=True))
        ]
        heads = self._spec.kv_heads
        entries = torch.zeros(
            (len(self.lengths), heads, max(index.shape[1] for index in indices), 2 * self._dim), dtype=self._dtype
        )
        sees = np.zeros((len(self.lengths), entries.shape[2]), bool)
        some = [i for i, index in enumerate(indices) if index.shape[1]]  # a window may have left the prompt behind
        requests = [(self._transfers[i], layer, indices[i], 0) for i in some]
        parallel = self._mode not in ("partial", "profile")
        for at, pending in select_many(requests, parallel=parallel, timeout_s=self._timeout_s):
            i = some[at]
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
