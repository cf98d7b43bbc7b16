"""A profile apart from its file: whose it is, what it knows, and what none can be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.errors import FingerprintMismatch, InvalidArgument
from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling.profile import ProfileGroup, for_model
from tests.profiles import CREATED, SPEC, matrix, profile


def test_a_profile_is_for_its_model_only() -> None:
    mine = profile()
    assert for_model(mine, SPEC) is mine
    # Another type of the same cache takes other bytes, but selects alike.
    assert for_model(mine, msgspec.structs.replace(SPEC, dtype="fp8", entry_bytes=128)) is mine
    other = msgspec.structs.replace(SPEC, model="org/other", layers=6)
    with pytest.raises(FingerprintMismatch, match="org/other") as caught:
        for_model(mine, other)
    assert caught.value.fields == {"model": ["org/model", "org/other"], "layers": [4, 6]}
    for name, value in (("revision", ""), ("kv_heads", 8)):
        with pytest.raises(FingerprintMismatch) as caught:
            for_model(mine, msgspec.structs.replace(SPEC, **{name: value}))
        assert list(caught.value.fields) == [name]


def test_a_prompt_gets_the_matrix_of_its_length() -> None:
    mine = profile()
    assert mine.importance.nearest(700).matrix is mine.groups[0].matrix
    assert mine.importance.nearest(5000).matrix is mine.groups[1].matrix


def test_transfer_times_follow_the_bytes_of_an_entry() -> None:
    timing, half = profile().timing(), profile().timing(entry_bytes=128)
    assert timing is not None
    assert half is not None
    assert timing.transfer_s(1024) == 1.4
    assert half.transfer_s(1024) == pytest.approx(0.7)
    assert half.prefill_s(1024) == timing.prefill_s(1024)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"model": "x" * 2000},
        {"revision": "\ud800"},
        {"layers": 3},
        {"kv_heads": 0},
        {"entry_bytes": 0},
        {"link_rate": -1},
        {"parameters": {"": 1}},
        {"parameters": {"a": float("nan")}},
        {"parameters": {"a": 1 << 60}},
        {"parameters": {"a": [1]}},
        {"parameters": {str(at): at for at in range(65)}},
        {"created": CREATED.replace(tzinfo=None)},
        {"groups": ()},
        {"groups": (ProfileGroup(1, 2, matrix()), ProfileGroup(2, 4, matrix(blocks=9)))},
        {"groups": (ProfileGroup(1, 2, matrix(), -1),)},
        {"groups": tuple(ProfileGroup(at, at + 1, ImportanceMatrix(np.ones((4, 1)))) for at in range(1, 66))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_profile_that_makes_no_sense_can_not_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        profile(**fields)


def test_nobody_can_change_its_parameters() -> None:
    given_parameters = {"share": 0.1}
    mine = profile(parameters=given_parameters)
    given_parameters["share"] = 0.2
    assert mine.parameters["share"] == 0.1
    with pytest.raises(TypeError):
        mine.parameters["share"] = 0.3  # type: ignore[index]
