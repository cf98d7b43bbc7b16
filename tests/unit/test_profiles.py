"""The daemon's profiles: installed and read again, replaced under running transfers, recorded and exported."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import profiles as module
from kvd.blocks import block_of
from kvd.errors import Busy, InvalidArgument, InvalidProfile, NotFound
from kvd.profiles import Profiles
from kvd.profiling import files
from kvd.profiling.profile import ProfileGroup
from kvd.profiling.timing import Times
from kvd.transfer.order import Policy
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import ReadyTokens, SendQueue
from kvd_client.spec import PartLayout
from tests.profiles import CREATED, SPEC, matrix, profile

LAYERS, BLOCKS = SPEC.layers, 5


def data(**fields: Any) -> bytes:
    return files.encode(profile(**fields))


def same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool((one.values == other.values).all())


# --- installing -------------------------------------------------------------------------------------------------------


def test_nothing_is_known_without_profiles(tmp_path: Path) -> None:
    for profiles in (Profiles(None), Profiles(tmp_path / "absent"), Profiles(tmp_path)):
        assert len(profiles) == 0
        assert profiles.known(SPEC, "quest", (600,)) == Profiled()


def test_an_installed_profile_is_known_by_length_with_its_times() -> None:
    profiles = Profiles(None)
    installed = profiles.install(data())
    assert (installed.model, len(profiles)) == (SPEC.model, 1)
    known = profiles.known(SPEC, "quest", (600, 512))
    assert same(known.matrix, matrix(1))
    timing = installed.timing(SPEC.entry_bytes)
    assert timing is not None
    assert known.prefill_s == timing.prefill_s(600)
    assert known.transfer_s == 2 * timing.transfer_s(600)
    assert same(profiles.known(SPEC, "quest", (9, 1500)).matrix, matrix(2))


def test_entries_of_another_size_take_another_time() -> None:
    profiles = Profiles(None)
    profiles.install(data())
    half = msgspec.structs.replace(SPEC, entry_bytes=128)
    assert profiles.known(half, "quest", (1024,)).transfer_s == pytest.approx(0.7)
    assert profiles.known(half, "quest", (1024,)).prefill_s == pytest.approx(0.2)


def test_a_profile_without_times_says_nothing_of_them() -> None:
    profiles = Profiles(None)
    profiles.install(data(prefill=Times((), ()), transfer=Times((), ())))
    known = profiles.known(SPEC, "quest", (600,))
    assert (known.prefill_s, known.transfer_s) == (0.0, 0.0)
    assert known.matrix is not None


@pytest.mark.parametrize("field", ["model", "revision"])
def test_another_models_profile_is_not_used(field: str) -> None:
    profiles = Profiles(None)
    profiles.install(data())
    assert profiles.known(msgspec.structs.replace(SPEC, **{field: "another"}), "quest", (600,)) == Profiled()


@pytest.mark.parametrize("field", ["layers", "kv_heads"])
def test_a_profile_that_does_not_fit_the_model_is_not_used(field: str) -> None:
    profiles = Profiles(None)
    profiles.install(data())
    assert profiles.known(msgspec.structs.replace(SPEC, **{field: 2}), "quest", (600,)) == Profiled()


def test_the_selectors_own_profile_or_none_but_any_where_none_is_named() -> None:
    profiles = Profiles(None)
    profiles.install(data(selector="quest", groups=(ProfileGroup(1, 10_000, matrix(3), 1, 1),)))
    newer = CREATED + datetime.timedelta(days=1)
    profiles.install(data(selector="hata", groups=(ProfileGroup(1, 10_000, matrix(4), 1, 1),), created=newer))
    assert len(profiles) == 2
    assert same(profiles.known(SPEC, "quest", (600,)).matrix, matrix(3))
    assert same(profiles.known(SPEC, "hata", (600,)).matrix, matrix(4))
    assert profiles.known(SPEC, "infinigen", (600,)) == Profiled()
    assert same(profiles.known(SPEC, "", (600,)).matrix, matrix(4))


def test_a_running_transfer_keeps_its_matrix() -> None:
    """Read-copy-update: what has begun goes on in the old order, what begins takes the new one."""
    profiles = Profiles(None)
    layout = PartLayout(layers=LAYERS, heads=1, entry_bytes=4, rows=1, capacity=40)

    def policy() -> Policy:
        known = profiles.known(SPEC, "quest", (40,))
        return choose_policy("profile", Selective(), known, layers=LAYERS, lengths=(40,), token_bytes=1 << 20)

    def order(queue: SendQueue) -> list[tuple[int, int]]:
        found = []
        while taken := queue.take(16):
            found += [(layer, piece.start) for layer, ranges in taken for piece in ranges]
        return found

    def queue() -> SendQueue:
        made = SendQueue(layout, (40,), policy())
        tokens = ReadyTokens(layout, (40,))
        for layer in range(LAYERS):
            made.add(tokens.add(layer, None, 0, 40))
        return made

    profiles.install(data(groups=(ProfileGroup(1, 100, matrix(5), 1, 1),)))
    expected = order(queue())
    running, kept = queue(), profiles.known(SPEC, "quest", (40,))
    first = running.take(16)
    profiles.install(data(groups=(ProfileGroup(1, 100, matrix(6), 1, 1),)))
    assert same(kept.matrix, matrix(5))
    rest = order(running)
    assert [(layer, piece.start) for layer, ranges in first for piece in ranges] + rest == expected
    assert order(queue()) != expected
    assert len(profiles) == 1


def damaged() -> list[bytes]:
    good = data()
    flipped = bytearray(good)
    flipped[-3] ^= 1
    return [b"", b"no profile", good[:-1], good + b"\0", bytes(flipped)]


@pytest.mark.parametrize("bad", damaged(), ids=["empty", "text", "cut", "longer", "flipped"])
def test_bad_bytes_leave_the_old_profile(bad: bytes, tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    profiles.install(data())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidProfile):
        profiles.install(bad)
    assert same(profiles.known(SPEC, "quest", (600,)).matrix, matrix(1))
    assert sorted(tmp_path.iterdir()) == before


def test_an_importance_that_is_no_number_is_refused() -> None:
    values = np.full((LAYERS, 10), 0.5, np.float32)
    text = data(groups=(ProfileGroup(1, 100, matrix(1), 1, 1),))
    at = text.index(matrix(1).values[2].tobytes())
    values[2, 0] = np.nan
    with pytest.raises(InvalidProfile):
        Profiles(None).install(text[:at] + values[2].tobytes() + text[at + 40 :])


# --- the folder -------------------------------------------------------------------------------------------------------


def test_installed_profiles_are_there_after_a_restart(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / "made" / "here")
    profiles.install(data())
    profiles.install(data(selector="hata"))
    again = Profiles(tmp_path / "made" / "here")
    assert len(again) == 2
    assert same(again.known(SPEC, "hata", (600,)).matrix, matrix(1))


def test_of_two_files_for_one_model_the_newest_is_used_and_the_installed_one_replaces_the_old(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    for seed in range(8):
        profiles.install(data(groups=(ProfileGroup(1, 10_000, matrix(seed), 1, 1),)))
    assert len(list(tmp_path.iterdir())) == 1
    assert same(Profiles(tmp_path).known(SPEC, "quest", (600,)).matrix, matrix(7))
    for number, name in enumerate(("zz", "aa", "mm")):  # put there by hand
        path = tmp_path / f"{name}.kvdprofile"
        path.write_bytes(data(groups=(ProfileGroup(1, 10_000, matrix(20 + number), 1, 1),)))
        os.utime(path, ns=(10**18, 4 * 10**18 + number))
    assert same(Profiles(tmp_path).known(SPEC, "quest", (600,)).matrix, matrix(22))


def test_a_file_that_is_of_no_use_does_not_keep_the_daemon_from_serving(tmp_path: Path) -> None:
    (tmp_path / "bad.kvdprofile").write_bytes(b"no profile")
    (tmp_path / "folder.kvdprofile").mkdir()
    (tmp_path / "broken.kvdprofile").symlink_to(tmp_path / "nowhere")
    (tmp_path / "good.kvdprofile").write_bytes(data())
    (tmp_path / "other.txt").write_bytes(data(selector="hata"))
    assert len(Profiles(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_the_askers_to_know(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    profiles = Profiles(tmp_path / "file" / "folder")
    with pytest.raises(InvalidArgument, match=r"can't be made: .*selective\.profiles"):
        profiles.install(data())
    assert len(profiles) == 0


# --- recording --------------------------------------------------------------------------------------------------------


def record(
    profiles: Profiles, selected: Any = None, *, lengths: tuple[int, ...] = (100,), spec: Any = SPEC, **more: Any
) -> None:
    counts = np.ones((LAYERS, BLOCKS), np.float32) if selected is None else np.asarray(selected, np.float32)
    fields: dict[str, Any] = {"heads": 3, "steps": 2, "counts": counts.tobytes(), "blocks": BLOCKS} | more
    profiles.record(spec, "quest", lengths, **fields)


def test_what_was_recorded_comes_back_as_a_profile_that_can_be_installed() -> None:
    profiles = Profiles(None)
    first, second = np.zeros((LAYERS, BLOCKS)), np.zeros((LAYERS, BLOCKS))
    first[2] = (120, 60, 30, 0, 12)  # of 20 tokens x 3 heads x 2 steps
    second[3, 4] = 240
    record(profiles, first)
    record(profiles, second, lengths=(100, 90), steps=4)
    record(profiles, lengths=(1000,))
    exported = files.decode(profiles.export(SPEC.model, "quest"))
    assert (exported.model, exported.revision, exported.selector) == (SPEC.model, SPEC.revision, "quest")
    assert [(g.low, g.high, g.samples, g.steps) for g in exported.groups] == [(64, 128, 3, 10), (512, 1024, 1, 2)]
    chances = 20 * 3 * 2 + (20 + 18) * 3 * 4
    assert exported.groups[0].matrix.values[2] == pytest.approx(first[2] / chances)
    assert exported.groups[0].matrix.values[3] == pytest.approx(second[3] / chances)
    profiles.install(files.encode(exported))
    assert same(profiles.known(SPEC, "quest", (80,)).matrix, exported.groups[0].matrix)


def test_a_selector_without_a_name_can_be_exported_too() -> None:
    profiles = Profiles(None)
    profiles.record(SPEC, "", (100,), heads=1, steps=1, counts=bytes(4 * LAYERS * BLOCKS), blocks=BLOCKS)
    profiles.install(profiles.export(SPEC.model, ""))
    assert profiles.known(SPEC, "", (100,)).matrix is not None


@pytest.mark.parametrize(("model", "selector"), [("org/model", "hata"), ("another", "quest"), ("org/model", "")])
def test_export_of_what_was_not_recorded_names_what_was(model: str, selector: str) -> None:
    profiles = Profiles(None)
    with pytest.raises(NotFound, match="recorded so far: nothing"):
        profiles.export(model, selector)
    record(profiles)
    with pytest.raises(NotFound, match=r"recorded so far: org/model \(quest\)"):
        profiles.export(model, selector)


@pytest.mark.parametrize(
    "more",
    [
        {"blocks": 0},
        {"blocks": (1 << 16) + 1},
        {"blocks": BLOCKS + 1},
        {"counts": b""},
        {"counts": bytes(4 * LAYERS * BLOCKS - 1)},
        {"steps": 0},
        {"steps": (1 << 24) + 1},
        {"lengths": (1 << 25,)},
    ],
)
def test_counts_that_do_not_fit_are_refused(more: dict[str, Any]) -> None:
    profiles = Profiles(None)
    with pytest.raises(InvalidArgument):
        record(profiles, **more)
    with pytest.raises(NotFound):
        profiles.export(SPEC.model, "quest")


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, 121.0])
def test_counts_that_cannot_be_are_refused_and_change_nothing(value: float) -> None:
    profiles = Profiles(None)
    record(profiles)
    before = files.decode(profiles.export(SPEC.model, "quest")).groups[0]
    counts = np.zeros((LAYERS, BLOCKS))
    counts[3, 1] = value
    with pytest.raises(InvalidArgument) as caught:
        record(profiles, counts)
    assert caught.value.fields == {"layer": 3, "block": 1}
    after = files.decode(profiles.export(SPEC.model, "quest")).groups[0]
    assert (after.samples, after.matrix.values.tolist()) == (before.samples, before.matrix.values.tolist())


@given(st.lists(st.integers(1, 1100), min_size=1, max_size=4), st.sampled_from([1, 7, 1000]))
@settings(max_examples=60, deadline=None)
def test_whatever_the_rows_lengths_selecting_everything_is_possible(lengths: list[int], blocks: int) -> None:
    """Rows of unequal lengths have tokens in different blocks; each selection must have its chance."""
    profiles = Profiles(None)
    counts = np.zeros((LAYERS, blocks), np.float32)
    for length in lengths:
        counts += np.bincount(block_of(length, blocks, np.arange(length)), minlength=blocks).astype(np.float32)
    record(profiles, counts * 6, lengths=tuple(lengths), blocks=blocks)
    (group,) = files.decode(profiles.export(SPEC.model, "quest")).groups
    assert group.matrix.values[2:] == pytest.approx(1.0)


def test_rows_that_differ_around_the_number_of_blocks_are_recorded() -> None:
    """Token 250 of a row of 501 is in block 499 of 1,000, in which a row of 998 has no token."""
    profiles = Profiles(None)
    counts = np.zeros((LAYERS, 1000), np.float32)
    counts[2, 499] = 1
    record(profiles, counts, lengths=(998, 501), blocks=1000)
    assert files.decode(profiles.export(SPEC.model, "quest")).blocks == 1000


def test_all_groups_of_a_model_are_recorded_alike() -> None:
    profiles = Profiles(None)
    record(profiles)
    other = {"blocks": 2 * BLOCKS, "counts": bytes(8 * LAYERS * BLOCKS)}
    for lengths in ((100,), (1000,)):
        with pytest.raises(InvalidArgument, match="5 blocks"):
            record(profiles, lengths=lengths, **other)
    with pytest.raises(InvalidArgument, match="3 KV heads"):
        record(profiles, spec=msgspec.structs.replace(SPEC, kv_heads=6))
    record(profiles, spec=msgspec.structs.replace(SPEC, entry_bytes=128), lengths=(1000,))
    assert len(files.decode(profiles.export(SPEC.model, "quest")).groups) == 2


def test_of_several_revisions_the_one_begun_last_is_exported() -> None:
    profiles = Profiles(None)
    record(profiles)
    record(profiles, spec=msgspec.structs.replace(SPEC, revision="next"))
    record(profiles, lengths=(1000,))
    exported = files.decode(profiles.export(SPEC.model, "quest"))
    assert (exported.revision, len(exported.groups)) == (SPEC.revision, 2)


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORDINGS", 2)
    profiles = Profiles(None)
    record(profiles)
    record(profiles, lengths=(1000,))
    with pytest.raises(Busy):
        record(profiles, lengths=(10_000,))
    record(profiles)
