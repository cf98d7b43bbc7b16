"""Everything that depends on how one range of transformers releases looks inside (tried: 5.18.0 and
5.24.0).

Four places let us in. ``Cache.update`` is called once a layer with that layer's post-RoPE K and V, just
before its attention; an attention function can be registered by name and sees ``module.layer_idx``, the
post-RoPE queries, and every keyword that the model was called with; a name without a mask function of its
own makes the models build no mask at all; and hooks before a layer and its ``self_attn`` see what these begin with.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import RESIDUAL

ATTENTION = "kvd"
"""The name under which the decode attention is registered."""
STEP = "kvd_step"
"""The keyword by which a decode step reaches its attention function through the model."""

WATCH = "kvd_watch"
"""The keyword by which :func:`call_watched` reaches the model's attention, and the beginning of the names under which
watched attention is registered."""

Begins = Callable[[int, Callable[[int], torch.Tensor]], None]
"""See :meth:`Ahead.watching`."""
Watch = Callable[[int, torch.Tensor], None]
"""Gets a layer and its attention's post-RoPE query (rows, query heads, tokens, head dim), before attention runs."""

_ROTATE = "apply_rotary_pos_emb"
_NORM = "input_layernorm"
"""What a decoder layer calls the norm before its attention."""

_FORMS = {"full_attention", "sliding_attention"}


class Step(Protocol):
    """What the attention function needs of a decode step."""

    eager: bool

    def look(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What the query (rows, query heads, 1, head dim) looks at, given what the cache returned: K and V, both
        (rows, heads, keys, head dim), and a boolean mask (rows, 1, 1, keys), True where a row's query may look; None
        when it may look everywhere."""


def text_config(model: Any) -> Any:
    """The configuration of the model's decoder, which a multimodal model nests."""
    return model.config.get_text_config(decoder=True)


def windows(model: Any) -> tuple[int, ...]:
    """Window of each layer, 0 for layers that see all tokens. Raises :class:`InvalidArgument` for models
    whose cache is anything else than one K and one V for each token, layer and KV head."""
    config = text_config(model)
    name = type(model).__name__
    forms = set(getattr(config, "layer_types", None) or ["full_attention"])
    if forms - _FORMS or getattr(config, "attention_chunk_size", None):
        raise InvalidArgument(
            f"{name} has layers of the kinds {sorted(forms)}; this engine moves the KV cache of models whose layers "
            f"are all one of {sorted(_FORMS)}",
            layer_types=sorted(forms),
        )
    found: list[int] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise InvalidArgument(
                f"{name} caches {type(layer).__name__} in layer {len(found)}; this engine moves plain K and V only",
                layer=len(found),
            )
        found.append(int(getattr(layer, "sliding_window", 0) or 0))
    if len(found) != config.num_hidden_layers:
        raise InvalidArgument(
            f"{name} caches {len(found)} of its {config.num_hidden_layers} layers; layers that share a cache are not "
            "supported",
            layers=config.num_hidden_layers,
        )
    return tuple(found)


class PrefillCache(DynamicCache):  # type: ignore[misc]
    """The ordinary cache, telling ``put(layer, start, k, v)`` of each layer's new K and V before its
    attention runs; k and v have the shape (rows, heads, new tokens, head dim)."""

    def __init__(self, config: Any, put: Callable[[int, int, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__(config=config)
        self._put = put

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._put(layer_idx, self.get_seq_length(layer_idx), key_states, value_states)
        both: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return both


class Ahead:
    """A layer's query one layer early: its own query projection of the state in which the layer before it begins, at
    the current positions (InfiniGen, section 4.3). Raises :class:`InvalidArgument` for a model whose attention is built
    otherwise.

    ``made_of`` is that state: ``residual``, the residual stream, which the later layer's own norm is applied to, as it
    will be to the stream that reaches it; or ``input``, the attention input, which the earlier layer has normed, as in
    the paper. Models that don't norm before attention have the same for both.
    """

    def __init__(self, model: Any, made_of: str = RESIDUAL) -> None:
        decoder = model.get_decoder()
        self._layers: list[Any] = list(getattr(decoder, "layers", ()))
        self._attention: list[Any] = [getattr(layer, "self_attn", None) for layer in self._layers]
        norms = [getattr(layer, _NORM, None) for layer in self._layers]
        self._norms: list[Any] | None = norms if made_of == RESIDUAL and None not in norms else None
        self._rotary: Any = getattr(decoder, "rotary_emb", None)
        if self._rotary is None or not self._attention:
            raise InvalidArgument(
                f"{type(model).__name__} has no rotary positions that its queries could be told ahead with; choose a "
                "selector that does not look ahead"
            )
        self._types = getattr(text_config(model), "layer_types", None)
        if "layer_type" not in inspect.signature(self._rotary.forward).parameters:
            self._types = None
        self._positions: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, module in enumerate(self._attention):
            if not hasattr(module, "q_proj") or not hasattr(sys.modules[type(module).__module__], _ROTATE):
                raise InvalidArgument(
                    f"layer {layer} of {type(model).__name__} has no query projection of its own, so its queries can't "
                    "be told ahead; choose a selector that does not look ahead",
                    layer=layer,
                )

    @contextlib.contextmanager
    def watching(self, positions: torch.Tensor, begins: Begins) -> Iterator[None]:
        """While this lasts, ``begins(layer, query_of)`` is called before each layer's attention, of tokens at
        ``positions`` (rows, tokens); ``query_of(later)`` is a later layer's post-RoPE query (rows, query heads, tokens,
        head dim), from this layer's state."""
        self._positions.clear()

        def told(layer: int, state: torch.Tensor, kwargs: dict[str, Any]) -> None:
            begins(layer, lambda later: self._query(later, state, positions, kwargs["position_embeddings"]))

        with self._hooked(told):
            yield

    @contextlib.contextmanager
    def states(self, seen: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """While this lasts, ``seen(layer, state)`` gets what queries are made of (rows, tokens, hidden size), before
        each layer's attention."""
        with self._hooked(lambda layer, state, kwargs: seen(layer, state)):
            yield

    def at(self, positions: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """``query_of(layer, state)``: the post-RoPE query (rows, query heads, tokens, head dim) that a layer makes of
        a state (rows, tokens, hidden size) which stands at ``positions`` (rows, tokens), wherever it stood.
        """
        rotary = copy.deepcopy(self._rotary)  # some grow with the positions that they have seen; the model's must not
        known: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

        def query_of(layer: int, state: torch.Tensor) -> torch.Tensor:
            kind = None if self._types is None else self._types[layer]
            if kind not in known:
                where = positions.to(state.device)
                known[kind] = rotary(state, where) if kind is None else rotary(state, where, kind)
            return self._project(layer, state, known[kind])

        return query_of

    @contextlib.contextmanager
    def _hooked(self, told: Callable[[int, torch.Tensor, dict[str, Any]], None]) -> Iterator[None]:
        """``told(layer, state, what else attention gets)``."""
        states: dict[int, torch.Tensor] = {}

        def begins(layer: int, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            states[layer] = _hidden(args, kwargs)

        def attends(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            layer = module.layer_idx
            told(layer, states.pop(layer) if self._norms is not None else _hidden(args, kwargs), kwargs)

        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(self._layers if self._norms is not None else ()):
                hook = functools.partial(begins, layer)
                stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for module in self._attention:
                stack.callback(module.register_forward_pre_hook(attends, with_kwargs=True).remove)
            yield

    def _query(
        self, layer: int, state: torch.Tensor, positions: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        if self._types is not None:  # windowed layers have other angles than full ones
            kind = self._types[layer]
            if kind not in self._positions:
                self._positions[kind] = self._rotary(state, positions, kind)
            embeddings = self._positions[kind]
        return self._project(layer, state, embeddings)

    def _project(self, layer: int, state: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        module = self._attention[layer]
        hidden = state if self._norms is None else self._norms[layer](state)
        query, form = module.q_proj(hidden), (-1, module.head_dim)
        norm: Any = getattr(module, "q_norm", None)
        weight = getattr(norm, "weight", None)
        if norm is None:
            query = query.unflatten(-1, form)
        elif weight is not None and weight.numel() == query.shape[-1]:  # of all heads together
            query = norm(query).unflatten(-1, form)
        else:
            query = norm(query.unflatten(-1, form))
        query = query.transpose(1, 2)
        rotated: torch.Tensor = getattr(sys.modules[type(module).__module__], _ROTATE)(query, query, *embeddings)[0]
        return rotated


def _hidden(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The first of what a module is called with."""
    found: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


class DecodeCache(Cache):  # type: ignore[misc]
    """A cache whose tokens lie elsewhere: ``attend(layer, k, v)`` takes one new token for each row, and
    returns all that the layer's attention shall see, both with the shape (rows, heads, tokens, head
    dim)."""

    def __init__(
        self,
        layers: int,
        attend: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        seen: Callable[[], int],
    ) -> None:
        super().__init__(layers=[_Elsewhere(seen) for _ in range(layers)])
        self._attend = attend

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend(layer_idx, key_states, value_states)


class _Elsewhere(CacheLayerMixin):  # type: ignore[misc]
    """Stands for a layer in :class:`DecodeCache`, which answers the questions about sizes only."""

    is_sliding = False

    def __init__(self, seen: Callable[[], int]) -> None:
        super().__init__()
        self._seen = seen

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the memory is the transfer's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise InvalidArgument("a layer of a DecodeCache can't be updated by itself; call DecodeCache.update")

    def get_seq_length(self) -> int:
        return self._seen()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
    """What ``get_max_length`` is called in the older releases of the range."""


def call(model: Any, input_ids: torch.Tensor, cache: Cache, **kwargs: Any) -> torch.Tensor:
    """Run the model on ``input_ids`` (rows, tokens) with ``cache`` and return its logits; no gradients."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=True, **{name: cache}, **kwargs).logits
    return logits


def call_step(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, step: Step) -> torch.Tensor:
    """Run one decode step: ``input_ids`` and ``positions`` are (rows, 1), the logits (rows, vocabulary)."""
    return call_forced(model, input_ids, positions, cache, step)[:, -1]


def call_forced(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, step: Step) -> torch.Tensor:
    """Run several steps whose tokens are known beforehand: ``input_ids`` and ``positions`` are (rows, steps), the
    logits (rows, steps, vocabulary). The step's query then has as many tokens, and its mask the shape (rows, 1 or query
    heads, steps, keys)."""
    with _attention_of(model, ATTENTION):
        return call(model, input_ids, cache, position_ids=positions, **{STEP: step})


def call_watched(model: Any, input_ids: torch.Tensor, cache: Cache, watch: Watch, **kwargs: Any) -> torch.Tensor:
    """As :func:`call`, and tell ``watch`` of each layer's query; the results are the same bits."""
    config = text_config(model)
    with _attention_of(model, _watched(config._attn_implementation)):
        return call(model, input_ids, cache, **{WATCH: watch}, **kwargs)


def _watched(implementation: str) -> str:
    """The name of an attention that tells of its query and then does what ``implementation`` does."""
    name = f"{WATCH}_{implementation}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, functools.partial(_tell, implementation))
        if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def _tell(
    implementation: str, module: Any, query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    watch: Watch = kwargs.pop(WATCH)
    watch(module.layer_idx, query)
    usual = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if usual is None:  # eager: each model has its own
        usual = sys.modules[type(module).__module__].eager_attention_forward
    both: tuple[torch.Tensor, torch.Tensor | None] = usual(module, query, *args, **kwargs)
    return both


def is_eager(model: Any) -> bool:
    """Whether the model computes attention with its own eager function instead of torch's fused one."""
    return bool(text_config(model)._attn_implementation == "eager")


@contextlib.contextmanager
def _attention_of(model: Any, name: str) -> Iterator[None]:
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's usual attention under the step's mask: the same kernel gives the same bits."""
    step: Step = kwargs.pop(STEP)
    key, value, mask = step.look(module.layer_idx, query, key, value)
    both: tuple[torch.Tensor, torch.Tensor | None]
    if not step.eager:
        both = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return both
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        bias.masked_fill_(~mask, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    both = eager(module, query, key, value, bias, **kwargs)
    return both


AttentionInterface.register(ATTENTION, _attention)
