"""From ready tokens to a complete sink: writes on the source's side, arrivals on the sink's."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.errors import ChecksumMismatch, ProtocolError
from kvd.mask import IntervalSet
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.part import SinkPart, SourcePart, State
from kvd.transfer.scheduler import Link
from kvd.types import Lane, Path
from kvd.wire import messages as wire
from kvd_client.spec import TokenRange

BATCHES = 3
"""Of layers: one that is being regrouped, one on the wire, and one between them. Bounds the memory for staging."""

BATCH_LEAST, BATCH_MOST, BATCH_S = 1 << 20, 16 << 20, 0.02
"""Layers that are ready go together, for so many seconds of the link's time, and within these bytes."""

BATCH_FIRST_S, BATCH_GROWTH = 0.004, 2
"""Fewer while nothing is on its way, since the link waits until they are regrouped: what it takes in so long, so that
the next batch can be there in time. Then so many times as many as in the batch ahead: regrouping takes a fraction of
the time that sending takes, but on two processors it is the sending thread's."""

METADATA = "metadata"
"""In the accounts, beside the names of the paths."""


def work_added(book: Book, part: SourcePart) -> None:
    """A source part may have something to send: give it its turn, and use what room the link has."""
    if part.state is not State.RUNNING or part.session is None or part.queue is None:
        return
    path = Path.PROACTIVE if part.metadata_queue else part.queue.path
    if path is not None:
        link = book.link(part.session)
        link.add(part.transfer, late=path is Path.SPECULATIVE)
        fill(book, part.session, link)


def fill(book: Book, session: ev.SessionId, link: Link) -> None:
    """Submit work until the link's limit is reached or nothing is left."""
    while (link.open or _overlaps(book, link)) and not link.paused(book.now):
        part = book.parts[link.next_turn()]
        assert isinstance(part, SourcePart)
        assert part.queue is not None
        path = part.queue.path
        if part.refused_until is not None or (part.queue.unit == "layer" and len(part.writes) >= BATCHES):
            link.remove(part.transfer)  # in the latter case until a batch has ended
        elif part.metadata_queue:
            layer = part.metadata_queue.popleft()
            nbytes = part.layout.metadata_stride
            write = _submit(book, part, session, link, nbytes, METADATA)
            book.emit(do.WriteMetadata(part.transfer, session, write, layer, nbytes))
        elif path is None:
            link.remove(part.transfer)
        elif path is Path.SPECULATIVE and link.turns:
            link.add(part.transfer, late=True)  # what it had to push is done
        elif path is Path.SPECULATIVE and not part.queue.policy.adaptive and part.idle.room <= 0:
            link.remove(part.transfer)  # until the next window
        elif part.regroups:
            layers = tuple(part.queue.take(_turn(part, link, path)))
            nbytes = sum(r.stop - r.start for _, ranges in layers for r in ranges) * part.layout.token_bytes
            part.idle.room -= nbytes
            write = _submit(book, part, session, link, nbytes, path.value)
            if part.pulled:
                part.staged[write] = (path.value, [wire.LayerRanges(layer, list(ranges)) for layer, ranges in layers])
            book.emit(do.WriteTensors(part.transfer, session, write, path, layers, nbytes))
        else:
            for layer, ranges in part.queue.take(_turn(part, link, path)):
                nbytes = sum(r.stop - r.start for r in ranges) * part.layout.token_bytes
                part.idle.room -= nbytes
                write = _submit(book, part, session, link, nbytes, path.value)
                book.emit(do.WriteTokens(part.transfer, session, write, Lane.BULK, path, layer, ranges, nbytes))


def _overlaps(book: Book, link: Link) -> bool:
    """Whether a layer may be regrouped while the one before it is on the wire, although both exceed the window."""
    if not link.turns:
        return False
    part = book.parts[link.turns[0]]
    if not isinstance(part, SourcePart) or part.queue is None or part.metadata_queue:
        return False
    return part.queue.unit == "layer" and len(part.writes) < 2


def _turn(part: SourcePart, link: Link, path: Path) -> int:
    """Most bytes of a part's next turn."""
    assert part.queue is not None
    if part.queue.unit == "layer":
        # A batch costs the same CPU time whatever it has, and the wait for a layer grows with what goes with it.
        ahead, _ = link.writes.get(max(part.writes, default=-1), (0, ""))
        most = max(int(link.rate * BATCH_FIRST_S), BATCH_GROWTH * ahead)
        return max(BATCH_LEAST, min(BATCH_MOST, most, int(link.rate * BATCH_S)))
    if path is Path.SPECULATIVE and not part.queue.policy.adaptive:
        return min(link.piece, part.idle.room)
    return link.piece


def _submit(book: Book, part: SourcePart, session: ev.SessionId, link: Link, nbytes: int, path: str) -> int:
    write, book.next_write = book.next_write, book.next_write + 1
    link.submitted(write, nbytes, path, book.now)
    book.writes[write] = session
    part.writes.add(write)
    return write


def on_write_completed(book: Book, event: ev.WriteCompleted, now: float) -> None:
    session = book.writes.pop(event.write, None)
    link = book.links.get(session) if session is not None else None
    placed = event.error is None
    nbytes, path = link.completed(event.write, now, placed=placed) if link is not None else (0, "")
    if placed and path:
        # Of a part that is forgotten, too: its process may release it before the last confirmation comes.
        book.counters[f"bytes_sent_{path}"] += nbytes
    part = book.parts.get(event.transfer)
    if isinstance(part, SourcePart):
        part.writes.discard(event.write)
        part.staged.pop(event.write, None)
        if event.error is None and path:
            part.paths[path] += nbytes
            if path != METADATA:
                part.bytes_done += nbytes
        elif isinstance(event.error, ChecksumMismatch) and not part.ended:
            # The sink's daemon refused it for this very reason: there is nothing to wait for. Not sent again: a link
            # that changes bytes is to be mended, and the process may well have another node to ask.
            event.error.fields["request"] = part.request
            book.end(part, event.error)
        elif event.error is not None and not part.ended:
            book.refused(part, event.error)
        if part.regroups:
            work_added(book, part)
    if link is not None and session is not None:
        fill(book, session, link)


def on_tokens_arrived(book: Book, event: ev.TokensArrived, now: float) -> None:
    arrived = event.arrived
    part = _receiving(book, arrived.transfer, event.session)
    if part is None:
        return
    layers = arrived.layers if isinstance(arrived, wire.TensorsArrived) else [arrived]
    for one in layers:
        for r in one.ranges:
            inside = 0 <= r.row < part.layout.rows and 0 <= one.layer < part.layout.layers
            if not inside or not 0 <= r.start <= r.stop <= part.lengths[r.row]:
                book.emit(do.CloseSession(event.session, f"tokens arrived that do not exist: {arrived}"))
                return
    if not event.marked:
        numbers = sorted({one.layer for one in layers})
        named = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {', '.join(map(str, numbers))}"
        book.end(part, _not_written(part, f"tokens of {named}", numbers[0]))
        return
    take_arrived(book, part, layers, arrived.path)


def take_arrived(
    book: Book, part: SinkPart, layers: Sequence[wire.LayerRanges] | Sequence[wire.Arrived], path: str
) -> None:
    """Tokens, which exist, are in place and marked: account for them, and tell the process."""
    tokens = sum(cover(part, one.layer, token_range) for one in layers for token_range in one.ranges)
    part.missing -= tokens
    new_bytes = tokens * part.layout.token_bytes
    part.bytes_done += new_bytes
    if path in _PATHS:
        part.paths[path] += new_bytes
    book.emit(do.Publish(part.transfer, part.bytes_done, new_bytes))
    deliver_if_complete(book, part)


def on_metadata_arrived(book: Book, event: ev.MetadataArrived, now: float) -> None:
    part = _receiving(book, event.arrived.transfer, event.session)
    if part is None:
        return
    if event.arrived.layer not in part.missing_metadata:
        book.emit(do.CloseSession(event.session, f"metadata arrived that was not missing: {event.arrived}"))
        return
    if not event.marked:
        book.end(part, _not_written(part, f"the metadata bytes of layer {event.arrived.layer}", event.arrived.layer))
        return
    part.missing_metadata.discard(event.arrived.layer)
    part.paths[METADATA] += part.layout.metadata_stride
    book.emit(do.Publish(part.transfer, part.bytes_done, 0))
    deliver_if_complete(book, part)


def _not_written(part: SinkPart, what: str, layer: int) -> ProtocolError:
    """Ends this transfer only: the masks are in the process's hands, too, and it must not be able to end a session."""
    return ProtocolError(
        f"node {part.peer!r} says that {what} of request {part.request!r} have arrived, and the masks say that they "
        "have not; open the transfer with another source, and look at that node's version and log",
        peer=part.peer,
        request=part.request,
        layer=layer,
    )


def _receiving(book: Book, transfer: int, session: ev.SessionId) -> SinkPart | None:
    """The sink part that news of an arrival concern; None for late news of a transfer that has ended."""
    part = book.parts.get(transfer)
    return part if isinstance(part, SinkPart) and not part.ended and part.session == session else None


def deliver_if_complete(book: Book, part: SinkPart) -> None:
    if part.complete and part.state is State.RUNNING:
        deliver(book, part)


def deliver(book: Book, part: SinkPart) -> None:
    """The sink needs nothing more of its source."""
    assert part.session is not None
    assert part.peer_transfer is not None
    book.emit(do.SendMessage(part.session, wire.Delivered(transfer=part.peer_transfer)))
    book.end(part, None, tell_peer=False)


def cover(part: SinkPart, layer: int, token_range: TokenRange) -> int:
    """Note tokens as arrived; how many were not."""
    if part.places is not None:
        return part.places.add(layer, token_range.row, token_range.start, token_range.stop)
    intervals = part.arrived.setdefault((layer, token_range.row), IntervalSet())
    return sum(stop - start for start, stop in intervals.add(token_range.start, token_range.stop))


def on_delivered(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, SourcePart)
    if part is not None and not part.ended:
        book.end(part, None, tell_peer=False)


_PATHS = frozenset(path.value for path in Path)
