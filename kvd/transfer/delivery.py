"""From ready tokens to a complete sink: writes on the source's side, arrivals on the sink's."""

from __future__ import annotations

from kvd.mask import IntervalSet
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.part import SinkPart, SourcePart, State
from kvd.transfer.scheduler import Link
from kvd.types import Lane, Path
from kvd.wire import messages as wire
from kvd_client.spec import TokenRange

REFUSED_GRACE_S = 1.0
"""How long a refused write waits for the control message that explains it: the two travel on different connections."""


def work_added(book: Book, part: SourcePart) -> None:
    if part.state is State.RUNNING and part.session is not None and part.path.pending_tokens:
        link = book.links.setdefault(part.session, Link(book.settings.window))
        link.add(part.transfer)
        _fill(book, part.session, link)


def _fill(book: Book, session: ev.SessionId, link: Link) -> None:
    """Submit work until the window is full or nothing is left."""
    while link.open:
        part = book.parts[link.next_turn()]
        assert isinstance(part, SourcePart)
        taken = None if part.refused_until is not None else part.path.take(book.settings.chunk)
        if taken is None:
            link.remove(part.transfer)
            continue
        layer, ranges = taken
        nbytes = sum(r.stop - r.start for r in ranges) * part.layout.token_bytes
        write, book.next_write = book.next_write, book.next_write + 1
        link.submitted(write, nbytes)
        book.writes[write] = session
        part.writes.add(write)
        book.emit(do.WriteTokens(part.transfer, session, write, Lane.BULK, Path.PROACTIVE, layer, ranges, nbytes))


def on_write_completed(book: Book, event: ev.WriteCompleted, now: float) -> None:
    session = book.writes.pop(event.write, None)
    link = book.links.get(session) if session is not None else None
    nbytes = link.completed(event.write) if link is not None else 0
    part = book.parts.get(event.transfer)
    if isinstance(part, SourcePart):
        part.writes.discard(event.write)
        if event.error is None:
            part.bytes_done += nbytes
        elif not part.ended and part.refused_until is None:
            part.refused_until = now + REFUSED_GRACE_S
            part.refusal = event.error.code
    if link is not None and session is not None:
        _fill(book, session, link)


def on_tokens_arrived(book: Book, event: ev.TokensArrived, now: float) -> None:
    arrived = event.arrived
    part = book.parts.get(arrived.transfer)
    if not isinstance(part, SinkPart) or part.ended or part.session != event.session:
        return  # late news of a transfer that has ended
    for token_range in arrived.ranges:
        inside = 0 <= token_range.row < part.layout.rows and 0 <= arrived.layer < part.layout.layers
        if not inside or not 0 <= token_range.start <= token_range.stop <= part.lengths[token_range.row]:
            book.emit(do.CloseSession(event.session, f"tokens arrived that do not exist: {arrived}"))
            return
    tokens = sum(cover(part, arrived.layer, token_range) for token_range in arrived.ranges)
    part.missing -= tokens
    new_bytes = tokens * part.layout.token_bytes
    part.bytes_done += new_bytes
    book.emit(do.Publish(part.transfer, part.bytes_done, new_bytes))
    if part.missing == 0 and part.state is State.RUNNING:
        deliver(book, part)


def deliver(book: Book, part: SinkPart) -> None:
    assert part.session is not None
    assert part.peer_transfer is not None
    book.emit(do.SendMessage(part.session, wire.Delivered(transfer=part.peer_transfer)))
    book.end(part, None, tell_peer=False)


def cover(part: SinkPart, layer: int, token_range: TokenRange) -> int:
    intervals = part.arrived.setdefault((layer, token_range.row), IntervalSet())
    return sum(stop - start for start, stop in intervals.add(token_range.start, token_range.stop))


def on_delivered(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, SourcePart)
    if part is not None and not part.ended:
        book.end(part, None, tell_peer=False)
