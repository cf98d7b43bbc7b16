"""How alike two profiles are, and what a profile says in numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import FingerprintMismatch
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling.compare import compare, pearson, spearman
from kvd.profiling.profile import ProfileGroup
from kvd.profiling.summary import on_demand_ratio, positions, summary, warnings
from kvd.profiling.timing import Times
from tests.profiles import matrix, profile, profiles

rows = st.lists(st.integers(-50, 50), min_size=2, max_size=20)


def group(values: ImportanceMatrix, low: int = 512, high: int = 1024) -> ProfileGroup:
    return ProfileGroup(low, high, values, 20, 100)


def test_known_correlations() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert pearson([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(0)
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1)
    # Ties share ranks: 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([0, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
    assert pearson([1, 1], [1, 2]) is None
    assert spearman([1, 2], [3, 3]) is None
    # The squares of these are no floating-point numbers.
    assert pearson([1e-300, 2e-300], [1e300, 2e300]) == pytest.approx(1)


@given(rows, st.randoms())
def test_correlations_are_numpys(x: list[int], random: object) -> None:
    y = list(x)
    random.shuffle(y)  # type: ignore[attr-defined]
    found = pearson(x, y)
    if len(set(x)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)


@given(rows)
def test_ranks_ignore_everything_but_the_order(x: list[int]) -> None:
    found = spearman(x, [3.0**value for value in x])
    assert found is None if len(set(x)) == 1 else found == pytest.approx(1)


def test_a_profile_is_like_itself() -> None:
    found = compare(profile(), profile())
    assert found.pearson == pytest.approx(1)
    assert found.spearman == pytest.approx(1)
    assert found.overlap == 1
    assert found.differences == {}
    assert [one.layer for one in found.groups[0].layers] == [2, 3]
    assert [(one.first, one.second) for one in found.groups] == [((512, 1024),) * 2, ((1024, 2048),) * 2]


@given(profiles())
def test_any_profile_can_be_compared_with_itself(any_profile: object) -> None:
    found = compare(any_profile, any_profile)  # type: ignore[arg-type]
    assert found.pearson is None or found.pearson == pytest.approx(1)
    assert found.overlap in (None, 1.0)


def test_an_order_turned_round_is_seen_in_its_layer() -> None:
    values = np.tile(np.arange(10.0), (4, 1))
    turned = values.copy()
    turned[3] = turned[3, ::-1]
    found = compare(
        profile(groups=(group(ImportanceMatrix(values)),)), profile(groups=(group(ImportanceMatrix(turned)),))
    )
    assert [one.spearman for one in found.layers()] == pytest.approx([1, -1])
    assert found.pearson == pytest.approx(0)
    assert found.overlap == 0.5


def test_unequal_numbers_of_blocks_are_resampled_to_the_smaller() -> None:
    fine = matrix(blocks=40)
    found = compare(profile(groups=(group(fine),)), profile(groups=(group(fine.resampled(8)),)))
    assert found.blocks == 8
    assert found.pearson == pytest.approx(1)
    assert found.differences == {"blocks": [40, 8]}


def test_a_group_meets_the_one_that_its_lengths_would_use() -> None:
    first = profile(groups=(group(matrix(1), 512, 1024), group(matrix(2), 8192, 16384)))
    second = profile(groups=(group(matrix(3), 64, 128), group(matrix(1), 256, 4096)))
    found = compare(first, second)
    assert [one.second for one in found.groups] == [(256, 4096), (256, 4096)]
    assert found.groups[0].pearson == pytest.approx(1)
    assert found.groups[1].pearson != pytest.approx(1)


def test_a_constant_layer_has_no_correlation_and_spoils_no_mean() -> None:
    values = np.array(matrix().values)
    values[2] = 0.1
    same = profile(groups=(group(ImportanceMatrix(values)),))
    layers = compare(same, same).layers()
    assert (layers[0].pearson, layers[0].spearman) == (None, None)
    assert layers[1].pearson == pytest.approx(1)
    assert compare(same, same).pearson == pytest.approx(1)


def test_other_numbers_of_layers_are_refused() -> None:
    five = profile(layers=5, groups=(group(matrix(layers=5)),))
    with pytest.raises(FingerprintMismatch, match="4 and 5 layers") as caught:
        compare(profile(), five)
    assert caught.value.fields["layers"] == [4, 5]


def test_what_differed_to_begin_with_is_listed() -> None:
    found = compare(profile(), profile(model="org/other", selector="hata"))
    assert found.differences == {"model": ["org/model", "org/other"], "selector": ["quest", "hata"]}


def test_the_expected_ratio_counts_what_is_not_sent() -> None:
    values = np.zeros((4, 4))
    values[2:] = [[4, 3, 2, 1], [0, 0, 0, 0]]
    # Half of 16 blocks: 8 of layers 0 and 1. Three quarters: the four of layer 2 as well.
    assert on_demand_ratio(ImportanceMatrix(values), 0.5) == 1
    assert on_demand_ratio(ImportanceMatrix(values), 0.625) == pytest.approx(0.3)
    assert on_demand_ratio(ImportanceMatrix(values), 0.75) == 0
    assert on_demand_ratio(ImportanceMatrix.sequential(4, 4), 0.5) is None


def test_positions_are_means_of_tenths() -> None:
    values = np.zeros((3, 20))
    values[2, 18:] = 0.5
    assert positions(ImportanceMatrix(values)) == pytest.approx([0] * 9 + [0.5])
    assert positions(ImportanceMatrix.sequential(2, 20)) == []


def test_a_summary_has_the_budget_at_each_length() -> None:
    found = summary(profile(prefill=Times((512, 2048), (0.1, 0.4)), transfer=Times((1024,), (0.8,))))
    assert [row["tokens"] for row in found["times"]] == [512, 1024, 2048]
    assert [row["transfer_s"] for row in found["times"]] == pytest.approx([0.4, 0.8, 1.6])
    # 3/4 of 0.4 s in 1.6 s are 7.5 of 40 blocks, and the 20 of layers 0 and 1 are sent whatever the time.
    assert [row["budget"] for row in found["times"]] == [20, 20, 20]
    assert summary(profile(prefill=Times()))["times"] == []


@given(profiles())
def test_any_profile_has_a_summary(any_profile: object) -> None:
    found = summary(any_profile)  # type: ignore[arg-type]
    assert len(found["groups"]) == len(any_profile.groups)  # type: ignore[attr-defined]


def test_warnings_name_what_is_thin() -> None:
    assert warnings(profile(groups=(group(matrix()),))) == []
    values = np.array(matrix().values)
    values[3] = 0
    thin = profile(
        groups=(ProfileGroup(64, 128, ImportanceMatrix(values), 3, 9), group(matrix(), 1024, 2048)), transfer=Times()
    )
    said = "\n".join(warnings(thin))
    assert "64 to 127 tokens has 3 prompts" in said
    assert "no selections in layers 3" in said
    assert "no group has 128 to 1023 tokens" in said
    assert "time of transfer was not measured" in said
    assert len(warnings(thin)) == 4
