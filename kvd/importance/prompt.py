"""Importance that knows the prompt: what its last queries would select, beside the profile.

With d = a block's importance in the profile and c = (c_1 + 2 c_w)/3, where c_w is the share of (KV head, token of the
block, query) triples over w of the prompt's last queries in which the token is in that query's own selection, and c_1
that of the newest in a narrower one (:mod:`kvd_client.engines.prompt` says which queries, and from where they ask),

    F = (1 - weight) · d + weight · c,        weight = 0.85.

On recorded selections of SmolLM2 (three domains against the profile of a fourth, and chats about texts; ``exact``,
``hata`` and ``infinigen``) a weight of 3/4 closes two to three points less of the gap between profile and optimum at
half and a quarter sent, and four to ten less where 5 % are selected and a tenth is sent; 0.95 gains another point
there and loses as much where a tenth is sent. Smoothing over neighbouring blocks or layers, maxima and geometric means,
and sending the first tokens first won nothing.

Both are shares of a selection, but hardly ever of the same size: the profile has the mean of what decode selects, c
that of what each query was allowed. So c is scaled to the profile's mean, layer by layer; with that, layers that are
ranked and layers that are not yet compare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd_client.protocol import RANK_WEIGHT

WEIGHT = RANK_WEIGHT
"""Of what the queries select, against the profile."""

Values = npt.NDArray[np.float32]


def mixed(last: npt.NDArray[Any], window: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """c of c_1 and c_w."""
    found: npt.NDArray[Any] = (last + 2 * window) / 3
    return found


def combined(profile: Values | None, shares: Values, weight: float = WEIGHT) -> Values:
    """F of one layer: float32 (rows, blocks), on the profile's scale.

    ``profile`` has the shape (blocks,), or (rows, blocks) where rows are heads that it tells apart; ``shares`` (rows,
    blocks) with 0 to 1. Without a profile, or with one that
    knows nothing of this layer, F is ``shares``. Raises :class:`InvalidArgument` where numbers or shapes make no sense.
    """
    check_shares(shares, weight)
    if profile is None or not profile.any():
        return shares
    if profile.shape not in (shares.shape, shares.shape[1:]):
        raise InvalidArgument(
            f"a ranking of {len(shares)} rows and {shares.shape[1]} blocks does not fit a profile of shape "
            f"{profile.shape}",
            blocks=shares.shape[1],
        )
    means = shares.mean(axis=1, keepdims=True)
    known = profile.mean(axis=-1, keepdims=True)
    scale = np.divide(known, means, out=np.zeros_like(means), where=means > 0)
    found: Values = ((1 - weight) * profile + weight * scale * shares).astype(np.float32)
    return found


def check_shares(shares: Values, weight: float) -> None:
    """Raise :class:`InvalidArgument` for shares that are not (rows, blocks) of 0 to 1, or such a weight."""
    if shares.ndim != 2 or not shares.size:
        raise InvalidArgument(f"a ranking has shape (rows, blocks), not {shares.shape}", shape=list(shares.shape))
    # Written so that NaN is wrong too; float32 may have rounded up.
    wrong = ~((shares >= 0) & (shares <= 1 + 1e-6))
    if wrong.any():
        row, block = np.argwhere(wrong)[0].tolist()
        raise InvalidArgument(
            f"a ranking has {shares[row, block]} for row {row}, block {block}; give the share of what could have been "
            "selected there, 0 to 1",
            row=row,
            block=block,
        )
    if not 0 <= weight <= 1:
        raise InvalidArgument(f"the weight of a ranking is {weight}; it must be between 0 and 1", weight=weight)


class Scale:
    """Classes of importance: which class a value belongs to, by the least value of each class. Immutable."""

    __slots__ = ("_first", "_least")

    def __init__(self, least: npt.NDArray[np.float32], first: int = 0) -> None:
        """``least``: descending; class ``first + i`` begins at ``least[i]``, and what is below the last one is in the
        last class."""
        self._least, self._first = -least, first

    @classmethod
    def of_classes(cls, values: Values, classes: npt.NDArray[np.int16]) -> Scale:
        """The scale behind classes that were made of ``values``: both (layers, blocks), classes from 0 on."""
        least = np.full(int(classes.max()) + 1, np.inf, np.float32)
        np.minimum.at(least, classes.ravel(), values.ravel())
        return cls(np.minimum.accumulate(least))

    @classmethod
    def of_sizes(cls, values: Values, counts: npt.NDArray[np.int64]) -> Scale:
        """The scale that gives class ``i`` the share of ``values``, or of what they are a sample of, that ``counts[i]``
        has of all counts; nothing finite is of a class without one that comes before all others."""
        ends = np.cumsum(counts)
        at = np.ceil(ends / max(int(ends[-1]), 1) * values.size).astype(np.int64)
        least = np.concatenate(([np.inf], -np.sort(-values, axis=None)))[at]
        return cls(least.astype(np.float32))

    @classmethod
    def of_values(cls, values: Values, count: int, first: int) -> Scale:
        """``count`` classes of about equal size, the first with number ``first``."""
        at = np.linspace(1, 0, count + 1)[1:]
        return cls(np.quantile(values, at).astype(np.float32), first)

    def classes(self, values: Values) -> npt.NDArray[np.int16]:
        """The class of each value, in the shape of ``values``."""
        found = np.searchsorted(self._least, -values, side="left")
        return (np.minimum(found, len(self._least) - 1) + self._first).astype(np.int16)
