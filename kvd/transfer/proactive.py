"""The proactive path of one source part: which ready tokens are pushed next.

Tokens become ready by layer and range, in any order and more than once (chunked prefill, retries in the engine);
each is pushed exactly once. What the sink holds already is never pushed.
"""

from __future__ import annotations

import collections

from kvd.errors import InvalidArgument
from kvd.mask import IntervalSet
from kvd_client.spec import PartLayout, TokenRange

MAX_RANGES = 1024
"""Most ranges of one write: bounds the size of its notification."""


class ProactivePath:
    """Full transfer: pushes everything, in the order in which it became ready."""

    def __init__(self, layout: PartLayout, lengths: tuple[int, ...]) -> None:
        self.layout = layout
        self.lengths = lengths
        self.pending_tokens = 0
        """Tokens (summed over layers) that are ready and not yet handed out."""
        self._known: dict[tuple[int, int], IntervalSet] = {}
        self._held: dict[int, IntervalSet] = {}
        self._queue: collections.deque[tuple[int, int, int, int]] = collections.deque()

    def ready(self, layer: int, row: int | None, start: int, stop: int) -> None:
        """Add tokens of a layer; ``row`` None means every row, clipped to its length.

        Raises :class:`InvalidArgument` if the layer, row or range does not exist; nothing is added then."""
        layout = self.layout
        if not 0 <= layer < layout.layers:
            raise InvalidArgument(
                f"layer_ready names layer {layer}, but the transfer has layers 0 to {layout.layers - 1}",
                layer=layer,
            )
        if row is not None and not 0 <= row < layout.rows:
            raise InvalidArgument(
                f"layer_ready names row {row} of layer {layer}, but the transfer has rows 0 to {layout.rows - 1}",
                layer=layer,
                row=row,
            )
        limit = max(self.lengths) if row is None else self.lengths[row]
        if not 0 <= start <= stop <= limit:
            raise InvalidArgument(
                f"layer_ready names tokens {start} to {stop} of layer {layer}, but there are only {limit}; "
                "ranges are start (included) to stop (excluded)",
                layer=layer,
                start=start,
                stop=stop,
            )
        for r in range(layout.rows) if row is None else (row,):
            end = min(stop, self.lengths[r])
            if start < end:
                for new_start, new_stop in self._intervals(layer, r).add(start, end):
                    self._enqueue(layer, r, new_start, new_stop)

    def hold(self, ranges: tuple[TokenRange, ...]) -> None:
        """The sink has these tokens, in every layer. Called once, before the first :meth:`take`."""
        for held in ranges:
            self._held.setdefault(held.row, IntervalSet()).add(held.start, held.stop)
        if self._held:
            queued, self._queue, self.pending_tokens = self._queue, collections.deque(), 0
            for item in queued:
                self._enqueue(*item)

    def take(self, max_bytes: int) -> tuple[int, tuple[TokenRange, ...]] | None:
        """The next tokens to push, all of one layer, at most ``max_bytes`` (but at least one token); None: none."""
        if not self._queue:
            return None
        layer = self._queue[0][0]
        room = max(1, max_bytes // self.layout.token_bytes)
        taken: list[TokenRange] = []
        while room and self._queue and self._queue[0][0] == layer and len(taken) < MAX_RANGES:
            _, row, start, stop = self._queue.popleft()
            end = min(stop, start + room)
            if end < stop:
                self._queue.appendleft((layer, row, end, stop))
            taken.append(TokenRange(row, start, end))
            room -= end - start
            self.pending_tokens -= end - start
        return layer, tuple(taken)

    def first_unready(self) -> tuple[int, int, int] | None:
        """A (layer, row, token) that has never been ready; None when every token of every layer has been."""
        for layer in range(self.layout.layers):
            for row, length in enumerate(self.lengths):
                gap = next(iter(self._intervals(layer, row).gaps(0, length)), None)
                if gap is not None:
                    return layer, row, gap[0]
        return None

    def _intervals(self, layer: int, row: int) -> IntervalSet:
        return self._known.setdefault((layer, row), IntervalSet())

    def _enqueue(self, layer: int, row: int, start: int, stop: int) -> None:
        held = self._held.get(row)
        for piece_start, piece_stop in held.gaps(start, stop) if held else [(start, stop)]:
            self.pending_tokens += piece_stop - piece_start
            if self._queue:
                last_layer, last_row, last_start, last_stop = self._queue[-1]
                if (last_layer, last_row, last_stop) == (layer, row, piece_start):
                    self._queue[-1] = (layer, row, last_start, piece_stop)
                    continue
            self._queue.append((layer, row, piece_start, piece_stop))
