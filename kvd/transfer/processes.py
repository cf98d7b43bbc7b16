"""What the processes of this node do: open, ring, finish, release, abort, die."""

from __future__ import annotations

import math
from typing import Any

from kvd.errors import Aborted, AlreadyExists, InvalidArgument, NotFound, ProcessLost
from kvd.mask import TokenFlags
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book, shutting_down
from kvd.transfer.delivery import cover, deliver, work_added
from kvd.transfer.matching import check_held
from kvd.transfer.on_demand import end_fetches, released, serve_early
from kvd.transfer.pairing import pair, send_open
from kvd.transfer.part import Part, SinkPart, SourcePart, State
from kvd.transfer.queue import ReadyTokens
from kvd.types import Role, TransferId

MAX_RANKED = 1 << 22
"""Most numbers of rankings that a part keeps before it is paired; those of later layers are dropped, since they only
make the order better."""


def check_open(book: Book, event: ev.PartOpened) -> None:
    """Raise what forbids this part to be opened, before memory is taken for it. Changes nothing."""
    if book.draining:
        raise shutting_down()
    if book.rank(event.role, event.request, event.rank) is not None:
        raise AlreadyExists(
            f"rank {event.rank} of request {event.request!r} is open on this node as {event.role.value} already; "
            "release it first, or use another request id",
            request=event.request,
            rank=event.rank,
        )
    check_held(event.held, event.lengths)
    if not 0 <= event.prefill_s < math.inf:
        raise InvalidArgument(
            f"prefill_s is {event.prefill_s}; give seconds, or 0 where they are not known", field="prefill_s"
        )


def check_finish(book: Book, transfer: TransferId) -> None:
    """Raise :class:`InvalidArgument` naming the first token that the source has never rung."""
    part = book.parts.get(transfer)
    if not isinstance(part, SourcePart):
        raise NotFound(f"transfer {transfer} is not open here as a source", transfer=transfer)
    if part.ended:
        return
    gap = part.ready.first_unready()
    if gap is not None:
        layer, row, token = gap
        raise InvalidArgument(
            f"request {part.request!r} can't finish: token {token} of row {row} in layer {layer} has never been "
            "announced; call layer_ready (or put_layer) for all layers and tokens first",
            request=part.request,
            layer=layer,
            row=row,
            token=token,
        )
    if part.layout.metadata and len(part.metadata_ready) < part.layout.layers:
        layer = min(set(range(part.layout.layers)) - part.metadata_ready)
        raise InvalidArgument(
            f"request {part.request!r} can't finish: the metadata of layer {layer} has never been announced; call "
            "metadata_ready for all layers first",
            request=part.request,
            layer=layer,
        )


def on_part_opened(book: Book, event: ev.PartOpened, now: float) -> None:
    tokens = sum(event.lengths) * event.layout.layers
    common: dict[str, Any] = {
        "transfer": event.transfer, "role": event.role, "client": event.client, "request": event.request,
        "rank": event.rank, "ranks": event.ranks, "head_start": event.head_start, "spec": event.spec,
        "layout": event.layout, "lengths": event.lengths, "handle": event.handle, "peer": event.peer,
        "opened": now, "deadline": now + event.deadline_s, "mode": event.mode, "selector": event.selector,
    }  # fmt: skip
    part: Part
    if event.role is Role.SOURCE:
        ready = ReadyTokens(event.layout, event.lengths)
        part = SourcePart(
            ready=ready, prefill_s=event.prefill_s, rendezvous_until=None, placement=event.placement, **common
        )
        part.bytes_total = tokens * event.layout.token_bytes
    else:
        part = SinkPart(
            held=event.held,
            announced=not event.peer,
            target=event.target,
            rendezvous_until=now + book.settings.rendezvous_s,
            missing_metadata=set(range(event.layout.layers)) if event.layout.metadata else set(),
            **common,
        )
        if event.layout.keeps_fetched and event.layout.landing_slots and event.target is None:
            part.places = TokenFlags(event.layout.rows, event.layout.capacity)
        held = 0
        for token_range in event.held:
            for layer in range(event.layout.layers):
                held += cover(part, layer, token_range)
        part.missing = tokens - held
        part.bytes_total = part.missing * event.layout.token_bytes
    book.add(part)
    if isinstance(part, SourcePart):
        for waiting in book.rendezvous.take_opens(event.request, event.rank):
            pair(book, part, waiting.session, waiting.node, waiting.message, now)
        if part.state is State.WAITING and event.peer:
            book.emit(do.Connect(event.transfer, event.peer))
        return
    announced = book.rendezvous.take_announced(event.request, event.rank)
    if event.peer:
        part.state = State.CONNECTING
        book.emit(do.Connect(event.transfer, event.peer))
    elif announced is not None and isinstance(part, SinkPart):
        send_open(book, part, *announced, now)


def on_layer_ready(book: Book, event: ev.LayerReady, now: float) -> None:
    part = book.parts.get(event.transfer)
    if not isinstance(part, SourcePart) or part.ended:
        return  # rung before the process could know of the end
    try:
        new = part.ready.add(event.layer, event.row, event.start, event.stop)
    except InvalidArgument as error:
        book.end(part, error)
        return
    if part.queue is not None:
        part.queue.add(new)
        serve_early(book, part)
        work_added(book, part)


def on_metadata_ready(book: Book, event: ev.MetadataReady, now: float) -> None:
    part = book.parts.get(event.transfer)
    if not isinstance(part, SourcePart) or part.ended:
        return
    if not part.layout.metadata or not 0 <= event.layer < part.layout.layers:
        message = f"metadata_ready names layer {event.layer}, which has no metadata in request {part.request!r}"
        book.end(part, InvalidArgument(message, layer=event.layer))
    elif event.layer not in part.metadata_ready:
        part.metadata_ready.add(event.layer)
        if part.queue is not None:
            part.metadata_queue.append(event.layer)
            work_added(book, part)


def on_blocks_ranked(book: Book, event: ev.BlocksRanked, now: float) -> None:
    part = book.parts.get(event.transfer)
    if not isinstance(part, SourcePart) or part.ended:
        return
    if part.queue is None:
        cells = sum(each.shares.size for each in part.rankings.values())
        if event.layer in part.rankings or cells + event.shares.size <= MAX_RANKED:
            part.rankings[event.layer] = event
    elif part.queue.rank(event.layer, event.shares, event.weight):
        # Nothing becomes or ceases to be allowed to go, so there is nothing to submit.
        part.paths["ranked"] += 1


def on_source_finished(book: Book, event: ev.SourceFinished, now: float) -> None:
    part = book.parts.get(event.transfer)
    if isinstance(part, SourcePart) and not part.finished:
        part.finished = True
        if part.queue is not None:
            part.queue.finish()
            work_added(book, part)
        if part.state is State.WAITING:
            part.rendezvous_until = now + book.settings.rendezvous_s
            book.timers.set(part)


def on_release(book: Book, event: ev.ReleaseRequested, now: float) -> None:
    part = book.parts.get(event.transfer)
    if part is None:
        return  # released before
    if not part.ended:
        if isinstance(part, SinkPart) and part.state is State.RUNNING:
            # A decode that stops early (end of text) is not a failure: the source is simply not needed any more.
            deliver(book, part)
        else:
            message = f"the {part.role.value} released request {part.request!r} before it was delivered"
            book.end(part, Aborted(message, request=part.request))
    if isinstance(part, SinkPart):
        end_fetches(book, part, released(part))
    book.forget(part)


def on_abort(book: Book, event: ev.AbortRequested, now: float) -> None:
    part = book.parts.get(event.transfer)
    if part is not None:
        book.end(part, event.error)


def on_client_lost(book: Book, event: ev.ClientLost, now: float) -> None:
    for part in [p for p in book.parts.values() if p.client == event.client]:
        book.end(
            part,
            ProcessLost(
                f"the {part.role.value}'s process of request {part.request!r} went away; "
                "send the request again once it is back",
                request=part.request,
                role=part.role.value,
            ),
        )
        if isinstance(part, SinkPart):
            end_fetches(book, part, released(part))
        book.forget(part)
