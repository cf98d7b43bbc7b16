"""Importance by prompt length (SmartGen, section 4.4: grouped profiling)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ImportanceMatrix


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One matrix for prompts of ``low`` (included) to ``high`` (excluded) tokens."""

    low: int
    high: int
    matrix: ImportanceMatrix
    samples: int = 0
    """Sequences that it was recorded from."""

    def distance(self, length: int) -> float:
        """By what factor a prompt is too short or too long for the group; 1 inside."""
        if length < self.low:
            return self.low / max(length, 1)
        if length >= self.high:
            return length / (self.high - 1)
        return 1.0


class Groups:
    """The groups of one model, by length. Immutable.

    Raises :class:`InvalidArgument` for no groups, an empty or overlapping range, or matrices of unequal layers.
    """

    __slots__ = ("groups",)

    def __init__(self, groups: Iterable[Group]) -> None:
        ordered = tuple(sorted(groups, key=lambda group: group.low))
        if not ordered:
            raise InvalidArgument("a profile needs at least one group of prompt lengths")
        for index, group in enumerate(ordered):
            name, fields = f"the group of {group.low} to {group.high} tokens", {"low": group.low, "high": group.high}
            if not 1 <= group.low < group.high:
                raise InvalidArgument(f"{name} is no range of prompt lengths", **fields)
            if index and group.low < ordered[index - 1].high:
                before = ordered[index - 1]
                raise InvalidArgument(
                    f"{name} overlaps that of {before.low} to {before.high}; give each length to one group", **fields
                )
            if group.matrix.layers != ordered[0].matrix.layers:
                raise InvalidArgument(
                    f"{name} has {group.matrix.layers} layers, the first group {ordered[0].matrix.layers}; "
                    "all must be of one model",
                    layers=[group.matrix.layers, ordered[0].matrix.layers],
                    **fields,
                )
        self.groups = ordered

    @property
    def layers(self) -> int:
        return self.groups[0].matrix.layers

    def __len__(self) -> int:
        return len(self.groups)

    def nearest(self, length: int) -> Group:
        """The group of a prompt's length, or that whose range is nearest by factor (of two, the shorter)."""
        return min(self.groups, key=lambda group: group.distance(length))
