"""What sliding-window layers never need: tokens that no head can see any more from the last prompt token on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.blocks import block_bounds, window_start
from kvd.errors import InvalidArgument
from kvd.importance.matrix import BlockMask
from kvd_client.spec import TokenRange


def needed_ranges(window: int, lengths: Sequence[int]) -> list[TokenRange]:
    """What decode can need of a layer with this window (``KVSpec.windows``; 0: all), one range a row."""
    return [TokenRange(row, window_start(length, window), length) for row, length in enumerate(lengths) if length]


def needed_blocks(windows: Sequence[int], lengths: Sequence[int], layers: int, blocks: int) -> BlockMask:
    """Shape (layers, blocks): blocks that have, in any row, a token that the layer can still see.

    ``windows`` as in ``KVSpec``: one number a layer, or none at all. Raises :class:`InvalidArgument` where there are
    windows for another number of layers.
    """
    if windows and len(windows) != layers:
        raise InvalidArgument(
            f"there are {len(windows)} windows for {layers} layers; give one a layer, or none",
            windows=len(windows),
            layers=layers,
        )
    bounds = np.stack([block_bounds(length, blocks) for length in lengths])
    filled = bounds[:, :-1] < bounds[:, 1:]
    by_window = {
        window: (filled & (bounds[:, 1:] > _starts(window, lengths))).any(axis=0) for window in set(windows) or {0}
    }
    return np.stack([by_window[window] for window in (windows or [0] * layers)])


def _starts(window: int, lengths: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array([[window_start(length, window)] for length in lengths], np.int64)
