"""The layout kernels for torch's memory, on the CPU: the same bytes as those for host memory."""

from __future__ import annotations

from typing import Any

import kvd_kernels as kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from kvd_kernels import cuda  # noqa: E402

CASES = settings(deadline=None, max_examples=80)


@st.composite
def boxes(draw: Any) -> tuple[Any, int, int]:
    dims, item = draw(st.integers(0, 3)), draw(st.sampled_from((1, 2, 4, 6, 8, 32)))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    target, width = [0] * dims, item
    for d in draw(st.permutations(range(dims))):
        target[d] = width + draw(st.sampled_from((0, 0, item)))
        width = target[d] * shape[d]
    source = [item * draw(st.integers(0, 3)) for _ in range(dims)]
    return (tuple(shape), tuple(source), tuple(target), item), *(
        item + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) for strides in (source, target)
    )


@CASES
@given(boxes(), st.integers(0, 6), st.booleans(), st.sampled_from((0, 1, 4)), st.integers(0, 2**32 - 1))
def test_regroup_is_that_of_host_memory(found: Any, n: int, grid: bool, offset: int, seed: int) -> None:
    box, source_reach, target_reach = found
    rng = np.random.default_rng(seed)
    item = box[3]
    source = rng.integers(0, 256, source_reach + 6 * item + offset, np.uint8)
    first = np.arange(n) if grid else rng.integers(0, 7, n)
    second = np.arange(n) if grid else rng.permutation(n)
    places = np.stack((np.minimum(first, 6) * item, second * -(-target_reach // item) * item), axis=1)
    size = n * (target_reach + item) + 5
    expected = np.full(size, 0x5A, np.uint8)
    kernels.regroup(source[offset:], expected, places, *box)
    target = torch.full((size + offset,), 0x5A, dtype=torch.uint8)[offset:]
    cuda.regroup(torch.from_numpy(source)[offset:], target, places, *box)
    assert target.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("channels", [1, 7, 8, 12])
def test_tiles_of_a_tensor(channels: int) -> None:
    tensor = torch.arange(96 * 3 * 128, dtype=torch.int32).to(torch.bfloat16).view(torch.uint8).reshape(-1)
    row = 3 * 128 * 2
    tiles = [32 * t * row + h * 256 + 64 * c for h in range(3) for t in range(3) for c in range(4)]
    order = np.argsort(np.arange(36) % channels, kind="stable")
    places = np.stack((np.array(tiles)[order], np.arange(36) * 2048), axis=1)
    box = ((2, 2, 16), (16 * row, 32, row), (1024, 512, 32), 32)
    expected = np.zeros(tensor.numel(), np.uint8)
    kernels.regroup(tensor.numpy(), expected, places, *box)
    target = torch.zeros_like(tensor)
    cuda.regroup(tensor, target, places, *box)
    assert target.numpy().tobytes() == expected.tobytes()
    again = torch.zeros_like(tensor)
    back = ((2, 16, 2), (1024, 32, 512), (16 * row, row, 32), 32)
    cuda.regroup(target, again, np.ascontiguousarray(places[:, ::-1]), *back)
    assert torch.equal(again, tensor)


@CASES
@given(st.lists(st.integers(0, 90), max_size=9), st.integers(0, 10))
def test_zero_is_that_of_host_memory(offsets: list[int], nbytes: int) -> None:
    expected = np.full(100, 0x5A, np.uint8)
    kernels.zero(expected, np.array(offsets, np.int64), nbytes)
    target = torch.full((100,), 0x5A, dtype=torch.uint8)
    cuda.zero(target, np.array(offsets, np.int64), nbytes)
    assert target.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [-1, 57, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("side", [0, 1])
def test_what_leaves_the_memory_is_refused_before_anything_is_written(side: int, bad: int) -> None:
    places = np.zeros((3, 2), np.int64)
    places[1, side] = bad
    target = torch.full((64,), 0x5A, dtype=torch.uint8)
    with pytest.raises(IndexError, match="box 1 takes 8 bytes"):
        cuda.regroup(torch.zeros(64, dtype=torch.uint8), target, places, (), (), (), 8)
    with pytest.raises(IndexError, match=r"offsets\[1\] is"):
        cuda.zero(target, places[:, side].copy(), 8)
    assert (target == 0x5A).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"source": np.zeros(64, np.uint8)}, TypeError, "source is no uint8 tensor"),
        ({"source": torch.zeros(64)}, TypeError, "source is no uint8 tensor"),
        ({"target": torch.zeros(128, dtype=torch.uint8)[::2]}, ValueError, "target is not contiguous"),
        ({"target": torch.zeros(64, dtype=torch.uint8, device="meta")}, ValueError, "use one device"),
        ({"shape": (2, 2)}, ValueError, "of one length"),
        ({"places": np.zeros((1, 3), np.int64)}, ValueError, r"places must be \(boxes, 2\)"),
        ({"target_strides": (-8,)}, ValueError, "target_strides has -8"),
        ({"item_bytes": 0}, ValueError, "item_bytes is 0"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    call = {
        "source": torch.zeros(64, dtype=torch.uint8),
        "target": torch.zeros(64, dtype=torch.uint8),
        "places": np.zeros((1, 2), np.int64),
        "shape": (2,),
        "source_strides": (4,),
        "target_strides": (8,),
        "item_bytes": 4,
    }
    cuda.regroup(**call)
    with pytest.raises(error, match=f"regroup: .*{words}"):
        cuda.regroup(**call | change)
