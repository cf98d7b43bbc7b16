"""Importance that follows the workload: a mean of what requests select in which old ones count ever less.

Every report of what some requests selected moves the matrix towards it by a = 1 - 2^(-n / half-life), where n is how
many requests (or decoded tokens) the report is about:

    weight' = weight·(1 - a) + a,        values' = values + (a / weight')·(reported - values).

``weight`` is the share of a full memory that has been filled: 1 where learning began with a profile, 0 where it began
with nothing. So the first report counts wholly where nothing else is known, and an old workload, or the profile of the
start, counts one half after a half-life. What was learnt from nothing of several reports is, as one report about all of
their requests, worth as much as they are one by one. Pure: no clock, no IO.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.importance.heads import HeadImportance
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix

UNITS = ("requests", "tokens")
FRESH = 1 / 64
"""The matrix for new transfers is made anew when so much of it has changed: sorting it costs milliseconds."""

Rates = npt.NDArray[np.float32]
"""Shape (layers, blocks): how often an entry of the block was selected, 0 to 1; layers 0 and 1 do not matter."""


@dataclasses.dataclass(frozen=True, slots=True)
class HalfLife:
    """After how many requests, or tokens that they decoded, what was learnt counts one half."""

    amount: float
    unit: str = "requests"

    @classmethod
    def parse(cls, text: str) -> HalfLife:
        """``"64 requests"``, ``"100000 tokens"``; raises :class:`ValueError` with a sentence."""
        amount, _, unit = text.strip().partition(" ")
        try:
            number = float(amount)
        except ValueError:
            number = math.nan
        if not (0 < number < 1e12) or unit.strip() not in UNITS:
            raise ValueError(f'"{text}" is no half-life, such as "64 requests" or "100000 tokens"')
        return cls(number, unit.strip())

    def moved(self, requests: float, tokens: float) -> float:
        """a: how far a report about so many requests and decoded tokens moves the matrix."""
        return -math.expm1(-(requests if self.unit == "requests" else tokens) / self.amount * math.log(2))


class Learnt:
    """What has been learnt of one model's prompts of about one length."""

    __slots__ = ("_fresh", "_matrix", "head_weight", "heads", "requests", "tokens", "values", "weight")

    def __init__(
        self, layers: int, blocks: int, start: Rates | None = None, heads: HeadImportance | None = None
    ) -> None:
        """``start``: the profile to begin with, of the same shape, or None; ``heads``: how it tells heads apart."""
        self.values: Rates = np.zeros((layers, blocks), np.float32)
        self.weight = 0.0
        self.heads: Rates | None = None if heads is None else heads.values.copy()
        """Shape (layers, KV heads, cells): the same by head, where that is known."""
        self.head_weight = 0.0 if heads is None else 1.0
        self.requests = 0.0
        """Since the start; a rank of a tensor-parallel group counts as its part of one."""
        self.tokens = 0.0
        self._matrix: ImportanceMatrix | None = None
        self._fresh = 0.0
        if start is not None:
            self.values[ALWAYS_LAYERS:] = start[ALWAYS_LAYERS:]
            self.weight = 1.0

    def learn(
        self, rates: Rates, half_life: HalfLife, *, requests: float, tokens: float, heads: Rates | None = None
    ) -> None:
        """Move towards what ``requests`` requests selected, on average, while they decoded ``tokens`` tokens; by head
        where ``heads``, (layers, KV heads, cells), says so. What was known of other heads or cells is forgotten.

        Raises :class:`InvalidArgument`, with nothing learnt, for rates that are no shares, or of another shape.
        """
        check_rates(rates, self.values.shape)
        if heads is not None:
            check_rates(heads.reshape(len(heads), -1), (len(rates), heads[0].size))
        if not (0 < requests < math.inf and 0 <= tokens < math.inf):
            raise InvalidArgument(f"a report of {requests} requests and {tokens} tokens has nothing to learn from")
        moved = half_life.moved(requests, tokens)
        weight = self.weight * (1 - moved) + moved
        if weight <= 0:
            return
        self.values[ALWAYS_LAYERS:] += np.float32(moved / weight) * (
            rates[ALWAYS_LAYERS:] - self.values[ALWAYS_LAYERS:]
        )
        self.weight = weight
        if heads is not None:
            self._learn_heads(heads, moved)
        self.requests += requests
        self.tokens += tokens
        self._fresh += moved / weight

    @property
    def size(self) -> int:
        """Numbers that are kept."""
        return self.values.size + (0 if self.heads is None else self.heads.size)

    def _learn_heads(self, heads: Rates, moved: float) -> None:
        if self.heads is None or self.heads.shape != heads.shape:
            self.heads, self.head_weight = np.zeros(heads.shape, np.float32), 0.0
        self.head_weight = self.head_weight * (1 - moved) + moved
        self.heads += np.float32(moved / self.head_weight) * (heads - self.heads)

    def matrix(self) -> ImportanceMatrix:
        """The matrix for transfers that begin now: immutable, and the same object until enough has been learnt."""
        if self._matrix is None or self._fresh >= FRESH:
            self._matrix = self.newest()
            self._fresh = 0.0
        return self._matrix

    def newest(self) -> ImportanceMatrix:
        """A matrix of everything that was learnt."""
        # Rounding may leave a value just below zero.
        heads = None if self.heads is None else HeadImportance(np.maximum(self.heads, 0))
        return ImportanceMatrix(np.maximum(self.values, 0), heads)


def check_rates(rates: Rates, shape: tuple[int, ...]) -> None:
    """Raise :class:`InvalidArgument` for rates of another shape, or that are not 0 to 1 from layer 2 on."""
    if rates.shape != shape:
        raise InvalidArgument(
            f"what was selected has shape {rates.shape}, and what is learnt {shape}", shape=list(rates.shape)
        )
    # Written so that NaN is wrong too; float32 may have rounded up.
    wrong = ~((rates[ALWAYS_LAYERS:] >= 0) & (rates[ALWAYS_LAYERS:] <= 1 + 1e-6))
    if wrong.any():
        layer, block = (int(at) for at in np.argwhere(wrong)[0])
        raise InvalidArgument(
            f"layer {layer + ALWAYS_LAYERS}, block {block} was selected {rates[layer + ALWAYS_LAYERS, block]} times a "
            "chance; count each selection once",
            layer=layer + ALWAYS_LAYERS,
            block=block,
        )


def packed(rates: Rates) -> tuple[float, bytes]:
    """A scale and a byte for each layer and block: 255 · sqrt(rate / scale). What matters is the order, and most where
    rates are small; the root gives them more of the 256 steps."""
    most = rates[ALWAYS_LAYERS:]
    scale = float(most.max()) if most.size else 0.0
    if not scale:
        return 0.0, bytes(rates.size)
    found = np.zeros(rates.shape, np.uint8)
    found[ALWAYS_LAYERS:] = np.rint(255 * np.sqrt(most / scale))
    return scale, found.tobytes()


def unpacked(scale: float, data: bytes, layers: int, blocks: int) -> Rates:
    """What :func:`packed` made; raises :class:`InvalidArgument` where it can't be that."""
    if len(data) != layers * blocks or not 0 <= scale <= 1 + 1e-6:
        raise InvalidArgument(
            f"{len(data)} bytes of rates up to {scale} do not fit {layers} layers and {blocks} blocks", blocks=blocks
        )
    steps = np.frombuffer(data, np.uint8).reshape(layers, blocks).astype(np.float32) / np.float32(255)
    found: Rates = np.minimum(np.float32(scale) * steps * steps, np.float32(1))
    return found
