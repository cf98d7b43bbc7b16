"""Importance by KV head: counted, recorded, kept in profiles, and shown."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvd.blocks import block_bounds
from kvd.cli.main import app
from kvd.errors import InvalidArgument, InvalidProfile
from kvd.importance.counts import HeadCounts
from kvd.importance.heads import CELLS, MAX_CELLS, HeadImportance, by_head
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling import files
from kvd.profiling.compare import compare
from kvd.profiling.recorder import Recorder
from kvd.profiling.summary import summary
from kvd_client.spec import KVSpec
from tests.unit.head_profiles import BLOCKS, HEADS, LAYERS, LENGTH, SPEC, matrix_of, profile_of, split


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros((3, 4)), "not \\(3, 4\\)"),
        (np.zeros((3, 0, 4)), "not \\(3, 0, 4\\)"),
        (np.zeros((3, 1, MAX_CELLS + 1)), f"at most {MAX_CELLS} cells"),
        (np.full((3, 1, 2), -1), "layer 2, KV head 0, cell 0 is -1"),
        (np.full((3, 1, 2), np.nan), "layer 2, KV head 0, cell 0 is nan"),
        (np.full((3, 1, 2), np.inf), "layer 2, KV head 0, cell 0 is inf"),
    ],
)
def test_what_is_no_importance_by_head(values: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        HeadImportance(values)


def test_a_matrix_and_its_heads_are_of_one_model() -> None:
    with pytest.raises(InvalidArgument, match=f"{LAYERS} layers, and the matrix 3"):
        ImportanceMatrix(np.zeros((3, 2)), split())
    mine = matrix_of(split())
    assert mine.resampled(40).heads is mine.heads
    assert mine.with_heads(mine.heads) is mine
    bare = mine.with_heads(None)
    assert bare.heads is None
    assert bare.ranks() is mine.ranks(), "nothing is sorted again"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 5), st.integers(0, 99))
def test_heads_share_what_all_of_them_have(blocks: int, cells: int, heads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.random((LAYERS, heads, cells)) * (rng.random((LAYERS, 1, cells)) < 0.8)
    known = HeadImportance(values)
    factors = known.factors()
    assert np.allclose(factors.mean(axis=1), 1, atol=1e-4)
    layer = rng.random(blocks).astype(np.float32)
    found = by_head(layer, factors[2])
    assert found.shape == (heads, blocks)
    assert np.allclose(found.mean(axis=0), layer, rtol=1e-3)
    for first in range(heads):
        assert np.array_equal(known.factors(first, 1), factors[:, first : first + 1]), "a rank has its own heads"


def test_a_recording_tells_heads_apart() -> None:
    recorder = Recorder(LAYERS, blocks=BLOCKS)
    lengths = [LENGTH, 200]
    with recorder.batch(lengths, starts=[3, 0]) as recording:
        for step in range(4):
            for layer in (2, 3):
                rows = [
                    3 * (row == 0) + head * length // 2 + np.arange(step, length // 2, 3)[:20]
                    for row, length in enumerate(lengths)
                    for head in range(HEADS)
                ]
                recording.add(layer, np.array(rows, np.int32))
    (group,) = recorder.groups()
    heads = group.matrix.heads
    assert heads is not None
    assert heads.values.shape == (LAYERS, HEADS, CELLS)
    assert not heads.values[2:4, 0, CELLS // 2 :].any()
    assert not heads.values[2:4, 1, : CELLS // 2].any()
    assert heads.values[2:4, 0, :10].all()
    # Both say how many entries were selected: 20 of each row, head and step.
    tokens = sum(np.diff(block_bounds(length, CELLS)) for length in lengths)
    assert np.isclose((heads.values[2] * tokens).sum(), 2 * HEADS * 20)
    made = recorder.profile(SPEC, selector="quest", created=datetime.now(UTC))
    mine = made.groups[0].matrix.heads
    assert mine is not None
    assert np.array_equal(mine.values, heads.values)
    alone = recorder.profile(
        KVSpec(layers=LAYERS, kv_heads=4, entry_bytes=16, dtype="float16", model="m"),
        selector="quest",
        created=datetime.now(UTC),
    )
    assert alone.groups[0].matrix.heads is None, "a rank's heads are not the model's"


def test_batches_of_other_numbers_of_heads_are_not_told_apart() -> None:
    recorder = Recorder(LAYERS, blocks=BLOCKS)
    for heads in (2, 3, 2):
        with recorder.batch([LENGTH]) as recording:
            recording.add(2, np.tile(np.arange(5, dtype=np.int32), (heads, 1)))
    (group,) = recorder.groups()
    assert group.matrix.heads is None
    assert group.samples == 3


def test_counts_that_can_not_be() -> None:
    counts = HeadCounts(LAYERS, HEADS, 4)
    for wrong in (np.full((HEADS, 4), 41), np.full((HEADS, 4), -1), np.zeros((HEADS + 1, 4))):
        with pytest.raises(InvalidArgument, match="layer 2: selections by head"):
            counts.add(2, wrong.astype(np.int64), length=40, steps=4)
    assert not counts.chances.any()
    with pytest.raises(InvalidArgument, match="can't be added"):
        counts.merge(HeadCounts(LAYERS, HEADS + 1, 4))
    tokens = np.diff(block_bounds(3, 4))
    assert tokens.min() == 0
    counts.add(2, np.stack([20 * tokens, 20 * tokens]), length=3, steps=20)
    assert counts.importance().values[2].all(), "a cell without a token has what the one before has"


def test_a_file_gives_it_back_and_old_files_are_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for heads, version in ((split(), b'"2"'), (None, b'"1"')):
        made = profile_of(heads)
        files.write(made, path)
        assert b'"version":' + version in path.read_bytes().replace(b" ", b"")
        found = files.read(path)
        assert files.fingerprint(found) == files.fingerprint(made)
        theirs = found.groups[0].matrix.heads
        assert (theirs is None) == (heads is None)
        assert theirs is None or heads is None or np.array_equal(theirs.values, heads.values)
    assert files.fingerprint(profile_of(split())) != files.fingerprint(profile_of(split(1)))


def edited(tensors: dict[str, Any], version: str = "2") -> bytes:
    """A file with other tensors, and a checksum that fits."""
    data = files.encode(profile_of(split()))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found = safetensors.numpy.load(data) | tensors
    metadata = header["__metadata__"] | {"version": version}
    named = {name: (files._NAMES[array.dtype], array) for name, array in found.items()}
    metadata["sha256"] = files._digest(version, metadata["profile"], named)
    return safetensors.numpy.save(found, metadata)


@pytest.mark.parametrize(
    ("tensors", "version", "field", "says"),
    [
        ({}, "1", "header", "tensor 'heads.0', which no profile has"),
        ({"heads.1": split().values}, "2", "header", "tensor 'heads.1', which no profile has"),
        ({"heads.0": split(heads=3).values}, "2", "heads.0", "(8, 3, 40)"),
        ({"heads.0": np.zeros((LAYERS, HEADS, MAX_CELLS + 1), np.float32)}, "2", "importance.0", "at most 1024 cells"),
        ({"heads.0": np.full((LAYERS, HEADS, 3), np.nan, np.float32)}, "2", "heads.0", "KV head 0, cell 0 is nan"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tensors: dict[str, Any], version: str, field: str, says: str) -> None:
    with pytest.raises(InvalidProfile) as caught:
        files.decode(edited(tensors, version))
    assert says in caught.value.message
    assert caught.value.fields["field"] == field


def test_a_profile_tells_its_models_heads_apart() -> None:
    with pytest.raises(InvalidArgument, match="tells 2 KV heads apart, and the model has 3"):
        profile_of(split(), kv_heads=3)


def test_show_and_compare_say_it(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, heads in zip(paths, (split(), split(1), None), strict=True):
        files.write(profile_of(heads), path)
    run = CliRunner()
    shown = run.invoke(app, ["profile", "show", str(paths[0])])
    assert shown.exit_code == 0
    assert "BY HEAD: the same with masks by head" in shown.stdout
    assert "BY HEAD" not in run.invoke(app, ["profile", "show", str(paths[2])]).stdout
    (group,) = json.loads(run.invoke(app, ["profile", "show", "--json", str(paths[0])]).stdout)["groups"]
    assert group["cells"] == CELLS
    assert group["on_demand_ratio_by_head"]["0.5"] < group["on_demand_ratio"]["0.5"]
    (group,) = summary(profile_of(None))["groups"]
    assert (group["cells"], group["on_demand_ratio_by_head"]) == (0, {"0.5": None, "0.25": None})
    assert "differences of heads 1.0" in run.invoke(app, ["profile", "compare", str(paths[0]), str(paths[0])]).stdout
    heads = json.loads(run.invoke(app, ["profile", "compare", "--json", *map(str, paths[:2])]).stdout)["heads"]
    assert 0.9 < heads < 1
    assert compare(profile_of(split()), profile_of(None)).heads is None
    assert run.invoke(app, ["profile", "check", str(paths[0])]).exit_code == 0
