"""What a process asks for, checked before anything is done about it: each function raises what is wrong."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgument
from kvd.importance.prompt import check_shares
from kvd.transfer.handle import parse_handle
from kvd.types import NodeId
from kvd_client import protocol as api
from kvd_client.spec import MASKS, MAX_HEADS, MAX_ROWS, MAX_TOKENS, PartLayout, check_name

MAX_REQUEST_ID = 256


def check_open(request: api.OpenSource | api.OpenSink) -> int:
    """Raise what is wrong with the numbers of an open; returns how many heads the part has."""
    spec = request.spec.check()
    heads = request.head_count or spec.kv_heads
    if not 1 <= len(request.request) <= MAX_REQUEST_ID:
        raise InvalidArgument(f"a request id has 1 to {MAX_REQUEST_ID} characters, not {len(request.request)}")
    peer = request.sink if isinstance(request, api.OpenSource) else request.source
    for what, name in (("the selector", request.selector), ("the other node's name", peer)):
        check_name(what, name)
    if not (request.head_start >= 0 and heads >= 1 and request.head_start + heads <= spec.kv_heads):
        raise InvalidArgument(
            f"heads {request.head_start} to {request.head_start + heads} do not exist; the model has {spec.kv_heads}",
            head_start=request.head_start,
            head_count=heads,
        )
    if not 0 <= request.rank < request.ranks <= MAX_HEADS:  # more than KV heads, where ranks share one
        raise InvalidArgument(
            f"rank {request.rank} of {request.ranks} does not exist; there are at most {MAX_HEADS} ranks",
            rank=request.rank,
            ranks=request.ranks,
        )
    if not 1 <= len(request.lengths) <= MAX_ROWS:
        raise InvalidArgument(f"a transfer has 1 to {MAX_ROWS} rows, not {len(request.lengths)}")
    for row, length in enumerate(request.lengths):
        if not 1 <= length <= min(request.capacity, MAX_TOKENS):
            raise InvalidArgument(
                f"row {row} has {length} tokens; each row needs 1 to {request.capacity} (the capacity)",
                row=row,
                length=length,
            )
    if request.mask not in MASKS:
        raise InvalidArgument(
            f"there is no mask by {request.mask[:100]!r}; choose one of {', '.join(MASKS)}", mask=request.mask[:100]
        )
    if request.mode and request.mode not in api.MODES:
        raise InvalidArgument(
            f"there is no mode {request.mode[:100]!r}; choose one of {', '.join(api.MODES)}", mode=request.mode[:100]
        )
    if not math.isfinite(request.deadline_s) or request.deadline_s < 0:
        raise InvalidArgument(
            f"deadline_s is {request.deadline_s}; give seconds, or 0 for the daemon's default", field="deadline_s"
        )
    return heads


def source_node(request: api.OpenSink) -> NodeId:
    """The node that a sink's handle or ``source`` names; raises where they differ."""
    if not request.handle:
        return request.source
    node = parse_handle(request.handle).node
    if request.source and request.source != node:
        raise InvalidArgument(
            f"the handle is of node {node!r}, but source says {request.source!r}; leave source out",
            handle=request.handle,
        )
    return node


def check_fetch(layout: PartLayout, request: api.Fetch) -> None:
    """Raise what is wrong with a fetch's layer, slot and counts; positions are checked where they are used."""
    if not 0 <= request.layer < layout.layers:
        raise InvalidArgument(
            f"a fetch names layer {request.layer}, but the transfer has layers 0 to {layout.layers - 1}",
            layer=request.layer,
        )
    if not 0 <= request.slot < layout.landing_slots:
        raise InvalidArgument(
            f"a fetch names landing slot {request.slot}, but the transfer was opened with {layout.landing_slots}",
            slot=request.slot,
        )
    if len(request.counts) != 4 * layout.rows * layout.heads:
        raise InvalidArgument(
            f"a fetch has {len(request.counts)} bytes of counts; it needs 4 for each of {layout.rows} rows and "
            f"{layout.heads} heads",
            counts=len(request.counts),
        )
    if len(request.index) % 4:
        raise InvalidArgument(
            f"a fetch has {len(request.index)} bytes of positions; it needs 4 for each", index=len(request.index)
        )
    counts = np.frombuffer(request.counts, np.int32)
    for entries in (int(counts.min()), int(counts.max())):
        if not 0 <= entries <= layout.landing_entries:
            raise InvalidArgument(
                f"a fetch asks for {entries} entries of a (row, head); the transfer was opened with room for 0 to "
                f"{layout.landing_entries}",
                entries=entries,
            )


def checked_ranking(layout: PartLayout, request: api.RankBlocks) -> npt.NDArray[np.float32]:
    """The shares of a ranking, (rows, blocks); raises what is wrong with it."""
    if not 0 <= request.layer < layout.layers:
        raise InvalidArgument(
            f"a ranking names layer {request.layer}, but the transfer has layers 0 to {layout.layers - 1}",
            layer=request.layer,
        )
    if request.blocks < 1 or len(request.shares) != 4 * layout.rows * request.blocks:
        raise InvalidArgument(
            f"a ranking has {len(request.shares)} bytes; it needs 4 for each of {layout.rows} rows and "
            f"{request.blocks} blocks",
            blocks=request.blocks,
        )
    shares = np.frombuffer(request.shares, np.float32).reshape(layout.rows, request.blocks)
    check_shares(shares, request.weight)
    return shares
