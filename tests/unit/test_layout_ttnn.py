"""Tenstorrent tensors by the library's own terms: where its pages are, and what is in them.

``maps.json`` has what ttnn 0.81 said of tensors in the L1 of a mocked p150, chosen at random: for each page, in the
order that the host has them, the core (by its place in the order of shards) and the page's number there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout import ttnn
from kvd.layout.descriptor import Layout, Placed
from kvd.layout.execute import regroup
from kvd.layout.notation import from_toml, from_wire, layout, to_toml, to_wire
from kvd.layout.plan import plan_regroup

MAPS = json.loads((Path(__file__).parent.parent / "data" / "tenstorrent" / "maps.json").read_text())
TILES = [None, (32, 32), (16, 32), (32, 16), (8, 32), (2, 16)]


def names(shape: tuple[int, ...]) -> list[str]:
    return [*(f"a{at}" for at in range(len(shape) - 2)), "t", "d"]


def placed(shape: tuple[int, ...], **terms: Any) -> Placed:
    sizes = dict(zip(names(shape), shape, strict=True))
    made = ttnn.tensor(sizes, **terms)
    assert from_wire(to_wire(made)) == from_toml(to_toml(made)) == made
    return Placed(made, {axis: (0, size) for axis, size in sizes.items()})


def plain(shape: tuple[int, ...], codec: str) -> Placed:
    axes = names(shape)
    return Placed(layout("plain", " ".join(axes), codec=codec), dict(zip(axes, ((0, n) for n in shape), strict=True)))


def pages_of(shape: tuple[int, ...], page: tuple[int, int]) -> list[int]:
    return [*shape[:-2], -(-shape[-2] // page[0]), -(-shape[-1] // page[1])]


def mapped(shape: tuple[int, ...], page: tuple[int, int], memory: str, shard: list[int], channels: int) -> Any:
    """(channel, slot) of each page, one at a time: the library's rules."""
    dims = pages_of(shape, page)
    if memory == "interleaved":
        return [(number % channels, number // channels) for number in range(math.prod(dims))]
    box = [*shard[:-2], -(-shard[-2] // page[0]), -(-shard[-1] // page[1])]
    dims = [math.prod(dims[: len(dims) - len(box) + 1]), *dims[len(dims) - len(box) + 1 :]]
    shards = [-(-size // part) for size, part in zip(dims, box, strict=True)]
    found = []
    for number in range(math.prod(dims)):
        at = np.unravel_index(number, dims)
        shard_number = int(np.ravel_multi_index([x // n for x, n in zip(at, box, strict=True)], shards))
        within = int(np.ravel_multi_index([x % n for x, n in zip(at, box, strict=True)], box))
        if memory == "nd":
            turn, channel = divmod(shard_number, channels)
        else:
            channel, turn = divmod(shard_number, -(-math.prod(shards) // channels) if "nd" in memory else 1)
        found.append((channel, turn * math.prod(box) + within))
    return found


def page_shape(case: dict[str, Any]) -> tuple[int, int]:
    return tuple(case["tile"]) if case["tile"] else (1, (case["shard"] or case["shape"])[-1])


@pytest.mark.parametrize("memory", ttnn.MEMORY)
def test_pages_are_where_the_library_has_them(memory: str) -> None:
    refused = 0
    for case in (case for case in MAPS if case["memory"] == memory):
        shape, page = tuple(case["shape"]), page_shape(case)
        wanted = list(zip(case["channel"], case["slot"], strict=True))
        assert mapped(shape, page, memory, case["shard"], case["channels"]) == wanted, case
        terms = {name: case[name] for name in ("codec", "tile", "memory", "shard", "channels")}
        try:
            target = placed(shape, alignment=16, **terms | {"tile": case["tile"] and tuple(case["tile"])})
        except UnsupportedLayout:
            refused += 1
            continue
        geometry = target.geometry
        assert (geometry.page_bytes, geometry.page_stride) == (case["page"], case["stride"]), case
        first = [np.arange(0, n, step) for n, step in zip(shape, (*[1] * (len(shape) - 2), *page), strict=True)]
        keys = sum(geometry.key(axis, at) for axis, at in zip(names(shape), np.ix_(*first), strict=True))
        channel, offset = geometry.places(keys.reshape(-1))
        assert list(zip(channel.tolist(), (offset // case["stride"]).tolist(), strict=True)) == wanted, case
    assert refused <= 10


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    tile = draw(st.sampled_from(TILES))
    rows, columns = tile or (1, 4)
    shape = (
        *draw(st.lists(st.integers(1, 4), max_size=2)),
        draw(st.integers(1, 3 * rows + 1)),
        draw(st.integers(1, 3 * columns + 1)),
    )
    memory = draw(st.sampled_from(ttnn.MEMORY))
    dims = pages_of(shape, (rows, columns))
    heights = math.prod(dims[:-1]) * rows
    width = dims[-1] * columns if tile else shape[-1]
    shard: list[int] = []
    if memory in ("height", "width", "block"):
        shard = [
            heights if memory == "width" else draw(st.integers(1, heights // rows)) * rows,
            width if memory == "height" else draw(st.integers(1, dims[-1])) * columns,
        ]
    elif memory != "interleaved":
        rank = draw(st.integers(2, len(shape)))
        below = draw(st.tuples(*(st.integers(1, n) for n in dims[len(dims) - rank + 1 :])))
        shard = [draw(st.integers(1, math.prod(dims[: len(dims) - rank + 1]))), *below]
        shard[-2:] = shard[-2] * rows, shard[-1] * columns
    return {
        "shape": shape,
        "tile": tile,
        "transposed": tile is not None and tile[0] >= 16 and draw(st.booleans()),
        "memory": memory,
        "shard": shard,
        "channels": draw(st.integers(1, 12)),
        "codec": draw(st.sampled_from(["bf16", "u8"])),
        "alignment": draw(st.sampled_from([16, 64])),
    }


def in_pages(values: np.ndarray, page: tuple[int, int], tile: tuple[int, int] | None, transposed: bool) -> np.ndarray:
    """Elements as (pages, elements of a page), pages in the order of the host."""
    rows, columns = page
    grown = [(0, 0)] * (values.ndim - 2) + [(0, -n % m) for n, m in zip(values.shape[-2:], page, strict=True)]
    values = np.pad(values, grown)
    values = values.reshape(-1, values.shape[-2] // rows, rows, values.shape[-1] // columns, columns).swapaxes(2, 3)
    values = values.reshape(-1, rows, columns)
    if transposed:
        values = values.swapaxes(1, 2)
    if tile:
        a, b = (min(16, n) for n in values.shape[1:])
        values = values.reshape(len(values), values.shape[1] // a, a, -1, b).swapaxes(2, 3)
    return values.reshape(len(values), -1)


def check_refusal(case: dict[str, Any], error: Any, last_channel: int) -> None:
    """Shards that no digits say begin anywhere in axes that their rows fold; or there are more than channels."""
    if isinstance(error, UnsupportedLayout):
        assert len(case["shard"]) < len(case["shape"])
        assert set(error.fields) == {"axis", "pages", "shard"}
        return
    assert error.fields["field"] == "channels"
    if case["memory"] == "nd-contiguous":
        assert error.fields["shards"] % case["channels"]
    else:
        assert last_channel >= case["channels"]


@given(tensors())
@settings(max_examples=120, deadline=None)
def test_elements_are_where_the_library_has_them(case: dict[str, Any]) -> None:
    shape, page, terms = case["shape"], page_shape(case), {k: v for k, v in case.items() if k != "shape"}
    where = mapped(shape, page, case["memory"], case["shard"], case["channels"])
    refused, target = None, None
    try:
        target = placed(shape, **terms)
    except (InvalidArgument, UnsupportedLayout) as error:
        refused = error
    if target is None:
        check_refusal(case, refused, max(channel for channel, _ in where))
        return
    item = {"bf16": np.uint16, "u8": np.uint8}[case["codec"]]
    values = np.random.default_rng(1).integers(1, 250, shape).astype(item)
    plan = plan_regroup(plain(shape, case["codec"]), target)
    staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
    regroup(plan, [values.reshape(-1).view(np.uint8)], staging)
    channels = [np.full(target.channel_bytes, 0xEE, np.uint8) for _ in range(case["channels"])]
    for start, channel, to, length in plan.requests.tolist():
        channels[channel][to : to + length] = staging[start : start + length]
    wanted = in_pages(values, page, case["tile"], case["transposed"]).view(np.uint8)
    stride = target.geometry.page_stride
    for (channel, slot), content in zip(where, wanted, strict=True):
        found = channels[channel][slot * stride : (slot + 1) * stride]
        np.testing.assert_array_equal(found[: len(content)], content)
        assert not found[len(content) :].any()
    back = plan_regroup(target, plain(shape, case["codec"]))
    out = np.empty(back.staging_bytes, np.uint8)
    regroup(back, channels, out)
    np.testing.assert_array_equal(out.view(item).reshape(shape), values)


def test_block_formats_move_between_memory_layouts_as_they_are() -> None:
    shape = (2, 96, 100)
    spread = placed(shape, codec="bfp8_b")
    blocks = placed(shape, codec="bfp8_b", memory="block", shard=(96, 64))
    plan = plan_regroup(spread, blocks)
    assert plan.decode is None
    assert plan.encode is None
    pages = np.random.default_rng(1).integers(0, 256, (24, 1088), np.uint8)
    channels = [np.zeros(spread.channel_bytes, np.uint8) for _ in range(8)]
    for number, one in enumerate(pages):
        channels[number % 8][number // 8 * 1088 :][:1088] = one
    staging = np.empty(plan.staging_bytes, np.uint8)
    regroup(plan, channels, staging)
    found = [np.zeros(blocks.channel_bytes, np.uint8) for _ in range(8)]
    for start, channel, to, length in plan.requests.tolist():
        found[channel][to : to + length] = staging[start : start + length]
    for one, (channel, slot) in zip(pages, mapped(shape, (32, 32), "block", [96, 64], 8), strict=True):
        np.testing.assert_array_equal(found[channel][slot * 1088 :][:1088], one)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"sizes": {"d": 32}}, "two axes"),
        ({"sizes": {"t": 0, "d": 32}}, "two axes"),
        ({"sizes": {"r": 3, "t": 2, "d": 32}}, "'r' is the name of a digit"),
        ({"memory": "single"}, "no memory layout 'single'"),
        ({"tile": (32, 8)}, "no tiles of 32 x 8"),
        ({"tile": (8, 32), "transposed": True}, "can't be transposed"),
        ({"tile": None, "codec": "bfp8_b"}, "a row-major tensor can't be bfp8_b"),
        ({"shard": (32, 32)}, "makes no sense for memory layout 'interleaved'"),
        ({"memory": "block"}, "has rows and columns"),
        ({"memory": "nd", "shard": (32,)}, "two sizes or more"),
        ({"memory": "block", "shard": (32, 0)}, "makes no sense"),
        ({"memory": "block", "shard": (40, 32)}, "not made of whole tiles of 32 x 32"),
        ({"memory": "height", "shard": (32, 64)}, "all 128 columns"),
        ({"memory": "width", "shard": (64, 32)}, "all 192 rows"),
        ({"memory": "block", "shard": (32, 64), "channels": 8}, "12 shards need as many channels"),
        ({"memory": "nd-contiguous", "shard": (1, 32, 64), "channels": 8}, "can't be dealt out evenly"),
    ],
)
def test_what_the_library_refuses_is_refused(terms: dict[str, Any], message: str) -> None:
    sizes = terms.pop("sizes", {"h": 3, "t": 50, "d": 128})
    with pytest.raises(InvalidArgument, match=message):
        ttnn.tensor(sizes, **terms)


def test_a_cache_has_a_tensor_for_each_layer_and_for_k_and_v() -> None:
    made = ttnn.tensor({"h": 2, "t": 64, "d": 64}, memory="nd", shard=(1, 32, 64), channels=3, tensors=("l", "kv"))
    held = {"l": (0, 2), "kv": (0, 2), "h": (0, 2), "t": (0, 64), "d": (0, 64)}
    target = Placed(made, held)
    channel, offset = target.locate(l=1, kv=0, h=1, t=np.arange(0, 64, 32), d=32)
    # four shards of two tiles: the tensor takes two shards in each channel, and is the third of four
    assert channel.tolist() == [2, 0]
    assert offset.tolist() == [2 * 8192 + 2048, 2 * 8192 + 4096 + 2048]


def test_shards_that_no_digits_say_are_refused_with_the_axis() -> None:
    with pytest.raises(UnsupportedLayout, match="different places of axis t, which has 2") as error:
        ttnn.tensor({"h": 3, "t": 64, "d": 128}, memory="block", shard=(96, 64))
    assert error.value.fields == {"axis": "t", "pages": 2, "shard": 3}
    # all columns in each: shards are runs of pages, wherever they begin
    made: Layout = ttnn.tensor({"h": 3, "t": 64, "d": 128}, memory="height", shard=(96, 128))
    assert made.placement.shard_pages == 12
