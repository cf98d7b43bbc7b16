"""The importance matrix and the counts it is made of."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.blocks import block_bounds
from kvd.errors import InvalidArgument
from kvd.importance.counts import SelectionCounts
from kvd.importance.matrix import ImportanceMatrix


@st.composite
def matrices(draw: st.DrawFn) -> ImportanceMatrix:
    layers, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    # Few values, so that there are ties.
    cells = st.lists(st.sampled_from([0.0, 0.25, 0.5, 3.0]), min_size=layers * blocks, max_size=layers * blocks)
    return ImportanceMatrix(np.array(draw(cells)).reshape(layers, blocks))


def test_layers_0_and_1_are_infinitely_important() -> None:
    matrix = ImportanceMatrix(np.full((4, 3), 0.5))
    assert matrix.values.dtype == np.float32
    assert np.isinf(matrix.values[:2]).all()
    assert matrix.values[2:].tolist() == [[0.5] * 3] * 2
    assert (matrix.layers, matrix.blocks) == (4, 3)
    assert ImportanceMatrix(matrix.values).values.tolist() == matrix.values.tolist()


@pytest.mark.parametrize("bad", [np.nan, -0.001, -np.inf, np.inf])
def test_what_is_no_importance_is_named(bad: float) -> None:
    values = np.zeros((5, 4))
    values[3, 2] = bad
    with pytest.raises(InvalidArgument, match="layer 3, block 2") as caught:
        ImportanceMatrix(values)
    assert (caught.value.fields["layer"], caught.value.fields["block"]) == (3, 2)


@pytest.mark.parametrize("bad", [np.nan, -1.0])
def test_layers_0_and_1_are_checked_too(bad: float) -> None:
    values = np.zeros((3, 4))
    values[1, 0] = bad
    with pytest.raises(InvalidArgument, match="layer 1, block 0"):
        ImportanceMatrix(values)


@pytest.mark.parametrize("values", [[1.0, 2.0], [[]], np.zeros((2, 2, 2))])
def test_other_shapes_are_refused(values: object) -> None:
    with pytest.raises(InvalidArgument, match="shape"):
        ImportanceMatrix(values)  # type: ignore[arg-type]


def test_nobody_can_change_it() -> None:
    given_values = np.full((3, 3), 0.5, np.float32)
    matrix = ImportanceMatrix(given_values)
    given_values[2, 2] = 9
    assert matrix.values[2, 2] == 0.5
    for array in (matrix.values, matrix.order(), matrix.ranks()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(matrices(), st.data())
def test_the_order_falls_and_ties_go_by_address(matrix: ImportanceMatrix, data: st.DataObject) -> None:
    flat = matrix.values.ravel()
    expected = sorted(range(flat.size), key=lambda n: (-flat[n], n))
    assert matrix.order().tolist() == expected
    assert matrix.ranks().ravel()[matrix.order()].tolist() == list(range(flat.size))
    count = data.draw(st.integers(0, flat.size + 2))
    assert np.flatnonzero(matrix.top(count)).tolist() == sorted(expected[:count])


def test_a_sequential_matrix_is_in_address_order() -> None:
    assert ImportanceMatrix.sequential(4, 5).order().tolist() == list(range(20))


@given(matrices(), st.integers(1, 30))
def test_resampling_keeps_the_mean_and_the_range(matrix: ImportanceMatrix, blocks: int) -> None:
    other = matrix.resampled(blocks)
    assert (other.layers, other.blocks) == (matrix.layers, blocks)
    before, after = matrix.values[2:], other.values[2:]
    np.testing.assert_allclose(after.mean(axis=1), before.mean(axis=1), rtol=1e-5, atol=1e-6)
    if before.size:
        assert after.min() >= before.min() - 1e-6
        assert after.max() <= before.max() + 1e-5
    if blocks % matrix.blocks == 0:
        np.testing.assert_allclose(after, np.repeat(before, blocks // matrix.blocks, axis=1), atol=1e-6)
    if matrix.blocks % blocks == 0:
        folded = before.reshape(len(before), blocks, matrix.blocks // blocks).mean(axis=2)
        np.testing.assert_allclose(after, folded, atol=1e-5)


def test_wrong_questions_are_refused() -> None:
    matrix = ImportanceMatrix.sequential(3, 4)
    for ask in (
        lambda: matrix.top(-1),
        lambda: matrix.resampled(0),
    ):
        with pytest.raises(InvalidArgument):
            ask()


# --- counts -------------------------------------------------------------------------------------------------------


def test_importance_is_the_mean_over_a_blocks_entries() -> None:
    counts = SelectionCounts(3, 2)
    # 5 tokens in blocks of 3 and 2; 2 heads, 4 steps: 24 and 16 chances.
    counts.add(2, [12, 4], length=5, heads=2, steps=4)
    np.testing.assert_allclose(counts.matrix().values[2], [12 / 24, 4 / 16])
    # A second sample of another length weighs as much as it has chances.
    counts.add(2, [2, 0], length=2, heads=2, steps=1)
    np.testing.assert_allclose(counts.matrix().values[2], [14 / 26, 4 / 18])


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.integers(1, 4), st.data())
def test_counts_equal_the_definition(length: int, blocks: int, heads: int, steps: int, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, heads * steps), min_size=length, max_size=length))
    bounds = block_bounds(length, blocks).tolist()
    cells = [tokens[start:stop] for start, stop in itertools.pairwise(bounds)]
    counts = SelectionCounts(3, blocks)
    counts.add(2, [sum(cell) for cell in cells], length=length, heads=heads, steps=steps)
    row = counts.matrix().values[2]
    value = 0.0
    for block, cell in enumerate(cells):
        if cell:
            value = sum(cell) / (len(cell) * heads) / steps
        assert row[block] == pytest.approx(value, rel=1e-6), "an empty block has the value of the one before"


def test_counts_of_two_recorders_are_added() -> None:
    one, two = SelectionCounts(3, 2), SelectionCounts(3, 2)
    one.add(2, [4, 0], length=4, heads=1, steps=2)
    two.add(2, [0, 4], length=4, heads=1, steps=2)
    one.merge(two)
    assert one.matrix().values[2].tolist() == [0.5, 0.5]
    assert two.matrix().values[2].tolist() == [0, 1]


def test_a_layer_without_counts_is_0_and_the_first_two_stay_infinite() -> None:
    values = SelectionCounts(4, 2).matrix().values
    assert np.isinf(values[:2]).all()
    assert not values[2:].any()


def test_counts_that_can_not_be_are_refused_and_change_nothing() -> None:
    counts = SelectionCounts(3, 2)
    for layer, selections, more in (
        (3, [0, 0], {}),
        (-1, [0, 0], {}),
        (2, [0, 0, 0], {}),
        (2, [0, 0], {"length": 0}),
        (2, [0, 0], {"heads": 0}),
        (2, [0, 0], {"steps": 0}),
        (2, [0, 5], {}),
        (2, [-1, 0], {}),
        (2, [np.nan, 0], {}),
    ):
        with pytest.raises(InvalidArgument):
            counts.add(layer, selections, **{"length": 4, "heads": 2, "steps": 1, **more})
    with pytest.raises(InvalidArgument, match="block 1 has 5 selections and 4 chances"):
        counts.add(2, [0, 5], length=4, heads=2, steps=1)
    for refuse in (
        lambda: counts.merge(SelectionCounts(3, 3)),
        lambda: SelectionCounts(0, 3),
    ):
        with pytest.raises(InvalidArgument):
            refuse()
    assert not counts.chances.any()
    assert not counts.selected.any()
