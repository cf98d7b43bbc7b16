"""The daemon's profiles: those installed, and those recorded from what this node really decodes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import structlog

from kvd.blocks import block_bounds
from kvd.errors import Busy, InvalidArgument, InvalidProfile, NotFound
from kvd.importance.counts import HeadCounts, SelectionCounts
from kvd.importance.heads import CELLS
from kvd.importance.matrix import ImportanceMatrix
from kvd.learnt import Key, Learner
from kvd.profiling import files
from kvd.profiling.profile import Profile, ProfileGroup, for_model
from kvd.profiling.recorder import group_range
from kvd.transfer.policy import Profiled
from kvd.types import NodeId
from kvd_client.spec import KVSpec
from kvd_client.statuses import ProfileStatus, RecordingStatus

log = structlog.get_logger("kvd.profiles")

MAX_FILE = 64 << 20
"""Largest profile that can be installed through the local API."""

MAX_RECORDINGS = 64
"""Models (times selectors and groups) whose selections are recorded at a time."""


@dataclasses.dataclass(slots=True)
class _Recording:
    """What was recorded for one group of one model."""

    spec: KVSpec
    counts: SelectionCounts
    by_head: HeadCounts | None = None
    """None where a process did not count so."""
    prompts: int = 0
    steps: int = 0


class Profiles:
    """Profiles by model, revision and selector. Replaced by read-copy-update: a running transfer keeps its matrix.

    ``folder`` holds the files that are read at the start, and takes those that are installed; None: none are kept.
    :attr:`learner`, where there is one, knows more than they do from its first report on.
    """

    def __init__(self, folder: Path | None) -> None:
        self.learner: Learner | None = None
        self._folder = folder
        self._profiles: dict[tuple[str, str, str], Profile] = {}
        self._fingerprints: dict[tuple[str, str, str], str] = {}
        self._recordings: dict[tuple[str, str, str, int], _Recording] = {}
        for path in _by_age(folder) if folder is not None else []:
            try:
                self._take(files.read(path))
            except (InvalidProfile, InvalidArgument) as error:
                # One bad file must not keep the node from serving; `kvd profile check` says what is wrong with it.
                log.warning("profile not used", file=str(path), reason=error.message)

    def __len__(self) -> int:
        return len(self._profiles)

    def install(self, data: bytes) -> Profile:
        """Check a profile file's bytes and use it for transfers that begin from now on.

        Raises :class:`InvalidProfile`, with the old one staying in use, and :class:`InvalidArgument` where the file
        can't be kept.
        """
        profile = files.decode(data, "the profile")
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidArgument(
                    f"the folder for profiles, {str(self._folder)!r}, can't be made: {error.strerror}; see "
                    "selective.profiles in the configuration",
                    file=str(self._folder),
                ) from None
            files.write(profile, self._folder / _file_name(profile))
        self._take(profile)
        if self.learner is not None:
            self.learner.forget((profile.model, profile.revision, profile.selector))
        return profile

    def start(self, key: Key, length: int) -> tuple[ImportanceMatrix, str] | None:
        """What learning begins with: the installed profile's matrix for a length, and the profile's fingerprint."""
        profile = self._profiles.get(key)
        if profile is None:
            return None
        return profile.importance.nearest(length).matrix, self._fingerprints[key]

    def known(self, spec: KVSpec, selector: str, lengths: tuple[int, ...]) -> Profiled:
        """What is known about transfers of this kind; of a profile for another number of layers or heads, nothing."""
        profile, length = self._find(spec, selector), max(lengths)
        if profile is not None and profile.differences(spec):
            profile = None
        group = profile.importance.nearest(length) if profile is not None else None
        learnt = None
        if self.learner is not None:
            nearer_than = group.distance(length) if group is not None else math.inf
            learnt = self.learner.matrix(spec, selector, length, nearer_than=nearer_than)
        if profile is None or group is None:
            return Profiled(matrix=learnt)
        timing = profile.timing(spec.entry_bytes)
        return Profiled(
            matrix=_split(learnt, group.matrix) if learnt is not None else group.matrix,
            prefill_s=timing.prefill_s(length) if timing else 0.0,
            transfer_s=timing.transfer_s(length) * len(lengths) if timing else 0.0,
        )

    def record(
        self,
        spec: KVSpec,
        selector: str,
        lengths: tuple[int, ...],
        *,
        heads: int,
        steps: int,
        counts: bytes,
        blocks: int,
        by_head: bytes = b"",
        asked: bool = True,
        source: NodeId = "",
        now: float = 0.0,
    ) -> None:
        """Add what one transfer selected: float32 (layers, blocks), summed over rows, heads and steps; and ``by_head``,
        float32 (layers, heads, cells), which counts where the transfer has all of the model's heads.

        The learner learns from it, if there is one, and tells ``source``; what a process ``asked`` for is recorded.
        Raises :class:`InvalidArgument` for counts that can't be, and :class:`Busy` when too many models are recorded.
        """
        if not 1 <= blocks <= 1 << 16 or len(counts) != 4 * spec.layers * blocks or not 1 <= steps <= 1 << 24:
            raise InvalidArgument(
                f"{len(counts)} bytes of counts do not fit {spec.layers} layers, {blocks} blocks and {steps} steps",
                blocks=blocks,
            )
        counted = _checked_counts(spec.layers, blocks, counts, lengths, heads * steps)
        cells = _checked_cells(spec.layers, heads, by_head, lengths, steps) if by_head else None
        if heads != spec.kv_heads:
            cells = None  # a tensor-parallel rank's, which say nothing of the others
        if self.learner is not None:
            self.learner.report(
                spec,
                selector,
                max(lengths),
                counted.matrix(cells),
                requests=len(lengths) * heads / spec.kv_heads,
                tokens=float(steps * len(lengths)),
                source=source,
                now=now,
            )
        if not asked:
            return
        model = (spec.model, spec.revision, selector)
        key = (*model, group_range(max(lengths))[0])
        # All groups of a profile must fit together, whatever their lengths.
        for known, other in self._recordings.items():
            mine = [spec.layers, spec.kv_heads, blocks]
            theirs = [other.spec.layers, other.spec.kv_heads, other.counts.blocks]
            if known[:3] == model and mine != theirs:
                raise InvalidArgument(
                    f"selections of {spec.model} are being recorded with {theirs[0]} layers, {theirs[1]} KV heads and "
                    f"{theirs[2]} blocks, not {mine}; name other models differently",
                    differ=[theirs, mine],
                )
        recording = self._recordings.get(key)
        if recording is None:
            if len(self._recordings) >= MAX_RECORDINGS:
                raise Busy(
                    f"selections of {MAX_RECORDINGS} models and lengths are being recorded; export and restart",
                    retry_after_s=3600.0,
                )
            recording = _Recording(spec, SelectionCounts(spec.layers, blocks))
            recording.by_head = HeadCounts(spec.layers, spec.kv_heads) if cells is not None else None
        recording.counts.merge(counted)
        if recording.by_head is not None and cells is not None:
            recording.by_head.merge(cells)
        recording.prompts += len(lengths)
        recording.steps += steps * len(lengths)
        self._recordings[key] = recording

    def export(self, model: str, selector: str, *, learnt: bool = False) -> bytes:
        """What was recorded for a model and selector, or ``learnt``, as a profile file; raises :class:`NotFound`."""
        if learnt:
            if self.learner is None:
                raise NotFound(
                    "this daemon does not learn; set profile.learn in its configuration, and restart it", model=model
                )
            return self.learner.export(model, selector)
        found = {key: r for key, r in self._recordings.items() if key[0] == model and key[2] == selector}
        if not found:
            known = sorted({f"{key[0]} ({key[2] or 'no selector'})" for key in self._recordings})
            raise NotFound(
                f"nothing has been recorded for model {model!r} with selector {selector!r}; recorded so far: "
                f"{', '.join(known) or 'nothing'}",
                model=model,
            )
        spec = list(found.values())[-1].spec  # of several revisions, the one that was begun last
        found = {key: r for key, r in found.items() if key[1] == spec.revision}
        groups = tuple(
            ProfileGroup(key[3], 2 * key[3], r.counts.matrix(r.by_head), r.prompts, r.steps) for key, r in found.items()
        )
        profile = Profile(
            model=spec.model,
            revision=spec.revision,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            entry_bytes=spec.entry_bytes,
            selector=selector or "unnamed",
            groups=groups,
            created=datetime.now(UTC),
        )
        return files.encode(for_model(profile, spec))

    def installed(self) -> list[ProfileStatus]:
        """The profiles in use, for status."""
        return [
            ProfileStatus(
                model=profile.model,
                revision=profile.revision,
                selector=profile.selector,
                groups=[(group.low, group.high) for group in profile.groups],
                fingerprint=self._fingerprints[key],
            )
            for key, profile in sorted(self._profiles.items())
        ]

    def recorded(self) -> list[RecordingStatus]:
        """What could be exported, for status."""
        return [
            RecordingStatus(
                model=model,
                revision=revision,
                selector=selector,
                low=low,
                high=2 * low,
                prompts=recording.prompts,
                steps=recording.steps,
            )
            for (model, revision, selector, low), recording in sorted(self._recordings.items())
        ]

    def _take(self, profile: Profile) -> None:
        key = (profile.model, profile.revision, profile.selector)
        self._profiles[key], self._fingerprints[key] = profile, files.fingerprint(profile)

    def _find(self, spec: KVSpec, selector: str) -> Profile | None:
        exact = self._profiles.get((spec.model, spec.revision, selector))
        if exact is not None or selector:
            return exact
        # Block importance depends little on the algorithm: where none is named, the newest profile will do.
        mine = [
            p for (model, revision, _), p in self._profiles.items() if (model, revision) == (spec.model, spec.revision)
        ]
        return max(mine, key=lambda profile: profile.created, default=None)


def _split(learnt: ImportanceMatrix, recorded: ImportanceMatrix) -> ImportanceMatrix:
    """What was learnt, by head as the profile has it where that was not learnt: what parts of a prompt a head prefers
    depends little on the workload."""
    return learnt if learnt.heads is not None else learnt.with_heads(recorded.heads)


def _by_age(folder: Path) -> list[Path]:
    """The folder's profile files, the newest last: of two for one model, it is the one in use."""
    aged = []
    try:
        paths = list(folder.glob("*.kvdprofile")) if folder.is_dir() else []
    except OSError as error:
        log.warning("profiles not used", file=str(folder), reason=error.strerror)
        paths = []
    for path in paths:
        with contextlib.suppress(OSError):  # removed meanwhile
            aged.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(aged)]


def _file_name(profile: Profile) -> str:
    """One file for each model, revision and selector, so that what is installed replaces what was."""
    key = "\0".join((profile.model, profile.revision, profile.selector))
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.kvdprofile"


def _checked_cells(layers: int, heads: int, data: bytes, lengths: tuple[int, ...], steps: int) -> HeadCounts:
    """The same by head."""
    found = HeadCounts(layers, heads)
    if len(data) != 4 * found.selected.size:
        raise InvalidArgument(
            f"{len(data)} bytes of counts by head do not fit {layers} layers, {heads} KV heads and {CELLS} cells",
            heads=heads,
        )
    found.chances[:] = float(steps) * sum(np.diff(block_bounds(length, CELLS)) for length in lengths)
    selected = np.frombuffer(data, np.float32).reshape(found.selected.shape).astype(np.float64)
    most = found.chances[:, None]
    wrong = np.argwhere(~((selected >= 0) & (selected <= most * (1 + 2**-23))))
    if wrong.size:
        layer, head, cell = wrong[0].tolist()
        raise InvalidArgument(
            f"layer {layer}, KV head {head}, cell {cell} has {selected[layer, head, cell]:g} selections and "
            f"{found.chances[layer, cell]:g} chances; count each selection once",
            layer=layer,
            head=head,
        )
    np.minimum(selected, most, out=found.selected)
    return found


def _checked_counts(layers: int, blocks: int, counts: bytes, lengths: tuple[int, ...], chances: int) -> SelectionCounts:
    """Counts of all rows together, with ``chances`` to be selected for each token; rows of other lengths have other
    tokens in a block, so that each row's are added up."""
    added = SelectionCounts(layers, blocks)
    added.chances[:] = float(chances) * sum(np.diff(block_bounds(length, blocks)) for length in lengths)
    selected = np.frombuffer(counts, np.float32).reshape(layers, blocks).astype(np.float64)
    # Written so that NaN is wrong too; float32 may have rounded up.
    wrong = np.argwhere(~((selected >= 0) & (selected <= added.chances * (1 + 2**-23))))
    if wrong.size:
        layer, block = wrong[0].tolist()
        raise InvalidArgument(
            f"layer {layer}, block {block} has {selected[layer, block]:g} selections and "
            f"{added.chances[layer, block]:g} chances; count each selection once",
            layer=layer,
            block=block,
        )
    np.minimum(selected, added.chances, out=added.selected)
    return added
