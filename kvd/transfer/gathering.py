"""Entries that a fetch names, as addresses: from (row, head) counts and token positions to bytes of a layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.types import Descriptors
from kvd_client.spec import PartLayout


def fetch_entries(
    layout: PartLayout, lengths: tuple[int, ...], counts: bytes, index: bytes
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The entries of a fetch as flat entry numbers of a layer, int64 (n,), and the counts, int64 (rows * heads,).

    Raises :class:`InvalidArgument` for counts or positions that do not fit the layout; every number is checked.
    """
    groups = layout.rows * layout.heads
    if len(counts) != 4 * groups or len(index) % 4:
        raise InvalidArgument(
            f"a fetch has {len(counts) // 4} counts and {len(index)} bytes of index; it needs {groups} counts (rows x "
            "heads) and 4 bytes for each entry",
            counts=len(counts) // 4,
        )
    many = np.frombuffer(counts, np.int32).astype(np.int64)
    tokens = np.frombuffer(index, np.int32).astype(np.int64)
    if many.min(initial=0) < 0 or many.max(initial=0) > layout.capacity or int(many.sum()) != len(tokens):
        raise InvalidArgument(
            f"a fetch's counts ask for {int(many.sum())} entries and its index has {len(tokens)}; each (row, head) can "
            f"have 0 to {layout.capacity}",
            entries=len(tokens),
        )
    group = np.repeat(np.arange(groups), many)
    row, head = group // layout.heads, group % layout.heads
    wrong = np.flatnonzero((tokens < 0) | (tokens >= np.asarray(lengths, np.int64)[row]))
    if wrong.size:
        first = int(wrong[0])
        raise InvalidArgument(
            f"a fetch names token {int(tokens[first])} of row {int(row[first])}, which has only "
            f"{lengths[row[first]]} tokens",
            token=int(tokens[first]),
            row=int(row[first]),
        )
    return (row * layout.capacity + tokens) * layout.heads + head, many


def landing_descriptors(
    counts: npt.NDArray[np.int64], entry_bytes: int, *, source: int, target: int, stride: int
) -> Descriptors:
    """From gathered entries at ``source`` to the heads of the rows of a landing slot at ``target``."""
    rows = np.flatnonzero(counts)
    nbytes = counts[rows] * entry_bytes
    starts = np.cumsum(nbytes) - nbytes
    return np.stack((source + starts, target + rows * stride, nbytes), axis=1).astype(np.int64)
