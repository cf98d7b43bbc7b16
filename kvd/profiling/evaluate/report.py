"""The report: everything that was measured as one tree, which tables, pictures and the JSON file are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kvd
from kvd.profiling.evaluate import results
from kvd.profiling.evaluate.marks import marks
from kvd.profiling.evaluate.plan import Settings, Variant, Work
from kvd.profiling.evaluate.store import Store
from kvd.profiling.evaluate.tables import markdown
from kvd.profiling.evaluate.texts import Domain, digests
from kvd.profiling.files import replace_file

REPORT = "report.json"


def report(
    store: Store,
    work: Work,
    settings: Settings,
    blocks: int,
    *,
    command: str,
    model: str,
    domains: Sequence[Domain],
    parameters: Callable[[Variant], Mapping[str, Any]],
    told: results.Told,
) -> dict[str, Any]:
    """What the results folder has of ``work``, finished or not. ``command`` made it; ``parameters`` are a variant's."""
    found = results.collect(store, work, settings, parameters, blocks)
    recall, on_demand = results.recalls(found), results.on_demand(found, settings, told)
    return {
        "command": command,
        "kvd": kvd.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "settings": settings.fields() | {"blocks": blocks, "half_life_prompts": results.HALF_LIFE},
        "selections": {one.label: dict(parameters(one)) for one in work.variants},
        "texts": {one.name: {"source": one.source, "digest": one.digest} for one in domains},
        "prompts": results.counted(found),
        "recall": recall,
        "divergence": results.divergences(found),
        "on_demand": on_demand,
        "correlation": results.correlations(found),
        "marks": [mark.fields() for mark in marks(recall, on_demand)],
    }


def write(made: dict[str, Any], output: Path) -> None:
    """``report.md``, ``report.json`` and the pictures; raises :class:`InvalidArgument` where they can't be written."""
    from kvd.profiling.evaluate.pictures import pictures

    drawn = pictures(made)
    for name, data in drawn.items():
        replace_file(output / name, data)
    replace_file(output / "report.md", markdown(made, list(drawn)).encode())
    replace_file(output / REPORT, json.dumps(made, separators=(",", ":")).encode() + b"\n")


def identity(folder: Path, settings: Settings, domains: Sequence[Domain]) -> dict[str, Any]:
    """What results depend on, for :class:`~kvd.profiling.evaluate.store.Store`; ``folder`` is the model's."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return {
        "model": {"name": folder.name, "digest": digest.hexdigest()[:16]},
        "settings": settings.fields(),
        "texts": digests(domains),
    }
