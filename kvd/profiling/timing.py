"""How long prefill (T_p) and a full transfer (T_t) take by prompt length: the inputs of equation 2 (SmartGen,
section 4.1).

Measured is a handful of lengths, asked for is every length. Between measured lengths a model is linear; a measurement
that says that more tokens took less time is noise, and is averaged with its neighbours. Times are in seconds.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections import defaultdict
from statistics import median

from kvd.errors import InvalidArgument
from kvd.importance.budget import block_budget
from kvd_client.spec import MAX_TOKENS

MAX_POINTS = 1 << 16
MAX_SECONDS = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds by prompt length as measured, in any order, a length once or more often; none where none was measured.

    Raises :class:`InvalidArgument` naming the first point that can't be: no tokens, or a time that is negative or not
    a number.
    """

    tokens: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.seconds) or len(self.tokens) > MAX_POINTS:
            raise InvalidArgument(
                f"there are {len(self.tokens)} lengths and {len(self.seconds)} times; give one time a length, "
                f"{MAX_POINTS} at most",
                tokens=len(self.tokens),
                seconds=len(self.seconds),
            )
        for at, (tokens, seconds) in enumerate(zip(self.tokens, self.seconds, strict=True)):
            if not (1 <= tokens <= MAX_TOKENS and 0 <= seconds <= MAX_SECONDS):
                raise InvalidArgument(
                    f"measurement {at} says {seconds} s for {tokens} tokens; measure it again",
                    at=at,
                    tokens=tokens,
                    seconds=seconds,
                )

    def __len__(self) -> int:
        return len(self.tokens)


NOT_MEASURED = Times()


class TimeModel:
    """Seconds as a function of tokens: never negative, never falling, linear between measured lengths.

    Exact at measured lengths, as long as the measurements do not fall with the length: of a length measured more than
    once the median counts, and neighbours that fall are replaced by their mean. Beyond the last length the slope of the
    last doubling goes on. Below the first length it is the line of the first doubling, but never under the line
    through the origin, so that a constant part is kept and nothing is free. A single length gives proportionality.

    Raises :class:`InvalidArgument` where nothing was measured.
    """

    __slots__ = ("_above", "_below", "seconds", "tokens")

    def __init__(self, times: Times) -> None:
        if not times:
            raise InvalidArgument("there is no measured time; measure at least one prompt length")
        self.tokens, self.seconds = _fitted(times)
        last = self.tokens[-1]
        self._below = self._slope(0, max(bisect_right(self.tokens, 2 * self.tokens[0]) - 1, 1))
        if len(self.tokens) == 1:
            self._below = self.seconds[0] / last
        self._above = self._slope(bisect_right(self.tokens, last // 2) - 1, len(self.tokens) - 1)
        if not self._above:
            # A flat end is noise or overhead; that any number of further tokens are free it can't mean.
            self._above = self._slope(0, len(self.tokens) - 1) or self.seconds[-1] / last

    def __call__(self, tokens: float) -> float:
        """Raises :class:`InvalidArgument` for a number of tokens that is negative or not a number."""
        if not (0 <= tokens < math.inf):
            raise InvalidArgument(f"{tokens} tokens have no time; give a number, 0 or more", tokens=tokens)
        first, last = self.tokens[0], self.tokens[-1]
        if tokens < first:
            line = self.seconds[0] - self._below * (first - tokens)
            return max(line, self.seconds[0] * (tokens / first))
        if tokens >= last:
            return self.seconds[-1] + self._above * (tokens - last)
        at = bisect_right(self.tokens, tokens) - 1
        # Rounding must not lift a value over the next point's.
        return min(self.seconds[at] + self._slope(at, at + 1) * (tokens - self.tokens[at]), self.seconds[at + 1])

    def _slope(self, start: int, stop: int) -> float:
        """Seconds a token between two points, by their numbers or those nearest that exist; 0 for the same point."""
        start, stop = max(start, 0), min(stop, len(self.tokens) - 1)
        if start >= stop:
            return 0.0
        return (self.seconds[stop] - self.seconds[start]) / (self.tokens[stop] - self.tokens[start])


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """T_p and T_t of one model on one pair of nodes."""

    prefill: TimeModel
    transfer: TimeModel

    def prefill_s(self, tokens: int) -> float:
        """T_p of a prompt."""
        return self.prefill(tokens)

    def transfer_s(self, tokens: int) -> float:
        """T_t: the whole KV cache of a prompt."""
        return self.transfer(tokens)

    def budget(self, layers: int, blocks: int, tokens: int) -> int:
        """K_r for a prompt (:func:`kvd.importance.budget.block_budget`)."""
        return block_budget(layers, blocks, self.prefill_s(tokens), self.transfer_s(tokens))


def _fitted(times: Times) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Medians by length, made non-falling by pooling adjacent violators: the least squares fit."""
    by_length: dict[int, list[float]] = defaultdict(list)
    for tokens, seconds in zip(times.tokens, times.seconds, strict=True):
        by_length[tokens].append(seconds)
    lengths = sorted(by_length)
    pools: list[tuple[float, int, int]] = []  # mean, measurements, lengths
    for length in lengths:
        mean, weight, count = float(median(by_length[length])), len(by_length[length]), 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_count = pools.pop()
            mean = (before * before_weight + mean * weight) / (before_weight + weight)
            weight, count = weight + before_weight, count + before_count
        pools.append((mean, weight, count))
    return tuple(lengths), tuple(mean for mean, _, count in pools for _ in range(count))
