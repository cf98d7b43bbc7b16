"""Profile files: what is written is read again, and what is damaged is refused."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgument, InvalidProfile
from kvd.profiling import files
from kvd.profiling.files import decode, encode, fingerprint, read, write
from kvd.profiling.profile import Profile
from tests.profiles import SPEC, plain, profile, profiles

Edit = Callable[[dict[str, str], dict[str, Any], dict[str, np.ndarray[Any, Any]]], None]


def parts(data: bytes) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]]]:
    """Metadata and tensors, read without kvd."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"], safetensors.numpy.load(data)


def sealed(metadata: dict[str, str], tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """A file with the checksum that its documentation describes."""
    dtypes = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32"}
    digest = hashlib.sha256(f"{metadata['version']}\n{metadata['profile']}\n".encode())
    for name, array in sorted(tensors.items()):
        shape = ",".join(map(str, array.shape))
        digest.update(f"{name} {dtypes[array.dtype.name]} {shape}\n".encode() + array.tobytes())
    return safetensors.numpy.save(tensors, metadata | {"sha256": digest.hexdigest()})


def edited(edit: Edit) -> bytes:
    """A file in which something was changed on purpose, its checksum made to fit."""
    metadata, tensors = parts(encode(profile()))
    fields = json.loads(metadata["profile"])
    edit(metadata, fields, tensors)
    if "profile" in metadata and metadata["profile"] == parts(encode(profile()))[0]["profile"]:
        metadata["profile"] = json.dumps(fields)
    return sealed(metadata, tensors)


@given(profiles())
def test_what_is_written_is_read_again(given_profile: Profile) -> None:
    again = decode(encode(given_profile))
    assert plain(again) == plain(given_profile)
    assert fingerprint(again) == fingerprint(given_profile)


@settings(max_examples=400)
@given(st.data())
def test_any_changed_byte_is_found_or_harmless(data: st.DataObject) -> None:
    whole = profile()
    damaged = bytearray(encode(whole))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged), "damaged")
    except InvalidProfile as caught:
        refused = caught.fields
    else:
        assert plain(found) == plain(whole)
        return
    assert refused["file"] == "damaged"
    assert refused["field"]


def test_every_changed_bit_of_a_matrix_is_found() -> None:
    data = encode(profile())
    at = data.index(profile().groups[0].matrix.values.tobytes())
    for offset in range(at, at + 80):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << (offset % 8)
        with pytest.raises(InvalidProfile, match="checksum") as caught:
            decode(bytes(damaged))
        assert caught.value.fields["field"] == "sha256"


@settings(max_examples=50)
@given(st.data())
def test_a_file_that_was_cut_or_has_more_behind_it_is_refused(data: st.DataObject) -> None:
    whole = encode(profile())
    with pytest.raises(InvalidProfile):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InvalidProfile):
        decode(whole + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidProfile):
        decode(data)


@settings(max_examples=150)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda of: (
            st.lists(of)
            | st.dictionaries(
                st.sampled_from(
                    ["__metadata__", "a", "dtype", "shape", "data_offsets", "format", "version", "profile"]
                ),
                of,
            )
        ),
    )
)
def test_foreign_headers_are_refused(header: Any) -> None:
    try:
        text = json.dumps(header).encode()
    except UnicodeEncodeError:
        return
    with pytest.raises(InvalidProfile):
        decode(len(text).to_bytes(8, "little") + text)


def test_another_safetensors_file_is_refused() -> None:
    data = safetensors.numpy.save({"weight": np.zeros((2, 3), np.float32)})
    with pytest.raises(InvalidProfile, match="something else") as caught:
        decode(data, "model.safetensors")
    assert caught.value.fields["field"] == "format"
    assert "model.safetensors" in caught.value.message


def nan(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["importance.1"][3, 2] = np.nan


def negative(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["importance.0"][2, 1] = -0.25


def flat(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["importance.0"] = tensors["importance.0"].ravel()


def doubles(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["importance.0"] = tensors["importance.0"].astype(np.float64)


def narrow(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["prefill.tokens"] = tensors["prefill.tokens"].astype(np.int32)


def missing(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    del tensors["importance.1"]


def extra(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["importance.2"] = tensors["importance.1"]


def crowd(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors |= {f"importance.{at}": tensors["importance.1"] for at in range(2, 200)}


def negative_time(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["transfer.seconds"][1] = -1


def lone_time(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["prefill.seconds"] = tensors["prefill.seconds"][:2]


def more_layers(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["layers"] = 5


def no_layers(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["layers"] = 0


def overlapping(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["groups"][1]["low"] = 600


def no_groups(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["groups"] = []
    del tensors["importance.0"], tensors["importance.1"]


def wrong_type(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["kv_heads"] = "three"


def unknown_field(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["color"] = "red"


def no_zone(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    fields["created"] = "2025-01-02T03:04:05"


def nested(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    metadata["profile"] = '{"parameters":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}"


def newer(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    metadata["version"], metadata["profile"] = "3", "in another language"


def no_version(metadata: dict[str, str], fields: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    metadata["version"] = "-1"


@pytest.mark.parametrize(
    ("edit", "field", "says"),
    [
        (nan, "importance.1", "layer 3, block 2 is nan"),
        (negative, "importance.0", "layer 2, block 1 is -0.25"),
        (flat, "importance.0", "shape (40,)"),
        (doubles, "importance.0", "float64"),
        (narrow, "prefill.tokens", "I32"),
        (missing, "importance.1", "lacks the tensor"),
        (extra, "header", "importance.2"),
        (crowd, "header", "204 tensors"),
        (negative_time, "transfer", "-1.0 s"),
        (lone_time, "prefill.seconds", "shape (2,)"),
        (more_layers, "importance.0", "(5, 10)"),
        (no_layers, "layers", "layers is 0"),
        (overlapping, "profile", "overlaps"),
        (no_groups, "profile", "at least one group"),
        (wrong_type, "profile", "kv_heads"),
        (unknown_field, "profile", "color"),
        (no_zone, "created", "time zone"),
        (nested, "profile", "metadata"),
        (newer, "version", "format version 3"),
        (no_version, "version", "'-1'"),
    ],
)
def test_what_makes_no_sense_is_named(edit: Edit, field: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.kvprofile"
    path.write_bytes(edited(edit))
    with pytest.raises(InvalidProfile) as caught:
        read(path)
    assert caught.value.fields["field"] == field
    assert caught.value.fields["file"] == str(path)
    assert says in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.code == "INVALID_PROFILE"


def test_an_edit_that_changes_nothing_is_read() -> None:
    """The edits above fail for what they change, not for being edited."""
    assert plain(decode(edited(lambda *_: None))) == plain(profile())


def test_a_claimed_gibibyte_allocates_nothing() -> None:
    header = b'{"importance.0":{"dtype":"F32","shape":[16384,16384],"data_offsets":[0,1073741824]}}'
    for data in (struct.pack("<Q", 1 << 30) + b"{}" * 40, struct.pack("<Q", len(header)) + header):
        tracemalloc.start()
        try:
            with pytest.raises(InvalidProfile) as caught:
                decode(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert caught.value.fields["field"] == "header"
        assert peak < 1 << 20


def test_empty_tensors_of_absurd_shapes_are_refused() -> None:
    header = b'{"a":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}'
    with pytest.raises(InvalidProfile):
        decode(struct.pack("<Q", len(header)) + header)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidProfile, match="1099511627776 bytes") as caught:
        read(path)
    assert caught.value.fields["field"] == "size"


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "null byte"])
def test_what_can_not_be_opened_is_said(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(InvalidArgument) as caught:
        read("a\0b" if kind == "null byte" else path)
    assert "file" in caught.value.fields


def test_a_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.kvprofile"
    write(profile(notes="old"), path)
    assert path.stat().st_mode & 0o777 == 0o644
    write(profile(notes="new"), path)
    assert read(path).notes == "new"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InvalidArgument, match="No space left"):
        write(profile(notes="newest"), path)
    assert read(path).notes == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("real")
    write(profile(), tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert read(tmp_path / "real").model == SPEC.model


def test_other_places_can_not_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "p", Path("/dev/null")):
        with pytest.raises(InvalidArgument):
            write(profile(), path)


def test_it_can_be_read_without_kvd(tmp_path: Path) -> None:
    path = tmp_path / "p.kvprofile"
    write(profile(), path)
    code = (
        "import json, sys\n"
        "from safetensors import safe_open\n"
        "with safe_open(sys.argv[1], framework='numpy') as file:\n"
        "    fields = json.loads(file.metadata()['profile'])\n"
        "    matrix = file.get_tensor('importance.1')\n"
        "print(fields['model'], fields['groups'][1]['low'], matrix.shape, matrix.dtype, 'kvd' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.strip() == "org/model 1024 (4, 10) float32 False", done.stderr


def test_the_checksum_is_the_documented_one() -> None:
    metadata, tensors = parts(encode(profile()))
    assert parts(sealed(metadata, tensors))[0]["sha256"] == metadata["sha256"] == fingerprint(profile())
    assert fingerprint(profile(notes="")) != fingerprint(profile())


def test_imports_are_light() -> None:
    code = (
        "import sys, kvd.profiling.files, kvd.profiling.compare, kvd.profiling.plot, kvd.profiling.summary\n"
        "print(sorted({'torch', 'matplotlib', 'uvloop', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_more_than_a_file_holds_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 600)
    with pytest.raises(InvalidArgument, match="fewer blocks"):
        encode(profile())
