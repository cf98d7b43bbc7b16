"""The reference engine: a Hugging Face causal language model that prefills into kvd and decodes out of it.

Any Llama-like model (Llama, Qwen, Gemma and their kin: one K and one V for each token, layer and KV head,
rotary positions, full or sliding-window layers). The prefill side hands each layer over as soon as its K
and V exist; the decode side computes attention on the transferred memory itself and keeps its own tokens
behind the prompt's, in the same memory.

Rows of unequal length are padded on the right on both sides. Under a causal mask a token never sees what
stands behind it, so prefill needs no padding mask and no shifted positions, and a row's tokens lie where a
row alone would have them: ``[0, lengths[row])``.

A model object serves one call at a time: while a decode step runs, the model's attention is ours.

This module imports torch and transformers; ``kvd_client`` itself does not.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from kvd_client.engines import _transformers_adapter as adapter
from kvd_client.errors import InvalidArgument
from kvd_client.spec import KVSpec


class PrefillTarget(Protocol):
    """Where :func:`prefill` puts K and V; ``kvd_client.PrefillTransfer`` is one."""

    def put_layer(self, layer: int, *, k: Any, v: Any, start: int = 0) -> None:
        """Take K and V, both (rows, heads, tokens, head dim), of the tokens from ``start`` on; what is
        behind a row's end is padding, and left alone."""


class DecodeOrigin(Protocol):
    """What :func:`decode` reads from; ``kvd_client.DecodeTransfer`` is one."""

    def wait_ready(self, layer: int | None = None) -> None:
        """Return when every prompt token of the layer is in place; raises what ended the transfer
        otherwise."""

    def layer(self, layer: int) -> Any:
        """Bytes of the layer as a writable array, uint8 (rows, capacity, heads, entry_bytes)."""

    def idle(self, layer: int) -> None:
        """Tell that attention of this layer begins."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill computed besides the KV cache."""

    tokens: list[int]
    """The first new token of each row."""
    logits: torch.Tensor
    """(rows, vocabulary): the logits behind each row's last prompt token."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeStep:
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
    """How much of the step was spent waiting for layers that had not arrived."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRun:
    """What one process computes by itself, each row alone."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    """For each row (its new tokens, vocabulary)."""


def spec_of(model: Any, model_id: str = "", revision: str = "") -> KVSpec:
    """The :class:`KVSpec` of a model. ``model_id`` defaults to the name that the model was loaded by, or
    its type; both sides must give the same. Raises :class:`InvalidArgument` for a model that this engine
    can't serve."""
    config = adapter.text_config(model)
    windows = adapter.windows(model)
    dtype: torch.dtype = model.dtype
    return KVSpec(
        layers=len(windows),
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        entry_bytes=2 * _head_dim(config) * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        model=model_id or model.config.name_or_path or config.model_type,
        revision=revision,
        windows=windows if any(windows) else (),
    ).check()


def prefill(
    model: Any,
    prompts: Sequence[Sequence[int]],
    transfer: PrefillTarget,
    *,
    chunk: int | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """Compute the prompts' KV cache, hand it over layer by layer, and return the first new token of each
    row.

    ``prompts`` are token ids, one row each, of any lengths; ``transfer`` must have been opened with those
    lengths. ``chunk`` computes that many tokens at a time, which bounds the memory of attention.
    ``on_layer(layer, stop)`` is called when the tokens up to ``stop`` of a layer have been handed over. The
    caller finishes the transfer. Raises :class:`InvalidArgument` for empty prompts, and whatever
    ``put_layer`` raises.
    """

    def put(layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        transfer.put_layer(layer, k=k, v=v, start=start)
        if on_layer is not None:
            on_layer(layer, start + k.shape[2])

    cache = adapter.PrefillCache(adapter.text_config(model), put)
    return run_prompts(model, prompts, cache, chunk=chunk)


def run_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    cache: Any,
    *,
    chunk: int | None = None,
    cached: int = 0,
    watch: Callable[[int, int, torch.Tensor], None] | None = None,
) -> Prefilled:
    """Run prompts through the model, whose first ``cached`` tokens ``cache`` holds already; arguments and errors as
    :func:`prefill` has them. ``watch(layer, start, query)`` gets the post-RoPE query (rows, query heads, tokens, head
    dim) of the tokens from ``start`` on, before attention of the layer runs."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) <= cached:
        raise InvalidArgument(
            f"prompts of lengths {lengths}, {cached} tokens of which are cached; prefill needs at least one row and "
            "one new token in each"
        )
    if chunk is not None and chunk < 1:
        raise InvalidArgument(f"chunk is {chunk}; it must be at least 1 token", chunk=chunk)
    longest = max(lengths)
    device = model.device
    ids = torch.zeros((len(prompts), longest), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = torch.as_tensor(list(prompt), dtype=torch.long, device=device)
    last: list[torch.Tensor | None] = [None] * len(prompts)
    for start in range(cached, longest, chunk or longest):
        stop = min(start + (chunk or longest), longest)
        ends = sorted({length - 1 - start for length in lengths if start < length <= stop})
        # Logits are needed behind last tokens only; one position is computed where a chunk has none.
        keep = torch.tensor(ends or [stop - start - 1], device=device)
        if watch is None:
            logits = adapter.call(model, ids[:, start:stop], cache, logits_to_keep=keep)
        else:
            told = functools.partial(_with_start, watch, start)
            logits = adapter.call_watched(model, ids[:, start:stop], cache, told, logits_to_keep=keep)
        for row, length in enumerate(lengths):
            if start < length <= stop:
                last[row] = logits[row, ends.index(length - 1 - start)]
    behind = torch.stack([row for row in last if row is not None])
    return Prefilled(tokens=behind.argmax(-1).tolist(), logits=behind)


def _with_start(watch: Callable[[int, int, torch.Tensor], None], start: int, layer: int, query: torch.Tensor) -> None:
    watch(layer, start, query)


def decode(
    model: Any,
    first_tokens: Sequence[int],
    transfer: DecodeOrigin,
    *,
    lengths: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[DecodeStep]:
    """Greedy decode from transferred memory; yields each step as soon as its tokens are known.

    ``first_tokens`` are what :func:`prefill` returned, ``lengths`` the prompts' tokens. ``max_new_tokens``
    counts the first token, so there are at most ``max_new_tokens - 1`` steps; fewer when every row has met
    a token of ``eos``. The transfer's capacity must hold ``max(lengths) + max_new_tokens - 1`` tokens,
    since the new ones are stored behind the prompts. A layer is waited for when the first step reaches it,
    not before.

    Raises :class:`InvalidArgument` before anything is computed when the transfer does not fit the model,
    and what ended the transfer when a layer does not arrive.
    """
    state = _Decode(model, transfer, list(lengths), max_new_tokens, clock)
    tokens = list(first_tokens)
    if len(tokens) != len(lengths):
        raise InvalidArgument(f"{len(tokens)} first tokens for {len(lengths)} rows; give one a row")
    return _steps(state, tokens, max_new_tokens, frozenset(eos))


def _steps(state: _Decode, tokens: list[int], max_new_tokens: int, eos: frozenset[int]) -> Iterator[DecodeStep]:
    for index in range(1, max_new_tokens):
        if all(token in eos for token in tokens):
            return
        logits, waited = state.step(tokens)
        chosen = logits.argmax(-1).tolist()
        tokens = [old if old in eos else new for old, new in zip(tokens, chosen, strict=True)]
        yield DecodeStep(index=index, tokens=tokens, logits=logits, at=state.clock(), waited_s=waited)


def generate_local(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos: Collection[int] = (),
    on_token: Callable[[], None] | None = None,
) -> LocalRun:
    """What transformers by itself makes of the prompts: its own ``generate``, greedy, one row after the
    other, so that no padding takes part. This is what a run through kvd is compared with."""
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

    class Count(BaseStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            if on_token is not None and value.dim() == 1:
                on_token()

        def end(self) -> None:
            """Nothing is held back."""

    tokens: list[list[int]] = []
    logits: list[torch.Tensor] = []
    for prompt in prompts:
        ids = torch.as_tensor([list(prompt)], dtype=torch.long, device=model.device)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(eos) or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        own, model.generation_config = model.generation_config, config  # what is None would come from its own
        try:
            made = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=Count())
        finally:
            model.generation_config = own
        tokens.append(made.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(made.logits))
    return LocalRun(tokens=tokens, logits=logits)


def eos_of(model: Any) -> frozenset[int]:
    """The tokens that end a text, as the model's generation configuration has them."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


class _Decode:
    """State of one decode: where the rows' tokens lie, and how many there are."""

    def __init__(
        self,
        model: Any,
        transfer: DecodeOrigin,
        lengths: list[int],
        max_new_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        config = adapter.text_config(model)
        self.clock = clock
        self.eager = adapter.is_eager(model)
        self._model, self._transfer = model, transfer
        self._lengths = torch.tensor(lengths, device=model.device)
        self._even = len(set(lengths)) == 1
        self._ends = list(lengths)
        """Tokens of each row, the one that the running step adds included."""
        self._capacity = max(lengths) + max_new_tokens - 1
        self._windows = adapter.windows(model)
        self._dim = _head_dim(config)
        self._dtype: torch.dtype = model.dtype
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._want = (len(lengths), heads, 2 * self._dim * self._dtype.itemsize)
        self._memory: dict[int, torch.Tensor] = {}
        """Per layer (rows, capacity, heads, 2 * head dim), once the layer has arrived."""
        self._masks: dict[int, torch.Tensor | None] = {}
        self._waited = 0.0
        self._cache = adapter.DecodeCache(len(self._windows), self._attend, lambda: max(self._ends) - 1)
        self._check(transfer.layer(0).shape)

    def step(self, tokens: Sequence[int]) -> tuple[torch.Tensor, float]:
        """Append ``tokens``, one a row; return the logits behind them and the seconds spent waiting."""
        self._waited = 0.0
        self._masks.clear()
        positions = torch.tensor(self._ends, device=self._model.device)[:, None]
        self._ends = [end + 1 for end in self._ends]
        ids = torch.tensor(tokens, dtype=torch.long, device=self._model.device)[:, None]
        logits = adapter.call_step(self._model, ids, positions, self._cache, self)
        return logits, self._waited

    def look(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return key, value, self._mask(layer)

    def _mask(self, layer: int) -> torch.Tensor | None:
        window = self._windows[layer]
        if self._even and not 0 < window <= max(self._ends):
            # Every row sees exactly what _attend returns. A full window gets a mask although it hides nothing:
            # so does transformers by itself, and torch's kernels differ in the last bit with and without.
            return None
        if window not in self._masks:
            ends = torch.tensor(self._ends, device=self._model.device)[:, None]
            at = torch.arange(self._first_key(window), max(self._ends), device=self._model.device)
            sees = at < ends
            if window:
                sees &= at >= ends - window
            self._masks[window] = sees[:, None, None, :]
        return self._masks[window]

    def _attend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self._memory.get(layer)
        if memory is None:
            memory = self._memory[layer] = self._arrived(layer)
        self._transfer.idle(layer)
        rows = torch.arange(len(self._ends), device=memory.device)
        at = torch.tensor(self._ends, device=memory.device) - 1
        memory[rows, at, :, : self._dim] = k[:, :, 0]
        memory[rows, at, :, self._dim :] = v[:, :, 0]
        seen = memory[:, self._first_key(self._windows[layer]) : max(self._ends)].permute(0, 2, 1, 3)
        return seen[..., : self._dim], seen[..., self._dim :]

    def _first_key(self, window: int) -> int:
        return max(min(self._ends) - window, 0) if window else 0

    def _arrived(self, layer: int) -> torch.Tensor:
        since = self.clock()
        self._transfer.wait_ready(layer)
        self._waited += self.clock() - since
        raw = torch.as_tensor(self._transfer.layer(layer))
        self._check(raw.shape)
        memory = raw.view(self._dtype)
        if self._model.device.type != "cpu":
            memory = memory[:, : self._capacity].to(self._model.device)
        if not self._even:
            # Masked scores still meet V: whatever the memory held before must not be an infinity or NaN.
            for row, length in enumerate(self._lengths.tolist()):
                memory[row, length : self._capacity].zero_()
        return memory

    def _check(self, shape: Any) -> None:
        rows, capacity, heads, entry = shape
        if (rows, heads, entry) != self._want:
            raise InvalidArgument(
                f"the transfer has {rows} rows, {heads} KV heads and {entry} bytes an entry, the model needs "
                f"{self._want[0]}, {self._want[1]} and {self._want[2]}; open it with spec_of(model) and these lengths"
            )
        if capacity < self._capacity:
            raise InvalidArgument(
                f"the transfer has room for {capacity} tokens a row, but {self._capacity} are needed for the longest "
                "prompt and the new tokens; open it with that capacity",
                capacity=capacity,
                need=self._capacity,
            )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
