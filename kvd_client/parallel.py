"""Requests whose two ends have different tensor-parallel degrees: prefill on 2 ranks, decode on 4, and the other way.

Transfers pair rank with rank, and each has some of the model's KV heads. Here a request is cut wherever either end's
division cuts the heads (:mod:`kvd_client.division`): each *piece* is what one rank of the source and one of the sink
have in common, and travels as a rank of the request of its own. So a rank holds one transfer for each rank at the other
end that shares heads with it, and :func:`prefill` and :func:`decode` hide that. On a device, or in an engine's cache,
the pieces lie in one memory: each is written where its heads belong, whatever the layouts, the block sizes and the way.

Both ends must know both degrees, as they know the model; where they disagree, the pairing refuses the open with
``UNSUPPORTED_LAYOUT`` and the fields. What is sent is everything (mode ``full``): selection metadata and fetches are
for transfers of equal degrees.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from kvd_client.arguments import deadline_of, whole, whole_numbers
from kvd_client.arrays import Bytes
from kvd_client.cache import Cache
from kvd_client.client import Client
from kvd_client.decode import DecodeTransfer
from kvd_client.division import Piece, divide, heads_of
from kvd_client.errors import Busy, DeadlineExceeded, InvalidArgument, KvdError
from kvd_client.layouts import Placement
from kvd_client.opening import checked_blocks, ranges_of
from kvd_client.prefill import PrefillTransfer
from kvd_client.spec import KVSpec, PartLayout, TokenRange, part_layout
from kvd_client.tensors import DeviceTensors
from kvd_client.transfer import Mask

__all__ = ["ParallelDecode", "ParallelPrefill", "Piece", "decode", "divide", "heads_of", "prefill"]

LOOK_S = 0.5
"""While one piece is waited for, the others are looked at this often: one that has failed ends the wait."""
CLOSE_S = 5.0
"""How long a cache of the transfer's own is given for what is still on its way into it."""

T = TypeVar("T", PrefillTransfer, DecodeTransfer)
Self = TypeVar("Self", bound="Parallel[Any]")


class Parallel(Generic[T]):
    """What both ends have in common. Any thread may use it, as it may each of :attr:`parts`."""

    def __init__(
        self,
        layout: PartLayout,
        start: int,
        parts: Sequence[tuple[Piece, T]],
        cache: Cache | None,
        blocks: Sequence[Sequence[int]],
        owned: bool,
    ) -> None:
        self.layout = layout
        """Of the whole rank."""
        self.parts: tuple[T, ...] = tuple(part for _, part in parts)
        """The transfers, one a piece, by head."""
        self._heads = [slice(piece.head_start - start, piece.head_start - start + piece.heads) for piece, _ in parts]
        self._cache, self._blocks, self._owned = cache, blocks, owned
        self._tensors: DeviceTensors | None = None

    @property
    def tensors(self) -> DeviceTensors:
        """All of the rank's heads on its device. Raises :class:`InvalidArgument` for a transfer that was opened without
        a placement."""
        if self._tensors is None:
            if self._cache is None:
                self._tensors = self.parts[0].tensors if len(self.parts) == 1 else None
            else:
                self._tensors = self._cache.of(self.layout, np.array(self._blocks, np.int64))
        if self._tensors is None:
            raise InvalidArgument(
                "the transfer was opened without a placement, and has no tensors on a device; open it with one, or "
                "with a cache"
            )
        return self._tensors

    def abort(self, reason: str = "") -> None:
        """End every piece on both sides with ``ABORTED``; the memory stays until :meth:`release`. Idempotent."""
        for part in self.parts:
            part.abort(reason)

    def release(self) -> None:
        """Give the memory back, ending what still runs. Idempotent."""
        for part in self.parts:
            part.release()
        if self._cache is not None and self._owned:
            _close(self._cache)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._leave()
            else:
                with contextlib.suppress(KvdError):  # the exception on its way says more
                    self.abort(f"{type(error).__name__}: {error}"[:200])
        finally:
            self.release()

    def _leave(self) -> None:
        """What a with-block does at its end before it releases."""

    def _each(self, wait: Callable[[T, float | None], None], timeout_s: float | None) -> None:
        """Wait for every piece. One that has failed ends them all: what it would have brought can't be replaced."""
        deadline, waiting = deadline_of(timeout_s), list(self.parts)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            turn = left if len(waiting) == 1 else min(LOOK_S, math.inf if left is None else left)
            try:
                wait(waiting[0], turn)
            except DeadlineExceeded as error:
                if "timeout_s" in error.fields and turn != left:  # it was this turn that ended, no more
                    waiting.append(waiting.pop(0))
                    continue
                if "timeout_s" not in error.fields:
                    self._fail(error)
                raise
            except KvdError as error:
                self._fail(error)
                raise
            waiting.pop(0)

    def _fail(self, error: KvdError) -> None:
        with contextlib.suppress(KvdError):
            self.abort(f"another piece has failed: {error.message}"[:200])


class ParallelPrefill(Parallel[PrefillTransfer]):
    """A rank at its source; made by :func:`prefill`. As a context manager it finishes and releases at the end."""

    def put_layer(
        self, layer: int, entries: Any = None, *, k: Any = None, v: Any = None, row: int | None = None, start: int = 0
    ) -> None:
        """:meth:`PrefillTransfer.put_layer` with all heads of the rank. Raises :class:`InvalidArgument` for another
        number of heads, before anything is copied."""
        for name, value, axis in (("entries", entries, -2), ("k", k, -3), ("v", v, -3)):
            shape = () if value is None else getattr(value, "shape", ())
            if value is not None and (len(shape) < -axis or shape[axis] != self.layout.heads):
                raise InvalidArgument(
                    f"{name} has shape {tuple(shape)}; this rank has {self.layout.heads} heads", name=name
                )
        for part, heads in zip(self.parts, self._heads, strict=True):
            part.put_layer(
                layer,
                None if entries is None else entries[..., heads, :],
                k=None if k is None else k[..., heads, :, :],
                v=None if v is None else v[..., heads, :, :],
                row=row,
                start=start,
            )

    def layer_ready(self, layer: int, start: int = 0, stop: int | None = None, row: int | None = None) -> None:
        """:meth:`PrefillTransfer.layer_ready`, for tokens that are in place in the rank's cache."""
        for part in self.parts:
            part.layer_ready(layer, start, stop, row)

    def finish(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """:meth:`PrefillTransfer.finish` for every piece."""
        for part in self.parts:
            part.finish(wait=False)
        if wait:
            self.wait_delivered(timeout_s)

    def wait_delivered(self, timeout_s: float | None = None) -> None:
        """Wait until every rank at the sink has its heads; raises as :meth:`PrefillTransfer.finish`."""
        self._each(lambda part, turn: part.wait_delivered(turn), timeout_s)

    def _leave(self) -> None:
        if not any(part._told for part in self.parts):
            self.finish()


class ParallelDecode(Parallel[DecodeTransfer]):
    """A rank at its sink; made by :func:`decode`."""

    def wait_ready(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """:meth:`DecodeTransfer.wait_ready` for all heads. A piece that fails aborts the others."""
        self._each(lambda part, turn: part.wait_ready(layer, turn), timeout_s)

    def poll_ready(self, layer: int) -> bool:
        """Whether every head of every token of the layer is in place."""
        return all(part.poll_ready(layer) for part in self.parts)

    def layer(self, layer: int) -> Bytes:
        """A layer's entries, all heads of the rank: uint8 (rows, capacity, heads, entry_bytes), a copy if there is more
        than one piece."""
        found = [part.layer(layer) for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=2)

    def mask(self, layer: int) -> Mask:
        """The layer's mask, int8 (rows, capacity), a copy: 0 padding, 1 all heads are in place, 2 one is missing."""
        found: Mask = np.maximum.reduce([part.mask(layer) for part in self.parts])
        return found

    def put_held(self, layer: int, row: int, start: int, entries: Any) -> None:
        """:meth:`DecodeTransfer.put_held` with all heads of the rank."""
        for part, heads in zip(self.parts, self._heads, strict=True):
            part.put_held(layer, row, start, entries[..., heads, :])

    def mark_held(self, row: int, start: int, stop: int) -> None:
        """:meth:`DecodeTransfer.mark_held`."""
        for part in self.parts:
            part.mark_held(row, start, stop)


def prefill(
    client: Client,
    request: str,
    spec: KVSpec,
    lengths: Sequence[int],
    *,
    rank: int,
    ranks: int,
    peer_ranks: int,
    capacity: int | None = None,
    sink: str | Sequence[str] = "",
    placement: Placement | None = None,
    cache: Cache | None = None,
    blocks: Sequence[Sequence[int]] = (),
    deadline_s: float = 0.0,
) -> ParallelPrefill:
    """Open rank ``rank`` of ``ranks`` of a request as its source; the sink's end has ``peer_ranks``.

    ``sink``: the node to announce to, or one for each rank of the sink. Other arguments as in
    :meth:`kvd_client.Client.prefill`; a ``placement``'s or ``cache``'s heads are the rank's. Raises what that does, and
    :class:`~kvd_client.errors.UnsupportedLayout` where the heads can't be divided so.
    """
    lengths, blocks = _checked(spec, lengths, placement, cache, blocks)
    all_pieces = divide(spec.kv_heads, ranks, peer_ranks)
    mine = [(number, piece) for number, piece in enumerate(all_pieces) if piece.source == rank]
    nodes = _nodes("sink", sink, peer_ranks)

    def opened(number: int, piece: Piece, memory: dict[str, Any]) -> PrefillTransfer:
        return client.prefill(
            request, spec, lengths, capacity=capacity, rank=number, ranks=len(all_pieces), mode="full",
            heads=(piece.head_start, piece.heads), sink=nodes[piece.sink], deadline_s=deadline_s, **memory,
        )  # fmt: skip

    heads = heads_of(spec.kv_heads, rank, ranks)
    return ParallelPrefill(*_open(client, spec, lengths, capacity, heads, mine, placement, cache, blocks, opened))


def decode(
    client: Client,
    request: str,
    spec: KVSpec,
    lengths: Sequence[int],
    *,
    rank: int,
    ranks: int,
    peer_ranks: int,
    capacity: int | None = None,
    source: str | Sequence[str] = "",
    held: Sequence[TokenRange | tuple[int, int, int]] = (),
    placement: Placement | None = None,
    cache: Cache | None = None,
    blocks: Sequence[Sequence[int]] = (),
    unit: str = "",
    pull: bool = False,
    deadline_s: float = 0.0,
) -> ParallelDecode:
    """Open rank ``rank`` of ``ranks`` of a request as its sink; the source's end has ``peer_ranks``.

    ``source``: the node to ask, or one for each rank of the source. Other arguments as in
    :meth:`kvd_client.Client.decode`; errors as in :func:`prefill`.
    """
    lengths, blocks = _checked(spec, lengths, placement, cache, blocks)
    held = ranges_of(held)
    all_pieces = divide(spec.kv_heads, peer_ranks, ranks)
    mine = [(number, piece) for number, piece in enumerate(all_pieces) if piece.sink == rank]
    nodes = _nodes("source", source, peer_ranks)

    def opened(number: int, piece: Piece, memory: dict[str, Any]) -> DecodeTransfer:
        return client.decode(
            request, spec, lengths, capacity=capacity, rank=number, ranks=len(all_pieces), mode="full",
            heads=(piece.head_start, piece.heads), source=nodes[piece.source], held=held, unit=unit, pull=pull,
            deadline_s=deadline_s, **memory,
        )  # fmt: skip

    heads = heads_of(spec.kv_heads, rank, ranks)
    return ParallelDecode(*_open(client, spec, lengths, capacity, heads, mine, placement, cache, blocks, opened))


def _open(
    client: Client,
    spec: KVSpec,
    lengths: Sequence[int],
    capacity: int | None,
    heads: tuple[int, int],
    pieces: Sequence[tuple[int, Piece]],
    placement: Placement | None,
    cache: Cache | None,
    blocks: Sequence[Sequence[int]],
    opened: Callable[[int, Piece, dict[str, Any]], T],
) -> tuple[PartLayout, int, list[tuple[Piece, T]], Cache | None, Sequence[Sequence[int]], bool]:
    """A transfer for each piece, all of them or none, and the memory that they share."""
    start, count = heads
    room = max(lengths, default=0) if capacity is None else whole("capacity", capacity)
    placed = placement is not None or cache is not None
    layout = part_layout(spec, heads=count, rows=len(lengths), capacity=room, placed=placed)
    owned = placement is not None and len(pieces) > 1
    if owned:
        assert placement is not None
        each = -(-room // placement.block_tokens)
        cache = client.open_cache(spec, placement, len(lengths) * each, heads=count)
        blocks = [list(range(row * each, (row + 1) * each)) for row in range(len(lengths))]
    parts: list[tuple[Piece, T]] = []
    try:
        for number, piece in pieces:
            memory: dict[str, Any] = {"placement": placement} if cache is None else {"cache": cache, "blocks": blocks}
            if cache is not None and piece.heads < count:
                memory["cache_head"] = piece.head_start - start
            parts.append((piece, opened(number, piece, memory)))
    except BaseException:
        for _, part in parts:
            part.release()
        if cache is not None and owned:
            with contextlib.suppress(KvdError):
                _close(cache)
        raise
    return layout, start, parts, cache, blocks, owned


def _checked(
    spec: KVSpec,
    lengths: Sequence[int],
    placement: Placement | None,
    cache: Cache | None,
    blocks: Sequence[Sequence[int]],
) -> tuple[list[int], list[list[int]]]:
    """Lengths and block table as lists: each piece goes through them."""
    if not isinstance(spec, KVSpec):
        raise InvalidArgument(f"spec is a {type(spec).__name__}; it must be a KVSpec")
    spec.check()
    found = whole_numbers("lengths", lengths), checked_blocks(placement, cache, blocks)
    if found[1] and cache is None:
        raise InvalidArgument("blocks need a cache to point into; open one, or leave them out")
    if placement is not None:
        placement.check()
    return found


def _close(cache: Cache) -> None:
    """Close a cache whose transfers have been released; what was on its way into it may take another moment."""
    until = time.monotonic() + CLOSE_S
    while True:
        try:
            cache.close()
        except Busy as error:
            if time.monotonic() > until:
                raise
            time.sleep(min(float(error.fields.get("retry_after_s", 0.1)), 0.1))
        else:
            return


def _nodes(name: str, given: str | Sequence[str], ranks: int) -> Sequence[str]:
    if isinstance(given, str):
        return [given] * ranks
    if not isinstance(given, Sequence):
        raise InvalidArgument(f"{name} is {given!r}; it must be a node's name, or a list of them")
    if len(given) != ranks:
        raise InvalidArgument(f"{name} names {len(given)} nodes for {ranks} ranks; give one a rank, or one for all")
    return given
