"""A transfer without a daemon, for runs in one process that others are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvd_client.counters import SelectionCounters, no_selections
from kvd_client.lanes import NOTHING
from kvd_client.selectors.base import Index, Selector, Shape
from kvd_client.spec import KVSpec


def shape_from(spec: KVSpec, lengths: Sequence[int]) -> Shape:
    """What a selector must know of a transfer of prompts of these lengths."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return Shape(tuple(lengths), spec.kv_heads, spec.entry_bytes // (2 * dtype.itemsize), spec.dtype)


class LocalTransfer:
    """Both ends of a transfer in one process, without a daemon: what is put is there."""

    def __init__(self, spec: KVSpec, lengths: Sequence[int], selector: Selector) -> None:
        self.lengths = tuple(lengths)
        self._spec = spec
        self._entries = np.zeros(
            (spec.layers, len(lengths), max(lengths), spec.kv_heads, spec.entry_bytes), dtype=np.uint8
        )
        arrays = selector.metadata(shape_from(spec, lengths))
        self._metadata = {array.name: np.zeros((spec.layers, array.layer_bytes), np.uint8) for array in arrays}
        self._counters = no_selections(spec.layers)

    def put_layer(self, layer: int, *, k: Any, v: Any, start: int = 0) -> None:
        entries = torch.cat([k, v], -1).permute(0, 2, 1, 3).contiguous().view(torch.uint8).cpu().numpy()
        for row, length in enumerate(self.lengths):
            stop = min(start + entries.shape[1], length)
            if stop > start:
                self._entries[layer, row, start:stop] = entries[row, : stop - start]

    def metadata(self, layer: int, name: str) -> npt.NDArray[np.uint8]:
        array: npt.NDArray[np.uint8] = self._metadata[name][layer]
        return array

    def metadata_ready(self, layer: int) -> None:
        """Nobody waits for it."""

    def wait_ready(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Everything is here."""

    def wait_metadata(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Everything is here."""

    def idle(self, layer: int) -> None:
        """There is no network."""

    def layer(self, layer: int) -> npt.NDArray[np.uint8]:
        entries: npt.NDArray[np.uint8] = self._entries[layer]
        return entries

    def prepare_select(self, layer: int, index: Index, *, slot: int = 0, parallel: bool = True) -> Any:
        rows = np.arange(len(index))[:, None]
        heads = self._spec.kv_heads
        entries = self._entries[layer][rows // heads, index, rows % heads]
        entries[index == NOTHING] = 0
        self._counters.selects[layer] += 1
        self._counters.selected[layer] += int((index != NOTHING).sum())
        return _LocalSelection(index, entries)

    def selection_counters(self) -> SelectionCounters:
        return self._counters.plus(no_selections(self._spec.layers))


@dataclasses.dataclass
class _LocalSelection:
    index: Index
    entries: npt.NDArray[np.uint8]
    done: bool = True

    def submit(self) -> None:
        """There is nothing to fetch."""

    def load_local(self) -> None:
        """It has been loaded."""

    def wait(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        return self.entries
