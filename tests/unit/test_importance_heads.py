"""Importance by KV head: recorded, kept in profiles, and what the order of sending makes of it."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
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
from kvd.importance.learning import HalfLife
from kvd.importance.matrix import ImportanceMatrix
from kvd.learnt import Learner
from kvd.profiles import Profiles
from kvd.profiling import files
from kvd.profiling.compare import compare
from kvd.profiling.profile import Profile, ProfileGroup
from kvd.profiling.recorder import Recorder
from kvd.profiling.summary import summary
from kvd.transfer.order import Policy
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import SendQueue
from kvd_client.spec import MASKS, KVSpec, TokenRange, part_layout
from tests.unit.selection_fakes import FakeDaemon

LAYERS, HEADS, BLOCKS, LENGTH = 8, 2, 80, 160
SPEC = KVSpec(layers=LAYERS, kv_heads=HEADS, entry_bytes=16, dtype="float16", model="m")


def split(seed: int = 0, heads: int = HEADS, cells: int = CELLS) -> HeadImportance:
    """Each head prefers another half of the prompt: the first the beginning, the last the end."""
    values = 0.01 + 0.01 * np.random.default_rng(seed).random((LAYERS, heads, cells))
    for head in range(heads):
        values[:, head, head * cells // heads : (head + 1) * cells // heads] += 0.5
    return HeadImportance(values)


def matrix_of(heads: HeadImportance | None = None) -> ImportanceMatrix:
    return ImportanceMatrix(np.random.default_rng(7).random((LAYERS, BLOCKS)), heads)


def profile_of(heads: HeadImportance | None, kv_heads: int = HEADS) -> Profile:
    return Profile(
        model="m",
        layers=LAYERS,
        kv_heads=kv_heads,
        entry_bytes=16,
        selector="quest",
        groups=(ProfileGroup(128, 256, matrix_of(heads), 9, 90),),
        created=datetime(2026, 1, 2, tzinfo=UTC),
    )


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


def policy(heads: tuple[int, int] | None, known: HeadImportance | None, mode: str = "profile", **how: Any) -> Policy:
    rows = 1 if heads is None else heads[1]
    profiled = Profiled(matrix_of(known), **how)
    settings_ = Selective(mode, budget="fixed" if how else "deadline")
    return choose_policy(
        mode, settings_, profiled, layers=LAYERS, lengths=(LENGTH,) * rows, token_bytes=1 << 16, heads=heads
    )


def taken(chosen: Policy, rows: int, shares: Any = None) -> list[tuple[int, int, int]]:
    """(layer, row, token) in the order in which they are sent."""
    spec = KVSpec(layers=LAYERS, kv_heads=max(rows, 1), entry_bytes=1 << 16, dtype="float16", model="m")
    layout = part_layout(spec, heads=rows, rows=1, capacity=LENGTH, mask="head")
    queue = SendQueue(layout, (LENGTH,) * rows, chosen)
    queue.add([(layer, TokenRange(row, 0, LENGTH)) for layer in range(LAYERS) for row in range(rows)])
    if shares is not None:
        for layer in range(2, LAYERS):
            assert queue.rank(layer, shares, 0.5)
    found = []
    while some := handed(queue, 1 << 16):
        found += some
    return found


def test_each_head_is_sent_in_its_own_order() -> None:
    order = taken(policy((0, 2), split()), 2)
    assert len(set(order)) == LAYERS * 2 * LENGTH == len(order)
    always = 2 * 2 * LENGTH
    assert all(layer < 2 for layer, _, _ in order[:always]), "layers 0 and 1 come first"
    half = always + 6 * LENGTH  # of the rest
    first = order[always:half]
    own = [(row == 0) == (token < LENGTH // 2) for _, row, token in first]
    assert np.mean(own) > 0.95
    plain = taken(policy((0, 2), None), 2)
    own = [(row == 0) == (token < LENGTH // 2) for _, row, token in plain[always:half]]
    assert np.mean(own) < 0.7, "what tells nothing apart sorts all heads alike"
    assert taken(policy((1, 1), split()), 1) != taken(policy((0, 1), split()), 1), "a rank has its own heads"


def test_classes_never_come_before_the_least() -> None:
    chosen = policy((0, 2), split())
    order = taken(chosen, 2)
    assert chosen.head_factors is not None
    values = {
        layer: by_head(chosen.importance[layer], chosen.head_factors[layer])  # type: ignore[index]
        for layer in range(2, LAYERS)
    }
    bounds = block_bounds(LENGTH, BLOCKS)
    worth = [
        float(values[layer][row, np.searchsorted(bounds, token, side="right") - 1])
        for layer, row, token in order[2 * 2 * LENGTH :]
    ]
    # Within a class the order is by address; over classes it is by worth.
    step = len(worth) // 8
    means = [np.mean(worth[at : at + step]) for at in range(0, len(worth), step)]
    assert means == sorted(means, reverse=True)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_token_goes_once_whatever_is_ranked_meanwhile(data: st.DataObject) -> None:
    lengths = (37, 37, 90, 90)  # two sequences of two heads
    known = Profiled(ImportanceMatrix(np.random.default_rng(2).random((4, 50)), HeadImportance(split().values[:4])))
    chosen = choose_policy("speculative", Selective(), known, layers=4, lengths=lengths, token_bytes=8, heads=(0, 2))
    spec = KVSpec(layers=4, kv_heads=2, entry_bytes=8, dtype="float16", model="m")
    queue = SendQueue(part_layout(spec, heads=2, rows=2, capacity=90, mask="head"), lengths, chosen)
    ready = [(layer, row, at) for layer in range(4) for row in range(4) for at in range(0, lengths[row], 13)]
    data.draw(st.randoms(use_true_random=False)).shuffle(ready)
    gone: list[tuple[int, int, int]] = []
    for number, (layer, row, at) in enumerate(ready):
        queue.add([(layer, TokenRange(row, at, min(at + 13, lengths[row])))])
        if number % 5 == 0:
            shares = np.random.default_rng(number).random((4, 7), np.float32)
            queue.rank(data.draw(st.integers(0, 3)), shares, 0.85)
        if data.draw(st.booleans()):
            gone += handed(queue, data.draw(st.integers(1, 400)))
    queue.finish()
    queue.window()
    while some := handed(queue, 200):
        gone += some
    assert sorted(gone) == [(layer, row, t) for layer in range(4) for row in range(4) for t in range(lengths[row])]
    assert queue.pending_tokens == 0


def handed(queue: SendQueue, room: int) -> list[tuple[int, int, int]]:
    """(layer, row, token) of the next turn."""
    return [
        (layer, each.row, token)
        for layer, ranges in queue.take(room)
        for each in ranges
        for token in range(each.start, each.stop)
    ]


def test_what_the_prompt_selects_counts_against_what_each_head_does() -> None:
    flat = np.full((2, BLOCKS), 0.5, np.float32)
    order = taken(policy((0, 2), split()), 2, flat)[2 * 2 * LENGTH :]
    own = [(row == 0) == (token < LENGTH // 2) for _, row, token in order[: 6 * LENGTH]]
    assert np.mean(own) > 0.85, "queries that prefer nothing leave it to the profile"
    eager = np.full((2, BLOCKS), 0.01, np.float32)
    eager[0, -8:] = 1
    (_, row, token) = taken(policy((0, 2), split()), 2, eager)[2 * 2 * LENGTH]
    assert (row, token >= LENGTH - 16) == (0, True)


def test_where_heads_do_not_count() -> None:
    assert policy(None, split()).head_factors is None, "by token"
    assert policy((0, 2), None).head_factors is None
    assert policy((1, 2), split()).head_factors is None, "heads that the profile does not know"
    assert policy((0, 2), split(), "partial").head_factors is None
    assert policy((0, 2), split(), prefill_s=1.0, transfer_s=4.0).head_factors is None, "equation 2 counts blocks"


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
