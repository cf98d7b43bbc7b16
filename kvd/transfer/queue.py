"""Which of a source part's ready tokens are sent next: the proactive and the speculative path's common queue.

Tokens become ready by layer and range, in any order and more than once (chunked prefill, retries of an engine); each
is handed out exactly once, and what the sink holds already never. The first class goes first, within one class by layer
and position, so that neighbours are sent as one run. A :class:`~kvd.transfer.order.Policy` says which class a KV block
belongs to, which classes may go while prefill runs, and how fast the rest may go afterwards. What prefill finds out
about the prompt on its way gives a layer other classes (:meth:`SendQueue.rank`): the order of what is unsent, never
whether something is sent. What a fetch brings first is taken out, where it is whole tokens (:meth:`SendQueue.drop`).

:mod:`kvd.transfer.order` knows the classes, :mod:`kvd.transfer.work` sorts what waits when its turn comes.

Where an end's tensors lie in a layout of their own, tokens go in whole blocks of that layout (``grain``), and possibly
a layer, or everything, at once (``unit``): what is not complete yet waits here.
"""

from __future__ import annotations

import numpy as np

from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS
from kvd.importance.prompt import Values
from kvd.mask import IntervalSet, Places, TokenFlags
from kvd.transfer.order import Order, Piece, Policy
from kvd.transfer.work import Work
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
        self._order = Order(layout.layers, lengths, policy, windows=windows, grain=grain)
        self._proactive = Work(self._order)
        self._rest = Work(self._order)
        """What may only go speculatively."""
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
        """What the prompt's last queries would select of a layer: what is unsent of it, and what becomes ready later,
        goes by that and the profile; see :meth:`kvd.transfer.order.Order.rank` for arguments, and where it is False.

        What has been handed out stays so, and no path gains or loses a token. Nothing is sorted before its turn.
        """
        if not self._order.rank(layer, shares, weight):
            return False
        self._proactive.sort_anew(layer)
        self._rest.sort_anew(layer)
        return True

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
            layer, pieces = work.first()
            if self.unit == "layer" and layer not in taken and count >= wanted:
                break
            found = taken.get(layer, [])
            before, rank = len(found), pieces[-1][0]
            some = self._take_class(layer, pieces, found, room - count, MAX_RANGES - ranges, bool(count))
            work.taken()
            if not some and pieces and pieces[-1][0] == rank:
                break  # a block of the layout that does not fit any more
            if some:
                taken[layer] = found
            count += some
            ranges += len(found) - before
        self.pending_tokens -= count
        if path is Path.SPECULATIVE and not self.policy.adaptive:
            self._quota -= count
        return [(layer, tuple(pieces)) for layer, pieces in taken.items()]

    def _take_class(
        self, layer: int, pieces: list[Piece], found: list[TokenRange], room: int, ranges: int, optional: bool
    ) -> int:
        """Move pieces of the first one's class from the end of a list to ``found``, at most ``room`` tokens and so many
        ranges; how many tokens. A block of the layout that exceeds the room goes if it is not ``optional``."""
        rank, count, most = pieces[-1][0], 0, len(found) + ranges
        out = self._out if layer in self._dropped else None
        marked = len(found)
        row, stop = (found[-1].row, found[-1].stop) if found else (-1, -1)
        while pieces and pieces[-1][0] == rank and count < room and len(found) < most:
            _, at, low, high = pieces.pop()
            if out is not None:
                left = out.gaps(layer, at, low, high)
                if left != [(low, high)]:
                    pieces += [(rank, at, *each) for each in reversed(left)]
                    continue
            end = min(high, low + room - count)
            if end < high:
                if self.grain > 1:
                    least = 0 if count or optional else 1
                    end = min(high, low + max((end - low) // self.grain, least) * self.grain)
                    if end == low:
                        pieces.append((rank, at, low, high))
                        break
                if end < high:
                    pieces.append((rank, at, end, high))
            if at == row and low == stop:
                found[-1] = TokenRange(row, found[-1].start, end)
                marked = min(marked, len(found) - 1)
            else:
                found.append(TokenRange(at, low, end))
            row, stop = at, end
            count += end - low
        if self._out is not None:
            self._out.mark_all(layer, found[marked:])
        return count

    def _enqueue(self, layer: int, row: int, start: int, stop: int) -> None:
        limit, piece = self.policy.proactive_classes, (row, start, stop)
        self.pending_tokens += stop - start
        if layer < ALWAYS_LAYERS:
            self._proactive.put(layer, piece)
        elif self.policy.until_finish and self._finished:
            self._rest.put(layer, piece)
        elif limit is None:
            self._proactive.put(layer, piece)
        else:
            for in_time, part in self._order.split(layer, piece, limit):
                (self._proactive if in_time else self._rest).put(layer, part)
