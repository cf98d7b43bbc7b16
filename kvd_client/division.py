"""How a model's KV heads are divided among tensor-parallel ranks, and what two divisions have in common.

Nothing here opens anything: :mod:`kvd_client.parallel` does, one transfer a piece.
"""

from __future__ import annotations

import msgspec

from kvd_client.arguments import whole
from kvd_client.errors import InvalidArgument, UnsupportedLayout
from kvd_client.spec import MAX_HEADS


class Piece(msgspec.Struct, frozen=True):
    """The heads that go from one rank of the source to one of the sink."""

    source: int
    sink: int
    head_start: int
    heads: int


def heads_of(kv_heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """``(start, count)``: the KV heads of a tensor-parallel rank, as engines divide them. With more ranks than heads,
    neighbouring ranks have the same one.

    Raises :class:`UnsupportedLayout` where neither number divides the other, :class:`InvalidArgument` for a rank that
    does not exist.
    """
    kv_heads, rank, ranks = whole("kv_heads", kv_heads), whole("rank", rank), whole("ranks", ranks)
    if ranks > MAX_HEADS:
        raise InvalidArgument(f"{ranks} ranks; there are at most {MAX_HEADS}", ranks=ranks)
    if kv_heads < 1 or not 0 <= rank < ranks:
        raise InvalidArgument(f"rank {rank} of {ranks} does not exist for {kv_heads} heads", rank=rank, ranks=ranks)
    if kv_heads % ranks and ranks % kv_heads:
        raise UnsupportedLayout(
            f"{kv_heads} KV heads can't be divided among {ranks} ranks; use a number of ranks that divides them, or a "
            "multiple of it",
            kv_heads=kv_heads,
            ranks=ranks,
        )
    if ranks > kv_heads:
        return rank * kv_heads // ranks, 1
    each = kv_heads // ranks
    return rank * each, each


def divide(kv_heads: int, source_ranks: int, sink_ranks: int) -> tuple[Piece, ...]:
    """The pieces of a request, by sink rank and head; a piece's place here is its rank in the transfer.

    Every rank of the sink gets each of its heads once. Where several ranks of the source have a head, the sink's take
    turns with them, and some may have nothing to send. Raises as :func:`heads_of`.
    """
    heads_of(kv_heads, 0, source_ranks)
    heads_of(kv_heads, 0, sink_ranks)
    each, copies = max(1, kv_heads // source_ranks), max(1, source_ranks // kv_heads)
    found = []
    for sink in range(sink_ranks):
        at, count = heads_of(kv_heads, sink, sink_ranks)
        stop, turn = at + count, sink % max(1, sink_ranks // kv_heads) % copies
        while at < stop:
            end = min(stop, at // each * each + each)
            found.append(Piece(at // each * copies + turn, sink, at, end - at))
            at = end
    return tuple(found)
