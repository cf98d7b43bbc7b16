"""How the two sides of a transfer find each other, and how a session's end parts them."""

from __future__ import annotations

import dataclasses

from kvd.errors import Aborted, Busy, KvdError, error_from_code
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book, shutting_down
from kvd.transfer.delivery import deliver_if_complete, work_added
from kvd.transfer.matching import MISFITS, unknown_handle, why_not
from kvd.transfer.on_demand import fill_fetches, send_fetch
from kvd.transfer.order import Policy
from kvd.transfer.part import Part, SinkPart, SourcePart, State
from kvd.transfer.policy import choose_policy
from kvd.transfer.queue import SendQueue
from kvd.transfer.rendezvous import WaitingOpen
from kvd.transfer.staging import fit_target, grain_of, unit_of
from kvd.types import NodeId, Role, TransferId
from kvd.wire import messages as wire


def on_session_ready(book: Book, event: ev.SessionReady, now: float) -> None:
    part = book.parts.get(event.transfer)
    if isinstance(part, SinkPart) and part.state is State.CONNECTING:
        send_open(book, part, event.session, event.node, now)
    elif isinstance(part, SourcePart) and part.state is State.WAITING:
        part.announced_on = event.session
        book.emit(
            do.SendMessage(event.session, wire.Announce(source=part.transfer, request=part.request, rank=part.rank))
        )


def on_connect_failed(book: Book, event: ev.ConnectFailed, now: float) -> None:
    part = book.parts.get(event.transfer)
    if part is not None and part.state in (State.WAITING, State.CONNECTING):
        book.end(part, event.error)


def on_session_lost(book: Book, event: ev.SessionLost, now: float) -> None:
    book.links.pop(event.session, None)
    for part in [p for p in book.parts.values() if p.session == event.session]:
        if isinstance(part, SinkPart) and part.ended and part.code == "OK":
            fill_fetches(book, part)
        book.end(part, event.error, tell_peer=False)
    book.rendezvous.session_lost(event.session)
    for part in book.parts.values():
        if isinstance(part, SourcePart) and part.state is State.WAITING and part.announced_on == event.session:
            part.announced_on = None
            book.emit(do.Connect(part.transfer, part.peer))  # the announcement was lost with the session


def on_open(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Open = event.message  # type: ignore[assignment]
    if message.handle:
        part = book.parts.get(book.by_handle.get(message.handle, -1))
        if part is None:
            refuse(book, event.session, message.sink, unknown_handle(message.handle, book.node, book.boot))
            return
    else:
        part = book.rank(Role.SOURCE, message.request, message.rank)
    if part is not None:
        assert isinstance(part, SourcePart)
        pair(book, part, event.session, event.node, message, now)
    elif book.draining:
        refuse(book, event.session, message.sink, shutting_down())
    else:
        until = now + min(book.settings.rendezvous_s, message.deadline_s)
        try:
            book.rendezvous.add_open(WaitingOpen(event.session, event.node, message, until))
        except Busy as error:
            refuse(book, event.session, message.sink, error)


def pair(book: Book, part: SourcePart, session: ev.SessionId, node: NodeId, message: wire.Open, now: float) -> None:
    error = why_not(part, message)
    if error is not None:
        refuse(book, session, message.sink, error)
        return
    try:
        tensors = fit_target(part, message)
        policy = _policy(book, part, session, message)
        part.regroups = part.placement is not None or message.target is not None
        unit = unit_of(part, message.target, policy)
    except KvdError as misfit:
        refuse(book, session, message.sink, misfit)
        return
    part.state = State.RUNNING
    book.pair(part, session, node, message.sink)
    part.deadline = min(part.deadline, now + message.deadline_s)
    book.timers.set(part)
    part.mode = policy.mode
    part.paths["budget_tokens"] = policy.budget_tokens
    part.pulled = message.target is not None and message.target.pull
    part.queue = SendQueue(
        part.layout,
        part.lengths,
        policy,
        held=tuple(message.held),
        windows=part.spec.windows,
        grain=grain_of(part, message.target),
        unit=unit,
        drops=part.layout.keeps_fetched and message.target is None and message.layout.landing_slots > 0,
    )
    for ranking in part.rankings.values():
        if part.queue.rank(ranking.layer, ranking.shares, ranking.weight):
            part.paths["ranked"] += 1
    part.rankings.clear()
    part.queue.add(part.ready.all())
    if part.finished:
        part.queue.finish()
    part.metadata_queue.extend(sorted(part.metadata_ready))
    book.emit(do.BindSink(part.transfer, session, message.sink, message.layout, message.grant, message.target, tensors))
    book.emit(do.SendMessage(session, wire.Accepted(transfer=message.sink, source=part.transfer, mode=policy.mode)))
    work_added(book, part)


def _policy(book: Book, part: SourcePart, session: ev.SessionId, message: wire.Open) -> Policy:
    """How a part that is about to be paired is sent; raises :class:`InvalidArgument` for an unknown mode."""
    settings = book.settings
    lengths = part.lengths[:: part.layout.sequence_rows]
    known = settings.profiled(part.spec, message.selector or part.selector, lengths)
    rate = book.link(session).rate
    # What the link really carries today says more than what it carried when the profile was made.
    transfer_s = part.bytes_total / rate if rate else known.transfer_s
    metadata_s = transfer_s * part.layout.metadata_stride * part.layout.layers / part.bytes_total
    known = dataclasses.replace(known, transfer_s=transfer_s, metadata_s=metadata_s)
    if part.prefill_s:
        known = dataclasses.replace(known, prefill_s=part.prefill_s)
    mode = message.mode or part.mode or settings.selective.mode
    return choose_policy(
        mode,
        settings.selective,
        known,
        layers=part.layout.layers,
        lengths=part.lengths,
        token_bytes=part.layout.token_bytes,
        heads=(part.head_start, part.layout.sequence_rows) if part.layout.mask_by == "head" else None,
    )


def refuse(book: Book, session: ev.SessionId, sink: TransferId, error: KvdError) -> None:
    book.counters["opens_refused"] += 1
    message = wire.Refused(transfer=sink, code=error.code, message=error.message, fields=error.fields)
    book.emit(do.SendMessage(session, message))


def on_withdraw(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Withdraw = event.message  # type: ignore[assignment]
    book.rendezvous.withdraw(event.session, message.sink)
    transfer = book.by_sink.get((event.session, message.sink))
    if transfer is not None:
        error = error_from_code(message.code, message.message, message.fields)
        book.end(book.parts[transfer], error, tell_peer=False)


def on_reject(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.RejectHandle = event.message  # type: ignore[assignment]
    if message.handle:
        found = [book.by_handle.get(message.handle, -1)]
    else:
        found = list(book.by_rank.get((Role.SOURCE, message.request), {}).values())
    for transfer in found:
        part = book.parts.get(transfer)
        if part is not None and part.state is State.WAITING:
            reason = message.reason or "no reason given"
            book.end(
                part,
                Aborted(
                    f"node {event.node!r} rejected request {part.request!r}: {reason}",
                    request=part.request,
                ),
            )


def on_announce(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Announce = event.message  # type: ignore[assignment]
    part = book.rank(Role.SINK, message.request, message.rank)
    if isinstance(part, SinkPart) and not part.ended:
        if part.state is State.WAITING:
            send_open(book, part, event.session, event.node, now)
    else:  # an ended part's process may open the request once more
        book.rendezvous.announce(message.request, message.rank, event.session, event.node)


def on_retract(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Retract = event.message  # type: ignore[assignment]
    book.rendezvous.retract(message.request, message.rank, event.session)


def send_open(book: Book, part: SinkPart, session: ev.SessionId, node: NodeId, now: float) -> None:
    part.state = State.OPENING
    part.session, part.peer = session, node
    # Who has no room for fetched entries can't ask for the rest, so that nobody else may choose a mode that needs it.
    mode = part.mode or ("" if part.layout.landing_slots else "full")
    message = wire.Open(
        sink=part.transfer, request=part.request, handle=part.handle, rank=part.rank, ranks=part.ranks,
        head_start=part.head_start, spec=part.spec, layout=part.layout, lengths=list(part.lengths),
        held=list(part.held), grant=b"", mode=mode, selector=part.selector, target=part.target,
        deadline_s=max(0.0, part.deadline - now),
    )  # fmt: skip
    book.emit(do.SendOpen(part.transfer, session, message))


def on_accepted(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, SinkPart)
    if part is None or part.state is not State.OPENING:
        return
    message: wire.Accepted = event.message  # type: ignore[assignment]
    part.state = State.RUNNING
    part.peer_transfer = message.source
    part.mode = message.mode
    if part.mode == "speculative":
        book.emit(do.WantWindows(part.transfer, True))
    for request in part.fetches.values():
        send_fetch(book, part, request)
    deliver_if_complete(book, part)


def on_refused(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, SinkPart)
    if part is not None and part.state is State.OPENING:
        message: wire.Refused = event.message  # type: ignore[assignment]
        error = error_from_code(message.code, message.message, message.fields)
        if part.announced and isinstance(error, MISFITS):
            # The source goes on waiting and announces only once: a sink that fits may still come.
            book.rendezvous.announce(part.request, part.rank, event.session, event.node)
        book.end(part, error, tell_peer=False)


def on_peer_abort(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, Part)
    if part is not None:
        message: wire.Abort = event.message  # type: ignore[assignment]
        book.end(part, error_from_code(message.code, message.message, message.fields), tell_peer=False)
