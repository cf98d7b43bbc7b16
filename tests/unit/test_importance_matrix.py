"""The importance matrix and the counts it is made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.blocks import block_range
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
    bits = data.draw(st.lists(st.booleans(), min_size=flat.size, max_size=flat.size))
    among = np.array(bits).reshape(matrix.values.shape)
    assert matrix.order(among).tolist() == [n for n in expected if bits[n]]
    for layer in range(matrix.layers):
        one = [n - layer * matrix.blocks for n in expected if n // matrix.blocks == layer]
        assert matrix.layer_order(layer).tolist() == one
        assert matrix.layer_order(layer, among).tolist() == [m for m in one if among[layer, m]]
    count = data.draw(st.integers(0, flat.size + 2))
    assert np.flatnonzero(matrix.top(count)).tolist() == sorted(expected[:count])
    assert matrix.top(count, among).sum() == min(count, among.sum())
    assert not (matrix.top(count, among) & ~among).any()


@given(matrices(), st.integers(0, 40), st.integers(0, 50), st.data())
def test_a_rows_tokens_come_in_order_of_importance(
    matrix: ImportanceMatrix, length: int, window: int, data: st.DataObject
) -> None:
    layer = data.draw(st.integers(0, matrix.layers - 1))
    among = np.array(data.draw(st.lists(st.booleans(), min_size=matrix.blocks, max_size=matrix.blocks)))
    chosen = np.zeros(matrix.values.shape, bool)
    chosen[layer] = among
    runs = matrix.row_runs(layer, length, window=window, among=chosen).tolist()
    first = max(0, length - window) if window else 0
    blocks = [
        [token for token in range(*block_range(length, matrix.blocks, block)) if token >= first]
        for block in matrix.layer_order(layer, chosen).tolist()
    ]
    tokens = [token for start, stop in runs for token in range(start, stop)]
    assert sorted(tokens) == sorted(token for block in blocks for token in block)
    assert all(start < stop for start, stop in runs)
    # The definition: stretches of blocks that each touch the one before.
    expected: list[list[list[int]]] = []
    for block in filter(None, blocks):
        before = expected[-1][-1] if expected else []
        if before and (before[-1] + 1 == block[0] or block[-1] + 1 == before[0]):
            expected[-1].append(block)
        else:
            expected.append([block])
    assert runs == [[min(map(min, stretch)), max(map(max, stretch)) + 1] for stretch in expected]


def test_runs_join_in_either_direction() -> None:
    matrix = ImportanceMatrix([[0] * 4, [0] * 4, [1, 2, 3, 0], [1, 3, 0, 2]])
    assert matrix.row_runs(2, 8).tolist() == [[0, 6], [6, 8]]
    assert matrix.row_runs(3, 8).tolist() == [[2, 4], [6, 8], [0, 2], [4, 6]]
    assert ImportanceMatrix.sequential(3, 4).row_runs(2, 8).tolist() == [[0, 8]]


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
        lambda: matrix.layer_order(3),
        lambda: matrix.row_runs(-1, 10),
        lambda: matrix.top(-1),
        lambda: matrix.order(np.ones((3, 5), bool)),
        lambda: matrix.resampled(0),
    ):
        with pytest.raises(InvalidArgument):
            ask()


# --- counts -------------------------------------------------------------------------------------------------------


def test_importance_is_the_mean_over_a_blocks_entries() -> None:
    counts = SelectionCounts(3, 2)
    # 5 tokens in blocks of 3 and 2; 2 heads, 4 steps: 24 and 16 chances.
    counts.add_tokens(2, [8, 0, 4, 1, 3], heads=2, steps=4)
    np.testing.assert_allclose(counts.matrix().values[2], [12 / 24, 4 / 16])
    # A second sample of another length weighs as much as it has chances.
    counts.add(2, [2, 0], length=2, heads=2, steps=1)
    np.testing.assert_allclose(counts.matrix().values[2], [14 / 26, 4 / 18])


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.integers(1, 4), st.data())
def test_counts_by_token_equal_the_definition(
    length: int, blocks: int, heads: int, steps: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, heads * steps), min_size=length, max_size=length))
    counts = SelectionCounts(3, blocks)
    counts.add_tokens(2, tokens, heads=heads, steps=steps)
    row = counts.matrix().values[2]
    value = 0.0
    for block in range(blocks):
        start, stop = block_range(length, blocks, block)
        if start < stop:
            value = sum(tokens[start:stop]) / ((stop - start) * heads) / steps
        assert row[block] == pytest.approx(value, rel=1e-6), "an empty block has the value of the one before"


def test_counting_goes_on_in_both_ways() -> None:
    one, two = SelectionCounts(3, 2), SelectionCounts(3, 2)
    one.add(2, [4, 0], length=4, heads=1, steps=2)
    two.add(2, [0, 4], length=4, heads=1, steps=2)
    one.merge(two)
    assert one.matrix().values[2].tolist() == [0.5, 0.5]
    one.fade(0)
    one.merge(two)
    assert one.matrix().values[2].tolist() == [0, 1]
    one.fade(0.5)
    assert one.matrix().values[2].tolist() == [0, 1]
    one.add(2, [4, 4], length=4, heads=1, steps=2)
    np.testing.assert_allclose(one.matrix().values[2], [4 / 6, 1])


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
        lambda: counts.add_tokens(2, [], heads=1, steps=1),
        lambda: counts.add_tokens(2, [[1]], heads=1, steps=1),
        lambda: counts.merge(SelectionCounts(3, 3)),
        lambda: counts.fade(1.5),
        lambda: SelectionCounts(0, 3),
    ):
        with pytest.raises(InvalidArgument):
            refuse()
    assert not counts.chances.any()
    assert not counts.selected.any()
