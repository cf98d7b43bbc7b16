"""Profile files: safetensors, readable with any library for it and without kvd.

safetensors rather than NumPy's npz: a reader exists in every language that serves models; there is no pickle and
nothing compressed in it, so a file can neither run code nor grow when it is read; and its header must describe every
byte. The library has no dependencies and does not need torch.

**Format, versions 1 and 2.** Tensors, all little-endian, with G groups of prompt lengths, L layers, M blocks a layer:

======================  ===  ==========  ==================================================================
``importance.0`` … G-1  F32  (L, M)      matrix of each group (equation 1); rows 0 and 1 are infinite
``heads.0`` … G-1       F32  (L, H, C)   version 2: how often an entry of each of C equal parts of the prompt was
                                         selected by each of H KV heads; missing for groups of which that is not known
``prefill.tokens``      I64  (P,)        prompt lengths at which T_p was measured; P may be 0
``prefill.seconds``     F64  (P,)        T_p
``transfer.tokens``     I64  (T,)        prompt lengths at which T_t was measured; T may be 0
``transfer.seconds``    F64  (T,)        T_t: the whole KV cache, layers 0 and 1 included
======================  ===  ==========  ==================================================================

The header's ``__metadata__`` has the texts

- ``format``: ``kvd-profile``, and ``version``, raised whenever an older reader would misread the rest; a profile that
  does not tell heads apart is written as version 1;
- ``profile``: a JSON object on one line: ``kvd`` (version), ``model``, ``revision``, ``layers``, ``kv_heads``,
  ``entry_bytes``, ``selector``, ``parameters`` (object), ``blocks``, ``groups`` (list of ``low``, ``high`` (excluded),
  ``prompts``, ``steps``, by length), ``link_rate`` (bytes a second, 0: not measured), ``created`` (RFC 3339),
  ``notes``;
- ``sha256``: lowercase hex digest of ``version``, a newline, ``profile``, a newline, and then for each tensor, sorted
  by name, the line ``NAME DTYPE D0,D1…`` with its newline and the tensor's bytes. It finds damage, not forgery.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from kvd.errors import InvalidArgument, InvalidProfile, KvdError
from kvd.importance.heads import HeadImportance
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling.profile import MAX_GROUPS, Parameter, Profile, ProfileGroup
from kvd.profiling.timing import Times
from kvd_client.spec import MAX_LAYERS

FORMAT, VERSION = "kvd-profile", 2
MAX_BYTES = 256 << 20
"""The largest file; 48 layers, 1,000 blocks and 8 groups take 1.5 MiB."""

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TIMES = ("prefill", "transfer")

_Array = npt.NDArray[Any]

_deserialize: Any = safetensors.deserialize  # typed in some of the library's versions only


class _GroupFields(msgspec.Struct, forbid_unknown_fields=True):
    low: int
    high: int
    prompts: int
    steps: int


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON object ``profile``."""

    kvd: str
    model: str
    revision: str
    layers: int
    kv_heads: int
    entry_bytes: int
    selector: str
    parameters: dict[str, Parameter]
    blocks: int
    groups: list[_GroupFields]
    link_rate: int
    created: datetime
    notes: str


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


class _Wrong(Exception):
    """What is wrong, and in which field; the caller knows the file."""

    def __init__(self, field: str, what: str, **more: Any) -> None:
        super().__init__(what)
        self.field, self.what, self.more = field, what, more


def encode(profile: Profile) -> bytes:
    """The file's bytes. Raises :class:`InvalidArgument` where they would be more than ``MAX_BYTES``."""
    text, tensors = _content(profile)
    version = _version(profile)
    metadata = {"format": FORMAT, "version": version, "profile": text, "sha256": _digest(version, text, tensors)}
    data: bytes = safetensors.numpy.save({name: array for name, (_, array) in tensors.items()}, metadata)
    return data


def fingerprint(profile: Profile) -> str:
    """The ``sha256`` that the profile's file has; equal content gives an equal one."""
    return _digest(_version(profile), *_content(profile))


def decode(data: bytes, name: str = "the profile") -> Profile:
    """Read a file's bytes; ``name`` is what messages call it.

    Raises :class:`InvalidProfile` for anything but a whole, undamaged profile of a version that this kvd knows, with
    ``file`` and ``field`` in its fields.
    """
    try:
        return _decoded(data)
    except _Wrong as wrong:
        raise InvalidProfile(
            f"{name} can't be used as a profile: {wrong.what}", file=name, field=wrong.field, **wrong.more
        ) from None


def read(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file.

    Raises :class:`InvalidProfile` as :func:`decode` does, also for a file larger than ``MAX_BYTES``, of which nothing
    is read; and :class:`InvalidArgument` where the file can't be opened or is no file.
    """
    name = os.fspath(path)
    try:
        # A named pipe without a writer would block the open.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{name} is not a file; give a profile file", file=name)
            if status.st_size > MAX_BYTES:
                raise InvalidProfile(
                    f"{name} can't be used as a profile: it has {status.st_size} bytes, and no profile has more than "
                    f"{MAX_BYTES}",
                    file=name,
                    field="size",
                    size=status.st_size,
                )
            data = file.read(MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InvalidArgument(f"{name!r} can't be read: {_reason(error)}", file=name) from None
    return decode(data, name)


def write(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile file, mode 0644, in one step: whoever reads sees the old file or the new one.

    Raises :class:`InvalidArgument` where it can't be written; then the old file is as it was.
    """
    replace_file(path, encode(profile))


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put a file in the place of another, or of none, in one step; see :func:`write`."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise InvalidArgument(f"{target} is not a file; give the name of a file to write", file=str(target))
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:64]}.", suffix=".tmp", dir=target.parent)
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{str(target)!r} can't be written: {_reason(error)}", file=str(target)) from None


def _version(profile: Profile) -> str:
    return "1" if all(group.matrix.heads is None for group in profile.groups) else str(VERSION)


def _content(profile: Profile) -> tuple[str, dict[str, tuple[str, _Array]]]:
    """The JSON object, and the tensors with the names of their dtypes."""
    matrices = [group.matrix for group in profile.groups]
    size = sum(each.values.nbytes + (0 if each.heads is None else each.heads.values.nbytes) for each in matrices)
    if size > MAX_BYTES // 2:
        raise InvalidArgument(
            f"the profile's matrices have {size} bytes, and {MAX_BYTES // 2} is the most; use fewer blocks", size=size
        )
    arrays: dict[str, _Array] = {f"importance.{at}": each.values.astype("<f4") for at, each in enumerate(matrices)}
    for at, each in enumerate(matrices):
        if each.heads is not None:
            arrays[f"heads.{at}"] = each.heads.values.astype("<f4")
    for name in _TIMES:
        times: Times = getattr(profile, name)
        arrays[f"{name}.tokens"] = np.array(times.tokens, "<i8")
        arrays[f"{name}.seconds"] = np.array(times.seconds, "<f8")
    fields = _Fields(
        kvd=profile.kvd,
        model=profile.model,
        revision=profile.revision,
        layers=profile.layers,
        kv_heads=profile.kv_heads,
        entry_bytes=profile.entry_bytes,
        selector=profile.selector,
        parameters=dict(sorted(profile.parameters.items())),
        blocks=profile.blocks,
        groups=[_GroupFields(group.low, group.high, group.samples, group.steps) for group in profile.groups],
        link_rate=profile.link_rate,
        created=profile.created,
        notes=profile.notes,
    )
    text = msgspec.json.encode(fields).decode()
    return text, {name: (_NAMES[array.dtype], array) for name, array in arrays.items()}


def _decoded(data: bytes) -> Profile:
    metadata, tensors = _parsed(data)
    if metadata.get("format") != FORMAT:
        raise _Wrong("format", "it is a safetensors file of something else; give one that kvd profile record wrote")
    version = metadata.get("version", "")
    if not (version.isascii() and version.isdigit()) or int(version[:9]) < 1:
        raise _Wrong("version", f"its version is {version[:20]!r}; it is damaged: copy or record it again")
    if int(version[:9]) > VERSION:
        raise _Wrong(
            "version",
            f"it has format version {version[:9]}, and this kvd reads version {VERSION}: use the kvd that wrote it, or "
            "a newer one",
            version=int(version[:9]),
        )
    text = metadata.get("profile", "")
    if _digest(version, text, tensors) != metadata.get("sha256"):
        raise _Wrong("sha256", "its checksum does not fit its content, so it is damaged: copy or record it again")
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Wrong("profile", f"its metadata is not what version {VERSION} has: {error}") from None
    try:
        return _built(fields, {name: array for name, (_, array) in tensors.items()}, int(version[:9]))
    except KvdError as error:
        raise _Wrong(str(error.fields.pop("field", "profile")), error.message, **error.fields) from None


def _parsed(data: bytes) -> tuple[dict[str, str], dict[str, tuple[str, _Array]]]:
    """Metadata, and each tensor with the name of its dtype. The library has the sizes checked against the file's before
    it allocates."""
    try:
        found: list[tuple[str, dict[str, Any]]] = _deserialize(data)
        # What the library does not hand out: it has just found the header to be well-formed.
        header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")], type=_Header)
    except (safetensors.SafetensorError, msgspec.DecodeError, RecursionError) as error:
        raise _Wrong("header", f"it is no safetensors file, or damaged, or cut off ({error})") from None
    most = 2 * MAX_GROUPS + 2 * len(_TIMES)
    if len(found) > most:
        raise _Wrong("header", f"it has {len(found)} tensors, and no profile has more than {most}")
    tensors: dict[str, tuple[str, _Array]] = {}
    for name, tensor in found:
        dtype, shape = str(tensor["dtype"]), tuple(tensor["shape"])
        if dtype not in _DTYPES or len(shape) > 3 or max(shape, default=1) > MAX_BYTES:
            raise _Wrong(
                str(name)[:40], f"tensor {str(name)[:40]!r} is {dtype} of shape {shape}, as none of a profile is"
            )
        tensors[name] = dtype, np.frombuffer(tensor["data"], _DTYPES[dtype]).reshape(shape)
    return header.metadata, tensors


def _built(fields: _Fields, tensors: dict[str, _Array], version: int) -> Profile:
    if not 1 <= fields.layers <= MAX_LAYERS:
        raise _Wrong("layers", f"layers is {fields.layers}; it must be between 1 and {MAX_LAYERS}")
    groups = []
    for at, group in enumerate(fields.groups):
        name = f"importance.{at}"
        values = _taken(tensors, name, "f4", (fields.layers, fields.blocks))
        split = f"heads.{at}"
        try:
            heads = None
            if version > 1 and split in tensors:
                heads = HeadImportance(_taken(tensors, split, "f4", (fields.layers, fields.kv_heads, None)))
            matrix = ImportanceMatrix(values, heads)
        except InvalidArgument as error:
            raise _Wrong(split if "head" in error.fields else name, error.message, **error.fields) from None
        groups.append(ProfileGroup(group.low, group.high, matrix, group.prompts, group.steps))
    times = {}
    for name in _TIMES:
        tokens = _taken(tensors, f"{name}.tokens", "i8", (None,))
        seconds = _taken(tensors, f"{name}.seconds", "f8", tokens.shape)
        try:
            times[name] = Times(tuple(tokens.tolist()), tuple(seconds.tolist()))
        except InvalidArgument as error:
            raise _Wrong(name, error.message, **error.fields) from None
    if tensors:
        raise _Wrong("header", f"it has a tensor {min(tensors)[:40]!r}, which no profile has")
    return Profile(
        model=fields.model,
        revision=fields.revision,
        layers=fields.layers,
        kv_heads=fields.kv_heads,
        entry_bytes=fields.entry_bytes,
        selector=fields.selector,
        parameters=fields.parameters,
        groups=tuple(groups),
        prefill=times["prefill"],
        transfer=times["transfer"],
        link_rate=fields.link_rate,
        created=fields.created,
        notes=fields.notes,
        kvd=fields.kvd,
    )


def _taken(tensors: dict[str, _Array], name: str, dtype: str, shape: tuple[int | None, ...]) -> _Array:
    """Take one tensor out, if it is what it should be; None stands for any length."""
    array = tensors.pop(name, None)
    if array is None:
        raise _Wrong(name, f"it lacks the tensor {name!r}")
    fits = len(array.shape) == len(shape) and all(b is None or a == b for a, b in zip(array.shape, shape, strict=True))
    if array.dtype != np.dtype(f"<{dtype}") or not fits:
        wanted = "any length" if None in shape else str(shape)
        raise _Wrong(
            name,
            f"tensor {name!r} is {array.dtype} of shape {array.shape}; it must be {np.dtype(dtype)} of {wanted}",
            shape=list(array.shape),
        )
    return array


def _digest(version: str, text: str, tensors: Mapping[str, tuple[str, _Array]]) -> str:
    digest = hashlib.sha256(f"{version}\n{text}\n".encode())
    for name in sorted(tensors):
        dtype, array = tensors[name]
        digest.update(f"{name} {dtype} {','.join(map(str, array.shape))}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
