"""Flat layouts against another implementation: CuTe's layout algebra, as the package tensor-layouts has it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from kvd.layout import named
from kvd.layout.descriptor import Layout, Placed
from tests.unit.layout_oracle import layouts

algebra = pytest.importorskip("tensor_layouts", reason="tensor-layouts is not installed")

SIZES = {"h": 2, "t": 9, "d": 4}


def in_algebra(placed: Placed):
    """The same function: a mode an axis, its digits innermost first, each with its stride in elements."""
    geometry, layout = placed.geometry, placed.layout
    shape, stride = [], []
    for _, digits in layout.axes:
        names = [digit.name for digit in reversed(digits)]
        shape.append(tuple(geometry.radix[name] for name in names))
        page = geometry.page_stride // geometry.codec.item_bytes
        stride.append(
            tuple(geometry.weight[name] if name in layout.inner else geometry.key_weight(name) * page for name in names)
        )
    return algebra.Layout(tuple(shape), tuple(stride))


def compare(placed: Placed) -> None:
    theirs = in_algebra(placed)
    axes = placed.layout.axis_names
    sizes = [placed.held[axis][1] for axis in axes]
    every = np.array(list(itertools.product(*map(range, sizes))))
    _, offset = placed.locate(**{axis: every[:, at] for at, axis in enumerate(axes)})
    wanted = [theirs(*map(int, position)) for position in every]
    assert (offset // placed.geometry.codec.item_bytes).tolist() == wanted


def is_flat(made: Layout) -> bool:
    """Whether its pages lie one behind the other: shards of several may have room behind a tensor's last page."""
    return not made.table and made.placement.channels == 1 and made.placement.shard_pages <= 1


@settings(max_examples=15, deadline=None)
@given(layouts(SIZES, 1, channels=1).filter(is_flat))
def test_any_flat_layout(made):
    compare(Placed(made, {axis: (0, size) for axis, size in SIZES.items()}))


@pytest.mark.parametrize("name", ["tenstorrent-host", "ascend-nz", "heads", "kvd"])
def test_named(name):
    held = {"l": (0, 2), "kv": (0, 2), "h": (0, 2), "t": (0, 20), "d": (0, 20)}
    compare(Placed(named.get(name), held))
