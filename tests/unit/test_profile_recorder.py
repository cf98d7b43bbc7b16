"""From KV indices to a profile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.blocks import block_of
from kvd.errors import InvalidArgument
from kvd.profiling.recorder import Recorder, group_range
from kvd.profiling.timing import Times
from kvd_client.spec import MAX_TOKENS, KVSpec
from tests.profiles import CREATED, SPEC


@given(st.integers(1, MAX_TOKENS))
def test_a_group_is_a_power_of_two(length: int) -> None:
    low, high = group_range(length)
    assert low <= length < high == 2 * low
    assert low.bit_count() == 1


@pytest.mark.parametrize("length", [0, -3, MAX_TOKENS + 1])
def test_other_lengths_have_no_group(length: int) -> None:
    with pytest.raises(InvalidArgument, match="can't be recorded"):
        group_range(length)


@given(st.data())
def test_it_counts_what_was_selected(data: st.DataObject) -> None:
    """Against a sum in plain Python, with padding, generated tokens and several groups in a batch."""
    layers, heads, blocks = 4, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    recorder = Recorder(layers, blocks=blocks)
    selected: dict[tuple[int, int, int], int] = {}
    chances: dict[tuple[int, int, int], int] = {}
    steps: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 2))):
        lengths = data.draw(st.lists(st.integers(4, 40), min_size=1, max_size=3))
        starts = [max(lengths) - length for length in lengths]
        total = data.draw(st.integers(1, 3))
        with recorder.batch(lengths, starts=starts) as recording:
            for step in range(total):
                for layer in range(2, layers):
                    rows = [
                        data.draw(st.permutations(range(start, start + length + step)))[:3]
                        for start, length in zip(starts, lengths, strict=True)
                        for _ in range(heads)
                    ]
                    recording.add(layer, np.array(rows, np.int32))
                    for at, row in enumerate(rows):
                        length, start = lengths[at // heads], starts[at // heads]
                        low = group_range(length)[0]
                        inside = [token - start for token in row if token - start < length]
                        for block in block_of(length, blocks, inside).tolist():
                            key = low, layer, block
                            selected[key] = selected.get(key, 0) + 1
                        for block in block_of(length, blocks, np.arange(length)).tolist():
                            key = low, layer, block
                            chances[key] = chances.get(key, 0) + 1
        for length in lengths:
            low = group_range(length)[0]
            steps[low] = steps.get(low, 0) + total
            prompts[low] = prompts.get(low, 0) + 1
    groups = recorder.groups()
    assert {group.low: group.steps for group in groups} == steps
    assert {group.low: group.samples for group in groups} == prompts
    for group in groups:
        assert np.isinf(group.matrix.values[:2]).all()
        for layer in range(2, layers):
            for block in range(blocks):
                key = group.low, layer, block
                if key in chances:
                    share = selected.get(key, 0) / chances[key]
                    assert group.matrix.values[layer, block] == pytest.approx(share, abs=1e-6)


def index(*rows: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.array(rows, np.int32)


def test_positions_that_are_selected_come_first() -> None:
    recorder = Recorder(3, blocks=4)
    with recorder.batch([8]) as recording:
        for _ in range(5):
            recording.add(2, index([6, 7, 0]))
    (group,) = recorder.groups()
    assert group.matrix.values[2].tolist() == [0.5, 0, 0, 1.0]
    assert group.matrix.ranks()[2].tolist() == [9, 10, 11, 8]
    assert (group.low, group.high, group.samples, group.steps) == (8, 16, 1, 5)


def test_a_profile_carries_the_models_fields() -> None:
    recorder = Recorder(SPEC.layers, blocks=4)
    with recorder.batch([8, 100]) as recording:
        recording.add(3, index([6, 7], [1, 99]))
    times = Times((8,), (0.5,))
    made = recorder.profile(
        SPEC, selector="exact", parameters={"k": 2}, created=CREATED, prefill=times, link_rate=7, notes="n"
    )
    assert (made.model, made.revision, made.layers, made.kv_heads, made.entry_bytes) == ("org/model", "abc", 4, 3, 256)
    assert (made.selector, dict(made.parameters), made.blocks) == ("exact", {"k": 2}, 4)
    assert (made.prefill, made.transfer, made.link_rate, made.notes) == (times, Times(), 7, "n")
    assert [(group.low, group.high) for group in made.groups] == [(8, 16), (64, 128)]
    assert made.created == CREATED


def test_nothing_recorded_is_no_profile() -> None:
    recorder = Recorder(SPEC.layers, blocks=4)
    with recorder.batch([8]):
        pass
    assert recorder.groups() == ()
    with pytest.raises(InvalidArgument, match="nothing was recorded"):
        recorder.profile(SPEC, selector="exact", created=CREATED)


def test_another_models_spec_is_refused() -> None:
    recorder = Recorder(7, blocks=4)
    with recorder.batch([8]) as recording:
        recording.add(3, index([6, 7]))
    with pytest.raises(InvalidArgument, match="7 layers were recorded"):
        recorder.profile(SPEC, selector="exact", created=CREATED)


def test_an_exception_drops_the_batch() -> None:
    recorder = Recorder(3, blocks=4)

    def run() -> None:
        with recorder.batch([8]) as recording:
            recording.add(2, index([6]))
            raise KeyError("the engine's")

    with pytest.raises(KeyError):
        run()
    assert recorder.groups() == ()


def test_a_closed_recording_takes_no_more() -> None:
    recorder = Recorder(3, blocks=4)
    recording = recorder.batch([8])
    recording.add(2, index([6]))
    recording.close()
    recording.close()
    assert recorder.groups()[0].samples == 1
    with pytest.raises(InvalidArgument, match="closed"):
        recording.add(2, index([6]))


def test_a_token_named_twice_adds_nothing_at_all() -> None:
    recorder = Recorder(4, blocks=8)
    recording = recorder.batch([8])
    recording.add(2, index([6, 7]))
    recording.add(3, index([6, 6]))
    with pytest.raises(InvalidArgument, match="count each selection once"):
        recording.close()
    assert recorder.groups() == ()


@pytest.mark.parametrize(
    ("layer", "given_index", "says"),
    [
        (4, index([1], [2]), "layer 4 does not exist"),
        (-1, index([1], [2]), "layer -1 does not exist"),
        (2, index([1], [2], [3]), "3 rows for 2 sequences"),
        (2, index([1], [2], [3], [4]), "4 rows for 2 sequences of 1 heads"),
        (2, np.empty((0, 3), np.int32), "0 rows"),
        (2, index([1], [-2]), "-2"),
        (2, index([1], [2]).astype(np.int64), "int32"),
        (2, index([1], [2]).ravel(), "shape"),
        (2, [[1], [2]], "int32 array"),
    ],
)
def test_a_wrong_index_is_refused_and_counts_nothing(layer: int, given_index: object, says: str) -> None:
    recorder = Recorder(4, blocks=4)
    recording = recorder.batch([8, 9])
    recording.add(2, index([1], [2]))
    with pytest.raises(InvalidArgument, match=says):
        recording.add(layer, given_index)  # type: ignore[arg-type]
    recording.close()
    (group,) = recorder.groups()
    assert group.steps == 2
    assert group.matrix.values[3].tolist() == [0, 0, 0, 0]


def test_a_position_in_the_padding_is_refused() -> None:
    recording = Recorder(4, blocks=4).batch([8, 5], starts=[0, 3])
    recording.add(2, index([0], [3]))
    with pytest.raises(InvalidArgument, match="layer 2"):
        recording.add(2, index([0], [2]))


@pytest.mark.parametrize(("lengths", "starts"), [([], 0), ([0], 0), ([5], [1, 2]), ([5], -1), ([5, 6], [0])], ids=str)
def test_batches_that_make_no_sense_are_refused(lengths: list[int], starts: list[int] | int) -> None:
    with pytest.raises(InvalidArgument):
        Recorder(3).batch(lengths, starts=starts)


@pytest.mark.parametrize(("layers", "blocks"), [(0, 5), (5, 0)])
def test_there_must_be_something_to_count_over(layers: int, blocks: int) -> None:
    with pytest.raises(InvalidArgument):
        Recorder(layers, blocks=blocks)


def test_a_model_of_two_layers_has_a_profile_without_choice() -> None:
    recorder = Recorder(2, blocks=3)
    with recorder.batch([8]) as recording:
        recording.add(1, index([1]))
    spec = KVSpec(layers=2, kv_heads=1, entry_bytes=4, dtype="x", model="m")
    made = recorder.profile(spec, selector="exact", created=CREATED)
    assert np.isinf(made.groups[0].matrix.values).all()
