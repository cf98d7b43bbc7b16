"""Every implementation of the layout kernels against a definition in plain Python, byte for byte."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvd_kernels import native

from tests.conformance.kernel_helpers import (
    COMPILED,
    IMPLEMENTATIONS,
    another_runs_during,
    changing,
    random_bytes,
    using,
)

STREAMED = 8 << 20
"""Bytes from which on the C code stores past the caches."""
CASES = settings(deadline=None, max_examples=80)


def memory(nbytes: int, offset: int = 0, fill: int = 0x5A) -> tuple[Any, Any]:
    """Memory that begins ``offset`` bytes behind a cache line, and the guarded whole that it is a part of."""
    raw = np.full(nbytes + offset + 192, fill, np.uint8)
    begin = -raw.ctypes.data % 64 + 64 + offset
    return raw[begin : begin + nbytes], raw


def by_definition(source: Any, target: Any, places: Any, box: Any) -> None:
    shape, source_strides, target_strides, item = box
    for s, t in places.tolist():
        for index in itertools.product(*map(range, shape)):
            f = s + sum(i * n for i, n in zip(index, source_strides, strict=True))
            g = t + sum(i * n for i, n in zip(index, target_strides, strict=True))
            target[g : g + item] = source[f : f + item]


def reach(shape: Any, strides: Any, item: int) -> int:
    return item + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


@st.composite
def boxes(draw: Any) -> tuple[Any, int, int]:
    """Disjoint boxes of any shape: the target's dims are nested in any order, with room between them or none."""
    dims, item = draw(st.integers(0, 4)), draw(st.sampled_from((1, 2, 3, 4, 8, 16, 24, 32, 64, 96)))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    target, width = [0] * dims, item
    for d in draw(st.permutations(range(dims))):
        target[d] = width + draw(st.sampled_from((0, 0, 0, item, 5)))
        width = target[d] * shape[d]
    source = [draw(st.integers(0, 3 * item)) for _ in range(dims)]
    return (tuple(shape), tuple(source), tuple(target), item), reach(shape, source, item), reach(shape, target, item)


@CASES
@given(boxes(), st.integers(0, 6), st.integers(0, 63), st.integers(0, 2**32 - 1), st.sampled_from((0, 1)))
def test_regroup_is_the_definition(found: Any, n: int, offset: int, seed: int, stream_from: int) -> None:
    box, source_reach, target_reach = found
    rng = np.random.default_rng(seed)
    source = random_bytes(seed, source_reach + 40)
    places = np.stack((rng.integers(0, 41, n), rng.permutation(n) * (target_reach + 3)), axis=1)
    size = n * (target_reach + 3) + 1
    expected, _ = memory(size)
    by_definition(source, expected, places, box)
    for name in IMPLEMENTATIONS:
        target, whole = memory(size, offset)
        with using(name):
            kernels.regroup(source, target, places, *box, stream_from=stream_from)
        assert target.tobytes() == expected.tobytes(), name
        assert (whole == 0x5A).sum() == whole.size - size + (expected == 0x5A).sum(), name


def tiled(tokens: int, heads: int, width: int, size: int, channels: int, first: int) -> tuple[Any, Any, int]:
    """A token-major (tokens, heads, width) tensor to 32x32 tiles of four faces, pages round robin over channels that
    begin one after another: (tile's places, order of pages, bytes). Full tiles only."""
    row = heads * width * size
    tiles = [
        (32 * t * row + h * width * size + 32 * c * size)
        for h in range(heads)
        for t in range(tokens // 32)
        for c in range(width // 32)
    ]
    page = np.arange(len(tiles))
    order = np.lexsort((page, (page + first) % channels))
    return np.stack((np.array(tiles)[order], np.arange(len(tiles)) * 1024 * size), axis=1), order, row


def tile_boxes(size: int, row: int) -> tuple[Any, Any]:
    """The box of a tile, and that of the way back."""
    face, line = 256 * size, 16 * size
    there = ((2, 2, 16), (16 * row, line, row), (2 * face, face, line), line)
    back = ((2, 16, 2), (2 * face, line, face), (16 * row, row, line), line)
    return there, back


def tiles_by_numpy(tensor: Any) -> Any:
    """The same by the tile's definition: (head, tile row, tile column), then (face row, face column, row, column)."""
    tokens, heads, width = tensor.shape
    split = tensor.transpose(1, 0, 2).reshape(heads, tokens // 32, 2, 16, width // 32, 2, 16)
    return split.transpose(0, 1, 4, 2, 5, 3, 6).reshape(-1, 1024)


@pytest.mark.parametrize("channels", [1, 7, 8, 12])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("heads", [1, 3])
def test_tiles_and_back(channels: int, dtype: Any, heads: int) -> None:
    rng = np.random.default_rng(channels)
    tensor = rng.integers(0, 2**16, (96, heads, 128)).astype(dtype)
    places, order, row = tiled(96, heads, 128, tensor.itemsize, channels, first=5)
    there, back = tile_boxes(tensor.itemsize, row)
    expected = tiles_by_numpy(tensor)[order]
    for name in IMPLEMENTATIONS:
        tiles, _ = memory(tensor.nbytes)
        again, _ = memory(tensor.nbytes)
        with using(name):
            kernels.regroup(tensor, tiles, places, *there)
            kernels.regroup(tiles, again, places[:, ::-1].copy(), *back)
        assert tiles.tobytes() == expected.tobytes(), name
        assert again.tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("offset", [0, 32, 2])
@pytest.mark.parametrize(
    ("dtype", "channels"), [(np.uint16, 8), (np.uint16, 12), (np.uint32, 7)], ids=["bf16-8", "bf16-12", "f32-7"]
)
def test_large_tensors_go_past_the_caches_to_the_same_bytes(dtype: Any, channels: int, offset: int) -> None:
    """Aligned, aligned to less than a line, and not at all; the last tokens fill no tile."""
    size, heads, width, row = np.dtype(dtype).itemsize, 8, 128, 8 * 128 * np.dtype(dtype).itemsize
    tokens = (STREAMED // row) // 32 * 32 + 64
    tensor = random_bytes(1, (tokens + 9) * row).view(dtype).reshape(-1, heads, width)
    places, order, _ = tiled(tokens, heads, width, size, channels, first=0)
    there, back = tile_boxes(size, row)
    expected = tiles_by_numpy(tensor[:tokens])[order].tobytes()
    rng = np.random.default_rng(2)
    assert len(expected) > STREAMED
    for name in IMPLEMENTATIONS:
        tiles, whole = memory(len(expected), offset)
        again, rest = memory(len(expected), offset)
        with using(name):
            kernels.regroup(tensor, tiles, places[rng.permutation(len(places))], *there)
            assert tiles.tobytes() == expected, name
            # Where the places come in the target's order, neighbours are written together.
            for order in (np.argsort(places[:, 0]), rng.permutation(len(places))):
                again[:] = 0x5A
                kernels.regroup(tiles, again, np.ascontiguousarray(places[order, ::-1]), *back)
                assert again.tobytes() == tensor[:tokens].tobytes(), name
        for guarded in (whole, rest):
            begin = -guarded.ctypes.data % 64 + 64 + offset
            assert (guarded[:begin] == 0x5A).all(), name
            assert (guarded[begin + len(expected) :] == 0x5A).all(), name


@pytest.mark.parametrize("item", [16, 32, 64, 96, 160, 4096, 65_600])
def test_large_rows_of_any_width(item: int) -> None:
    """The ways by width, with a block table's places: no grid."""
    n = STREAMED // (3 * item) + 2
    rng = np.random.default_rng(item)
    source = random_bytes(2, 4 * n * item)
    places = np.stack((rng.permutation(n) * item * 4, rng.permutation(n) * item * 3), axis=1)
    expected = np.empty((n, 3, item), np.uint8)
    expected[places[:, 1] // (3 * item)] = source.reshape(n, 4, item)[places[:, 0] // (4 * item)][:, (0, 1, 2)]
    for name in IMPLEMENTATIONS:
        target, _ = memory(expected.size)
        with using(name):
            kernels.regroup(source, target, places, (3,), (item,), (item,), item)
        assert target.tobytes() == expected.tobytes(), name


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 3), st.integers(2, 5), st.sampled_from((32, 64, 128)), st.integers(0, 2), st.integers(0, 2**32 - 1)
)
def test_large_boxes_side_by_side(n: int, rows: int, item: int, gap: int, seed: int) -> None:
    """Rows of whole lines, some boxes with their neighbours right beside them and some not, the last ones as well."""
    rng = np.random.default_rng(seed)
    filled = n * item * 2
    boxes = STREAMED // (rows * filled) + 3
    width = filled * (7 + gap)  # seven boxes side by side, and room or none
    source = random_bytes(seed % 1000, boxes * rows * filled)
    line, column = np.divmod(np.arange(boxes), 7)
    places = np.stack((rng.permutation(boxes) * rows * filled, line * rows * width + column * filled), axis=1)
    swapped = rng.integers(0, boxes, 6)
    places[swapped] = places[swapped[::-1]]
    box = ((rows, 2 * n), (filled, item), (width, item), item)
    size = int(places[:, 1].max()) + (rows - 1) * width + filled
    expected = np.full(size, 0x5A, np.uint8)
    for r in range(rows):
        windows = np.ndarray((size - filled + 1,), f"V{filled}", expected, strides=(1,))
        given_ = source.reshape(boxes, rows, filled)[places[:, 0] // (rows * filled), r]
        windows[places[:, 1] + r * width] = np.ascontiguousarray(given_).view(f"V{filled}").reshape(-1)
    for name in IMPLEMENTATIONS:
        target, whole = memory(size)
        with using(name):
            kernels.regroup(source, target, places, *box)
        assert target.tobytes() == expected.tobytes(), name
        assert (whole[: -whole.ctypes.data % 64 + 64] == 0x5A).all(), name


@CASES
@given(boxes(), st.data())
def test_regroup_refuses_before_it_writes(found: Any, data: Any) -> None:
    box, source_reach, target_reach = found
    n = data.draw(st.integers(1, 5))
    source = random_bytes(0, source_reach + 7)
    places = np.stack((np.arange(n) % 7, np.arange(n) * target_reach), axis=1)
    at, side = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 1))
    beyond = (8, n * target_reach + 1)[side] - (0, target_reach)[side]
    places[at, side] = data.draw(st.sampled_from((-1, beyond, 2**62, -(2**63), 2**63 - 1)))
    for name in IMPLEMENTATIONS:
        target, whole = memory(n * target_reach)
        with using(name), pytest.raises(IndexError, match=rf"box {at} reads"):
            kernels.regroup(source, target, places, *box)
        assert (whole == 0x5A).all(), name


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_boxes_that_fit_nowhere_are_refused(name: Any) -> None:
    place = np.zeros((1, 2), np.int64)
    target, whole = memory(64)
    with using(name):
        for box in [
            ((9,), (8,), (8,), 8),
            ((2**62,), (1,), (0,), 1),
            ((2**62, 2**62), (0, 0), (2**62, 2**62), 1),
            ((3,), (2**62,), (0,), 1),
            ((), (), (), 65),
        ]:
            with pytest.raises(IndexError, match="box 0 reads"):
                kernels.regroup(bytes(64), target, place, *box)
    assert (whole == 0x5A).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"places": np.zeros((1, 3), np.int64)}, ValueError, r"must be \(boxes, 2\)"),
        ({"places": np.zeros((1, 2), np.int32)}, TypeError, "places is a int32 array"),
        ({"shape": (2, 2)}, ValueError, "shape has 2 dims, source_strides 1"),
        ({"shape": (1,) * 9, "source_strides": (0,) * 9, "target_strides": (0,) * 9}, ValueError, "8 at most"),
        ({"shape": (-1,)}, ValueError, "shape has -1"),
        ({"shape": (1.0,)}, TypeError, "shape has a float"),
        ({"source_strides": (-4,)}, ValueError, "source_strides has -4"),
        ({"target_strides": (2**63,)}, ValueError, "target_strides has"),
        ({"item_bytes": 0}, ValueError, "item_bytes is 0"),
        ({"target": bytes(64)}, ValueError, "target is read-only"),
        ({"source": np.zeros((8, 8), np.uint8)[:, :4]}, ValueError, "source is not contiguous"),
    ],
)
def test_what_regroup_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given_ = {
        "source": bytes(64),
        "target": bytearray(64),
        "places": np.zeros((1, 2), np.int64),
        "shape": (2,),
        "source_strides": (4,),
        "target_strides": (8,),
        "item_bytes": 4,
    }
    kernels.regroup(**given_)
    with pytest.raises(error, match=f"regroup: .*{words}"):
        kernels.regroup(**given_ | change)


def test_source_and_target_are_apart() -> None:
    both = np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="target overlaps source"):
        kernels.regroup(both[:65], both[64:], np.zeros((1, 2), np.int64), (), (), (), 8)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nothing_is_no_work(name: Any) -> None:
    with using(name):
        kernels.regroup(b"", bytearray(), np.empty((0, 2), np.int64), (4,), (1,), (1,), 1)
        kernels.regroup(b"", bytearray(), np.zeros((3, 2), np.int64), (4, 0), (1, 1), (1, 1), 1)
        kernels.zero(bytearray(), np.empty(0, np.int64), 8)
        kernels.zero(bytearray(4), np.array([99]), 0)


@CASES
@given(st.lists(st.integers(0, 90), max_size=9), st.integers(0, 10))
def test_zero_is_the_definition(offsets: list[int], nbytes: int) -> None:
    expected, _ = memory(100)
    for at in offsets:
        expected[at : at + nbytes] = 0
    for name in IMPLEMENTATIONS:
        target, _ = memory(100, 7)
        with using(name):
            kernels.zero(target, np.array(offsets, np.int64), nbytes)
            assert target.tobytes() == expected.tobytes(), name
            for bad in (-1, 101 - nbytes, 2**63 - 1, -(2**63)):
                if nbytes:
                    before = target.copy()
                    with pytest.raises(IndexError, match=rf"offsets\[{len(offsets)}\] is {bad}, where {nbytes} bytes"):
                        kernels.zero(target, np.array([*offsets, bad], np.int64), nbytes)
                    assert (target == before).all(), name


@pytest.mark.parametrize("name", COMPILED)
def test_another_thread_runs_meanwhile(name: Any) -> None:
    source, target = np.zeros(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8)
    places = np.zeros((1, 2), np.int64)
    assert another_runs_during(
        native.load(name).regroup, source, target, places, np.array([[1 << 10, 4096, 4096]]), 4096
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_block_table_that_changes_meanwhile_never_leads_outside(name: Any) -> None:
    """Places may come from memory that another process writes, between the check and the use."""
    n, size = 1 << 13, 256
    places = np.stack((np.arange(n) * size, np.arange(n) * size), axis=1)
    source, whole = np.ones(n * size, np.uint8), np.full((n + 2) * size, 0x5A, np.uint8)
    target = whole[: n * size]

    def change() -> None:
        places[-1, 1] = (n + 1) * size  # would land behind the target
        places[-1, 1] = (n - 1) * size

    with changing(change), using(name):
        for _ in range(30):
            with suppress(IndexError):
                kernels.regroup(source, target, places, (8,), (32,), (32,), 32)
    assert (whole[n * size :] == 0x5A).all()
