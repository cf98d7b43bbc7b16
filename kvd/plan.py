"""From tokens to descriptors: which bytes of the source go where in the sink, in as few pieces as possible.

Descriptors are int64 arrays of shape (n, 3): source offset, sink offset, length. Everything is computed on arrays,
since a transfer cut into a thousand blocks a layer has tens of thousands of ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.types import Descriptors
from kvd_client.spec import PartLayout, TokenRange

FEW = 64
"""Ranges of a list so short that arithmetic on Python's integers beats NumPy's calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Tokens of one layer on their way: their bytes, and their mask bytes.

    Row ``i`` of ``data`` and of ``masks`` concern the same tokens, by source address; neighbours in both memories are
    one descriptor, also across rows of the batch.
    """

    data: Descriptors
    masks: Descriptors
    """One byte a token. Offsets as in ``data``: the source's mask bytes say 1 where its own bytes are ready."""
    token_bytes: int

    @property
    def tokens(self) -> int:
        return int(self.masks[:, 2].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of ``data``; the masks add one a token."""
        return self.tokens * self.token_bytes

    def __len__(self) -> int:
        return len(self.data)


def check_compatible(source: PartLayout, sink: PartLayout) -> None:
    """Raise :class:`UnsupportedLayout` with ``{field: [source's, sink's]}`` where the two can't be copied plainly.

    Capacities may differ; layers, heads, rows and entry size must be equal.
    """
    if (source.layers, source.heads, source.rows, source.entry_bytes) != (
        sink.layers,
        sink.heads,
        sink.rows,
        sink.entry_bytes,
    ):
        differ = {
            name: [getattr(source, name), getattr(sink, name)]
            for name in ("layers", "heads", "rows", "entry_bytes")
            if getattr(source, name) != getattr(sink, name)
        }
        listed = ", ".join(f"{name} {mine} and {theirs}" for name, (mine, theirs) in differ.items())
        raise UnsupportedLayout(
            f"source and sink differ in {listed}; open both sides with the same model, batch and head range", **differ
        )


def plan_tokens(
    source: PartLayout,
    sink: PartLayout,
    layer: int,
    ranges: Sequence[TokenRange] | npt.NDArray[np.int64],
    *,
    source_offset: int = 0,
    sink_offset: int = 0,
) -> Plan:
    """Descriptors for the given tokens of one layer; ranges may overlap and come in any order.

    ``ranges`` are :class:`TokenRange` or an int64 array of shape (n, 3): row, start, stop. ``source_offset`` and
    ``sink_offset`` are where the lease begins in its region or grant, and are added to every offset.

    Raises :class:`UnsupportedLayout` as :func:`check_compatible`, and :class:`InvalidArgument` for a layer or range
    outside either layout.
    """
    check_compatible(source, sink)
    _check_layer(source, layer)
    pieces = _pieces(source, sink, ranges)
    size = source.token_bytes
    data_at = (source_offset + source.layer_offset(layer), sink_offset + sink.layer_offset(layer), 0)
    masks_at = (source_offset + source.mask_offset(layer), sink_offset + sink.mask_offset(layer), 0)
    return Plan(
        data=pieces * size + np.array(data_at, np.int64),
        masks=pieces + np.array(masks_at, np.int64),
        token_bytes=size,
    )


def plan_masks(
    source: PartLayout,
    sink: PartLayout,
    layers: Sequence[tuple[int, Sequence[TokenRange]]],
    *,
    source_offset: int = 0,
) -> Descriptors:
    """The mask bytes alone of tokens of several layers, by layer, in as few descriptors as they go: what
    :func:`plan_tokens` has of each in ``masks``. Raises as it does."""
    check_compatible(source, sink)
    parts: list[Descriptors] = []
    alike: tuple[Sequence[TokenRange], Descriptors] | None = None
    for layer, ranges in layers:
        _check_layer(source, layer)
        if alike is None or alike[0] != ranges:  # most often the same tokens go of every layer
            alike = ranges, _pieces(source, sink, ranges)
        at = (source_offset + source.mask_offset(layer), sink.mask_offset(layer), 0)
        parts.append(alike[1] + np.array(at, np.int64))
    return merge(np.concatenate(parts)) if parts else np.empty((0, 3), np.int64)


def chop(plan: Plan, max_bytes: int) -> list[Plan]:
    """Cut a plan, at token boundaries, into plans of at most ``max_bytes`` of data each (at least one token).

    Order and completeness are kept; all but the last are as full as tokens allow.
    """
    if max_bytes < 1:
        raise InvalidArgument(f"a plan can't be cut into pieces of {max_bytes} bytes", max_bytes=max_bytes)
    total, step = plan.tokens, max(1, max_bytes // plan.token_bytes)
    if total <= step:
        return [plan] if total else []
    ends = np.cumsum(plan.masks[:, 2])
    cuts = np.union1d(ends, np.arange(step, total, step))
    begins = np.concatenate(([0], cuts[:-1]))
    at = np.searchsorted(ends, begins, side="right")
    inside = begins - (ends - plan.masks[:, 2])[at]
    counts = cuts - begins
    masks = np.stack((plan.masks[at, 0] + inside, plan.masks[at, 1] + inside, counts), axis=1)
    inside, counts = inside * plan.token_bytes, counts * plan.token_bytes
    data = np.stack((plan.data[at, 0] + inside, plan.data[at, 1] + inside, counts), axis=1)
    edges = np.flatnonzero(np.diff(begins // step)) + 1
    return [
        Plan(data=one, masks=other, token_bytes=plan.token_bytes)
        for one, other in zip(np.split(data, edges), np.split(masks, edges), strict=True)
    ]


def ranges_of(plan: Plan, source: PartLayout, layer: int, *, source_offset: int = 0) -> list[TokenRange]:
    """The tokens that a plan (or a piece of one) covers, as ranges in the plan's order: the way back."""
    places = plan.masks[:, 0] - (source_offset + source.mask_offset(layer))
    found = []
    for place, count in zip(places.tolist(), plan.masks[:, 2].tolist(), strict=True):
        while count:
            row, start = divmod(place, source.capacity)
            here = min(count, source.capacity - start)
            found.append(TokenRange(row, start, start + here))
            place, count = place + here, count - here
    return found


def merge(descriptors: Descriptors) -> Descriptors:
    """Join neighbours that are contiguous in both memories, in the order given; empty ones are dropped."""
    pieces = descriptors[descriptors[:, 2] > 0]
    if len(pieces) < 2:
        return pieces
    follows = (pieces[1:, :2] == pieces[:-1, :2] + pieces[:-1, 2:]).all(axis=1)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    merged = pieces[first]
    merged[:, 2] = np.add.reduceat(pieces[:, 2], first)
    return merged


def _check_layer(source: PartLayout, layer: int) -> None:
    if not 0 <= layer < source.layers:
        raise InvalidArgument(
            f"layer {layer} does not exist; the part has layers 0 to {source.layers - 1}", layer=layer
        )


def _pieces(source: PartLayout, sink: PartLayout, ranges: Sequence[TokenRange] | npt.NDArray[np.int64]) -> Descriptors:
    """Tokens' places in each memory and their number, counted in tokens from the layer's start; bytes and mask bytes
    follow from it."""
    capacity = min(source.capacity, sink.capacity)
    if len(ranges) <= FEW and not isinstance(ranges, np.ndarray):
        return np.array(_few(ranges, source, sink, capacity), np.int64).reshape(-1, 3)
    rows, starts, stops = _columns(ranges, source.rows, capacity)
    pieces = np.stack((rows * source.capacity + starts, rows * sink.capacity + starts, stops - starts), axis=1)
    return _joined(pieces)


def _few(
    ranges: Sequence[TokenRange], source: PartLayout, sink: PartLayout, capacity: int
) -> list[tuple[int, int, int]]:
    """What :func:`_columns` and :func:`_joined` make of a short list, for a tenth of what their NumPy calls cost."""
    found: list[tuple[int, int, int]] = []
    reach = -1
    for piece in sorted(ranges, key=_place):
        row, start, stop = piece.row, piece.start, piece.stop
        if not (0 <= row < source.rows and 0 <= start <= stop <= capacity):
            _columns(ranges, source.rows, capacity)  # which raises
        at = row * source.capacity
        start = max(start, reach - at)
        if start >= stop:
            continue
        reach = at + stop
        there = row * sink.capacity + start
        if found and found[-1][0] + found[-1][2] == at + start and found[-1][1] + found[-1][2] == there:
            found[-1] = (*found[-1][:2], found[-1][2] + stop - start)
        else:
            found.append((at + start, there, stop - start))
    return found


def _place(piece: TokenRange) -> tuple[int, int]:
    return piece.row, piece.start


def _joined(pieces: Descriptors) -> Descriptors:
    """Token pieces sorted by place, each token once, neighbours joined."""
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    if len(pieces) > 1:
        # Within a row both places differ by a constant: cutting what earlier pieces cover is the same in both.
        reach = np.maximum.accumulate(pieces[:, 0] + pieces[:, 2])
        covered = np.clip(reach[:-1] - pieces[1:, 0], 0, pieces[1:, 2])
        pieces[1:, :2] += covered[:, None]
        pieces[1:, 2] -= covered
    return merge(pieces)


def _columns(
    ranges: Sequence[TokenRange] | npt.NDArray[np.int64], rows: int, capacity: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if isinstance(ranges, np.ndarray):
        table = ranges.astype(np.int64).reshape(-1, 3)
    else:
        table = np.array([(part.row, part.start, part.stop) for part in ranges], np.int64).reshape(-1, 3)
    row, start, stop = table.T
    wrong = (row < 0) | (row >= rows) | (start < 0) | (stop < start) | (stop > capacity)
    if wrong.any():
        index = int(np.argmax(wrong))
        values = dict(zip(("row", "start", "stop"), table[index].tolist(), strict=True))
        raise InvalidArgument(
            f"ranges[{index}] is tokens {values['start']} to {values['stop']} of row {values['row']}; the layouts have "
            f"{rows} rows with room for {capacity} tokens",
            index=index,
            **values,
        )
    return row, start, stop
