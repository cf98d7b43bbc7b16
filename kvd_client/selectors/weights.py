"""Weights that a selector was given for one model: matrices that both ends load, and that never travel.

**Format, version 1.** A safetensors file; every tensor is F32, little-endian, and begins with the axes (layers, KV
heads). The header's ``__metadata__`` has the texts

- ``format``: ``kvd-selector-weights``, and ``version``: ``1``;
- ``weights``: a JSON object on one line: ``selector``, ``model``, ``revision``, ``layers``, ``kv_heads``,
  ``head_dim``, ``parameters`` (how they were made), ``created`` (RFC 3339), ``notes``;
- ``sha256``: as in profile files: lowercase hex digest of ``version``, a newline, ``weights``, a newline, and then for
  each tensor, sorted by name, the line ``NAME D0,D1…`` with its newline and the tensor's bytes. It finds damage, not
  forgery.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import stat
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvd_client.errors import FingerprintMismatch, InvalidArgument, InvalidProfile, KvdError
from kvd_client.spec import MAX_HEADS, MAX_LAYERS, KVSpec

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "kvd-selector-weights", 1
MAX_BYTES = 1 << 30
"""The largest file; 256-bit hashes of 80 layers and 8 heads of 128 dimensions take 84 MB."""
MAX_TENSORS, MAX_DIM = 16, 1 << 16

Matrix = npt.NDArray[np.float32]


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON object ``weights``."""

    selector: str
    model: str
    revision: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: dict[str, str | int | float]
    created: datetime
    notes: str


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """What training made of one model for one selector. Immutable.

    Raises :class:`InvalidArgument` naming the first field that makes no sense.
    """

    selector: str
    model: str
    """As in ``KVSpec``, ``revision`` too."""
    revision: str = ""
    layers: int
    kv_heads: int
    head_dim: int
    arrays: Mapping[str, Matrix]
    """By name, float32 (layers, KV heads, ...)."""
    parameters: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
    """How they were made; nothing depends on it."""
    created: datetime
    notes: str = ""
    _tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, high in (("layers", MAX_LAYERS), ("kv_heads", MAX_HEADS), ("head_dim", MAX_DIM)):
            if not 1 <= getattr(self, name) <= high:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be between 1 and {high}", field=name)
        if self.created.utcoffset() is None:
            raise InvalidArgument("created has no time zone; use UTC", field="created")
        if not self.arrays or len(self.arrays) > MAX_TENSORS:
            raise InvalidArgument(f"{len(self.arrays)} tensors; there must be 1 to {MAX_TENSORS}", field="arrays")
        kept = {}
        for name, array in self.arrays.items():
            if array.dtype != np.float32 or array.shape[:2] != (self.layers, self.kv_heads) or not array.size:
                raise InvalidArgument(
                    f"tensor {name!r} is {array.dtype} of shape {array.shape}; it must be float32 and begin with "
                    f"({self.layers}, {self.kv_heads})",
                    field=name,
                )
            if not np.isfinite(array).all():
                raise InvalidArgument(f"tensor {name!r} has values that are not finite; train again", field=name)
            kept[name] = array.copy()
            kept[name].flags.writeable = False
        object.__setattr__(self, "arrays", MappingProxyType(kept))
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """The ``sha256`` that the file has; equal content gives an equal one."""
        return _digest(str(VERSION), self._text, self.arrays)

    @functools.cached_property
    def _text(self) -> str:
        names = (field for field in _Fields.__struct_fields__)
        found = {name: getattr(self, name) for name in names} | {"parameters": dict(sorted(self.parameters.items()))}
        return msgspec.json.encode(_Fields(**found)).decode()

    def array(self, name: str, *form: int) -> Matrix:
        """A tensor of the shape (layers, KV heads, ``form``); raises :class:`InvalidArgument` where there is none."""
        found = self.arrays.get(name)
        if found is None or found.shape[2:] != form:
            raise InvalidArgument(
                f"the weights lack a tensor {name!r} of shape {(self.layers, self.kv_heads, *form)}; they have "
                f"{', '.join(f'{key} {value.shape}' for key, value in sorted(self.arrays.items()))}",
                field=name,
            )
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """The same for torch, made once; nobody writes to it."""
        import torch

        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = torch.tensor(self.arrays[name])
        return found

    def for_selector(self, name: str) -> Weights:
        """These, if they are for that selector; raises :class:`FingerprintMismatch` otherwise."""
        if self.selector != name:
            raise FingerprintMismatch(
                f"the weights are for selector {self.selector!r}, not for {name!r}; train some for {name}",
                selector=[self.selector, name],
            )
        return self

    def for_model(self, spec: KVSpec) -> Weights:
        """These, if they are that model's; raises :class:`FingerprintMismatch`, whose fields have each difference as
        ``[weights', spec's]``."""
        pairs = {
            name: [getattr(self, name), getattr(spec, name)] for name in ("model", "revision", "layers", "kv_heads")
        }
        found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if found:
            listed = ", ".join(f"{name} {mine!r} instead of {theirs!r}" for name, (mine, theirs) in found.items())
            raise FingerprintMismatch(
                f"the weights are another model's: they have {listed}; train some for {spec.model}", **found
            )
        return self

    def check_form(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """Raise :class:`FingerprintMismatch` unless these are weights of a model of that form."""
        mine, its = (self.layers, self.kv_heads, self.head_dim), (layers, kv_heads, head_dim)
        if mine != its:
            raise FingerprintMismatch(
                f"the weights of selector {self.selector!r} are for {mine[0]} layers, {mine[1]} KV heads and head "
                f"dimension {mine[2]}, the model has {its[0]}, {its[1]} and {its[2]}; train some for this model",
                form=[list(mine), list(its)],
            )


def encode(weights: Weights) -> bytes:
    """The file's bytes."""
    import safetensors.numpy

    metadata = {"format": FORMAT, "version": str(VERSION), "weights": weights._text, "sha256": weights.fingerprint}
    data: bytes = safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in weights.arrays.items()}, metadata)
    return data


def decode(data: bytes, name: str = "the file") -> Weights:
    """Read a file's bytes; ``name`` is what messages call it. Raises :class:`InvalidProfile` for anything but whole,
    undamaged weights of a version that this kvd knows, with ``file`` and ``field`` in its fields."""
    import safetensors

    parse: Any = safetensors.deserialize  # typed in some of the library's versions only

    def wrong(field: str, what: str) -> InvalidProfile:
        return InvalidProfile(f"{name} can't be used as selector weights: {what}", file=name, field=field)

    try:
        tensors: list[tuple[str, dict[str, Any]]] = parse(data)
        metadata = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")], type=_Header).metadata
    except (safetensors.SafetensorError, msgspec.DecodeError, RecursionError) as error:
        raise wrong("header", f"it is no safetensors file, or damaged, or cut off ({error})") from None
    if metadata.get("format") != FORMAT:
        raise wrong("format", "it is a safetensors file of something else; give one that kvd profile train wrote")
    if metadata.get("version") != str(VERSION):
        raise wrong(
            "version",
            f"it has format version {metadata.get('version', '')[:20]!r}, and this kvd reads version {VERSION}: use "
            "the kvd that wrote it, or train again",
        )
    arrays: dict[str, Matrix] = {}
    for tensor, found in tensors:
        if found["dtype"] != "F32" or not 3 <= len(found["shape"]) <= 4:
            raise wrong(tensor[:40], f"tensor {tensor[:40]!r} is {found['dtype']} of shape {tuple(found['shape'])}")
        arrays[tensor] = np.frombuffer(found["data"], "<f4").reshape(found["shape"])
    text = metadata.get("weights", "")
    if _digest(str(VERSION), text, arrays) != metadata.get("sha256"):
        raise wrong("sha256", "its checksum does not fit its content, so it is damaged: copy or train it again")
    try:
        fields = msgspec.json.decode(text, type=_Fields)
        return Weights(arrays=arrays, **{key: getattr(fields, key) for key in _Fields.__struct_fields__})
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong("weights", f"its metadata is not what version {VERSION} has: {error}") from None
    except KvdError as error:
        raise wrong(str(error.fields.get("field", "weights")), error.message) from None


def read(path: str | os.PathLike[str]) -> Weights:
    """Read a file. Raises :class:`InvalidProfile` as :func:`decode` does, also for a file larger than ``MAX_BYTES``,
    and :class:`InvalidArgument` where it can't be opened or is no file."""
    name = os.fspath(path)
    try:
        # A named pipe without a writer would block the open.
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{name} is not a file; give a file of selector weights", file=name)
            if status.st_size > MAX_BYTES:
                raise InvalidProfile(
                    f"{name} can't be used as selector weights: it has {status.st_size} bytes, and none have more than "
                    f"{MAX_BYTES}",
                    file=name,
                    field="size",
                )
            data = file.read(MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InvalidArgument(f"{name!r} can't be read: {_reason(error)}", file=name) from None
    return decode(data, name)


def _digest(version: str, text: str, arrays: Mapping[str, Matrix]) -> str:
    digest = hashlib.sha256(f"{version}\n{text}\n".encode())
    for name in sorted(arrays):
        digest.update(f"{name} {','.join(map(str, arrays[name].shape))}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name], "<f4").tobytes())
    return digest.hexdigest()


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
