"""How alike two profiles are: whether one can stand in for the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import FingerprintMismatch
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.profiling.profile import Profile, ProfileGroup

_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerLikeness:
    """Correlations of one layer's blocks, -1 to 1; None where either profile has one value everywhere."""

    layer: int
    pearson: float | None
    spearman: float | None
    """Of the ranks, ties sharing theirs: only the order decides what is sent first."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLikeness:
    """One group of the first profile and the second's nearest. Lengths are ``(low, high)``, the latter excluded."""

    first: tuple[int, int]
    second: tuple[int, int]
    layers: tuple[LayerLikeness, ...]
    """From layer 2 on: layers 0 and 1 are infinitely important in every profile."""
    overlap: float | None
    """Share of the more important half of the blocks of layers 2 on that both have; .5 by chance."""
    heads: float | None = None
    """Mean over the layers: correlation of how heads differ, cell by cell; None where either does not tell them
    apart, or has other heads or cells."""

    @property
    def pearson(self) -> float | None:
        """Mean over the layers."""
        return mean(layer.pearson for layer in self.layers)

    @property
    def spearman(self) -> float | None:
        """Mean over the layers."""
        return mean(layer.spearman for layer in self.layers)


@dataclasses.dataclass(frozen=True, slots=True)
class Likeness:
    """Two profiles compared over ``blocks`` blocks a layer, the smaller of their numbers."""

    blocks: int
    groups: tuple[GroupLikeness, ...]
    differences: dict[str, list[Any]]
    """What was not the same to begin with, as ``{field: [first's, second's]}``."""

    @property
    def pearson(self) -> float | None:
        """Mean over groups and layers."""
        return mean(group.pearson for group in self.groups)

    @property
    def spearman(self) -> float | None:
        """Mean over groups and layers."""
        return mean(group.spearman for group in self.groups)

    @property
    def overlap(self) -> float | None:
        """Mean over groups."""
        return mean(group.overlap for group in self.groups)

    @property
    def heads(self) -> float | None:
        """Mean over groups."""
        return mean(group.heads for group in self.groups)

    def layers(self) -> tuple[LayerLikeness, ...]:
        """Each layer's means over the groups."""
        return tuple(
            LayerLikeness(same[0].layer, mean(one.pearson for one in same), mean(one.spearman for one in same))
            for same in zip(*(group.layers for group in self.groups), strict=True)
        )


def compare(first: Profile, second: Profile) -> Likeness:
    """Compare each group of the first with the group that the second would use for its middle length.

    Matrices of unequal numbers of blocks are resampled to the smaller. Raises :class:`FingerprintMismatch` where the
    numbers of layers differ; other models, selectors or numbers of heads are listed as differences.
    """
    if first.layers != second.layers:
        raise FingerprintMismatch(
            f"profiles of {first.layers} and {second.layers} layers can't be compared; give two of the same model",
            layers=[first.layers, second.layers],
        )
    blocks = min(first.blocks, second.blocks)
    names = ("model", "revision", "kv_heads", "selector", "parameters", "blocks")
    pairs = {name: [getattr(first, name), getattr(second, name)] for name in names}
    others = second.importance
    groups = []
    for group in first.groups:
        middle = math.isqrt(group.low * (group.high - 1))
        other = others.nearest(middle)
        groups.append(
            GroupLikeness(
                _range(group),
                (other.low, other.high),
                *_likeness(group.matrix, other.matrix, blocks),
                _heads_likeness(group.matrix, other.matrix),
            )
        )
    return Likeness(blocks, tuple(groups), {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def pearson(x: npt.ArrayLike, y: npt.ArrayLike) -> float | None:
    """Correlation of two rows of numbers, shape (n,); None where one of them is constant."""
    return _correlation(np.asarray(x, np.float64), np.asarray(y, np.float64))


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float | None:
    """Correlation of their ranks; equal numbers share the mean of their ranks."""
    return _correlation(_ranks(np.asarray(x)), _ranks(np.asarray(y)))


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that exist."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _likeness(
    first: ImportanceMatrix, second: ImportanceMatrix, blocks: int
) -> tuple[tuple[LayerLikeness, ...], float | None]:
    one, two = (matrix.resampled(blocks).values[ALWAYS_LAYERS:] for matrix in (first, second))
    layers = tuple(
        LayerLikeness(ALWAYS_LAYERS + at, pearson(x, y), spearman(x, y))
        for at, (x, y) in enumerate(zip(one, two, strict=True))
    )
    if not one.size:
        return layers, None
    half = max(1, one.size // 2)
    tops = [set(np.argsort(-values, axis=None, kind="stable")[:half].tolist()) for values in (one, two)]
    return layers, len(tops[0] & tops[1]) / half


def _heads_likeness(first: ImportanceMatrix, second: ImportanceMatrix) -> float | None:
    one, two = first.heads, second.heads
    if one is None or two is None or one.values.shape != two.values.shape:
        return None
    pairs = zip(one.factors()[ALWAYS_LAYERS:], two.factors()[ALWAYS_LAYERS:], strict=True)
    return mean(pearson(x.ravel(), y.ravel()) for x, y in pairs)


def _correlation(x: _Floats, y: _Floats) -> float | None:
    # Compared before the means are taken off: rounding gives constant rows a variance.
    if not x.size or x.min() == x.max() or y.min() == y.max():
        return None
    # Scaled to 1, so that squares of tiny numbers do not vanish.
    x, y = (values - values.mean() for values in (x / np.abs(x).max(), y / np.abs(y).max()))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / scale)) if scale else None


def _ranks(values: npt.NDArray[Any]) -> _Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: _Floats = (last - (counts - 1) / 2)[inverse.reshape(-1)]
    return ranks


def _range(group: ProfileGroup) -> tuple[int, int]:
    return group.low, group.high
