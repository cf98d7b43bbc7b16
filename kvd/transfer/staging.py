"""Tensors that lie in a layout of their own (HAWK, sections 4.2 to 4.4): staged at the source, written or pulled.

Where the sink pulls, a stage is one :class:`~kvd.transfer.instructions.WriteTensors`: the source regroups and says so,
the sink reads, marks its masks, and says so. A stage ends once, whichever of the sink's word, the part's end and the
session's end comes first.
"""

from __future__ import annotations

import math

import msgspec

from kvd.errors import (
    Aborted,
    FabricError,
    InvalidArgument,
    RemoteAccessError,
    UnsupportedLayout,
    error_from_code,
)
from kvd.tensors import PLANS, Tensors, in_lease, of_target
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.delivery import take_arrived
from kvd.transfer.order import Policy
from kvd.transfer.part import Part, SinkPart, SourcePart, State
from kvd.wire import messages as wire
from kvd_client.layouts import UNITS, Target

MAX_PULLS = 64
"""Stages that a source may have waiting for one sink."""


def grain_of(part: SourcePart, target: Target | None) -> int:
    """Tokens that both ends' blocks have a whole number of: what is moved is moved in such pieces."""
    mine = part.placement.block_tokens if part.placement is not None else 1
    return math.lcm(mine, target.placement.block_tokens if target is not None else 1)


def unit_of(part: SourcePart, target: Target | None, policy: Policy) -> str:
    """What is sent at once; raises :class:`InvalidArgument` where the mode needs smaller pieces."""
    if not part.regroups:
        return "chunk"
    asked = target.unit if target is not None else ""
    if asked and asked not in UNITS:
        raise InvalidArgument(f"there is no unit {asked!r}; choose one of {', '.join(UNITS)}", unit=asked[:100])
    unit = asked or ("layer" if policy.mode == "full" else "chunk")
    if unit != "chunk" and policy.mode != "full":
        raise InvalidArgument(
            f"unit {unit!r} sends everything, in mode 'full' only, and this transfer's mode is {policy.mode!r}; leave "
            "the unit out",
            unit=unit,
            mode=policy.mode,
        )
    return unit


def fit_target(part: SourcePart, message: wire.Open) -> Tensors | None:
    """The sink's tensors, None where it has none of its own; raises :class:`KvdError` where this source can't bring its
    tokens into them, as far as the core can tell."""
    target = message.target
    if target is None:
        check_grain(part, message)
        return None
    theirs = of_target(message.layout, part.lengths, part.head_start, target)
    placement = part.placement or target.placement
    # Where the source's tensors lie is not the core's to know, but which part of the model's they are is.
    plain = msgspec.structs.replace(part.layout, placed=False)
    mine = in_lease(plain, part.lengths, part.head_start, placement)
    _check_elements(mine, theirs)
    for one, other in zip(mine.rows, theirs.rows, strict=True):
        PLANS.check(one, other, pages_only=part.placement is not None)
    check_grain(part, message)
    return theirs


def _check_elements(source: Tensors, target: Tensors) -> None:
    """Raise :class:`UnsupportedLayout` where the ends see other vectors in an entry: K and V here, a single one there.
    A plan brings what both have, and would leave the rest out."""
    mine, theirs = source.rows[0].held, target.rows[0].held
    differ = {axis: [mine[axis][1], theirs[axis][1]] for axis in ("kv", "d") if mine[axis] != theirs[axis]}
    if differ:
        raise UnsupportedLayout(
            f"the source's entries are {mine['kv'][1]} vectors of {mine['d'][1]} elements, and the sink's are "
            f"{theirs['kv'][1]} of {theirs['d'][1]}; give both ends placements of the same tensors and dtype",
            differ=differ,
        )


def check_grain(part: SourcePart, message: wire.Open) -> None:
    """Raise :class:`UnsupportedLayout` unless the tokens that the sink holds already can be left out."""
    grain = grain_of(part, message.target)
    for piece in message.held:
        if piece.start % grain or (piece.stop % grain and piece.stop != part.lengths[piece.row]):
            raise UnsupportedLayout(
                f"the sink of request {part.request!r} holds tokens {piece.start} to {piece.stop} of row {piece.row}, "
                f"and the layout moves blocks of {grain}; hold whole blocks",
                differ={"held": [grain, [piece.row, piece.start, piece.stop]]},
            )


# --- at the source ---------------------------------------------------------------------------------------------------


def on_regrouped(book: Book, event: ev.Regrouped, now: float) -> None:
    """A batch begins its way: the link is judged by what it carries, not by what was done before."""
    link = book.links.get(book.writes.get(event.write, -1))
    if link is not None:
        link.began(event.write, now)


def on_offered(book: Book, event: ev.Staged, now: float) -> None:
    part = book.parts.get(event.transfer)
    layers = part.staged.get(event.write) if isinstance(part, SourcePart) else None
    if not isinstance(part, SourcePart) or part.ended or layers is None:
        return  # its end has cancelled the stage
    assert part.session is not None
    assert part.peer_transfer is not None
    message = wire.Staged(
        transfer=part.peer_transfer, source=part.transfer, stage=event.write, layers=layers[1],
        grant=event.grant, nbytes=event.nbytes, path=layers[0],
    )  # fmt: skip
    book.emit(do.SendMessage(part.session, message))


def on_pulled(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, SourcePart)
    message: wire.Pulled = event.message  # type: ignore[assignment]
    stage = part.staged.pop(message.stage, None) if part is not None else None
    if part is not None and stage is not None:
        nbytes = sum(r.stop - r.start for one in stage[1] for r in one.ranges) * part.layout.token_bytes
        error = error_from_code(message.code, message.message, message.fields) if message.code else None
        book.emit(do.EndStage(part.transfer, message.stage, nbytes, error))


def on_moved(book: Book, event: ev.Moved, now: float) -> None:
    book.counters["tensor_requests"] += event.requests
    book.counters["tensor_bytes"] += event.nbytes
    book.counters["regroup_us"] += event.regroup_us
    part = book.parts.get(event.transfer)
    if part is not None:
        part.paths["requests"] += event.requests
        part.paths["tensor_bytes"] += event.nbytes
        part.paths["regroup_us"] += event.regroup_us


# --- at the sink -----------------------------------------------------------------------------------------------------


def on_staged(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Staged = event.message  # type: ignore[assignment]
    part = book.named_by(event, Part)
    if not isinstance(part, SinkPart) or part.state is not State.RUNNING:
        return  # the source has learned of the end, or will
    wrong = ""
    if part.target is None or not part.target.pull:
        wrong = "a stage for a part that does not pull"
    elif message.stage in part.pulls or len(part.pulls) >= MAX_PULLS:
        wrong = f"stage {message.stage} while {len(part.pulls)} are being read"
    else:
        wrong = _impossible(part, message)
    if wrong:
        book.emit(do.CloseSession(event.session, wrong))
        return
    part.pulls.add(message.stage)
    book.emit(do.PullTensors(part.transfer, event.session, message))


def _impossible(part: SinkPart, message: wire.Staged) -> str:
    assert part.target is not None
    grain = part.target.placement.block_tokens
    for one in message.layers:
        for r in one.ranges:
            inside = 0 <= one.layer < part.layout.layers and 0 <= r.row < part.layout.rows
            if not inside or not 0 <= r.start < r.stop <= part.lengths[r.row]:
                return f"a stage has tokens that do not exist: {r} of layer {one.layer}"
            if r.start % grain or (r.stop % grain and r.stop != part.lengths[r.row]):
                return f"a stage has parts of blocks: {r} of layer {one.layer}"
    return ""


def on_pull_completed(book: Book, event: ev.PullCompleted, now: float) -> None:
    part, message, error = book.parts.get(event.transfer), event.message, event.error
    if not isinstance(part, SinkPart):
        return
    part.pulls.discard(message.stage)
    if part.ended or part.peer_transfer is None:
        return
    told = wire.Pulled(transfer=part.peer_transfer, stage=message.stage)
    if error is not None:
        told = wire.Pulled(
            transfer=part.peer_transfer,
            stage=message.stage,
            code=error.code,
            message=error.message,
            fields=error.fields,
        )
    book.emit(do.SendMessage(event.session, told))
    if isinstance(error, (FabricError, RemoteAccessError, Aborted)):
        # A part or a session that ends takes its staging memory away, and says why on another connection.
        book.refused(part, error)
        return
    if error is not None:
        book.end(part, error)
        return
    take_arrived(book, part, message.layers, message.path)
