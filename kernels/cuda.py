"""`regroup` and `zero` for memory that torch holds, on a GPU or not: the same results as `kvd_kernels.regroup`.

Everything is queued on the current stream; the caller waits for it before the bytes leave the device. CuPy's arrays
come in through ``torch.from_dlpack``. torch is imported when a function is called, not with the package.

Boxes whose places are a whole grid (a tensor's tiles) are one strided copy. Others (a block table's) are one gather and
one scatter of rows, by positions that are made on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import checks
from .reference import whole_grid
from .regrouping import MAX_BYTES, MAX_DIMS

if TYPE_CHECKING:
    from torch import Tensor

MOVED_AT_ONCE = 64 << 20
"""Bytes of a gather: what positions and rows take beside the tensors is bounded by a few times this."""


def regroup(
    source: Tensor,
    target: Tensor,
    places: NDArray[np.int64],
    shape: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    item_bytes: int,
) -> None:
    """As `kvd_kernels.regroup`, with `source` and `target` contiguous uint8 tensors of one dimension on one device.

    Raises:
        IndexError: a box leaves `source` or `target`; then nothing has been written.
        RuntimeError: torch is not installed, or has no memory left.
        TypeError, ValueError: see `kvd_kernels.ops`.
    """
    op = "regroup"
    torch = _torch(op)
    _check(op, "source", source)
    _check(op, "target", target)
    if source.device != target.device:
        raise ValueError(f"{op}: source is on {source.device} and target on {target.device}; use one device")
    checks.array(op, "places", places, checks.INT64, (2,))
    if places.shape[1] != 2 or not len(shape) == len(source_strides) == len(target_strides) <= MAX_DIMS:
        raise ValueError(f"{op}: places must be (boxes, 2), and shape and strides of one length, {MAX_DIMS} at most")
    for name, values in (("shape", shape), ("source_strides", source_strides), ("target_strides", target_strides)):
        for value in values:
            checks.extent(op, name, value, MAX_BYTES)
    item_bytes = checks.positive(op, "item_bytes", item_bytes)
    places = places.copy()  # what is checked is what is used
    if len(places) == 0 or 0 in shape:
        return
    sides = (source, target)
    strides = (list(source_strides), list(target_strides))
    for side, (memory, steps) in enumerate(zip(sides, strides, strict=True)):
        reach = item_bytes + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        bad = (places[:, side] < 0) | (places[:, side] > memory.numel() - reach)
        if bad.any():
            at = int(bad.argmax())
            raise IndexError(
                f"{op}: box {at} takes {reach} bytes from {places[at, side]} on, but {('source', 'target')[side]} has "
                f"{memory.numel()} bytes; check places and strides against the layouts"
            )
    word = _word(sides, places, strides, item_bytes)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    # A memory's last bytes may be no whole word; no box reaches into them.
    given, taken = (memory[: memory.numel() // word * word].view(kind) for memory in sides)
    units = [[step // word for step in steps] for steps in strides]
    grid = whole_grid(places)
    if grid is not None and (grid >= 0).all():  # torch has no strides below zero
        sizes = [*grid[:, 0].tolist(), *shape, item_bytes // word]
        reading, writing = (
            memory.as_strided(
                sizes,
                [*(grid[:, side + 1] // word).tolist(), *units[side], 1],
                memory.storage_offset() + first // word,
            )
            for side, (memory, first) in enumerate(zip((given, taken), places[0].tolist(), strict=True))
        )
        writing.copy_(reading)
        return
    _scattered(given, taken, places // word, shape, units, item_bytes // word, MOVED_AT_ONCE // item_bytes)


def zero(target: Tensor, offsets: NDArray[np.int64], nbytes: int) -> None:
    """As `kvd_kernels.zero`, with `target` as in :func:`regroup`."""
    op = "zero"
    torch = _torch(op)
    _check(op, "target", target)
    checks.array(op, "offsets", offsets, checks.INT64, (1,))
    nbytes = checks.extent(op, "nbytes", nbytes, MAX_BYTES)
    offsets = offsets.copy()
    if len(offsets) == 0 or nbytes == 0:
        return
    bad = (offsets < 0) | (offsets > target.numel() - nbytes)
    if bad.any():
        at = int(bad.argmax())
        raise IndexError(
            f"{op}: offsets[{at}] is {offsets[at]}, where {nbytes} bytes do not fit into a target of {target.numel()}; "
            "check it against the layout"
        )
    step = max(1, MOVED_AT_ONCE // nbytes // 8)
    row = torch.arange(nbytes, device=target.device)
    for first in range(0, len(offsets), step):
        some = torch.from_numpy(offsets[first : first + step]).to(target.device)
        target.index_fill_(0, (some[:, None] + row).reshape(-1), 0)


def _scattered(
    given: Tensor,
    taken: Tensor,
    places: NDArray[np.int64],
    shape: Sequence[int],
    units: Sequence[Sequence[int]],
    item: int,
    items_at_once: int,
) -> None:
    """Everything in words. Rows are read through windows that overlap, and written word by word."""
    import torch

    device = given.device
    within = []
    for steps in units:
        offsets = torch.zeros(1, dtype=torch.int64, device=device)
        for size, step in zip(shape, steps, strict=True):
            offsets = (offsets[:, None] + torch.arange(size, device=device) * step).reshape(-1)
        within.append(offsets)
    windows = given.as_strided((given.numel() - item + 1, item), (1, 1), given.storage_offset())
    words = torch.arange(item, device=device)
    boxes = max(1, items_at_once // math.prod(shape))
    for first in range(0, len(places), boxes):
        some = torch.from_numpy(places[first : first + boxes]).to(device)
        rows = windows.index_select(0, (some[:, :1] + within[0]).reshape(-1))
        where = (some[:, 1:] + within[1]).reshape(-1, 1) + words
        taken.index_copy_(0, where.reshape(-1), rows.reshape(-1))


def _word(sides: Sequence[Tensor], places: NDArray[np.int64], strides: Sequence[Sequence[int]], item_bytes: int) -> int:
    """The widest word, in bytes, that divides whatever is an address or a length."""
    numbers = [item_bytes, *strides[0], *strides[1], *(memory.data_ptr() for memory in sides)]
    common = math.gcd(8, *numbers, int(np.gcd.reduce(places.reshape(-1))))
    return common & -common


def _torch(op: str):  # type: ignore[no-untyped-def]
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"{op}: device memory needs torch, which can't be imported ({error})") from None
    return torch


def _check(op: str, name: str, memory: Tensor) -> None:
    torch = _torch(op)
    if not isinstance(memory, torch.Tensor) or memory.dtype != torch.uint8 or memory.ndim != 1:
        raise TypeError(f"{op}: {name} is no uint8 tensor of one dimension; pass tensor.view(torch.uint8).reshape(-1)")
    if not memory.is_contiguous():
        raise ValueError(f"{op}: {name} is not contiguous; pass the memory that it is a view of")
