"""Shapes, tiles and numbers that nobody chose, against Tenstorrent's own library: its bytes, and what it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.layout import ttnn as layouts
from kvd.layout.descriptor import Placed
from kvd.layout.execute import regroup
from kvd.layout.notation import layout
from kvd.layout.plan import plan_regroup
from tests.npu.judge import ask, in_page_order, python
from tests.npu.test_ttnn import as_codec

pytestmark = pytest.mark.usefixtures("ttnn")

TILES = ((32, 32), (16, 32), (32, 16), (16, 16), (8, 32), (4, 32), (2, 32), (1, 32))
"""Rows and columns. Faces have 16 columns, and 16 rows or all that there are."""


@pytest.fixture(scope="session")
def ttnn() -> str:
    return python()


def shape_of(rng: np.random.Generator) -> tuple[int, ...]:
    """One to six axes; sizes at, around and off the tiles' multiples."""
    rank = int(rng.integers(1, 7))
    last = rng.choice([1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128], 2)
    return (*rng.integers(1, 4, max(0, rank - 2)).tolist(), *last[-min(rank, 2) :].tolist())


def values_of(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Any:
    bits = rng.integers(0, 2**32, shape, np.uint32)
    if kind == "halves":  # few bits, neighbouring exponents: ties
        bits = (bits & 0x80780000) | (rng.integers(0, 6, shape, np.uint32) + 124) << 23
    elif kind == "small":  # denormals, zeros, and what becomes so
        bits = (bits & 0x80FFFFFF) * rng.integers(0, 2, shape, np.uint32)
    elif kind == "special":  # infinity and NaN beside ordinary numbers
        odd = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x80000000], np.uint32)
        bits = np.where(rng.random(shape) < 0.2, rng.choice(odd, shape), (bits & 0x83FFFFFF) | 0x3C000000)
    return bits.astype(np.uint32).view(np.float32)


def placed(
    shape: tuple[int, ...], codec: str, banks: int, alignment: int, tile: tuple[int, int] | None, transposed: bool
) -> tuple[Placed, Placed]:
    """The tensor as it is in C order, and on the banks: as tiles, or with a row as a page."""
    full = shape if len(shape) > 1 else (1, *shape)
    outer = [f"a{i}" for i in range(len(full) - 2)]
    held = dict(zip((*outer, "t", "d"), ((0, size) for size in full), strict=True))
    plain = codec if codec in ("bf16", "f32") else "f32"
    source = Placed(layout("plain", " ".join((*outer, "t", "d")), codec=plain), held)
    sizes = dict(zip((*outer, "t", "d"), full, strict=True))
    there = layouts.tensor(sizes, codec=codec, tile=tile, transposed=transposed, channels=banks, alignment=alignment)
    return source, Placed(there, held)


def test_cases_that_nobody_chose(tmp_path: Path) -> None:
    rng = np.random.default_rng(20261130)
    asked, cases = [], []
    for number in range(72):
        shape, codec = shape_of(rng), ("bf16", "f32", "bfp8_b", "bfp4_b")[number % 4]
        kind = ("any", "halves", "small", "special")[number // 4 % 4]
        tile = None if codec in ("bf16", "f32") and number % 3 == 0 else TILES[int(rng.integers(len(TILES)))]
        banks, alignment = int(rng.integers(1, 13)), int(rng.choice([16, 32, 64]))
        values = values_of(rng, shape, kind)
        if codec == "bf16":
            bits = values.view(np.uint32) & 0xFFFF0000
            # The library has one NaN in bf16, where a move would keep each as it was.
            values = np.where(np.isnan(values), np.uint32(0x7FC00000), bits).astype(np.uint32).view(np.float32)
        transposed = tile is not None and tile[0] >= 16 and bool(rng.integers(2))
        source, target = placed(shape, codec, banks, alignment, tile, transposed)
        memory = as_codec(values, "bf16" if codec == "bf16" else "f32").reshape(-1).view(np.uint8)
        plan = plan_regroup(source, target)
        staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
        regroup(plan, [memory], staging)
        channels = [np.full(target.channel_bytes, 0xEE, np.uint8) for _ in range(banks)]
        for start, channel, to, length in plan.requests.tolist():
            channels[channel][to : to + length] = staging[start : start + length]
        geometry = target.geometry
        raw = in_page_order(channels, geometry.page_stride, geometry.pages, geometry.page_bytes)
        back = plan_regroup(target, source)
        read = np.empty(back.staging_bytes, np.uint8)
        regroup(back, channels, read)
        one = {"shape": np.array(shape), "dtype": codec, "layout": "row_major" if tile is None else "tile"}
        asked.append(
            one
            | {"raw": raw, "given": values}
            | ({} if tile is None else {"tile": np.array(tile), "transposed": transposed})
        )
        cases.append((f"case {number}: {shape} {codec} {kind} {tile} {banks} banks", read, memory))
    for tensor, (what, read, memory), answer in zip(asked, cases, ask(tmp_path, asked), strict=True):
        np.testing.assert_array_equal(tensor["raw"], answer["encoded"], what)
        if tensor["dtype"] in ("bf16", "f32"):
            np.testing.assert_array_equal(read, memory, what)
        else:
            np.testing.assert_array_equal(read.view(np.uint32), answer["values"].view(np.uint32).reshape(-1), what)
