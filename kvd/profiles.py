"""The daemon's profiles: those installed, and those recorded from what this node really decodes."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import structlog

from kvd.errors import Busy, InvalidArgument, InvalidProfile, NotFound
from kvd.importance.counts import SelectionCounts
from kvd.profiling import files
from kvd.profiling.profile import Profile, ProfileGroup, for_model
from kvd.profiling.recorder import group_range
from kvd.transfer.policy import Profiled
from kvd_client.spec import KVSpec

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
    prompts: int = 0
    steps: int = 0


class Profiles:
    """Profiles by model, revision and selector. Replaced by read-copy-update: a running transfer keeps its matrix.

    ``folder`` holds the files that are read at the start, and takes those that are installed; None: none are kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._profiles: dict[tuple[str, str, str], Profile] = {}
        self._recordings: dict[tuple[str, str, str, int], _Recording] = {}
        for path in sorted(folder.glob("*.kvdprofile")) if folder is not None and folder.is_dir() else []:
            try:
                self._take(files.read(path))
            except InvalidProfile as error:
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
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write(profile, self._folder / f"{files.fingerprint(profile)[:16]}.kvdprofile")
        self._take(profile)
        return profile

    def known(self, spec: KVSpec, selector: str, lengths: tuple[int, ...]) -> Profiled:
        """What is known about transfers of this kind; of a profile for another number of layers or heads, nothing."""
        profile = self._find(spec, selector)
        if profile is None or profile.differences(spec):
            return Profiled()
        length = max(lengths)
        timing = profile.timing(spec.entry_bytes)
        return Profiled(
            matrix=profile.importance.nearest(length).matrix,
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
    ) -> None:
        """Add what one transfer selected: float32 (layers, blocks), summed over rows, heads and steps.

        Raises :class:`InvalidArgument` for counts that can't be, and :class:`Busy` when too many models are recorded.
        """
        if not 1 <= blocks <= 1 << 16 or len(counts) != 4 * spec.layers * blocks or not 1 <= steps <= 1 << 24:
            raise InvalidArgument(
                f"{len(counts)} bytes of counts do not fit {spec.layers} layers, {blocks} blocks and {steps} steps",
                blocks=blocks,
            )
        length = max(lengths)
        key = (spec.model, spec.revision, selector, group_range(length)[0])
        recording = self._recordings.get(key)
        if recording is None:
            if len(self._recordings) >= MAX_RECORDINGS:
                raise Busy(f"selections of {MAX_RECORDINGS} models and lengths are being recorded; export and restart")
            recording = _Recording(spec, SelectionCounts(spec.layers, blocks))
        elif recording.counts.blocks != blocks:
            raise InvalidArgument(
                f"selections of {spec.model} are being recorded in {recording.counts.blocks} blocks, not {blocks}",
                blocks=[recording.counts.blocks, blocks],
            )
        added = SelectionCounts(spec.layers, blocks)
        for layer, selected in enumerate(np.frombuffer(counts, np.float32).reshape(spec.layers, blocks)):
            added.add(layer, selected, length=length, heads=heads * len(lengths), steps=steps)
        recording.counts.merge(added)
        recording.prompts += len(lengths)
        recording.steps += steps * len(lengths)
        self._recordings[key] = recording

    def export(self, model: str, selector: str) -> bytes:
        """What was recorded for a model and selector, as a profile file; raises :class:`NotFound`."""
        found = {key: r for key, r in self._recordings.items() if key[0] == model and key[2] == selector}
        if not found:
            known = sorted({f"{key[0]} ({key[2] or 'no selector'})" for key in self._recordings})
            raise NotFound(
                f"nothing has been recorded for model {model!r} with selector {selector!r}; recorded so far: "
                f"{', '.join(known) or 'nothing'}",
                model=model,
            )
        spec = next(iter(found.values())).spec
        groups = tuple(
            ProfileGroup(key[3], 2 * key[3], r.counts.matrix(), r.prompts, r.steps) for key, r in found.items()
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

    def _take(self, profile: Profile) -> None:
        self._profiles[profile.model, profile.revision, profile.selector] = profile

    def _find(self, spec: KVSpec, selector: str) -> Profile | None:
        exact = self._profiles.get((spec.model, spec.revision, selector))
        if exact is not None or selector:
            return exact
        # Block importance depends little on the algorithm: where none is named, the newest profile will do.
        mine = [
            p for (model, revision, _), p in self._profiles.items() if (model, revision) == (spec.model, spec.revision)
        ]
        return max(mine, key=lambda profile: profile.created, default=None)
