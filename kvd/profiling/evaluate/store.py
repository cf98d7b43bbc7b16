"""The results folder: what is finished stays finished, whatever ends the program.

    FOLDER/evaluation.json              what the results are of: model, texts, settings
    FOLDER/cells/PLACE/KIND/LABEL.json  one prompt with one selection
    FOLDER/cells/PLACE/text/LABEL.kvdrecorded   what its steps selected
    FOLDER/states/PLACE-KIND.safetensors        the prompt's prefill: K, V and queries in half precision
    FOLDER/weights/SELECTOR.safetensors         what was trained on the calibration domain

Every file appears by a rename, whole or not at all. The report and its pictures lie at the top.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvd.errors import FingerprintMismatch, InvalidArgument
from kvd.profiling.evaluate.plan import Place
from kvd.profiling.files import replace_file

FORM = 1
"""Grows when what is measured changes, so that old results aren't mixed with new ones."""
MANIFEST = "evaluation.json"


class Store:
    """A results folder, made if need be.

    ``identity`` is what its results depend on. Raises :class:`FingerprintMismatch` where the folder has results of
    another one; its fields have each difference as ``[folder's, asked for]``. Raises :class:`InvalidArgument` for a
    folder that holds something else, or can't be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        wanted = flat({"form": FORM, **identity})
        manifest = folder / MANIFEST
        try:
            if manifest.is_file():
                self._compare(_read(manifest), wanted)
                self._lock()
                return
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise InvalidArgument(f"{folder}: holds something else than an evaluation; give a new folder's name")
            folder.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise InvalidArgument(f"{folder}: can't be used: {(error.strerror or str(error)).lower()}") from None
        self._write(manifest, wanted)

    def _lock(self) -> None:
        """Held until the program ends: two at once would do everything twice."""
        self._held = (self.folder / "lock").open("a")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held.close()
            raise InvalidArgument(f"{self.folder}: another evaluation is running there; wait until it ends") from None

    def close(self) -> None:
        """Let others use the folder."""
        self._held.close()

    def _compare(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        names = [*found, *(name for name in wanted if name not in found)]
        differences = {
            name: [found.get(name), wanted.get(name)] for name in names if found.get(name) != wanted.get(name)
        }
        if differences:
            listed = ", ".join(f"{name} {old!r} instead of {new!r}" for name, (old, new) in differences.items())
            raise FingerprintMismatch(
                f"{self.folder} has results of another evaluation: {listed}; give another folder, or the same options",
                **differences,
            )

    def cell(self, place: Place, kind: str, label: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """A finished cell; None where there is none, or one of a selection with other parameters."""
        path = self._cell(place, kind, label)
        if not path.is_file():
            return None
        found = _read(path)
        return found["values"] if found["parameters"] == json.loads(json.dumps(dict(parameters))) else None

    def finish(
        self, place: Place, kind: str, label: str, parameters: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Keep a cell."""
        self._write(self._cell(place, kind, label), {"parameters": dict(parameters), "values": dict(values)})

    def recorded(self, place: Place, label: str) -> Path:
        """Where the selections of a cell of kind ``text`` are."""
        cell = self._made(self._cell(place, "text", label))
        return cell.with_name(f"{cell.name.removesuffix('.json')}.kvdrecorded")

    def state(self, place: Place, kind: str) -> Path:
        """Where a prompt's prefill is."""
        return self._made(self.folder / "states" / f"{place.key}-{kind}.safetensors")

    def weights(self, selector: str) -> Path:
        """Where a selector's weights are."""
        return self._made(self.folder / "weights" / f"{selector}.safetensors")

    def report(self, name: str) -> Path:
        """A file of the report."""
        return self.folder / name

    def _cell(self, place: Place, kind: str, label: str) -> Path:
        return self.folder / "cells" / place.key / kind / f"{label.replace('/', '_')}.json"

    def _made(self, path: Path) -> Path:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{path.parent}: can't be made: {(error.strerror or str(error)).lower()}") from None
        return path

    def _write(self, path: Path, tree: Mapping[str, Any]) -> None:
        replace_file(self._made(path), json.dumps(tree, indent=1).encode() + b"\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which then takes ``path``'s place; nothing is left where writing fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A tree of mappings as one, keys joined by dots, values as JSON has them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: json.loads(json.dumps(value))}
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: can't be read: {error}; delete it to have it made again") from None
    if not isinstance(tree, dict):
        raise InvalidArgument(f"{path}: is no JSON object; delete it to have it made again")
    return tree
