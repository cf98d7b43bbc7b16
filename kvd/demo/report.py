"""The demo's figures, and how they are told to people and to programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run showed. Times in seconds, rates in bits a second."""

    model: str
    prompt_tokens: int
    tokens: list[int]
    """The new tokens, the first (which prefill computed) included."""
    reference_tokens: list[int]
    """What a single process generated from the same prompt."""
    text: str
    kv_bytes: int
    """Size of the prompt's KV cache."""
    bytes_moved: int
    """What the prefill node's daemon counted as sent, masks included."""
    link_configured: float | None
    link_achieved: float | None
    """Bytes moved by the time in which the link had something to move; None if that can't be told."""
    ttft_s: float
    """From the request's arrival to the first token."""
    ttst_s: float | None
    """To the second token; None if there was none."""
    waited_s: float
    """How much of the second token's time was spent waiting for layers that had not arrived."""
    tbt_s: float | None
    """Mean time between tokens from the second one on."""
    layers_before_first: int
    """Layers that were complete at the decode node when the first token was known."""
    layers: int
    peak_memory: dict[str, int]
    """Bytes of each process at its largest."""
    layout: str = ""
    """In which the cache arrived; empty: token-major, as prefill has it."""
    channels: int = 0
    """Of the device that it arrived in."""
    requests: int = 0
    """Pieces in which it crossed the link, where it was regrouped."""
    regroup_s: float = 0.0

    @property
    def tokens_equal(self) -> bool:
        return self.tokens == self.reference_tokens

    @property
    def stall_s(self) -> float | None:
        """From the first token to the second: what the user waits for the KV cache, and one decode step."""
        return None if self.ttst_s is None else self.ttst_s - self.ttft_s

    def to_json(self) -> str:
        """One line of JSON; names carry their units."""
        return json.dumps(
            {
                "model": self.model,
                "prompt_tokens": self.prompt_tokens,
                "new_tokens": len(self.tokens),
                "tokens": self.tokens,
                "reference_tokens": self.reference_tokens,
                "tokens_equal": self.tokens_equal,
                "text": self.text,
                "kv_bytes": self.kv_bytes,
                "bytes_moved": self.bytes_moved,
                "link_configured_bit_per_s": self.link_configured,
                "link_achieved_bit_per_s": self.link_achieved,
                "ttft_s": self.ttft_s,
                "ttst_s": self.ttst_s,
                "stall_s": self.stall_s,
                "stall_waiting_for_kv_s": self.waited_s,
                "tbt_mean_s": self.tbt_s,
                "layers": self.layers,
                "layers_at_sink_before_first_token": self.layers_before_first,
                "peak_memory_bytes": self.peak_memory,
                "layout": self.layout or None,
                "channels": self.channels,
                "requests": self.requests,
                "regroup_s": self.regroup_s,
            }
        )

    def rows(self) -> list[tuple[str, str]]:
        """The table: a name and a value a row."""
        stall = seconds(self.stall_s)
        if self.stall_s is not None:
            stall += f", of which {seconds(self.waited_s)} waiting for KV"
        return [
            ("model", self.model),
            ("prompt", f"{self.prompt_tokens} tokens, KV cache {megabytes(self.kv_bytes)}"),
            ("new tokens", str(len(self.tokens))),
            ("bytes moved", f"{self.bytes_moved:,} ({megabytes(self.bytes_moved)})"),
            *self._regrouped(),
            (
                "link",
                f"{rate(self.link_configured, 'unlimited')}, achieved {rate(self.link_achieved, 'unknown')}",
            ),
            (
                "moved by then",
                f"{self.layers_before_first} of {self.layers} layers when the first token was known",
            ),
            ("TTFT", seconds(self.ttft_s)),
            ("TTST", seconds(self.ttst_s)),
            ("stall (TTST - TTFT)", stall),
            ("TBT (mean)", seconds(self.tbt_s)),
            (
                "peak memory",
                f"{megabytes(sum(self.peak_memory.values()))} in {len(self.peak_memory)} processes",
            ),
            (
                "same tokens as one process",
                "yes" if self.tokens_equal else f"NO, from token {self.first_difference}",
            ),
        ]

    def _regrouped(self) -> list[tuple[str, str]]:
        if not self.layout:
            return []
        how = f"{self.requests} requests, regrouped in {seconds(self.regroup_s)}"
        return [("layout", f"{self.layout} over {self.channels} channels: {how}")]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Further tables: none."""
        return []

    @property
    def first_difference(self) -> int:
        """Index of the first new token that a single process did not generate."""
        pairs = zip(self.tokens, self.reference_tokens, strict=False)
        same = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
        return min(len(self.tokens), len(self.reference_tokens)) if same is None else same


def busy_rate(nbytes: int, ready: Sequence[float], arrived: Sequence[float]) -> float | None:
    """Bits a second while the link had work. Layer ``l`` could leave from ``ready[l]`` on, and had arrived at
    ``arrived[l]``; layers leave in order. None if no time passed."""
    busy, free = 0.0, float("-inf")
    for start, stop in zip(ready, arrived, strict=True):
        busy += max(stop - max(start, free), 0.0)
        free = max(free, stop)
    return nbytes * 8 / busy if busy > 0 else None


def seconds(value: float | None) -> str:
    """``"14.2 s"``, ``"312 ms"``, ``"-"``."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def megabytes(nbytes: int) -> str:
    """Decimal, as link rates are."""
    return f"{nbytes / 1e6:.1f} MB"


def rate(bits: float | None, otherwise: str) -> str:
    """``"200 Mbit/s"``, ``"1.25 Gbit/s"``."""
    if bits is None:
        return otherwise
    value: Any = bits
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} Gbit/s"
