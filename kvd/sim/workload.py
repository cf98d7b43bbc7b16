"""What a simulation is of: a model, a cluster, its requests. All drawn from one seed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd_client.protocol import MODES
from kvd_client.spec import MAX_TOKENS, KVSpec

MAX_NODES, MAX_REQUESTS = 4096, 10_000_000
"""Of each kind of node; of all requests together."""
BLOCKS = 200
"""M of the simulated importance: enough for the order, and cheap for each step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV cache: layers, KV heads, and bytes of one token's K and V in one head."""

    layers: int
    kv_heads: int
    entry_bytes: int


MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-3.1-8b": Shape(32, 8, 512),
        "llama-3.1-70b": Shape(80, 8, 512),
        "qwen3-14b": Shape(40, 8, 512),
        "qwen3-32b": Shape(64, 8, 512),
        "smollm2-135m": Shape(30, 3, 256),
        "deepseek-v3": Shape(61, 1, 1152),
    }
)
"""16 bits a value; DeepSeek's is one latent a token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Raises :class:`InvalidArgument` naming the first field that makes no sense. Rates are bytes or tokens a second,
    times seconds."""

    model: str = "llama-3.1-8b"
    shape: Shape = MODELS["llama-3.1-8b"]
    prefill_nodes: int = 2
    decode_nodes: int = 2
    link_rate: float = 25e9 / 8
    delay_s: float = 50e-6
    """One way between any two nodes."""
    arrivals: float = 1.0
    """Requests a second, all nodes together, at random times (Poisson)."""
    duration_s: float = 60.0
    prompt_tokens: int = 8192
    """Median; lengths are drawn log-normally."""
    prompt_sigma: float = 0.5
    prefix_hit: float = 0.75
    """Of each prompt, held by the source from before."""
    output_tokens: int = 256
    """Mean; drawn from an exponential distribution."""
    prefill_rate: float = 10_000.0
    """Tokens a second that a prefill node computes, for one prompt after the other."""
    step_s: float = 0.03
    """A decode step with everything local."""
    batch: int = 32
    """Requests that a decode node decodes at a time; others wait."""
    selected: float = 0.1
    """Of each layer's entries, in each step."""
    novelty: float = 0.2
    """Of a step's selection, what the steps before had not selected."""
    metadata: float = 0.0625
    """Selection metadata that travels ahead, as a share of the cache (Quest's; not in mode ``full``)."""
    surprise: float = 0.5
    """How far a prompt's own importance strays from the profile's: standard deviation of its logarithm."""
    mode: str = "speculative"
    budget: str = "deadline"
    speculative: str = "adaptive"
    fetch_delay_s: float = 0.01
    seed: int = 1

    def __post_init__(self) -> None:
        positive = (
            "prefill_nodes", "decode_nodes", "link_rate", "arrivals", "duration_s", "prompt_tokens", "output_tokens",
            "prefill_rate", "step_s", "batch", "fetch_delay_s",
        )  # fmt: skip
        for name in positive:
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be positive and finite", field=name)
        if self.arrivals * self.duration_s > MAX_REQUESTS:
            raise InvalidArgument(
                f"{self.arrivals:g} requests a second for {self.duration_s:g} s are more than {MAX_REQUESTS}, which no "
                "machine simulates; ask for less",
                field="arrivals",
            )
        bounds = {
            "prefill_nodes": MAX_NODES,
            "decode_nodes": MAX_NODES,
            "prompt_tokens": MAX_TOKENS,
            "output_tokens": MAX_TOKENS,
            "prefix_hit": 1,
            "selected": 1,
            "novelty": 1,
            "metadata": 1,
            "surprise": 5,
            "prompt_sigma": 3,
            "delay_s": 10,
        }
        for name, high in bounds.items():
            if not 0 <= getattr(self, name) <= high:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be between 0 and {high}", field=name)
        if self.mode not in MODES:
            raise InvalidArgument(f"there is no mode {self.mode!r}; choose one of {', '.join(MODES)}", mode=self.mode)
        self.spec.check()
        if self.shape.layers <= ALWAYS_LAYERS:
            raise InvalidArgument(f"a model of {self.shape.layers} layers has nothing to select from", field="layers")

    @property
    def spec(self) -> KVSpec:
        shape = self.shape
        return KVSpec(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            entry_bytes=shape.entry_bytes,
            dtype="float16",
            model=self.model,
        )

    @property
    def token_bytes(self) -> int:
        """Of one token, in all layers."""
        return self.shape.layers * self.shape.kv_heads * self.shape.entry_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    number: int
    arrives_s: float
    tokens: int
    output: int

    @property
    def name(self) -> str:
        return f"request-{self.number}"


def requests(scenario: Scenario) -> Iterator[Request]:
    """In the order of arrival; the same for every mode of one seed."""
    rng = random.Random(f"requests {scenario.seed}")
    now, number = rng.expovariate(scenario.arrivals), 0
    while now < scenario.duration_s:
        length = int(scenario.prompt_tokens * rng.lognormvariate(0.0, scenario.prompt_sigma))
        output = 2 + int(rng.expovariate(1.0 / scenario.output_tokens))
        yield Request(number, now, max(16, min(length, MAX_TOKENS)), output)
        now += rng.expovariate(scenario.arrivals)
        number += 1


def synthetic_importance(layers: int, seed: int) -> ImportanceMatrix:
    """As profiles of real models look: few blocks matter much, the first and the last ones and some others."""
    rng = np.random.default_rng(seed)
    values = rng.lognormal(0.0, 1.2, (layers, BLOCKS))
    values[:, 0] += values.max()
    values[:, -BLOCKS // 10 :] *= 4
    return ImportanceMatrix(values / values.max())


def wanted(scenario: Scenario, known: ImportanceMatrix, request: Request) -> npt.NDArray[np.float64]:
    """What share of each block's tokens one step of this request selects: shape (layers, blocks); mean
    ``scenario.selected`` in each layer but the first two, which are wanted whole."""
    rng = np.random.default_rng((scenario.seed, request.number))
    weights = known.values.astype(np.float64)
    weights[:ALWAYS_LAYERS] = 1.0
    weights = (weights + 1e-9) * rng.lognormal(0.0, scenario.surprise, weights.shape)
    share = weights / weights.sum(axis=1, keepdims=True) * scenario.selected * weights.shape[1]
    for _ in range(8):
        # No block has more tokens to select than it has: what is cut off goes to the others.
        over = np.minimum(share, 1.0)
        lost = scenario.selected * share.shape[1] - over.sum(axis=1, keepdims=True)
        free = np.where(over < 1.0, over, 0.0)
        total = free.sum(axis=1, keepdims=True)
        share = over + np.divide(lost * free, total, out=np.zeros_like(free), where=total > 0)
    found: npt.NDArray[np.float64] = np.minimum(share, 1.0)
    found[:ALWAYS_LAYERS] = 1.0
    return found
