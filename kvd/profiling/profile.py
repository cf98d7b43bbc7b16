"""A profile: importance by prompt length, and the times that say how much of it can be sent (SmartGen, section 4.1)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeAlias

from kvd import __version__
from kvd.errors import FingerprintMismatch, InvalidArgument
from kvd.importance.groups import Group, Groups
from kvd.profiling.timing import NOT_MEASURED, TimeModel, Times, Timing
from kvd_client.spec import MAX_ENTRY_BYTES, MAX_HEADS, MAX_LAYERS, MAX_NAME, MAX_TOKENS, KVSpec

MAX_BLOCKS, MAX_GROUPS, MAX_PARAMETERS = 1 << 16, 64, 64
MAX_NOTES = 1 << 16
"""In characters."""

_MAX_COUNT = 1 << 53
"""Readers in other languages hold JSON numbers as doubles."""

Parameter: TypeAlias = bool | int | float | str


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileGroup(Group):
    """A group as it was recorded; ``samples`` are prompts."""

    steps: int = 0
    """Decode steps of all its prompts together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """What was measured about one model with one KV selection algorithm. Immutable.

    Raises :class:`InvalidArgument` naming the first field that makes no sense, groups that overlap, and groups of
    unequal numbers of blocks.
    """

    model: str
    revision: str = ""
    layers: int
    kv_heads: int
    entry_bytes: int
    """As in ``KVSpec``; says what T_t was measured with. Importance does not depend on it."""
    selector: str
    """Name of the KV selection algorithm."""
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    """The selection algorithm's settings, as it names them."""
    groups: tuple[ProfileGroup, ...]
    """One matrix of shape (layers, blocks) for each range of prompt lengths, with how the KV heads differ where that
    was recorded; sorted."""
    prefill: Times = NOT_MEASURED
    """T_p as measured."""
    transfer: Times = NOT_MEASURED
    """T_t as measured, for entries of ``entry_bytes``."""
    link_rate: int = 0
    """What the link carried, in bytes a second; 0 if that was not measured."""
    created: datetime
    """With a time zone."""
    notes: str = ""
    kvd: str = __version__
    """Version of kvd that recorded it."""

    def __post_init__(self) -> None:
        _check_range("layers", self.layers, 1, MAX_LAYERS)
        _check_range("kv_heads", self.kv_heads, 1, MAX_HEADS)
        _check_range("entry_bytes", self.entry_bytes, 1, MAX_ENTRY_BYTES)
        _check_range("link_rate", self.link_rate, 0, _MAX_COUNT)
        for name in ("model", "selector", "kvd"):
            _check_text(name, getattr(self, name), MAX_NAME, needed=True)
        _check_text("revision", self.revision, MAX_NAME)
        _check_text("notes", self.notes, MAX_NOTES)
        if self.created.utcoffset() is None:
            raise InvalidArgument("created has no time zone; use UTC", field="created")
        object.__setattr__(self, "parameters", MappingProxyType(_checked_parameters(self.parameters)))
        object.__setattr__(self, "groups", _checked_groups(self.groups, self.layers, self.kv_heads))

    @property
    def blocks(self) -> int:
        """M."""
        return self.groups[0].matrix.blocks

    @property
    def importance(self) -> Groups:
        """The matrices by prompt length."""
        return Groups(self.groups)

    def timing(self, entry_bytes: int | None = None) -> Timing | None:
        """T_p and T_t by prompt length, or None where one of them was not measured.

        ``entry_bytes`` are the model's at hand: an fp8 cache takes half the time of the fp16 one that was measured.
        """
        if not (self.prefill and self.transfer):
            return None
        factor = 1.0 if entry_bytes is None else entry_bytes / self.entry_bytes
        scaled = Times(self.transfer.tokens, tuple(seconds * factor for seconds in self.transfer.seconds))
        return Timing(TimeModel(self.prefill), TimeModel(scaled))

    def differences(self, spec: KVSpec) -> dict[str, list[Any]]:
        """Fields that must be equal and are not, as ``{field: [profile's, spec's]}``."""
        names = ("model", "revision", "layers", "kv_heads")
        pairs = {name: [getattr(self, name), getattr(spec, name)] for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def for_model(profile: Profile, spec: KVSpec) -> Profile:
    """The profile, if it is this model's. ``fields`` of the :class:`FingerprintMismatch` that it raises otherwise has
    each difference as ``[profile's, spec's]``."""
    found = profile.differences(spec)
    if found:
        listed = ", ".join(f"{name} {mine!r} instead of {theirs!r}" for name, (mine, theirs) in found.items())
        raise FingerprintMismatch(
            f"the profile is another model's: it has {listed}; record one for {spec.model}", **found
        )
    return profile


def _checked_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidArgument(
            f"there are {len(parameters)} selector parameters; give at most {MAX_PARAMETERS}", field="parameters"
        )
    for name, value in parameters.items():
        field = f"parameters[{name!r}]"
        _check_text("a name in parameters", name, MAX_NAME, needed=True)
        if isinstance(value, str):
            _check_text(field, value, MAX_NAME)
        elif not isinstance(value, bool | int | float) or not math.isfinite(value) or abs(value) > _MAX_COUNT:
            raise InvalidArgument(
                f"{field} is {value!r}; it must be a text, a finite number or a truth value", field=field
            )
    return dict(parameters)


def _checked_groups(groups: tuple[ProfileGroup, ...], layers: int, kv_heads: int) -> tuple[ProfileGroup, ...]:
    if len(groups) > MAX_GROUPS:
        raise InvalidArgument(f"there are {len(groups)} groups; make at most {MAX_GROUPS}", field="groups")
    Groups(groups)
    ordered = tuple(sorted(groups, key=lambda group: group.low))
    for at, group in enumerate(ordered):
        _check_range(f"groups[{at}].high", group.high, 2, 2 * MAX_TOKENS)
        _check_range(f"groups[{at}].samples", group.samples, 0, _MAX_COUNT)
        _check_range(f"groups[{at}].steps", group.steps, 0, _MAX_COUNT)
        _check_range(f"groups[{at}] blocks", group.matrix.blocks, 1, MAX_BLOCKS)
        expected = (layers, ordered[0].matrix.blocks)
        if group.matrix.values.shape != expected:
            raise InvalidArgument(
                f"the matrix of groups[{at}] has shape {group.matrix.values.shape}; all must have {expected}",
                field=f"groups[{at}]",
                shape=list(group.matrix.values.shape),
            )
        heads = group.matrix.heads
        if heads is not None and heads.heads != kv_heads:
            raise InvalidArgument(
                f"groups[{at}] tells {heads.heads} KV heads apart, and the model has {kv_heads}",
                field=f"groups[{at}]",
                heads=[heads.heads, kv_heads],
            )
    return ordered


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}; it must be between {low} and {high}", field=name, value=value)


def _check_text(name: str, value: str, longest: int, *, needed: bool = False) -> None:
    if len(value) > longest or (needed and not value):
        raise InvalidArgument(
            f"{name} has {len(value)} characters; it must have {'1' if needed else '0'} to {longest}", field=name
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} is no Unicode text", field=name) from None
