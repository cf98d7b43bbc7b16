"""The reference engine with KV selection: prefill that summarizes keys, decode that attends to what it selects.

Layers 0 and 1 are complete: decode waits for them and attends to every token. In each later layer a selector names the
prompt tokens that the step's query needs, and the transfer brings their entries from wherever they are. Sliding-window
layers select their whole window. Tokens that decode itself has made are kept here and are always seen. For a selector
that looks ahead, the selection of the next layer is made, and what is missing asked for, while a layer computes.

The order of entries does not matter to attention, but it does to rounding: sums of floats differ in the last bit, and
one bit can tip a token. A transfer returns fetched entries first, so the order tells what happened to be missing.
Attention here therefore always runs over entries in ascending token order (a copy, needed only while something is
missing), and the tokens of every mode and interleaving equal those of a run with everything in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvd_client.counters import ALWAYS_LAYERS
from kvd_client.engines import _transformers_adapter as adapter
from kvd_client.engines import prompt
from kvd_client.engines._selective_steps import SelectiveOrigin, SelectiveSteps, entries_of
from kvd_client.engines.local import LocalTransfer, shape_from
from kvd_client.engines.transformers import LocalRun, Prefilled, PrefillTarget, run_prompts, spec_of
from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Chunk, Index, Selector, Shape
from kvd_client.spec import AUTO, KVSpec

if TYPE_CHECKING:
    from kvd_client.client import Client
    from kvd_client.decode import DecodeTransfer
    from kvd_client.prefill import PrefillTransfer

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
    "open_sink",
    "open_source",
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
    fetch_s: float = 0.0
    """How long they took from the request until the answer was seen, all of the step's fetches together."""
    select_s: float = 0.0
    """How much of the step was spent choosing entries: scores and the highest of them."""

    @property
    def on_demand_ratio(self) -> float:
        return self.fetched / self.selected if self.selected else 0.0


def shape_of(model: Any, lengths: Sequence[int]) -> Shape:
    """What a selector must know of a transfer of these prompts."""
    return shape_from(spec_of(model), lengths)


def landing_entries(model: Any, lengths: Sequence[int], share: float) -> int:
    """The ``landing_entries`` with which to open the sink of a transfer for :func:`decode_selective`."""
    later = adapter.windows(model)[ALWAYS_LAYERS:]
    most = max(entries_of(lengths, share))
    return max([min(window, max(lengths)) if window else most for window in later], default=0)


def open_source(
    client: Client,
    request: str,
    model: Any,
    lengths: Sequence[int],
    selector: Selector,
    *,
    spec: KVSpec | None = None,
    mask: str = AUTO,
    **options: Any,
) -> PrefillTransfer:
    """Open a transfer for :func:`prefill_selective`: :meth:`kvd_client.Client.prefill` with the selector's metadata and
    name, and masks by head where they can be. ``spec`` (default: :func:`~kvd_client.engines.transformers.spec_of`),
    ``mask`` and further ``options`` are the client's. Raises as that does.
    """
    spec = spec_of(model) if spec is None else spec
    metadata = selector.metadata(shape_from(spec, lengths))
    return client.prefill(request, spec, lengths, metadata=metadata, selector=selector.name, mask=mask, **options)


def open_sink(
    client: Client,
    request: str,
    model: Any,
    lengths: Sequence[int],
    selector: Selector,
    *,
    share: float,
    spec: KVSpec | None = None,
    mask: str = AUTO,
    **options: Any,
) -> DecodeTransfer:
    """Open a transfer for :func:`decode_selective`, with room for what ``share`` selects; otherwise as
    :func:`open_source`, with the options of :meth:`kvd_client.Client.decode`, ``source`` and ``mode`` among them."""
    spec = spec_of(model) if spec is None else spec
    return client.decode(
        request,
        spec,
        lengths,
        metadata=selector.metadata(shape_from(spec, lengths)),
        selector=selector.name,
        landing_entries=landing_entries(model, lengths, share),
        mask=mask,
        **options,
    )


def prefill_selective(
    model: Any,
    prompts: Sequence[Sequence[int]],
    transfer: SelectiveTarget,
    selector: Selector,
    *,
    chunk: int | None = None,
    prefix: Any = None,
    on_layer: Callable[[int, int], None] | None = None,
    prompt_aware: bool = True,
    on_queries: Callable[[int, list[Index]], None] | None = None,
) -> Prefilled:
    """As :func:`kvd_client.engines.transformers.prefill`, and summarize each layer's keys for ``selector``.

    ``transfer`` must have been opened as :func:`open_source` does. ``prefix`` is the KV cache
    of the prompts' first tokens, where the source has it from before: :data:`Prefix`, or a cache with
    ``layers[i].keys`` and ``.values``; with one row it is shared by all. It is handed over in all layers at once, and
    only the tokens behind it are computed.

    ``prompt_aware``: rank each layer's blocks by what the prompt's last queries select
    (:mod:`kvd_client.engines.prompt`), where ``transfer`` takes rankings; they change the order of sending, and no
    result. ``on_queries(layer, indices)`` sees the KV indices that these queries select, the narrow one of the prompt's
    last query last.

    Raises :class:`InvalidArgument` for a prefix that does not fit the prompts or the model, and for a selector that is
    an oracle.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise InvalidArgument(f"prompts of lengths {lengths}; give at least one row and one token in each")
    shape = shape_of(model, lengths)
    if not selector.deployable and not isinstance(transfer, LocalTransfer):
        raise InvalidArgument(f"selector {selector.name!r} needs every key: use it in one process only")
    windows = adapter.windows(model)
    selector.check(shape, len(windows))
    names = [array.name for array in selector.metadata(shape)]
    computed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    scratch: list[dict[str, Any]] = [{} for _ in windows]
    rank = getattr(transfer, "rank", None) if prompt_aware else None
    by_head = bool(getattr(transfer, "by_head", False))
    if rank is not None:
        rank = functools.partial(rank, wait=False)  # the daemon sorts while the next layer computes
    asked = prompt.PromptQueries(model, shape, selector, rank=rank, told=on_queries, by_head=by_head)

    def attends(layer: int, start: int, queries: torch.Tensor | None) -> None:
        k, v = computed.pop(layer)
        stop = start + k.shape[2]
        arrays = {name: transfer.metadata(layer, name) for name in names}
        if names:
            # Before the layer's entries, since it is to travel ahead of them.
            if windows[layer]:  # selects its window, and needs none; what the memory held before is nobody's business
                for array in arrays.values():
                    array[:] = 0
            else:
                keys = cache.layers[layer].keys
                selector.summarize(shape, Chunk(layer, start, keys, queries, scratch[layer]), arrays)
            if stop >= shape.longest:
                transfer.metadata_ready(layer)
        transfer.put_layer(layer, k=k, v=v, start=start)
        if queries is not None and layer >= ALWAYS_LAYERS and not windows[layer] and asked.wanted:
            # Behind the entries: the link has something to send while the queries are asked.
            asked.add(layer, start, queries, arrays)
        if on_layer is not None:
            on_layer(layer, stop)

    def updated(layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        computed[layer] = k, v

    cache = adapter.PrefillCache(adapter.text_config(model), updated)
    cached = 0
    if prefix is not None:
        layers, cached = _prefix(model, prefix, shape)
        for layer, (k, v) in enumerate(layers):
            cache.update(k, v, layer)
            attends(layer, 0, None)
    with asked.watching():
        return run_prompts(model, prompts, cache, chunk=chunk, cached=cached, watch=attends)


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

    ``transfer`` is one, or several whose rows make one decode batch; all opened with one client, as :func:`open_sink`
    does; a selector that looks ahead needs two landing slots, which is the default. ``share`` of each row's tokens are
    selected in each layer (:func:`entries_of`), by some selectors at most. ``mode``, as the transfers have it: ``full``
    waits for whole layers, ``partial`` and ``profile`` fetch first and then load what is local, ``parallel`` does both
    at once, and ``speculative`` also says when each layer's attention begins. The selection is the same in all modes,
    and so are the tokens.

    ``timeout_s`` bounds each single wait. ``on_select(layer, index)`` sees each KV index, as it was selected, all
    transfers' rows together where they are one. Otherwise as :func:`kvd_client.engines.transformers.decode`; new
    tokens need no room in the transfers. Raises :class:`InvalidArgument` before anything is computed when a transfer
    does not fit the model, and what ended a transfer.
    """
    transfers = list(transfer) if isinstance(transfer, Sequence) else [transfer]
    state = SelectiveSteps(model, transfers, selector, share, mode, max_new_tokens, timeout_s, on_select, clock)
    tokens = list(first_tokens)
    if len(tokens) != len(state.lengths):
        raise InvalidArgument(f"{len(tokens)} first tokens for {len(state.lengths)} rows; give one a row")
    return _steps(state, tokens, max_new_tokens, frozenset(eos), on_step)


def _steps(
    state: SelectiveSteps,
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
            fetch_s=float(np.max([c.fetch_s for c in spent], axis=0).sum()),
            select_s=state.select_s,
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
