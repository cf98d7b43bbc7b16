"""A transfer's order without a transfer: what has been sent when the first token exists, by the daemon's own queue.

Layer l is ready, and ranked, when l + 1 of L equal parts of prefill are over, and the link carries the same number of
tokens in each part: the causal order of a running transfer, to be compared with recorded selections
(:mod:`kvd.profiling.recorded`). The global order, in which everything is known at once, is the bound of any causal one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.blocks import block_bounds
from kvd.errors import InvalidArgument
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.importance.prompt import WEIGHT, Values
from kvd.transfer.policy import Profiled, Selective, choose_policy
from kvd.transfer.queue import SendQueue
from kvd_client.spec import PartLayout, TokenRange

Mask = npt.NDArray[np.bool_]
"""Shape (layers, tokens), or by head (layers, KV heads, tokens): what has been sent."""

TURN = 1 << 16
"""Bytes of a turn of the link."""


def causal_sent(
    profile: ImportanceMatrix | None,
    shares: Values | None,
    *,
    layers: int,
    length: int,
    sent: float,
    weight: float = WEIGHT,
    at_once: bool = False,
    token_bytes: int = 512,
    heads: int = 0,
) -> Mask:
    """What has been sent of a prompt when prefill ends and the link has carried the share ``sent`` of its tokens.

    ``shares``, (layers, blocks), is what the prompt's last queries select of each layer; None: the order is the
    profile's. With ``heads`` masks are by head, shares (layers, heads, blocks), and heads are told apart where the
    profile does. ``at_once``: every token is ready from the beginning (a prefix hit), and only the rankings come layer
    by layer.
    """
    if not 0 <= sent <= 1:
        raise InvalidArgument(f"the share that is sent is {sent}; it must be between 0 and 1", sent=sent)
    rows = heads or 1
    layout = PartLayout(layers=layers, heads=1, entry_bytes=token_bytes // rows, rows=rows, capacity=length)
    policy = choose_policy(
        "profile",
        Selective(mode="profile", budget="deadline"),
        Profiled(matrix=profile),
        layers=layers,
        lengths=(length,) * rows,
        token_bytes=layout.token_bytes,
        heads=(0, heads) if heads else None,
    )
    queue = SendQueue(layout, (length,) * rows, policy)
    found = np.zeros((layers, rows, length), np.bool_)
    whole = [TokenRange(row, 0, length) for row in range(rows)]
    if at_once:
        queue.add([(layer, piece) for layer in range(layers) for piece in whole])
    carried, total = 0, round(sent * found.size)
    for layer in range(layers):
        if not at_once:
            queue.add([(layer, piece) for piece in whole])
        if shares is not None:
            queue.rank(layer, np.ascontiguousarray(shares[layer].reshape(rows, -1), np.float32), weight)
        # Nothing is carried while the first layer is computed; then as much in each part.
        until = total * (layer + 1) // max(layers - 1, 1) if layer < layers - 1 else carried
        carried += _carry(queue, found, min(until, total) - carried)
    return found if heads else found[:, 0]


def global_sent(values: Values, *, length: int, sent: float) -> Mask:
    """What is sent of a prompt where importance ``values`` (layers, blocks) of every layer is known at once: blocks in
    its order, of the last one what still fits. Layers 0 and 1 come first."""
    layers, blocks = values.shape
    bounds = block_bounds(length, blocks)
    found = np.zeros((layers, length), np.bool_)
    left = round(sent * layers * length)
    for at in ImportanceMatrix(np.where(np.arange(layers)[:, None] < ALWAYS_LAYERS, 0, values)).order().tolist():
        layer, block = divmod(at, blocks)
        start = int(bounds[block])
        stop = min(int(bounds[block + 1]), start + left)
        found[layer, start:stop] = True
        left -= stop - start
        if left <= 0:
            break
    return found


def _carry(queue: SendQueue, found: Mask, tokens: int) -> int:
    carried = 0
    while carried < tokens:
        room = min(TURN, (tokens - carried) * queue.layout.token_bytes)
        taken = queue.take(room)
        if not taken:
            break
        for layer, ranges in taken:
            for piece in ranges:
                found[layer, piece.row, piece.start : piece.stop] = True
                carried += piece.stop - piece.start
    return carried
