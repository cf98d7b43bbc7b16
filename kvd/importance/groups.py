"""Importance by prompt length, and its replacement while transfers run (SmartGen, section 4.4: grouped and periodic
profiling)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

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


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What a transfer takes hold of when it begins and keeps until it ends."""

    version: int
    groups: Groups

    def matrix(self, length: int) -> ImportanceMatrix:
        return self.groups.nearest(length).matrix


class ImportanceStore:
    """The profiles in use, one a model; replaced by read-copy-update.

    :meth:`current` hands out an immutable snapshot; :meth:`replace` puts another in its place for whoever asks next.
    Nobody waits, and a running transfer's order never changes under it.
    """

    __slots__ = ("_snapshots", "_version")

    def __init__(self) -> None:
        self._snapshots: dict[Hashable, Snapshot] = {}
        self._version = 0

    def current(self, model: Hashable) -> Snapshot | None:
        """The newest profile of a model (a key of the caller's choice: id, revision, selector), if there is one."""
        return self._snapshots.get(model)

    def replace(self, model: Hashable, groups: Groups, *, layers: int) -> Snapshot:
        """Install a profile; returns its snapshot, with a version higher than every earlier one.

        Raises :class:`InvalidArgument`, leaving the old one, unless it has the model's number of ``layers``.
        """
        if groups.layers != layers:
            raise InvalidArgument(
                f"the profile has {groups.layers} layers and the model {layers}; it belongs to another model",
                layers=[groups.layers, layers],
            )
        self._version += 1
        snapshot = Snapshot(self._version, groups)
        self._snapshots[model] = snapshot
        return snapshot

    def remove(self, model: Hashable) -> None:
        """Forget a model's profile; transfers that hold it keep it. Does nothing where there is none."""
        self._snapshots.pop(model, None)
