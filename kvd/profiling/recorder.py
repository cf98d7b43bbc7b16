"""Recording: from the KV indices of decode steps to a profile (SmartGen, section 4.1). No IO and no clock.

Groups form by themselves, one for each power of two: a prompt of n tokens belongs to the lengths from 2^k (included) to
2^(k+1) (excluded). The paper finds one distribution within a factor of four (4K to 16K); a factor of two is on the safe
side of that, gives about a dozen groups from 64 tokens to 256K, and lets recordings of different days and nodes share
their groups' borders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType

import numpy as np
import numpy.typing as npt
from kvd_kernels import accumulate_blocks

from kvd.errors import InvalidArgument
from kvd.importance.counts import HeadCounts, SelectionCounts
from kvd.importance.heads import CELLS
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.profiling.profile import Parameter, Profile, ProfileGroup
from kvd.profiling.timing import NOT_MEASURED, Times
from kvd_client.spec import MAX_TOKENS, KVSpec

BLOCKS = 1000
"""M as in the paper."""


def group_range(length: int) -> tuple[int, int]:
    """The lengths, ``low`` included and ``high`` excluded, that share a group with a prompt of ``length`` tokens."""
    if not 1 <= length <= MAX_TOKENS:
        raise InvalidArgument(
            f"a prompt of {length} tokens can't be recorded; it must have 1 to {MAX_TOKENS}", length=length
        )
    low = 1 << (length.bit_length() - 1)
    return low, 2 * low


class Recorder:
    """Selections of any number of decode batches, by group. Not for several threads at once.

    Raises :class:`InvalidArgument` for no layers or blocks.
    """

    def __init__(self, layers: int, *, blocks: int = BLOCKS) -> None:
        if layers < 1 or blocks < 1:
            raise InvalidArgument(
                f"selections can't be recorded over {layers} layers and {blocks} blocks", layers=layers, blocks=blocks
            )
        self.layers, self.blocks = layers, blocks
        self._groups: dict[tuple[int, int], _GroupCounts] = {}

    def batch(self, lengths: Sequence[int], *, starts: Sequence[int] | int = 0) -> Recording:
        """Begin to record one decode batch: sequences that decode together from their first step to their last.

        ``lengths`` are the prompts' tokens, one number a sequence; ``starts`` the positions of their first tokens,
        where padding comes first. Where sequences come and go (continuous batching), give each a recording of its own.
        """
        return Recording(self, lengths, starts)

    def groups(self) -> tuple[ProfileGroup, ...]:
        """What was recorded so far, by length; batches count once they are closed."""
        return tuple(
            ProfileGroup(*bounds, counts.matrix(), counts.prompts, counts.steps)
            for bounds, counts in sorted(self._groups.items())
        )

    def profile(
        self,
        spec: KVSpec,
        *,
        selector: str,
        created: datetime,
        parameters: Mapping[str, Parameter] | None = None,
        prefill: Times = NOT_MEASURED,
        transfer: Times = NOT_MEASURED,
        link_rate: int = 0,
        notes: str = "",
    ) -> Profile:
        """A profile of what was recorded so far; the arguments are its fields.

        Raises :class:`InvalidArgument` where nothing was recorded, or ``spec`` has another number of layers.
        """
        if spec.layers != self.layers:
            raise InvalidArgument(
                f"{self.layers} layers were recorded, and the model has {spec.layers}; record with the model's number",
                layers=[self.layers, spec.layers],
            )
        groups = self.groups()
        if not groups:
            raise InvalidArgument("nothing was recorded; run at least one prompt and decode step")
        return Profile(
            model=spec.model,
            revision=spec.revision,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            entry_bytes=spec.entry_bytes,
            selector=selector,
            parameters=parameters or {},
            groups=tuple(_of_model(group, spec.kv_heads) for group in groups),
            prefill=prefill,
            transfer=transfer,
            link_rate=link_rate,
            created=created,
            notes=notes,
        )

    def _merge(self, found: Mapping[tuple[int, int], _GroupCounts]) -> None:
        for bounds, counts in found.items():
            mine = self._groups.setdefault(bounds, _GroupCounts(self.layers, self.blocks))
            mine.selections.merge(counts.selections)
            mine.merge_heads(counts.heads)
            mine.prompts += counts.prompts
            mine.steps += counts.steps


def _of_model(group: ProfileGroup, kv_heads: int) -> ProfileGroup:
    """Without telling heads apart where the model has others: a tensor-parallel rank records only its own."""
    heads = group.matrix.heads
    if heads is None or heads.heads == kv_heads:
        return group
    return dataclasses.replace(group, matrix=group.matrix.with_heads(None))


class Recording:
    """One decode batch being recorded. A context manager: closing it adds it to the recorder, an exception drops it."""

    def __init__(self, recorder: Recorder, lengths: Sequence[int], starts: Sequence[int] | int) -> None:
        if not len(lengths):
            raise InvalidArgument("a batch without sequences can't be recorded; give at least one prompt length")
        for length in lengths:
            group_range(length)
        given = [starts] * len(lengths) if isinstance(starts, int) else list(starts)
        if len(given) != len(lengths) or min(given) < 0:
            raise InvalidArgument(
                f"starts are {given} for {len(lengths)} sequences; give each one number, 0 or more", starts=given
            )
        self._recorder = recorder
        self._lengths = np.array(lengths, np.int64)
        self._starts = np.array(given, np.int64)
        self._counts = np.zeros((recorder.layers, len(lengths), recorder.blocks), np.int64)
        self._by_head: npt.NDArray[np.int64] | None = None
        """(layers, rows, KV heads, cells); made when the number of heads is known."""
        self._steps = [0] * recorder.layers
        self._heads = 0
        self._closed = False

    def add(self, layer: int, index: npt.NDArray[np.int32]) -> None:
        """Add what one layer selected in one step: a KV index, C-contiguous int32 of shape (B·H, k), each row with
        distinct token positions. Tokens that decode made are left out of the count.

        Layers 0 and 1 need not be added: they don't select. Raises :class:`InvalidArgument`, with nothing counted, for
        a layer that does not exist, another shape or type, another H than before, or a position before a prompt's
        start.
        """
        if self._closed:
            raise InvalidArgument("the recording is closed; begin another for the next batch")
        if not 0 <= layer < self._recorder.layers:
            raise InvalidArgument(
                f"layer {layer} does not exist; the model has layers 0 to {self._recorder.layers - 1}", layer=layer
            )
        if not isinstance(index, np.ndarray) or index.ndim != 2:
            raise InvalidArgument(f"layer {layer}: a KV index is an int32 array of shape (B·H, k)", layer=layer)
        heads, left = divmod(len(index), len(self._lengths))
        if left or not heads or heads != (self._heads or heads):
            raise InvalidArgument(
                f"layer {layer}: the KV index has {len(index)} rows for {len(self._lengths)} sequences"
                + (f" of {self._heads} heads" if self._heads else "")
                + "; give a row for each sequence and KV head",
                layer=layer,
                rows=len(index),
            )
        try:
            accumulate_blocks(index, self._counts[layer], self._lengths, self._starts, beyond="skip")
        except (IndexError, TypeError, ValueError) as error:
            raise InvalidArgument(f"layer {layer}: {error}", layer=layer) from None
        if self._by_head is None:
            self._by_head = np.zeros((self._recorder.layers, len(self._lengths), heads, CELLS), np.int64)
        each = [numbers.repeat(heads) for numbers in (self._lengths, self._starts)]
        accumulate_blocks(index, self._by_head[layer].reshape(len(index), CELLS), *each, beyond="skip")
        self._heads = heads
        self._steps[layer] += 1

    def close(self) -> None:
        """Add the batch to its recorder. Idempotent; a batch without a step counts as never begun.

        Raises :class:`InvalidArgument`, with nothing added, where a row named a token more than once.
        """
        if self._closed:
            return
        self._closed = True
        if not any(self._steps):
            return
        found: dict[tuple[int, int], _GroupCounts] = {}
        for row, length in enumerate(self._lengths.tolist()):
            bounds = group_range(length)
            group = found.setdefault(bounds, _GroupCounts(self._recorder.layers, self._recorder.blocks))
            group.prompts += 1
            group.steps += max(self._steps)
            for layer in range(ALWAYS_LAYERS, self._recorder.layers):
                if steps := self._steps[layer]:
                    selected = self._counts[layer, row]
                    group.selections.add(layer, selected, length=length, heads=self._heads, steps=steps)
                    if self._by_head is not None:
                        group.of_heads(self._heads).add(layer, self._by_head[layer, row], length=length, steps=steps)
        self._recorder._merge(found)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        self._closed = True


class _GroupCounts:
    def __init__(self, layers: int, blocks: int) -> None:
        self.selections = SelectionCounts(layers, blocks)
        self.heads: HeadCounts | None = None
        """None until selections say how many there are, and where batches had different numbers."""
        self._mixed = False
        self.prompts = 0
        self.steps = 0

    def of_heads(self, heads: int) -> HeadCounts:
        if self.heads is None:
            self.heads = HeadCounts(self.selections.layers, heads)
        return self.heads

    def merge_heads(self, other: HeadCounts | None) -> None:
        """What other batches selected by head; batches of other numbers of heads are not told apart."""
        if other is None or self._mixed:
            return
        if self.heads is not None and self.heads.selected.shape != other.selected.shape:
            self.heads, self._mixed = None, True
        else:
            self.of_heads(other.selected.shape[1]).merge(other)

    def matrix(self) -> ImportanceMatrix:
        return self.selections.matrix(self.heads)
