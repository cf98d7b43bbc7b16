"""Recorded selections: what is counted of them, and that a file gives back what was put into it, or says no."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.blocks import block_of
from kvd.errors import InvalidArgument, InvalidProfile
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling import recorded
from kvd.profiling.recorded import Recorded, pack
from kvd.transfer.replay import causal_sent, global_sent


def some(length: int = 37, *, layers: int = 4, steps: int = 3, queries: int = 5, heads: int = 2) -> Recorded:
    rng = np.random.default_rng(length)
    masks = [rng.random((layers, n, heads, length)) < 0.3 for n in (steps, queries)]
    for mask in masks:
        mask[:2] = False
    return Recorded(
        name="code",
        selector="quest",
        parameters={"page": 16},
        model="m",
        share=0.3,
        query_share=0.2,
        length=length,
        steps=pack(masks[0]),
        queries=pack(masks[1]),
        asked_ahead=64,
    )


def test_a_file_gives_it_back(tmp_path: Path) -> None:
    one, path = some(), tmp_path / "one.kvdrecorded"
    recorded.write(one, path)
    found = recorded.read(path)
    for field in ("name", "selector", "parameters", "model", "share", "query_share", "length", "asked_ahead"):
        assert getattr(found, field) == getattr(one, field)
    np.testing.assert_array_equal(found.steps, one.steps)
    np.testing.assert_array_equal(found.queries, one.queries)
    assert (found.layers, found.kv_heads, found.step_count, found.query_count) == (4, 2, 3, 5)


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(0, 255))
def test_damage_is_said_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "one.kvdrecorded"
    recorded.write(some(), path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data[: len(data) - at % 7 * (byte % 2)])
    with contextlib.suppress(InvalidProfile):  # anything else fails the test
        assert recorded.read(path).length == 37


@pytest.mark.parametrize("content", [b"", b"\x10", b"nothing of the kind, but long enough for a header"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(InvalidProfile, match="other"):
        recorded.read(path)
    with pytest.raises(InvalidArgument, match="missing"):
        recorded.read(tmp_path / "missing")


@pytest.mark.parametrize("blocks", [1, 5, 37, 100])
def test_counts_and_shares(blocks: int) -> None:
    one = some()
    steps, queries = one.step_mask(), one.query_mask()
    assert steps.shape == (4, 3, 2, 37)
    where = block_of(37, blocks, np.arange(37))
    for block in range(blocks):
        inside = where == block
        np.testing.assert_array_equal(one.counts(blocks)[:, block], steps[..., inside].sum((1, 2, 3)))
        np.testing.assert_array_equal(one.counts(blocks, steps=1)[:, block], steps[:, 1][..., inside].sum((1, 2)))
        np.testing.assert_array_equal(one.counts(blocks, heads=True)[:, :, block], steps[..., inside].sum((1, 3)))
        if inside.any():
            np.testing.assert_allclose(one.shares(2, blocks)[:, block], queries[:, 3:][..., inside].mean((1, 2, 3)))
            np.testing.assert_allclose(
                one.shares(1, blocks, heads=True)[:, :, block], queries[:, 4][..., inside].mean(2)
            )
    counts = one.selection_counts(blocks)
    assert counts.selected.sum() == steps.sum()
    np.testing.assert_array_equal(one.step_mask(2), steps[2])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"length": 0}, "length"),
        ({"length": 36}, "behind the prompt"),
        ({"length": 41}, "no prompt of 41"),
        ({"queries": np.zeros((4, 5, 3, 5), np.uint8)}, "queries"),
        ({"steps": np.zeros((4, 5, 5), np.uint8)}, "steps"),
    ],
)
def test_what_does_not_fit(changes: dict[str, object], says: str) -> None:
    one = some()
    fields = {name: getattr(one, name) for name in one.__dataclass_fields__}
    if changes.get("length") == 36:
        fields["steps"] = np.full_like(one.steps, 255)
    with pytest.raises(InvalidArgument, match=says):
        Recorded(**fields | changes)
    with pytest.raises(InvalidArgument, match="5 queries, not 6"):
        one.shares(6, 3)


@given(st.floats(0, 1), st.booleans(), st.booleans(), st.integers(1, 60))
@settings(deadline=None)
def test_what_a_replay_has_sent(sent: float, ranked: bool, at_once: bool, length: int) -> None:
    rng = np.random.default_rng(length)
    profile = ImportanceMatrix(rng.random((5, 20)))
    shares = rng.random((5, 20)).astype(np.float32) if ranked else None
    found = causal_sent(profile, shares, layers=5, length=length, sent=sent, at_once=at_once)
    whole = global_sent(profile.values, length=length, sent=sent)
    # The link never waits, but for what is not computed yet.
    assert whole.sum() == round(sent * 5 * length)
    assert found.sum() == whole.sum() if at_once else found.sum() >= min(whole.sum(), 4 * length) - length
    if not ranked and at_once and length % 20 == 0:
        # Of equal classes by address instead of by value, no more than one class differs.
        assert (found & whole).sum() >= whole.sum() - 5 * length // 8


def test_a_ranking_changes_what_a_replay_sends() -> None:
    """The last layer is ready when prefill is over, so that nothing of it has been sent then."""
    profile = ImportanceMatrix(np.tile(np.linspace(1, 0.1, 8), (5, 1)))
    shares = np.zeros((5, 8), np.float32)
    shares[:, -1] = 1.0
    found = causal_sent(profile, shares, layers=5, length=80, sent=0.6, weight=1.0)
    assert found[2:4, -10:].all()
    plain = causal_sent(profile, None, layers=5, length=80, sent=0.6)
    assert not plain[2:4, -10:].any()
    assert not found[4].any()
    assert not plain[4].any()
