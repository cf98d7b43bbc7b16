"""Choosing by scores in every implementation against sorting."""

from __future__ import annotations

from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.test_kernels_conformance import Guarded, using

IMPLEMENTATIONS = kernels.available()
SPECIAL = (0.0, -0.0, 1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, -np.nan)


@st.composite
def scored(draw: Any) -> tuple[Any, Any, Any]:
    rows, tokens = draw(st.integers(0, 4)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = {
        "spread": lambda: rng.standard_normal((rows, tokens)),
        "level": lambda: rng.integers(0, 4, (rows, tokens)) - 1.5,
        "pages": lambda: np.repeat(rng.standard_normal((rows, tokens)), 16, axis=1)[:, :tokens],
        "bits": lambda: rng.integers(0, 2**32, (rows, tokens), np.uint32).view(np.float32),
        "special": lambda: rng.choice(SPECIAL, (rows, tokens)),
    }[draw(st.sampled_from(("spread", "level", "pages", "bits", "special")))]()
    with np.errstate(all="ignore"):
        scores = np.ascontiguousarray(scores, np.float32)
    lengths = rng.integers(1, tokens + 1, rows) if draw(st.booleans()) else np.full(rows, tokens)
    k = rng.integers(1, lengths + 1) if draw(st.booleans()) else lengths.copy()
    return scores, lengths, k


def by_sorting(scores: Any, length: int, k: int) -> list[int]:
    value = [float("-inf") if np.isnan(score) else float(score) for score in scores[: length - 1]]
    order = sorted(range(length - 1), key=lambda t: (-value[t], t))
    return sorted([*order[: k - 1], length - 1])


@settings(deadline=None, max_examples=150)
@given(scored(), st.integers(0, 9))
def test_the_best_and_the_newest(case: tuple[Any, Any, Any], more: int) -> None:
    scores, lengths, k = case
    width = min(int(k.max(initial=0)) + more, scores.shape[1])
    expected = [
        [*by_sorting(row, length, n), *[-1] * (width - n)] for row, length, n in zip(scores, lengths, k, strict=True)
    ]
    for name in IMPLEMENTATIONS:
        guarded = Guarded(4 * len(scores) * width)
        out = guarded.memory.view(np.int32).reshape(len(scores), width)
        with using(name):
            kernels.top_k(scores, lengths, k, out)
        assert out.tolist() == expected, name
        assert guarded.intact(), name


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_large_work_without_the_gil(name: Any) -> None:
    rng = np.random.default_rng(1)
    scores = rng.permutation(40_000).astype(np.float32)[None]
    with using(name):
        for k in (1, 2, 4_000, 39_999):
            found = kernels.top_k(scores, np.array([40_000]), np.array([k]))[0]
            least = np.sort(scores[0, :-1])[::-1][: k - 1].min(initial=np.inf)
            np.testing.assert_array_equal(found, [*np.flatnonzero(scores[0, :-1] >= least), 39_999])


def test_what_does_not_fit_is_refused() -> None:
    scores, lengths, k = np.zeros((3, 8), np.float32), np.array([8, 5, 3]), np.array([8, 5, 3])
    for error, call in (
        (TypeError, lambda: kernels.top_k(scores.astype(np.float64), lengths, k)),
        (TypeError, lambda: kernels.top_k(scores, lengths.astype(np.int32), k)),
        (ValueError, lambda: kernels.top_k(scores[:, ::2], lengths, k)),
        (ValueError, lambda: kernels.top_k(scores[0], lengths, k)),
        (ValueError, lambda: kernels.top_k(scores, lengths[:2].copy(), k)),
        (ValueError, lambda: kernels.top_k(scores, lengths, k[:2].copy())),
        (ValueError, lambda: kernels.top_k(scores, lengths, k, np.zeros((3, 9), np.int32))),
        (ValueError, lambda: kernels.top_k(scores, lengths, k, np.zeros((2, 8), np.int32))),
        (ValueError, lambda: kernels.top_k(scores, lengths, k, scores.view(np.int32))),
    ):
        with pytest.raises(error):
            call()
    for name in IMPLEMENTATIONS:
        for row, (length, n) in enumerate([(8, 0), (9, 5), (2, 3), (0, 0), (-1, -1), (8, -(2**63))]):
            wrong_lengths, wrong_k = lengths.copy(), np.array([4, 4, 3])
            wrong_lengths[row % 3], wrong_k[row % 3] = length, n
            with (
                using(name),
                pytest.raises(ValueError, match=f"row {row % 3} of {length} tokens can't give {n} entries"),
            ):
                kernels.top_k(scores, wrong_lengths, wrong_k)
        with using(name), pytest.raises(ValueError, match="row 0 of 8 tokens can't give 8 entries to an index of 7"):
            kernels.top_k(scores, lengths, k, np.zeros((3, 7), np.int32))
