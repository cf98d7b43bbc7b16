"""Callers' numbers as float32, whatever they came in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd_client.arrays import floats_of
from kvd_client.errors import InvalidArgument

VALUES = [[0.0, 0.5, 1.0], [0.25, 0.75, 0.125]]


@pytest.mark.parametrize("make", [list, np.array, lambda v: np.array(v, np.float16), lambda v: np.array(v).T.copy().T])
def test_arrays_and_lists(make: Any) -> None:
    found = floats_of(make(VALUES))
    assert (found.dtype, found.flags.c_contiguous, found.tolist()) == (np.float32, True, VALUES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_of_any_real_dtype_that_autograd_follows(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(VALUES, dtype=getattr(torch, dtype), requires_grad=True)
    assert floats_of(tensor.T.contiguous().T).tolist() == VALUES


@pytest.mark.parametrize("wrong", ["x", [["a"]], [[1], [1, 2]], [[1j]], np.ones(2, np.complex64), [None, {}]])
def test_what_is_no_number(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="real numbers"):
        floats_of(wrong)


def test_tensors_that_have_no_real_values() -> None:
    torch = pytest.importorskip("torch")
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")):
        with pytest.raises(InvalidArgument, match="real numbers"):
            floats_of(wrong)
