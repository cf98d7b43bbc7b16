"""What a daemon learns and tells: bounds, peers, files, and what new transfers get of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import learnt as module
from kvd.errors import InvalidArgument, NotFound, ProtocolError
from kvd.importance.learning import HalfLife, unpacked
from kvd.importance.matrix import ImportanceMatrix
from kvd.learnt import Key, Learner
from kvd.profiles import Profiles
from kvd.profiling import files
from kvd.profiling.profile import Profile, ProfileGroup
from kvd.wire import framing
from kvd.wire.messages import Learnt
from kvd_client.spec import KVSpec

SPEC = KVSpec(layers=4, kv_heads=2, entry_bytes=64, dtype="float16", model="m")
KEY = ("m", "", "quest")


def matrix(*row: float) -> ImportanceMatrix:
    return ImportanceMatrix(np.tile(np.array(row, np.float32), (4, 1)))


LOW, HIGH = matrix(0.9, 0.1, 0.1, 0.1), matrix(0.1, 0.1, 0.1, 0.9)


def learner(
    start: Callable[[Key, int], tuple[ImportanceMatrix, str] | None] = lambda key, length: None, **how: Any
) -> Learner:
    return Learner(HalfLife(4), blocks=4, start=start, **how)


def report(one: Learner, what: ImportanceMatrix = LOW, *, spec: KVSpec = SPEC, **how: Any) -> None:
    fields: dict[str, Any] = {"requests": 1.0, "tokens": 10.0, "source": "p", "now": 5.0}
    one.report(spec, how.pop("selector", "quest"), how.pop("length", 100), what, **(fields | how))


def message(**changes: Any) -> Learnt:
    one = learner()
    report(one)
    ((_, found),) = one.outgoing()
    return msgspec.structs.replace(found, **changes)


def test_groups_fill_on_their_own() -> None:
    one = learner()
    report(one, LOW, length=100)
    report(one, HIGH, length=1000)
    report(one, HIGH, length=700)
    assert [(s.low, s.high, s.requests, s.heard) for s in one.statuses(7.0)] == [(64, 128, 1, 0), (512, 1024, 2, 0)]
    assert [s.age_s for s in one.statuses(7.0)] == [2.0, 2.0]
    inf = float("inf")
    np.testing.assert_allclose(one.matrix(SPEC, "quest", 100, nearer_than=inf).values[2:], LOW.values[2:])
    np.testing.assert_allclose(one.matrix(SPEC, "quest", 600, nearer_than=1).values[2:], HIGH.values[2:])
    np.testing.assert_allclose(one.matrix(SPEC, "quest", 300, nearer_than=inf).values[2:], HIGH.values[2:])
    assert one.matrix(SPEC, "quest", 300, nearer_than=1.5) is None
    assert one.matrix(SPEC, "hata", 100, nearer_than=inf) is None
    assert one.matrix(spec_with(SPEC, layers=5), "quest", 100, nearer_than=inf) is None


def spec_with(spec: KVSpec, **changes: Any) -> KVSpec:
    return msgspec.structs.replace(spec, **changes)


def test_a_source_learns_from_messages_what_it_would_have_from_requests() -> None:
    sink, source = learner(lambda key, length: (HIGH, "x")), learner(lambda key, length: (HIGH, "x"))
    for what in (LOW, LOW, HIGH, LOW, LOW):
        report(sink, what)
    told = list(sink.outgoing())
    assert [node for node, _ in told] == ["p"]
    assert not sink.waiting
    source.hear("d", told[0][1], 9.0)
    mine, its = (one.matrix(SPEC, "quest", 100, nearer_than=1) for one in (source, sink))
    np.testing.assert_allclose(mine.values[2:], its.values[2:], atol=0.005)  # a byte for each block
    assert (np.argsort(mine.values[2]) == np.argsort(its.values[2])).all()
    (status,) = source.statuses(10.0)
    assert (status.requests, status.heard, status.tokens) == (5, 5, 50)
    assert not source.waiting  # nobody passes on what it heard


def test_every_source_is_told_and_nobody_else() -> None:
    one = learner()
    report(one, source="p")
    report(one, source="q")
    report(one, source="")
    assert sorted(node for node, _ in one.outgoing()) == ["p", "q"]
    report(one, spec=spec_with(SPEC, model="other"), source="r")
    assert [(node, m.model) for node, m in one.outgoing()] == [("r", "other")]
    assert one.counters["learnt_told"] == 3


def test_only_some_messages_at_a_time() -> None:
    one = learner()
    for number in range(20):
        report(one, length=1 << number)
    counts = []
    while one.waiting:
        counts.append(len(list(one.outgoing())))
    assert counts == [8, 8, 4]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": 1 << 20}, "layers is"),
        ({"kv_heads": -1}, "kv_heads"),
        ({"blocks": 1 << 40}, "blocks is"),
        ({"blocks": 3}, "do not fit"),
        ({"rates": b"\0" * 17}, "17 bytes"),
        ({"scale": 1.5}, "1.5"),
        ({"scale": float("nan")}, "nan"),
        ({"low": 65}, "begins with 65"),
        ({"low": 0}, "0 tokens"),
        ({"low": 1 << 40}, "tokens"),
        ({"requests": 0.0}, "0.0 requests"),
        ({"requests": float("nan")}, "nan requests"),
        ({"tokens": -1.0}, "-1.0 tokens"),
        ({"model": ""}, "no name"),
        ({"selector": "x" * 1025}, "1024 characters"),
    ],
)
def test_what_no_kvd_says_teaches_nothing(changes: dict[str, Any], says: str) -> None:
    one = learner()
    with pytest.raises(InvalidArgument, match=says):
        one.hear("d", message(**changes), 1.0)
    assert len(one) == 0


def test_another_model_of_the_same_name_is_refused() -> None:
    one = learner()
    report(one)
    before = one.matrix(SPEC, "quest", 100, nearer_than=1)
    with pytest.raises(InvalidArgument, match="4 layers and 3 KV heads there, and 4 and 2"):
        one.hear("d", message(kv_heads=3), 1.0)
    assert one.matrix(SPEC, "quest", 100, nearer_than=1) is before
    one.hear("d", message(entry_bytes=32), 1.0)  # importance does not depend on how large entries are


@settings(deadline=None)
@given(
    st.builds(
        Learnt,
        model=st.text(max_size=5),
        revision=st.text(max_size=3),
        selector=st.text(max_size=3),
        layers=st.integers(-1, 6) | st.integers(),
        kv_heads=st.integers(0, 3) | st.integers(),
        entry_bytes=st.integers(),
        low=st.sampled_from([1, 64, 1024]) | st.integers(),
        blocks=st.integers(0, 6) | st.integers(),
        requests=st.floats(),
        tokens=st.floats(),
        scale=st.floats(0, 1) | st.floats(),
        rates=st.binary(max_size=36),
        version=st.sampled_from([0, 1, 1, 1, 2]),
    )
)
def test_any_message_teaches_something_sane_or_nothing(one: Learnt) -> None:
    try:
        one = framing.decode(framing.encode(one)[4:])
    except (OverflowError, ProtocolError):  # numbers beyond msgpack's
        return
    found = learner()
    try:
        found.hear("d", one, 1.0)
    except InvalidArgument:
        assert len(found) == 0
        return
    (status,) = found.statuses(1.0)
    assert status.requests == one.requests > 0
    spec = KVSpec(
        layers=one.layers, kv_heads=one.kv_heads, entry_bytes=1, dtype="x", model=one.model, revision=one.revision
    )
    values = found.matrix(spec, one.selector, one.low, nearer_than=1).values[2:]
    assert ((values >= 0) & (values <= 1)).all()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GROUPS", 5)
    one = learner()
    for number in range(12):
        report(one, spec=spec_with(SPEC, model=f"m{number}"))
        one.matrix(spec_with(SPEC, model="m0"), "quest", 100, nearer_than=1)
    assert [status.model for status in one.statuses(0)] == ["m0", "m10", "m11", "m8", "m9"]
    assert one.counters["learnt_dropped"] == 7
    assert len(one._sources) == 5
    assert len(list(one.outgoing())) == 5
    monkeypatch.setattr(module, "MAX_CELLS", 3 * 16)
    report(one, spec=spec_with(SPEC, model="m12"))
    assert len(one) == 3
    for number in range(300):
        report(one, source=f"p{number}")
    assert len(one._sources[KEY]) == module.MAX_SOURCES


def test_blocks_that_fit_into_a_message() -> None:
    one = Learner(HalfLife(4), blocks=1000, start=lambda key, length: None)
    assert one.blocks_of(30) == 1000
    assert 4 * 1024 * one.blocks_of(1024) < 1 << 20


def test_it_outlives_a_restart(tmp_path: Path) -> None:
    one = learner(folder=tmp_path)
    report(one, LOW)
    report(one, HIGH, length=1000)
    report(one, HIGH, selector="")
    for path, data in one.unsaved():
        files.replace_file(path, data)
    assert one.unsaved() == []
    again = learner(folder=tmp_path, now=3.0)
    assert [seen(s) for s in again.statuses(3.0)] == [seen(s) for s in one.statuses(5.0)]
    for selector, length in (("quest", 100), ("quest", 1000), ("", 100)):
        mine, its = (x.matrix(SPEC, selector, length, nearer_than=1) for x in (again, one))
        np.testing.assert_array_equal(mine.values, its.values)
    report(one, HIGH)
    report(again, HIGH)
    np.testing.assert_allclose(
        again.matrix(SPEC, "quest", 100, nearer_than=1).values, one.matrix(SPEC, "quest", 100, nearer_than=1).values,
        rtol=1e-5,
    )  # fmt: skip


def seen(status: Any) -> tuple[Any, ...]:
    return (status.model, status.selector, status.low, status.requests, status.tokens, round(status.filled, 6))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another"])
def test_damaged_files_are_said_once_and_begun_anew(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = learner(folder=tmp_path)
    report(one)
    ((path, data),) = one.unsaved()
    if damage == "another":
        profile = files.decode(data)
        data = files.encode(dataclasses.replace(profile, parameters={}))
    wrong = {"cut": data[:-3], "flipped": data[:200] + bytes([data[200] ^ 1]) + data[201:], "empty": b""}
    path.write_bytes(wrong.get(damage, data))
    again = learner(folder=tmp_path)
    assert len(again) == 0
    assert again.counters["learnt_damaged"] == 1
    report(again)
    ((new, data),) = again.unsaved()
    assert new == path
    files.replace_file(new, data)
    assert len(learner(folder=tmp_path)) == 1


def installed(values: ImportanceMatrix) -> bytes:
    return files.encode(
        Profile(
            model="m",
            layers=4,
            kv_heads=2,
            entry_bytes=64,
            selector="quest",
            groups=(ProfileGroup(64, 128, values, 1, 1),),
            created=datetime(2026, 1, 1, tzinfo=UTC),
        )
    )


def profiles(folder: Path | None = None) -> Profiles:
    found = Profiles(None)
    found.learner = learner(found.start, folder=folder)
    return found


def record(found: Profiles, counts: ImportanceMatrix, **how: Any) -> None:
    selected = np.zeros((4, 4), np.float32)
    selected[2:] = counts.values[2:] * 25 * 2 * 10
    fields: dict[str, Any] = {"heads": 2, "steps": 10, "blocks": 4, "asked": False, "source": "p"}
    found.record(SPEC, "quest", (100,), counts=selected.astype("<f4").tobytes(), **(fields | how))


def test_new_transfers_get_what_was_learnt_and_learning_begins_with_the_file() -> None:
    found = profiles()
    assert found.known(SPEC, "quest", (100,)).matrix is None
    found.install(installed(LOW))
    held = found.known(SPEC, "quest", (100,)).matrix
    np.testing.assert_array_equal(held.values, LOW.values)
    for _ in range(4):  # a half-life
        record(found, HIGH)
    now = found.known(SPEC, "quest", (100,)).matrix
    np.testing.assert_allclose(now.values[2:], (LOW.values[2:] + HIGH.values[2:]) / 2, atol=1e-5)
    np.testing.assert_array_equal(held.values, LOW.values)
    # Of lengths that the file knows and learning does not, the file's are nearer.
    assert found.known(SPEC, "quest", (60,)).matrix is not None
    assert found.recorded() == []
    record(found, HIGH, asked=True)
    assert [one.prompts for one in found.recorded()] == [1]


def test_installing_a_profile_begins_anew() -> None:
    found = profiles()
    record(found, HIGH)
    found.install(installed(LOW))
    np.testing.assert_array_equal(found.known(SPEC, "quest", (100,)).matrix.values, LOW.values)
    assert len(found.learner) == 0


def test_what_began_with_another_profile_is_dropped_at_the_start(tmp_path: Path) -> None:
    found = profiles(tmp_path)
    found.install(installed(LOW))
    record(found, HIGH)
    for path, data in found.learner.unsaved():
        files.replace_file(path, data)
    same, other, none = Profiles(None), Profiles(None), Profiles(None)
    same._take(files.decode(installed(LOW)))
    other._take(files.decode(installed(HIGH)))
    assert [len(learner(one.start, folder=tmp_path)) for one in (same, other, none)] == [1, 0, 0]


def test_what_was_learnt_is_exported_as_a_profile() -> None:
    found = profiles()
    with pytest.raises(NotFound, match="nothing has been learnt of model 'm' with selector 'quest'"):
        found.export("m", "quest", learnt=True)
    record(found, HIGH)
    profile = files.decode(found.export("m", "quest", learnt=True))
    assert (profile.model, profile.selector, profile.layers, profile.kv_heads) == ("m", "quest", 4, 2)
    assert [(g.low, g.high, g.samples, g.steps) for g in profile.groups] == [(64, 128, 1, 10)]
    np.testing.assert_allclose(profile.groups[0].matrix.values[2:], HIGH.values[2:], atol=1e-5)
    with pytest.raises(NotFound, match=r"learnt so far: m \(quest\)"):
        found.export("other", "quest", learnt=True)
    plain = Profiles(None)
    with pytest.raises(NotFound, match="does not learn"):
        plain.export("m", "quest", learnt=True)


def test_a_rank_of_a_group_is_its_part_of_a_request() -> None:
    found = profiles()
    selected = np.zeros((4, 4), np.float32)
    for _ in range(2):
        found.record(SPEC, "quest", (100,), heads=1, steps=10, counts=selected.tobytes(), blocks=4, asked=False)
    assert [one.requests for one in found.learner.statuses(0)] == [1.0]


def test_messages_hold_what_was_reported() -> None:
    found = message()
    rates = unpacked(found.scale, found.rates, found.layers, found.blocks)
    np.testing.assert_allclose(rates[2:], LOW.values[2:], atol=0.005)
    assert (found.requests, found.tokens, found.low, found.blocks) == (1, 10, 64, 4)


def test_what_can_be_no_profile_keeps_no_other_from_being_written(tmp_path: Path) -> None:
    one = learner(folder=tmp_path)
    report(one, spec=msgspec.structs.replace(SPEC, model="m" * 2000))
    report(one)
    ((_, data),) = one.unsaved()
    assert files.decode(data).model == "m"
    assert one.unsaved() == []


def test_one_name_is_one_model_whatever_the_length(tmp_path: Path) -> None:
    one = learner(folder=tmp_path)
    report(one, length=100)
    other = msgspec.structs.replace(SPEC, layers=8)
    with pytest.raises(InvalidArgument, match="give one name"):
        report(one, ImportanceMatrix(np.full((8, 4), 0.5, np.float32)), spec=other, length=5000)
    assert len(one.unsaved()) == 1


@pytest.mark.parametrize("made", [Learner, Profiles])
def test_a_folder_that_can_not_be_read_keeps_no_daemon_from_starting(
    made: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refused)
    folder = Path("/locked/inner")
    assert learner(folder=folder).statuses(0.0) == [] if made is Learner else made(folder).installed() == []
