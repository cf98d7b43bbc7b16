"""Which of a source part's ready tokens are sent next: the proactive and the speculative path's common queue.

Tokens become ready by layer and range, in any order and more than once (chunked prefill, retries of an engine); each
is handed out exactly once, and what the sink holds already never. Work is sorted into classes, the first class first;
within one class by layer and position, so that neighbours are sent as one run. A :class:`Policy` says which class a
KV block belongs to, which classes may go while prefill runs, and how fast the rest may go afterwards. What prefill
finds out about the prompt on its way sorts a layer anew (:meth:`SendQueue.rank`): the order of what is unsent, never
whether something is sent. What a fetch brings first is taken out, where it is whole tokens (:meth:`SendQueue.drop`).

Where an end's tensors lie in a layout of their own, tokens go in whole blocks of that layout (``grain``), and possibly
a layer, or everything, at once (``unit``): what is not complete yet waits here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds, blocks_touched, window_start
from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS, resampled_columns
from kvd.importance.prompt import Scale, Values, combined
from kvd.mask import IntervalSet, Places, TokenFlags
from kvd.transfer.work import ROWS, Piece, Work
from kvd.types import Path
from kvd_client.spec import PartLayout, TokenRange

MAX_RANGES = 1024
"""Most ranges of one write: bounds the size of its notification."""


class ReadyTokens:
    """What has been rung by the source's process so far: layers, rows and ranges, checked."""

    def __init__(self, layout: PartLayout, lengths: tuple[int, ...]) -> None:
        self.layout = layout
        self.lengths = lengths
        self._known: dict[tuple[int, int], IntervalSet] = {}

    def add(self, layer: int, row: int | None, start: int, stop: int) -> list[tuple[int, TokenRange]]:
        """Add tokens of a layer, in every row (clipped to it) where ``row`` is None; returns (layer, range) of those
        that are new. Raises :class:`InvalidArgument` if they do not exist; nothing is added then."""
        layout = self.layout
        if not 0 <= layer < layout.layers:
            raise InvalidArgument(
                f"layer_ready names layer {layer}, but the transfer has layers 0 to {layout.layers - 1}", layer=layer
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
        found = []
        for r in range(layout.rows) if row is None else (row,):
            for piece in self._intervals(layer, r).add(start, min(stop, self.lengths[r])):
                found.append((layer, TokenRange(r, *piece)))
        return found

    def all(self) -> list[tuple[int, TokenRange]]:
        """Everything so far, by layer, row and position."""
        return [
            (layer, TokenRange(row, *piece))
            for (layer, row), intervals in sorted(self._known.items(), key=lambda item: item[0])
            for piece in intervals
        ]

    def covers(self, layer: int, row: int, start: int, stop: int) -> bool:
        """Whether all these tokens are ready."""
        return self._intervals(layer, row).contains(start, stop)

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """How a transfer is sent. The default is full transfer: everything, layer by layer, as it becomes ready."""

    mode: str = "full"
    classes: npt.NDArray[np.int16] | None = None
    """Shape (layers, blocks): each block's class, 0 first. None: one class."""
    proactive_classes: int | None = None
    """Blocks of the first so many classes are pushed whenever they are ready; None: all."""
    until_finish: bool = False
    """The proactive path ends when the source's process has finished prefill (the first token exists)."""
    share: float = 0.0
    """Speculative path: share of all tokens that may go in the windows of one decode iteration; 0: none at all."""
    adaptive: bool = False
    """Speculative path: once a window has been signalled, go on without waiting for more; the link's bound on delay is
    the limit."""
    importance: Values | None = None
    """Shape (layers, blocks): the profile's, where there is one."""
    rankable: bool = False
    """Whether what the prompt's queries select changes the order."""
    budget_tokens: int = 0
    """For status: tokens (summed over layers) that the budget allowed; 0: no budget."""


class SendQueue:
    """A paired source part's work. Not thread-safe; pure."""

    def __init__(
        self,
        layout: PartLayout,
        lengths: tuple[int, ...],
        policy: Policy,
        *,
        held: tuple[TokenRange, ...] = (),
        windows: tuple[int, ...] = (),
        grain: int = 1,
        unit: str = "chunk",
        drops: bool = False,
    ) -> None:
        """``held`` must begin and end at multiples of ``grain`` tokens, or at the end of a row. With ``drops`` single
        tokens can be taken out (:meth:`drop`); only with a ``grain`` of 1 and in chunks."""
        self.layout = layout
        self.lengths = lengths
        self.policy = policy
        self.grain = grain
        self.unit = unit
        """One of :data:`kvd_client.layouts.UNITS`."""
        self.pending_tokens = 0
        """Tokens (summed over layers) that are queued and not handed out, whether or not they may go now."""
        self.windows_used = 0
        self._held: dict[int, IntervalSet] = {}
        for piece in held:
            self._held.setdefault(piece.row, IntervalSet()).add(piece.start, piece.stop)
        self._partial: dict[tuple[int, int], IntervalSet] = {}
        """By (layer, row): what is ready, to tell which blocks are whole."""
        self._gathered: dict[int, list[TokenRange]] = {}
        """By layer: what is ready of a unit that is not."""
        wanted = sum(lengths) - sum(intervals.total for intervals in self._held.values())
        self._awaited = dict.fromkeys(range(layout.layers), wanted)
        """By layer: tokens that its unit still lacks."""
        self._windows = windows
        self._bounds: dict[int, npt.NDArray[np.int64]] = {}
        self._proactive = Work()
        self._rest = Work()
        """What may only go speculatively."""
        self._scale: Scale | None = None
        """Of the policy's classes; made when the first layer is ranked."""
        self._ranked: dict[int, npt.NDArray[np.int16]] = {}
        """By layer, (rows, blocks): the classes of a layer that was ranked, instead of the policy's."""
        self._unsorted: dict[tuple[int, int], None] = {}
        """(layer, rows // ROWS) that were ranked, and whose pieces still have their former classes; the first first."""
        self._finished = False
        self._quota = 0.0
        self._out = TokenFlags(layout.rows, layout.capacity) if drops else None
        """What has been handed out or dropped. Dropped tokens may lie in pieces that are still queued, restored ones in
        two: what is here by then is left out of a piece when its turn comes."""
        self._dropped: set[int] = set()
        """Layers of which anything was."""

    def add(self, ready: list[tuple[int, TokenRange]]) -> None:
        """Tokens have become ready; each at most once."""
        for layer, piece in ready:
            held = self._held.get(piece.row)
            for start, stop in held.gaps(piece.start, piece.stop) if held else [(piece.start, piece.stop)]:
                if self.grain > 1:
                    start, stop = self._whole_blocks(layer, piece.row, start, stop)
                if start >= stop:
                    continue
                if self.unit == "chunk":
                    self._enqueue(layer, piece.row, start, stop)
                else:
                    self._gather(layer, TokenRange(piece.row, start, stop))

    def _whole_blocks(self, layer: int, row: int, start: int, stop: int) -> tuple[int, int]:
        """The blocks that become whole with these new tokens: only the first and the last can lack any."""
        grain, length = self.grain, self.lengths[row]
        known = self._partial.setdefault((layer, row), IntervalSet())
        known.add(start, stop)
        low, high = start // grain * grain, min(-(-stop // grain) * grain, length)
        if not known.contains(low, min(low + grain, length)):
            low += grain
        last = (high - 1) // grain * grain
        if not known.contains(last, high):
            high = last
        return low, high

    def _gather(self, layer: int, piece: TokenRange) -> None:
        """Keep tokens until their unit is whole, then queue it."""
        self._gathered.setdefault(layer, []).append(piece)
        self._awaited[layer] -= piece.stop - piece.start
        if self._awaited[layer] or (self.unit == "whole" and any(self._awaited.values())):
            return
        for ready in sorted(self._gathered) if self.unit == "whole" else [layer]:
            for one in self._gathered.pop(ready):
                self._enqueue(ready, one.row, one.start, one.stop)

    def drop(self, layer: int, places: Places) -> Places:
        """A fetch brings these tokens of a layer that is ready: leave out those that have not been handed out. Returns
        them, ascending, for :meth:`restore`."""
        if self._out is None:
            return np.empty(0, np.int64)
        found = np.unique(places)
        found = found[self._out.absent(layer, found)]
        rows, tokens = np.divmod(found, self.layout.capacity)
        for row, held in self._held.items():
            for start, stop in held:
                outside = (rows != row) | (tokens < start) | (tokens >= stop)
                found, rows, tokens = found[outside], rows[outside], tokens[outside]
        self._out.add_places(layer, found)
        self._dropped.add(layer)
        self.pending_tokens -= len(found)
        return found

    def restore(self, layer: int, places: Places) -> None:
        """The fetch has failed: what it dropped is to be sent after all."""
        if self._out is not None:
            self._out.subtract_places(layer, places)
            for row, start, stop in self._out.ranges(places):
                self._enqueue(layer, row, start, stop)

    def finish(self) -> None:
        """The first token exists: a deadline budget ends, and what is left becomes speculative, but for the layers
        that decode needs whole."""
        if self.policy.until_finish and not self._finished:
            self._finished = True
            self._proactive.move_layers(ALWAYS_LAYERS, self._rest)

    def rank(self, layer: int, shares: Values, weight: float) -> bool:
        """What the prompt's last queries would select of a layer: sort what is unsent of it, and what becomes ready
        later, by that and the profile (:func:`kvd.importance.prompt.combined`). ``shares``: float32 (rows, blocks) with
        any number of blocks.

        False, with nothing changed, where the order is not importance's to choose: full transfer, the paper's fixed
        budget, layers 0 and 1. What has been handed out stays so, and no path gains or loses a token. Of large batches
        the first rows are sorted at once, and with each :meth:`take` some more, so that none of these calls is long.
        """
        policy = self.policy
        if not policy.rankable or policy.classes is None or layer < ALWAYS_LAYERS:
            return False
        blocks = policy.classes.shape[1]
        if shares.shape[1] != blocks:
            shares = np.minimum(resampled_columns(shares, blocks), 1).astype(np.float32)
        profile = None if policy.importance is None else policy.importance[layer]
        found = combined(profile, shares, weight)
        self._ranked[layer] = self._scale_for(found).classes(found)
        self._unsorted.update(dict.fromkeys((layer, rows) for rows in range(-(-len(self.lengths) // ROWS))))
        self._sort_some()
        return True

    def _sort_some(self) -> None:
        """Give the unsent pieces of some ranked rows the classes that they have now."""
        if not self._unsorted:
            return
        layer, rows = next(iter(self._unsorted))
        del self._unsorted[layer, rows]
        for work in (self._proactive, self._rest):
            # Neighbours together: what is enqueued costs more by the piece than by the token.
            for row, start, stop in _joined(piece for _, piece in work.take_rows(layer, rows)):
                self.pending_tokens -= stop - start
                self._enqueue(layer, row, start, stop)

    def _scale_for(self, values: Values) -> Scale:
        """That of the profile's classes, or without a profile one made of the first ranked layer: layers resemble each
        other more than nothing does."""
        if self._scale is None:
            assert self.policy.classes is not None
            classes = self.policy.classes
            if self.policy.importance is not None:
                self._scale = Scale.of_classes(self.policy.importance, classes)
            else:
                first, last = int(classes[:ALWAYS_LAYERS].max()), int(classes.max())
                self._scale = Scale.of_values(values, last - first + 1, first)
        return self._scale

    def window(self) -> None:
        """A decode attention layer has begun: so much more may go. Unused shares of one iteration are kept, no more,
        so that a late burst can't follow a pause."""
        share = self.policy.share * sum(self.lengths) * self.layout.layers
        # A share of less than a token adds up to one; otherwise a short prompt's rest would never go.
        self._quota = min(max(share, 1.0), self._quota + share / self.layout.layers)
        self.windows_used += 1

    @property
    def path(self) -> Path | None:
        """The path on which :meth:`take` would hand out work now; None if nothing may go."""
        if self._proactive:
            return Path.PROACTIVE
        if self._rest and ((self.policy.adaptive and self.windows_used) or self._quota >= 1):
            return Path.SPECULATIVE
        return None

    def take(self, max_bytes: int) -> list[tuple[int, tuple[TokenRange, ...]]]:
        """The next tokens, as (layer, ranges) for each layer concerned: at most ``max_bytes``, but one token at least;
        empty if nothing may go now, or if all that might has been dropped. A layer that goes as one may exceed that.
        All of it goes by :attr:`path`, as it was before the call."""
        path = self.path
        if path is None:
            return []
        self._sort_some()
        work = self._proactive if path is Path.PROACTIVE else self._rest
        room = max(1, max_bytes // self.layout.token_bytes)
        wanted = room  # of whole layers so many as there is room for, but one at least
        if self.unit != "chunk":
            room = self.pending_tokens
        if path is Path.SPECULATIVE and not self.policy.adaptive:
            room = min(room, int(self._quota))
        taken: dict[int, list[TokenRange]] = {}
        count = ranges = 0
        while work and count < room and ranges < MAX_RANGES:
            rank, layer, (row, start, stop) = work.pop()
            if self._out is not None and layer in self._dropped:
                left = self._out.gaps(layer, row, start, stop)
                if left != [(start, stop)]:
                    for low, high in left:
                        work.push(rank, layer, (row, low, high))
                    continue
            end = min(stop, start + room - count)
            if end < stop and self.grain > 1:
                end = start + max((end - start) // self.grain, 0 if taken else 1) * self.grain
            if end == start or (self.unit == "layer" and layer not in taken and count >= wanted):
                work.push(rank, layer, (row, start, stop))
                break
            end = min(stop, end)
            if end < stop:
                work.push(rank, layer, (row, end, stop))
            pieces = taken.setdefault(layer, [])
            if pieces and pieces[-1].row == row and pieces[-1].stop == start:
                pieces[-1] = TokenRange(row, pieces[-1].start, end)
            else:
                pieces.append(TokenRange(row, start, end))
                ranges += 1
            if layer in self._dropped:
                self._mark(layer, [TokenRange(row, start, end)])
            count += end - start
        for layer, pieces in taken.items():
            self._mark(layer, pieces)
        self.pending_tokens -= count
        if path is Path.SPECULATIVE and not self.policy.adaptive:
            self._quota -= count
        return [(layer, tuple(pieces)) for layer, pieces in taken.items()]

    def _mark(self, layer: int, pieces: list[TokenRange]) -> None:
        """Note them as handed out, where tokens may be dropped."""
        if self._out is not None:
            for piece in pieces:
                self._out.mark(layer, piece.row, piece.start, piece.stop)

    def _enqueue(self, layer: int, row: int, start: int, stop: int) -> None:
        policy, length = self.policy, self.lengths[row]
        if self._windows:
            # Tokens that a sliding-window layer can't see any more matter least; they still make the cache complete.
            edge = window_start(length, self._windows[layer]) // self.grain * self.grain
            if start < edge:
                self._push(_LAST_CLASS, layer, row, start, min(stop, edge))
                start = min(stop, edge)
        if start >= stop:
            return
        if policy.classes is None:
            self._push(0, layer, row, start, stop)
            return
        blocks = policy.classes.shape[1]
        bounds = self._bounds.get(length)
        if bounds is None:
            bounds = block_bounds(length, blocks)
            if self.grain > 1:  # a KV block ends where the nearest block of the layout does
                bounds = np.minimum((bounds + self.grain // 2) // self.grain * self.grain, length)
                bounds[-1] = length
            self._bounds[length] = bounds
        if self.grain > 1:
            first = int(np.searchsorted(bounds, start, side="right")) - 1
            last = int(np.searchsorted(bounds, stop, side="left"))
        else:
            first, last = blocks_touched(length, blocks, start, stop)
        ranked = self._ranked.get(layer)
        classes = (policy.classes[layer] if ranked is None else ranked[row])[first:last]
        # Neighbours of one class are one run; a chunk of prefill may end within a block.
        edges = np.flatnonzero(np.diff(classes)) + 1
        firsts = np.concatenate(([0], edges))
        lasts = np.concatenate((edges, [last - first]))
        lows = np.maximum(bounds[first + firsts], start)
        highs = np.minimum(bounds[first + lasts], stop)
        ranks, filled = classes[firsts], lows < highs
        limit = self.policy.proactive_classes
        for part in [filled] if limit is None else [filled & (ranks < limit), filled & (ranks >= limit)]:
            if part.any():
                work = self._work_of(int(ranks[part][0]), layer)
                work.push_row(layer, row, ranks[part].tolist(), lows[part].tolist(), highs[part].tolist())
        self.pending_tokens += int((highs - lows)[filled].sum())

    def _push(self, rank: int, layer: int, row: int, start: int, stop: int) -> None:
        self._work_of(rank, layer).push(rank, layer, (row, start, stop))
        self.pending_tokens += stop - start

    def _work_of(self, rank: int, layer: int) -> Work:
        """Where a layer's pieces of a class belong now."""
        limit = self.policy.proactive_classes
        in_time = not (self.policy.until_finish and self._finished)
        proactive = layer < ALWAYS_LAYERS or (in_time and (limit is None or rank < limit))
        return self._proactive if proactive else self._rest


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that touch as one, in order of their positions."""
    found: list[Piece] = []
    for row, start, stop in sorted(pieces):
        if found and found[-1][0] == row and found[-1][2] == start:
            found[-1] = (row, found[-1][1], stop)
        else:
            found.append((row, start, stop))
    return found


_LAST_CLASS = 1 << 14
