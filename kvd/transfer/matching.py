"""Whether a source and a sink fit, and the sentences for when they do not."""

from __future__ import annotations

from typing import Any

from kvd.errors import (
    AlreadyExists,
    FingerprintMismatch,
    InvalidArgument,
    KvdError,
    NotFound,
    PeerRestarted,
    RendezvousTimeout,
    UnsupportedLayout,
)
from kvd.transfer.handle import parse_handle
from kvd.transfer.part import SourcePart, State
from kvd.types import NodeId, Role
from kvd.wire.messages import Open
from kvd_client.spec import PartLayout, TokenRange

MISFITS = (FingerprintMismatch, UnsupportedLayout, InvalidArgument)
"""Refusals that are about the sink: the source goes on waiting for one that fits."""


def check_held(held: tuple[TokenRange, ...], lengths: tuple[int, ...]) -> None:
    """Raise :class:`InvalidArgument` naming the first held range that does not exist."""
    for number, piece in enumerate(held):
        if not 0 <= piece.row < len(lengths) or not 0 <= piece.start <= piece.stop <= lengths[piece.row]:
            raise InvalidArgument(
                f"held[{number}] is tokens {piece.start} to {piece.stop} of row {piece.row}, which do not exist; "
                f"the rows' lengths are {list(lengths)}",
                held=number,
            )


def why_not(part: SourcePart, message: Open) -> KvdError | None:
    """Why this source can't serve this sink; None if it can."""
    if part.state is not State.WAITING:
        why = f"has ended ({part.code})" if part.ended else "is being sent to another sink"
        return AlreadyExists(
            f"rank {part.rank} of request {part.request!r} {why}; open a transfer once",
            request=part.request,
            rank=part.rank,
        )
    differ = part.spec.differences(message.spec)
    if differ:
        return FingerprintMismatch(
            f"source and sink disagree on the KV cache of request {part.request!r}: {_list(differ)}",
            differ=differ,
        )
    mine, theirs = part.layout, message.layout
    if mine.mask_by != theirs.mask_by:
        return UnsupportedLayout(
            f"request {part.request!r} has a mask by {mine.mask_by} at the source and by {theirs.mask_by} at the sink; "
            'open both ends with the same mask, "token" if one has its tensors on a device',
            differ={"mask": [mine.mask_by, theirs.mask_by]},
        )
    pairs: dict[str, list[Any]] = {
        "ranks": [part.ranks, message.ranks],
        "rank": [part.rank, message.rank],
        "head_start": [part.head_start, message.head_start],
        "heads": [mine.heads, theirs.heads],
        "rows": [mine.rows, theirs.rows],
        "lengths": [list(part.lengths), message.lengths],
        "layers": [mine.layers, theirs.layers],
        "entry_bytes": [mine.entry_bytes, theirs.entry_bytes],
        "metadata": [_arrays(mine), _arrays(theirs)],
    }
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if theirs.capacity < max(part.lengths):
        differ["capacity"] = [mine.capacity, theirs.capacity]
    if differ:
        return UnsupportedLayout(
            f"source and sink divide request {part.request!r} differently: {_list(differ)}", differ=differ
        )
    try:
        theirs.check()
        check_held(tuple(message.held), part.lengths)
    except InvalidArgument as error:
        return error
    return None


def unknown_handle(handle: str, node: NodeId, boot: str) -> KvdError:
    """The error for a handle that names no transfer of this daemon."""
    try:
        named = parse_handle(handle)
    except InvalidArgument as error:
        return error
    if named.node == node and named.boot != boot:
        return PeerRestarted(
            f"handle {handle!r} is of an earlier life of node {node!r}, which has restarted since; prefill again",
            handle=handle,
            node=node,
        )
    return NotFound(
        f"handle {handle!r} names no transfer on node {node!r}: it has ended or was released; prefill again",
        handle=handle,
        node=node,
    )


def no_rendezvous(request: str, missing: Role, seconds: float, peer: NodeId = "") -> KvdError:
    """The error for a part whose other side was not opened in time."""
    where = f" on node {peer!r}" if peer else ""
    return RendezvousTimeout(
        f"no {missing.value} opened request {request!r}{where} within {seconds:.3g} s; check that both sides use the "
        "same request id and name each other's nodes",
        request=request,
        missing=missing.value,
    )


def _arrays(layout: PartLayout) -> list[list[Any]]:
    """Name and bytes of each metadata array, in their order: it says where each lies."""
    return [[array.name, array.layer_bytes] for array in layout.metadata]


def _list(differ: dict[str, list[Any]]) -> str:
    return "; ".join(
        f"{name} is {mine!r} at the source, {theirs!r} at the sink" for name, (mine, theirs) in differ.items()
    )
