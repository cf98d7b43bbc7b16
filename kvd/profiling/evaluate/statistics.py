"""Means with their uncertainty, and paired comparisons of right and wrong answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Statistic = Callable[[npt.NDArray[np.float64]], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """A mean over prompts."""

    value: float
    error: float | None
    """Standard error; None for one prompt."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Raises :class:`ValueError` for no values."""
        if not len(values):
            raise ValueError("there is no mean of nothing")
        array = np.asarray(values, np.float64)
        count = len(array)
        error = float(array.std(ddof=1) / math.sqrt(count)) if count > 1 else None
        return cls(float(array.mean()), error, count)

    def fields(self) -> dict[str, float | int | None]:
        error = None if self.error is None else round(self.error, 6)
        return {"mean": round(self.value, 6), "error": error, "prompts": self.count}


def interval(values: Sequence[Sequence[float]], of: Statistic, *, rounds: int = 1000, seed: int = 0) -> list[float]:
    """The middle 95 % of a statistic of means over bootstrapped prompts.

    ``values``: a row for each prompt; ``of`` gets the means of the columns, and NaN from it is left out. Empty where
    nothing is left.
    """
    array = np.asarray(values, np.float64)
    dice = np.random.default_rng(seed)
    means = array[dice.integers(0, len(array), (rounds, len(array)))].mean(axis=1)
    found = np.array([of(row) for row in means], np.float64)
    found = found[np.isfinite(found)]
    return [round(float(each), 6) for each in np.quantile(found, (0.025, 0.975))] if len(found) else []


def no_worse(lost: int, gained: int) -> float:
    """McNemar's exact test, one-sided: how likely at least ``lost`` of the ``lost + gained`` answers in which two runs
    differ would be lost if losing and gaining were as likely as each other."""
    both = lost + gained
    return sum(math.comb(both, at) for at in range(lost, both + 1)) / 2**both if both else 1.0
