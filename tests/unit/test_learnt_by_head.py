"""What sinks count by KV head, what daemons learn of it, and what sources hear."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.blocks import block_bounds
from kvd.errors import InvalidArgument
from kvd.importance.heads import CELLS
from kvd.importance.learning import HalfLife
from kvd.importance.matrix import ImportanceMatrix
from kvd.learnt import Learner
from kvd.profiles import Profiles
from kvd.profiling import files
from kvd_client.spec import MASKS, KVSpec
from tests.unit.head_profiles import BLOCKS, HEADS, LAYERS, LENGTH, SPEC, profile_of, split
from tests.unit.selection_fakes import FakeDaemon


def test_what_was_learnt_is_split_as_the_profile_has_it() -> None:
    profiles = Profiles(None)
    profiles.install(files.encode(profile_of(split())))
    installed = profiles.known(SPEC, "quest", (LENGTH,)).matrix
    assert installed is not None
    profiles.learner = Learner(HalfLife(4), blocks=BLOCKS, start=profiles.start)
    rates = ImportanceMatrix(np.random.default_rng(1).random((LAYERS, BLOCKS)))
    profiles.learner.report(SPEC, "quest", LENGTH, rates, requests=2, tokens=20, source="", now=0.0)
    known = profiles.known(SPEC, "quest", (LENGTH,)).matrix
    assert known is not None
    assert known.heads is not None
    assert installed.heads is not None
    assert np.array_equal(known.heads.values, installed.heads.values)
    assert not np.array_equal(known.values, installed.values)
    other = dataclasses.replace(profile_of(None), selector="hata")
    profiles.install(files.encode(other))
    assert profiles.known(SPEC, "hata", (LENGTH,)).matrix.heads is None  # type: ignore[union-attr]


@pytest.mark.parametrize("mask", MASKS)
def test_a_sink_counts_by_head(mask: str) -> None:
    lengths, layers, heads, k = [90, 41], 4, 3, 7
    daemon = FakeDaemon(
        lengths, layers=layers, heads=heads, landing_entries=k, count_blocks=10, mask=mask, entry_bytes=4
    )
    wanted = np.zeros((layers, heads, CELLS), np.int64)
    rng = np.random.default_rng(4)
    for _ in range(3):
        for layer in (2, 3):
            index = np.array([rng.permutation(length)[:k] for length in lengths for _ in range(heads)], np.int32)
            daemon.transfer.select(layer, index)
            for row, chosen in enumerate(index):
                cells = chosen.astype(np.int64) * CELLS // lengths[row // heads]
                np.add.at(wanted[layer, row % heads], cells, 1)
    daemon.transfer.release()
    (report,) = daemon.connection.reports
    found = np.frombuffer(report.by_head, "<f4").reshape(layers, heads, CELLS)
    assert np.array_equal(found, wanted)
    assert found.sum() == np.frombuffer(report.counts, "<f4").sum()
    profiles = Profiles(None)
    spec = KVSpec(layers=layers, kv_heads=heads, entry_bytes=4, dtype="uint8", model="m")
    how: dict[str, Any] = {"steps": report.steps, "counts": report.counts, "blocks": report.blocks}
    profiles.record(spec, "s", tuple(lengths), heads=heads, by_head=report.by_head, **how)
    matrix = files.decode(profiles.export("m", "s")).groups[0].matrix
    tokens = sum(np.diff(block_bounds(length, CELLS)) for length in lengths)
    assert matrix.heads is not None
    assert np.allclose(matrix.heads.values[2:], wanted[2:] / (tokens * report.steps), rtol=1e-5)


def test_one_head_is_not_told_apart() -> None:
    daemon = FakeDaemon([9], heads=1, count_blocks=3)
    daemon.transfer.select(2, np.array([[1, 2]], np.int32))
    daemon.transfer.release()
    assert daemon.connection.reports[0].by_head == b""


def counts_of(profiles: Profiles, by_head: Any, heads: int = HEADS) -> None:
    profiles.record(
        SPEC,
        "quest",
        (LENGTH,),
        heads=heads,
        steps=2,
        counts=bytes(4 * LAYERS * 4),
        blocks=4,
        by_head=np.asarray(by_head, "<f4").tobytes(),
    )


def test_counts_by_head_are_checked() -> None:
    profiles, fine = Profiles(None), np.zeros((LAYERS, HEADS, CELLS))
    for wrong, says in (
        (fine[:, :, 1:], "bytes of counts by head do not fit"),
        (fine + 9, "layer 0, KV head 0, cell 0 has 9 selections and 8 chances"),
        (fine - 1, "has -1 selections"),
        (fine + np.nan, "has nan selections"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            counts_of(profiles, wrong)
    assert not profiles.recorded()
    counts_of(profiles, fine + 8)
    counts_of(profiles, fine[:, :1] + 8, heads=1)  # a tensor-parallel rank's, which say nothing of the others
    heads = files.decode(profiles.export("m", "quest")).groups[0].matrix.heads
    assert heads is not None
    assert (heads.values[2:] == 1).all()


def learner(folder: Path | None = None, profiles: Profiles | None = None) -> Learner:
    start = profiles.start if profiles is not None else lambda key, length: None
    return Learner(HalfLife(2), blocks=BLOCKS, start=start, folder=folder)


def told(sink: Learner, seed: int, source: str = "prefill") -> None:
    rates = ImportanceMatrix(np.random.default_rng(seed).random((LAYERS, BLOCKS)), split(seed))
    sink.report(SPEC, "quest", LENGTH, rates, requests=1, tokens=9, source=source, now=1.0)


def learnt_heads(of: Learner) -> Any:
    matrix = of.matrix(SPEC, "quest", LENGTH, nearer_than=9.0)
    assert matrix is not None
    return None if matrix.heads is None else matrix.heads.values[2:]


def test_sources_learn_how_heads_differ_and_keep_it(tmp_path: Path) -> None:
    sink, source = learner(), learner(tmp_path)
    told(sink, 1)
    assert np.allclose(learnt_heads(sink), split(1).values[2:])
    told(sink, 2)
    for _, message in sink.outgoing():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
        source.hear("decode", message, 2.0)
    assert np.allclose(learnt_heads(source), learnt_heads(sink), atol=0.01)
    half = split(1).values[2:] * 2**-0.5 / (1 + 2**-0.5) + split(2).values[2:] / (1 + 2**-0.5)
    assert np.allclose(learnt_heads(sink), half, rtol=1e-3), "the older of two counts less"
    for path, data in source.unsaved():
        path.write_bytes(data)
    assert np.array_equal(learnt_heads(learner(tmp_path)), learnt_heads(source))
    exported = files.decode(source.export("m", "quest"))
    assert np.array_equal(exported.groups[0].matrix.heads.values[2:], learnt_heads(source))  # type: ignore[union-attr]


def test_learning_begins_with_the_profiles_heads() -> None:
    profiles = Profiles(None)
    profiles.install(files.encode(profile_of(split())))
    mine = learner(profiles=profiles)
    told(mine, 3)
    moved = 1 - 2**-0.5
    assert np.allclose(learnt_heads(mine), (1 - moved) * split().values[2:] + moved * split(3).values[2:], rtol=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cells": 1 << 20},
        {"cells": -1},
        {"cells": CELLS + 1},
        {"head_rates": b"1"},
        {"head_scale": float("nan")},
        {"head_scale": 2.0},
    ],
)
def test_what_no_kvd_says_of_heads(wrong: dict[str, Any]) -> None:
    sink, source = learner(), learner()
    told(sink, 1)
    ((_, message),) = sink.outgoing()
    with pytest.raises(InvalidArgument):
        source.hear("decode", msgspec.structs.replace(message, **wrong), 2.0)
    assert not len(source)
    source.hear("decode", msgspec.structs.replace(message, cells=0), 2.0)
    assert learnt_heads(source) is None
