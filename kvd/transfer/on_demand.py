"""The on-demand path (SmartGen, section 4.2) and the idle windows of the speculative one (section 4.3).

A fetch goes from the sink's process over both daemons to the source's memory, and its entries come back into the
process's landing slot on the urgent lane. While a source serves fetches, nothing speculative starts on that link.

Where a mask byte stands for a single entry (:attr:`PartLayout.keeps_fetched`) a fetched entry travels once: the source
takes it out of its queue when it serves the fetch, and puts it back if that fails; the sink's daemon copies it from the
landing slot to its place, marks it, and counts it as arrived before it answers the process.
"""

from __future__ import annotations

import numpy as np

from kvd.errors import Busy, InvalidArgument, KvdError, LeaseExpired, NotFound, UnsupportedLayout, error_from_code
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd.transfer.delivery import deliver_if_complete, fill, work_added
from kvd.transfer.gathering import fetch_entries
from kvd.transfer.part import SinkPart, SourcePart, State
from kvd.types import Path
from kvd.wire import messages as wire
from kvd_client.protocol import MAX_FRAME

MAX_FETCH_BYTES = MAX_FRAME - 4096
"""Of a fetch's counts and index: its message must fit into a frame."""

MAX_SERVED = 1024
"""Fetches that one session may have in service here."""

_NO_DROP = (0, np.empty(0, np.int64))


# --- at the sink -----------------------------------------------------------------------------------------------------


def on_fetch_requested(book: Book, event: ev.FetchRequested, now: float) -> None:
    part = book.parts.get(event.transfer)
    if not isinstance(part, SinkPart):
        error: KvdError = NotFound(f"transfer {event.transfer} is not open here as a sink", transfer=event.transfer)
        book.emit(do.FetchEnded(event.transfer, event.fetch, error))
    elif part.ended and part.code == "OK":
        _fill(book, part, event)
    elif part.ended:
        book.emit(do.FetchEnded(part.transfer, event.fetch, ended(part)))
    elif len(event.counts) + len(event.index) > MAX_FETCH_BYTES:
        too_much = InvalidArgument(
            f"a fetch has {len(event.counts)} bytes of counts and {len(event.index)} of index, and together at most "
            f"{MAX_FETCH_BYTES} can go over; fetch fewer entries at a time",
            limit=MAX_FETCH_BYTES,
        )
        book.emit(do.FetchEnded(part.transfer, event.fetch, too_much))
    else:
        part.fetches[event.fetch] = event
        part.paths["fetches"] += 1
        if part.state is State.RUNNING:
            send_fetch(book, part, event)  # else when the source has accepted


def send_fetch(book: Book, part: SinkPart, request: ev.FetchRequested) -> None:
    assert part.session is not None
    assert part.peer_transfer is not None
    message = wire.Fetch(
        transfer=part.peer_transfer, sink=part.transfer, fetch=request.fetch, layer=request.layer,
        counts=request.counts, index=request.index, offset=request.offset, stride=request.stride,
        keep=part.places is not None,
    )  # fmt: skip
    book.emit(do.SendMessage(part.session, message))


def on_fetch_arrived(book: Book, event: ev.FetchArrived, now: float) -> None:
    part = book.parts.get(event.arrived.transfer)
    if not isinstance(part, SinkPart) or part.session != event.session:
        return
    request = part.fetches.get(event.arrived.fetch)
    if request is None or request.fetch in part.keeping:
        return
    part.paths[Path.ON_DEMAND.value] += _entries_bytes(part, request)
    if part.places is None or part.ended or not _keep(book, part, request):
        del part.fetches[request.fetch]
        book.emit(do.FetchEnded(part.transfer, request.fetch))


def _keep(book: Book, part: SinkPart, request: ev.FetchRequested) -> bool:
    """Put what a fetch has brought in place, but for what is there already; False where all of it is."""
    assert part.places is not None
    layout = part.layout
    try:
        entries, counts = fetch_entries(layout, part.lengths, request.counts, request.index)
    except InvalidArgument as error:  # which the source should have refused
        book.end(part, error)
        return True
    group = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)
    places, first = np.unique(entries, return_index=True)  # with one head, entries are places
    new = part.places.absent(request.layer, places)
    if not new.any():
        return False
    landed = (group * layout.landing_entries + column)[first[new]]
    part.keeping[request.fetch] = request.layer, places[new]
    book.emit(
        do.KeepFetched(
            part.transfer, request.fetch, request.layer, request.offset, landed, part.keeping[request.fetch][1]
        )
    )
    return True


def on_fetch_kept(book: Book, event: ev.FetchKept, now: float) -> None:
    part = book.parts.get(event.transfer)
    if not isinstance(part, SinkPart) or part.places is None:
        return
    kept, request = part.keeping.pop(event.fetch, None), part.fetches.pop(event.fetch, None)
    if event.error is None and kept is not None and not part.ended:
        layer, places = kept
        new = int(np.count_nonzero(part.places.absent(layer, places)))  # a block may have come meanwhile
        part.places.add_places(layer, places)
        part.missing -= new
        part.bytes_done += new * part.layout.token_bytes
        book.emit(do.Publish(part.transfer, part.bytes_done, new * part.layout.token_bytes))
    if request is not None:
        book.emit(do.FetchEnded(part.transfer, request.fetch, event.error))
    if event.error is not None:
        book.end(part, event.error)  # the source will not send them again
    else:
        deliver_if_complete(book, part)


def on_fetch_failed(book: Book, event: ev.MessageReceived, now: float) -> None:
    part = book.named_by(event, SinkPart)
    message: wire.FetchFailed = event.message  # type: ignore[assignment]
    if part is None or message.fetch in part.keeping:
        return
    request = part.fetches.pop(message.fetch, None)
    if request is None:
        return
    if part.ended and part.code == "OK":
        _fill(book, part, request)
    else:
        error = error_from_code(message.code, message.message, message.fields)
        book.emit(do.FetchEnded(part.transfer, request.fetch, error))


def end_fetches(book: Book, part: SinkPart, error: KvdError) -> None:
    """The part has failed, or its memory goes back: its fetches end with it."""
    fetches, part.fetches = part.fetches, {}
    for number in fetches:
        book.emit(do.FetchEnded(part.transfer, number, error))


def fill_fetches(book: Book, part: SinkPart) -> None:
    """The source is gone but everything had arrived: its unanswered fetches are served from here."""
    fetches, part.fetches = part.fetches, {}
    for request in fetches.values():
        _fill(book, part, request)


def _fill(book: Book, part: SinkPart, request: ev.FetchRequested) -> None:
    """Serve a fetch from this side's own memory, counted apart: these entries didn't travel on demand."""
    part.paths["filled"] += _entries_bytes(part, request)
    book.emit(do.FillFetch(part.transfer, request))


def _entries_bytes(part: SinkPart, request: ev.FetchRequested) -> int:
    return len(request.index) // 4 * part.layout.entry_bytes


def ended(part: SinkPart) -> KvdError:
    """Why a fetch that comes late can't be answered: its process may hear of the end by this first."""
    return part.error or KvdError(f"request {part.request!r} has ended", request=part.request)


def released(part: SinkPart) -> KvdError:
    return LeaseExpired(f"request {part.request!r} was released while a fetch was under way", request=part.request)


def on_idle_window(book: Book, event: ev.IdleWindow, now: float) -> None:
    part = book.parts.get(event.transfer)
    if not isinstance(part, SinkPart) or part.ended:
        return
    if not 0 <= event.layer < part.layout.layers:
        book.end(
            part,
            InvalidArgument(
                f"idle names layer {event.layer}, but the transfer has layers 0 to {part.layout.layers - 1}",
                layer=event.layer,
            ),
        )
    elif part.state is State.RUNNING and part.mode == "speculative":
        assert part.session is not None
        assert part.peer_transfer is not None
        part.paths["windows"] += 1
        book.emit(do.SendMessage(part.session, wire.Idle(transfer=part.peer_transfer, windows=1)))


# --- at the source ---------------------------------------------------------------------------------------------------


def on_fetch(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Fetch = event.message  # type: ignore[assignment]
    part = book.named_by(event, SourcePart)
    error: KvdError | None = None
    link = book.link(event.session)
    if part is None or part.ended:
        error = NotFound("the source has no such transfer any more", transfer=message.transfer)
    elif part.placement is not None:
        error = UnsupportedLayout(
            f"the source of request {part.request!r} has its tensors in a device's layout, from which single entries "
            "can't be fetched; use mode 'full'",
            request=part.request,
        )
    elif link.urgent >= MAX_SERVED:
        error = Busy(f"{MAX_SERVED} fetches of this node are being served; retry", retry_after_s=0.01)
    elif not 0 <= message.layer < part.layout.layers:
        error = InvalidArgument(
            f"a fetch names layer {message.layer}; there are {part.layout.layers}", layer=message.layer
        )
    elif len(part.early) >= MAX_SERVED:
        error = Busy(f"{MAX_SERVED} fetches wait for layers to be computed; fetch after prefill", retry_after_s=0.1)
    if error is not None or part is None:
        assert error is not None
        _fail(book, event.session, message.sink, message.fetch, error)
        return
    part.idle.fetch(now)
    if _layer_is_ready(part, message.layer):
        _serve(book, part, event.session, message)
    else:
        part.early.append(message)


def serve_early(book: Book, part: SourcePart) -> None:
    """Something has become ready: serve the fetches that waited for it."""
    if part.early and part.session is not None:
        ready = [message for message in part.early if _layer_is_ready(part, message.layer)]
        part.early = [message for message in part.early if message not in ready]
        for message in ready:
            _serve(book, part, part.session, message)


def _layer_is_ready(part: SourcePart, layer: int) -> bool:
    return all(part.ready.covers(layer, row, 0, length) for row, length in enumerate(part.lengths))


def _serve(book: Book, part: SourcePart, session: ev.SessionId, message: wire.Fetch) -> None:
    if message.keep and part.queue is not None:
        try:
            places, _ = fetch_entries(part.layout, part.lengths, message.counts, message.index)
        except InvalidArgument as error:
            _fail(book, session, message.sink, message.fetch, error)
            return
        part.dropped[message.fetch] = message.layer, part.queue.drop(message.layer, places)
    book.link(session).fetch_begins(book.now)
    part.paths["fetches"] += 1
    book.emit(do.ServeFetch(part.transfer, session, message.sink, message))


def on_fetch_served(book: Book, event: ev.FetchServed, now: float) -> None:
    link = book.links.get(event.session)
    if link is None:
        return  # the session has ended meanwhile
    link.fetch_ended()
    part = book.parts.get(event.transfer)
    layer, dropped = part.dropped.pop(event.fetch, _NO_DROP) if isinstance(part, SourcePart) else _NO_DROP
    if event.error is not None:
        _fail(book, event.session, event.sink, event.fetch, event.error)
        if isinstance(part, SourcePart) and part.queue is not None and not part.ended:
            part.queue.restore(layer, dropped)
            work_added(book, part)
    else:
        if part is not None:
            part.paths[Path.ON_DEMAND.value] += event.nbytes
            part.bytes_done += len(dropped) * part.layout.token_bytes
        book.counters[f"bytes_sent_{Path.ON_DEMAND.value}"] += event.nbytes
    fill(book, event.session, link)


def _fail(book: Book, session: ev.SessionId, sink: int, fetch: int, error: KvdError) -> None:
    book.counters["fetches_refused"] += 1
    message = wire.FetchFailed(transfer=sink, fetch=fetch, code=error.code, message=error.message, fields=error.fields)
    book.emit(do.SendMessage(session, message))


def on_idle(book: Book, event: ev.MessageReceived, now: float) -> None:
    message: wire.Idle = event.message  # type: ignore[assignment]
    part = book.named_by(event, SourcePart)
    if part is not None and part.queue is not None and not part.ended:
        for _ in range(min(message.windows, part.layout.layers)):
            part.queue.window()
        link = book.link(event.session)
        part.idle.window(now, link.rate, part.layout.token_bytes)
        part.paths["windows"] = part.queue.windows_used
        work_added(book, part)
