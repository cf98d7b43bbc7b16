"""What this daemon learns of importance while it runs: from its own decode processes, and from its peers.

Selections happen at sinks; the order of sending is the sources' to choose. So a sink's daemon keeps what its processes
report for itself and, in small messages (:class:`kvd.wire.messages.Learnt`), tells every source that has served the
model: each is the mean of what a few requests selected, later ones counting more as the half-life has it, a byte for
each block. A source learns from it what it would have learnt from the requests. Nobody passes on what it heard.

Everything is bounded: the matrices that are kept (the one that was not used for longest goes first), those who are
told, and what waits to be told. Time comes as an argument, in seconds; files are read at the start, and written when
:meth:`Learner.unsaved` is asked for them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import numpy as np
import structlog

from kvd.errors import InvalidArgument, InvalidProfile, KvdError, NotFound
from kvd.importance.heads import MAX_CELLS as MAX_CELLS_OF_HEAD
from kvd.importance.learning import HalfLife, Learnt, Rates, check_rates, packed, unpacked
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix, resampled_columns
from kvd.profiling import files
from kvd.profiling.profile import MAX_BLOCKS, Parameter, Profile, ProfileGroup
from kvd.profiling.recorder import group_range
from kvd.types import NodeId
from kvd.wire import messages as wire
from kvd_client.protocol import MAX_FRAME
from kvd_client.spec import MAX_ENTRY_BYTES, MAX_HEADS, MAX_LAYERS, MAX_NAME, KVSpec
from kvd_client.statuses import LearntStatus

log = structlog.get_logger("kvd.learnt")

SUFFIX = ".kvdlearnt"
MAX_GROUPS = 128
"""Matrices (models, times selectors and ranges of lengths) that are kept."""
MAX_CELLS = 1 << 24
"""Layers times blocks, and what tells their heads apart, of all of them together: 64 MiB."""
MAX_HEAD_CELLS = 1 << 18
"""Layers times KV heads times parts of the prompt that are told apart of one matrix, and told in one message: 80 layers
of 8 heads have a tenth of it."""
MAX_SOURCES = 256
"""Nodes that are told about one model."""
MESSAGES_AT_A_TIME = 8
"""Most messages of one :meth:`Learner.outgoing`: their bytes share the control connection with fetches."""

Key: TypeAlias = tuple[str, str, str]
"""Model, revision, selector."""


@dataclasses.dataclass(slots=True)
class _Group:
    """What is kept for one key and range of lengths."""

    form: tuple[int, int, int]
    """Layers, KV heads, bytes of an entry."""
    learnt: Learnt
    start: str
    """Fingerprint of the profile that it began with, if any."""
    heard: float = 0.0
    """Requests that peers told of."""
    updated: float = 0.0
    dirty: bool = False


class Learner:
    """``start(key, length)`` gives the profile to begin with, and its fingerprint: the installed one.

    ``folder`` holds what was learnt over restarts; None: it is forgotten. A damaged file is said once, and begun anew.
    """

    def __init__(
        self,
        half_life: HalfLife,
        *,
        blocks: int,
        start: Callable[[Key, int], tuple[ImportanceMatrix, str] | None],
        folder: Path | None = None,
        now: float = 0.0,
    ) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self._half_life, self._blocks, self._start, self._folder = half_life, blocks, start, folder
        self._groups: collections.OrderedDict[tuple[Key, int], _Group] = collections.OrderedDict()
        """The one that was used last is last."""
        self._sources: dict[Key, collections.OrderedDict[NodeId, None]] = {}
        self._outbox: collections.OrderedDict[tuple[Key, int], Learnt] = collections.OrderedDict()
        try:
            paths = sorted(folder.glob(f"*{SUFFIX}")) if folder is not None and folder.is_dir() else []
        except OSError as error:
            log.warning("learnt importance not used, begun anew", file=str(folder), reason=error.strerror)
            paths = []
        for path in paths:
            self._load(path, now)

    def __len__(self) -> int:
        return len(self._groups)

    def blocks_of(self, layers: int) -> int:
        """In how many blocks a model's selections are counted: a report must fit into a message."""
        return max(1, min(self._blocks, (MAX_FRAME - 4096) // (4 * layers)))

    # --- learning ---------------------------------------------------------------------------------------------------

    def report(
        self,
        spec: KVSpec,
        selector: str,
        length: int,
        rates: ImportanceMatrix,
        *,
        requests: float,
        tokens: float,
        source: NodeId,
        now: float,
    ) -> None:
        """A process of this node has decoded: ``rates`` of prompts of up to ``length`` tokens. ``source`` is the node
        that sent their caches, which is told; empty: nobody."""
        if not spec.model:
            return  # whose importance would it be?
        key, low = (spec.model, spec.revision, selector), group_range(length)[0]
        form = (spec.layers, spec.kv_heads, spec.entry_bytes)
        mine = self._fitted(rates.values, self.blocks_of(spec.layers))
        heads = None if rates.heads is None else np.minimum(rates.heads.values, np.float32(1))
        if heads is not None and heads.size > MAX_HEAD_CELLS:
            heads = None
        self._learn(key, low, form, mine, heads, requests=requests, tokens=tokens, now=now)
        self.counters["learnt_reports"] += 1
        if source:
            known = self._sources.setdefault(key, collections.OrderedDict())
            known[source] = None
            known.move_to_end(source)
            while len(known) > MAX_SOURCES:
                known.popitem(last=False)
            told = self._outbox.setdefault((key, low), Learnt(*mine.shape))
            told.learn(mine, self._half_life, requests=requests, tokens=tokens, heads=heads)

    def hear(self, node: NodeId, message: wire.Learnt, now: float) -> None:
        """A sink's daemon tells what its processes selected. Raises :class:`InvalidArgument`, with nothing learnt, for
        what no kvd says."""
        if message.version != wire.LEARNT_VERSION:
            raise InvalidArgument(f"it speaks version {message.version} of what was learnt")
        for name, value, most in (
            ("layers", message.layers, MAX_LAYERS),
            ("kv_heads", message.kv_heads, MAX_HEADS),
            ("entry_bytes", message.entry_bytes, MAX_ENTRY_BYTES),
            ("blocks", message.blocks, MAX_BLOCKS),
        ):
            if not 1 <= value <= most:
                raise InvalidArgument(f"{name} is {value}; it must be between 1 and {most}", field=name)
        if not message.model or max(map(len, (message.model, message.revision, message.selector))) > MAX_NAME:
            raise InvalidArgument(f"the model has no name, or a name has more than {MAX_NAME} characters")
        if group_range(message.low)[0] != message.low:
            raise InvalidArgument(f"no range of lengths begins with {message.low} tokens", field="low")
        rates = unpacked(message.scale, message.rates, message.layers, message.blocks)
        heads = None
        if message.cells:
            each = message.kv_heads * message.cells
            if not 1 <= message.cells <= MAX_CELLS_OF_HEAD or message.layers * each > MAX_HEAD_CELLS:
                raise InvalidArgument(f"cells is {message.cells}; that is more than is kept", field="cells")
            flat = unpacked(message.head_scale, message.head_rates, message.layers, each)
            heads = flat.reshape(message.layers, message.kv_heads, message.cells)
        key = (message.model, message.revision, message.selector)
        form = (message.layers, message.kv_heads, message.entry_bytes)
        fitted = self._fitted(rates, self.blocks_of(message.layers))
        how = {"requests": message.requests, "tokens": message.tokens, "now": now}
        group = self._learn(key, message.low, form, fitted, heads, **how)
        group.heard += message.requests
        self.counters["learnt_heard"] += 1

    def _learn(
        self,
        key: Key,
        low: int,
        form: tuple[int, int, int],
        rates: Rates,
        heads: Rates | None,
        *,
        requests: float,
        tokens: float,
        now: float,
    ) -> _Group:
        check_rates(rates, rates.shape)
        group = self._groups.get((key, low))
        # One file holds all lengths of a model.
        known = (
            group.form
            if group is not None
            else next((g.form for (of, _), g in self._groups.items() if of == key), form)
        )
        if known[:2] != form[:2]:
            raise InvalidArgument(
                f"{key[0]} has {form[0]} layers and {form[1]} KV heads there, and {known[0]} and {known[1]} in what "
                "was learnt; give one name and revision to one model only",
                differ=[list(known[:2]), list(form[:2])],
            )
        if group is None:
            started = self._start(key, low)
            values, split = None, None
            if started is not None and started[0].layers == form[0]:
                values, split = self._fitted(started[0].values, rates.shape[1]), started[0].heads
                if split is not None and split.heads != form[1]:
                    split = None
            fingerprint = started[1] if started is not None and values is not None else ""
            group = _Group(form, Learnt(rates.shape[0], rates.shape[1], values, split), fingerprint)
        group.learnt.learn(rates, self._half_life, requests=requests, tokens=tokens, heads=heads)
        group.updated, group.dirty = now, True
        self._groups[key, low] = group
        self._groups.move_to_end((key, low))
        self._make_room()
        return group

    def _make_room(self) -> None:
        def cells() -> int:
            return sum(group.learnt.size for group in self._groups.values())

        while len(self._groups) > 1 and (len(self._groups) > MAX_GROUPS or cells() > MAX_CELLS):
            gone, _ = self._groups.popitem(last=False)
            self._outbox.pop(gone, None)
            if not any(key == gone[0] for key, _ in self._groups):
                self._sources.pop(gone[0], None)
            self.counters["learnt_dropped"] += 1

    @staticmethod
    def _fitted(values: Rates, blocks: int) -> Rates:
        found = np.zeros((len(values), blocks), np.float32)
        later = values[ALWAYS_LAYERS:]
        found[ALWAYS_LAYERS:] = later if values.shape[1] == blocks else resampled_columns(later, blocks)
        return np.minimum(found, np.float32(1))

    # --- using ------------------------------------------------------------------------------------------------------

    def matrix(self, spec: KVSpec, selector: str, length: int, *, nearer_than: float) -> ImportanceMatrix | None:
        """What was learnt of prompts of about this length, for a transfer that begins now; None where there is nothing
        whose lengths are nearer than ``nearer_than`` (a factor, as :meth:`kvd.importance.groups.Group.distance`)."""
        key = (spec.model, spec.revision, selector)
        best: tuple[float, tuple[Key, int]] | None = None
        for at, group in self._groups.items():
            if at[0] == key and group.form[:2] == (spec.layers, spec.kv_heads):
                distance = _distance(at[1], length)
                if distance <= nearer_than and (best is None or distance < best[0]):
                    best = distance, at
        if best is None:
            return None
        self._groups.move_to_end(best[1])
        return self._groups[best[1]].learnt.matrix()

    def forget(self, key: Key) -> None:
        """A new profile has been installed: begin with that."""
        for at in [at for at in self._groups if at[0] == key]:
            del self._groups[at]
            self._outbox.pop(at, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / _file_name(key)).unlink(missing_ok=True)

    def export(self, model: str, selector: str) -> bytes:
        """What was learnt of a model and selector, as a profile file; raises :class:`NotFound`."""
        keys = [key for key, _ in self._groups if key[0] == model and key[2] == selector]
        if not keys:
            known = sorted({f"{key[0]} ({key[2] or 'no selector'})" for key, _ in self._groups})
            raise NotFound(
                f"nothing has been learnt of model {model!r} with selector {selector!r}; learnt so far: "
                f"{', '.join(known) or 'nothing'}",
                model=model,
            )
        return files.encode(self._profile(keys[-1]))

    def statuses(self, now: float) -> list[LearntStatus]:
        """For ``kvd status``."""
        return [
            LearntStatus(
                model=key[0],
                revision=key[1],
                selector=key[2],
                low=low,
                high=2 * low,
                requests=group.learnt.requests,
                heard=group.heard,
                tokens=group.learnt.tokens,
                filled=group.learnt.weight,
                age_s=max(0.0, now - group.updated),
            )
            for (key, low), group in sorted(self._groups.items(), key=lambda item: item[0])
        ]

    # --- telling ----------------------------------------------------------------------------------------------------

    def outgoing(self) -> Iterator[tuple[NodeId, wire.Learnt]]:
        """Take what is to be told, and to whom; the rest waits for the next call."""
        for _ in range(min(MESSAGES_AT_A_TIME, len(self._outbox))):
            (key, low), told = self._outbox.popitem(last=False)
            group = self._groups.get((key, low))
            if group is None or not told.requests:
                continue
            layers, kv_heads, entry_bytes = group.form
            scale, rates = packed(np.clip(told.values, 0, 1))  # rounding may leave a value just beyond
            head_scale, head_rates, each = 0.0, b"", 0
            if told.heads is not None:
                head_scale, head_rates = packed(np.clip(told.heads, 0, 1).reshape(layers, -1))
                each = told.heads.shape[2]
            message = wire.Learnt(
                model=key[0], revision=key[1], selector=key[2], layers=layers, kv_heads=kv_heads,
                entry_bytes=entry_bytes, low=low, blocks=told.values.shape[1], requests=told.requests,
                tokens=told.tokens, scale=scale, rates=rates, cells=each, head_scale=head_scale, head_rates=head_rates,
            )  # fmt: skip
            for node in self._sources.get(key, ()):
                self.counters["learnt_told"] += 1
                yield node, message

    @property
    def waiting(self) -> bool:
        """Whether :meth:`outgoing` has something."""
        return bool(self._outbox)

    # --- files ------------------------------------------------------------------------------------------------------

    def unsaved(self) -> list[tuple[Path, bytes]]:
        """Files to be written (:func:`kvd.profiling.files.replace_file`), each a profile with all groups of a key. One
        that can't be a profile is said, and keeps no other from being written."""
        if self._folder is None:
            return []
        found = []
        keys = dict.fromkeys(key for (key, _), group in self._groups.items() if group.dirty)
        for group in self._groups.values():
            group.dirty = False
        for key in keys:
            try:
                found.append((self._folder / _file_name(key), files.encode(self._profile(key))))
            except KvdError as error:
                log.warning("learnt importance not saved", model=key[0][:100], reason=error.message)
        return found

    def _profile(self, key: Key) -> Profile:
        mine = sorted((low, group) for (of, low), group in self._groups.items() if of == key)
        layers, kv_heads, entry_bytes = mine[0][1].form
        parameters: dict[str, Parameter] = {"learnt": True, "named": bool(key[2]), "start": mine[0][1].start}
        parameters |= {f"filled.{low}": group.learnt.weight for low, group in mine}
        return Profile(
            model=key[0],
            revision=key[1],
            layers=layers,
            kv_heads=kv_heads,
            entry_bytes=entry_bytes,
            selector=key[2] or "unnamed",
            parameters=parameters,
            groups=tuple(
                ProfileGroup(
                    low, 2 * low, group.learnt.newest(), round(group.learnt.requests), round(group.learnt.tokens)
                )
                for low, group in mine
            ),
            created=datetime.now(UTC),
            notes="learnt from the selections of running requests",
        )

    def _load(self, path: Path, now: float) -> None:
        try:
            profile = files.read(path)
            if profile.parameters.get("learnt") is not True:
                raise InvalidProfile(f"{path} was not learnt by a daemon", file=str(path))
            selector = profile.selector if profile.parameters.get("named") is True else ""
            key = (profile.model, profile.revision, selector)
            blocks = self.blocks_of(profile.layers)
            for group in profile.groups:
                started = self._start(key, group.low)
                fingerprint = started[1] if started is not None else ""
                if fingerprint != profile.parameters.get("start", ""):
                    log.info("learnt importance dropped: another profile is installed", model=profile.model)
                    return
                learnt = Learnt(profile.layers, blocks, self._fitted(group.matrix.values, blocks), group.matrix.heads)
                weight = float(profile.parameters.get(f"filled.{group.low}", 0.0))
                learnt.weight = learnt.head_weight = min(max(weight, 1e-9), 1.0)
                learnt.requests, learnt.tokens = float(group.samples), float(group.steps)
                form = (profile.layers, profile.kv_heads, profile.entry_bytes)
                self._groups[key, group.low] = _Group(form, learnt, fingerprint, updated=now)
            self._make_room()
        except (KvdError, ValueError, TypeError) as error:
            # It can be learnt again; a daemon that does not start is worse.
            log.warning("learnt importance not used, begun anew", file=str(path), reason=str(error))
            self.counters["learnt_damaged"] += 1


def _distance(low: int, length: int) -> float:
    """As that of a group from ``low`` to twice that."""
    if length < low:
        return low / max(length, 1)
    return max(1.0, length / (2 * low - 1))


def _file_name(key: Key) -> str:
    return f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:16]}{SUFFIX}"
