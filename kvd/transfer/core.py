"""The transfer core: every decision about transfers, and no IO.

``TransferCore.handle(event, now)`` is the only mutator: it takes what happened and returns what shall be done. It
never blocks, reads no clock and touches no memory, so the daemon, the tests and the simulator run the same code.

A *part* (one rank of a transfer at one end) is paired with its counterpart by request id and rank, in either order
of arrival, or by the source's handle. :mod:`kvd.transfer.part` has the table of states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvd.errors import DeadlineExceeded, error_from_code
from kvd.transfer import delivery, on_demand, pairing, processes, staging
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.book import Book, Settings, shutting_down
from kvd.transfer.matching import no_rendezvous
from kvd.transfer.pairing import refuse
from kvd.transfer.part import Part
from kvd.types import NodeId, Role, TransferId
from kvd.wire import messages as wire

__all__ = ["Settings", "TransferCore"]


class TransferCore:
    """All parts of one daemon."""

    def __init__(self, node: NodeId, boot: str, settings: Settings) -> None:
        self._book = Book(node, boot, settings)

    def handle(self, event: ev.Event, now: float) -> list[do.Instruction]:
        """Take one event; return the instructions that follow from it, to be carried out in order."""
        book = self._book
        book.now = now
        if isinstance(event, ev.MessageReceived):
            handler = _MESSAGES.get(type(event.message))
            if handler is None:
                return [do.CloseSession(event.session, f"unexpected message {type(event.message).__name__}")]
            handler(book, event, now)
        else:
            _EVENTS[type(event)](book, event, now)
        out, book.out = book.out, []
        return out

    def next_timer(self) -> float | None:
        """When the next ``Tick`` is needed; None if nothing waits for time to pass. Seconds of the same clock."""
        book = self._book
        times = (book.timers.next(), book.rendezvous.next_expiry())
        return min((time for time in times if time is not None), default=None)

    def check_open(self, event: ev.PartOpened) -> None:
        """Raise what forbids this part to be opened, before memory is taken for it. Changes nothing."""
        processes.check_open(self._book, event)

    def check_finish(self, transfer: TransferId) -> None:
        """Raise :class:`~kvd.errors.InvalidArgument` naming the first token that the source has never rung."""
        processes.check_finish(self._book, transfer)

    @property
    def parts(self) -> Mapping[TransferId, Part]:
        """All parts that still have memory; to be read, not changed."""
        return self._book.parts

    @property
    def counters(self) -> Mapping[str, int]:
        """Totals since the start: transfers opened and ended, by role and code."""
        return self._book.counters

    @property
    def unfinished(self) -> int:
        """Parts that have not ended."""
        return self._book.unfinished

    @property
    def draining(self) -> bool:
        """Whether new transfers are refused."""
        return self._book.draining


def on_tick(book: Book, event: ev.Tick, now: float) -> None:
    for waiting in book.rendezvous.expire(now):
        error = no_rendezvous(waiting.message.request, Role.SOURCE, book.settings.rendezvous_s)
        refuse(book, waiting.session, waiting.message.sink, error)
    for part in book.timers.expired(now):
        if part.ended:
            continue  # with its sibling
        if part.refused_until is not None and part.refused_until <= now:
            what = "sink's memory refused a write" if part.role is Role.SOURCE else "source's memory refused a read"
            message = f"the {what} of request {part.request!r} and no reason followed"
            book.end(part, error_from_code(part.refusal, message, {"request": part.request}))
        elif part.deadline <= now:
            message = (
                f"request {part.request!r} was not delivered within its deadline of "
                f"{part.deadline - part.opened:.3g} s ({part.bytes_done} of {part.bytes_total} bytes were)"
            )
            book.end(part, DeadlineExceeded(message, request=part.request))
        else:
            other = Role.SINK if part.role is Role.SOURCE else Role.SOURCE
            book.end(part, no_rendezvous(part.request, other, book.settings.rendezvous_s, part.peer))


def on_drain(book: Book, event: ev.DrainRequested, now: float) -> None:
    book.draining = True
    for waiting in book.rendezvous.take_all_opens():
        refuse(book, waiting.session, waiting.message.sink, shutting_down())


def on_stop(book: Book, event: ev.StopRequested, now: float) -> None:
    on_drain(book, ev.DrainRequested(), now)
    for part in list(book.parts.values()):
        book.end(part, event.error)


_EVENTS: dict[type, Callable[[Book, Any, float], None]] = {
    ev.PartOpened: processes.on_part_opened,
    ev.LayerReady: processes.on_layer_ready,
    ev.MetadataReady: processes.on_metadata_ready,
    ev.BlocksRanked: processes.on_blocks_ranked,
    ev.SourceFinished: processes.on_source_finished,
    ev.IdleWindow: on_demand.on_idle_window,
    ev.FetchRequested: on_demand.on_fetch_requested,
    ev.FetchServed: on_demand.on_fetch_served,
    ev.FetchArrived: on_demand.on_fetch_arrived,
    ev.FetchKept: on_demand.on_fetch_kept,
    ev.MetadataArrived: delivery.on_metadata_arrived,
    ev.ReleaseRequested: processes.on_release,
    ev.AbortRequested: processes.on_abort,
    ev.ClientLost: processes.on_client_lost,
    ev.SessionReady: pairing.on_session_ready,
    ev.ConnectFailed: pairing.on_connect_failed,
    ev.SessionLost: pairing.on_session_lost,
    ev.TokensArrived: delivery.on_tokens_arrived,
    ev.WriteCompleted: delivery.on_write_completed,
    ev.Regrouped: staging.on_regrouped,
    ev.Staged: staging.on_offered,
    ev.Moved: staging.on_moved,
    ev.PullCompleted: staging.on_pull_completed,
    ev.Tick: on_tick,
    ev.DrainRequested: on_drain,
    ev.StopRequested: on_stop,
}

_MESSAGES: dict[type, Callable[[Book, ev.MessageReceived, float], None]] = {
    wire.Open: pairing.on_open,
    wire.Announce: pairing.on_announce,
    wire.Retract: pairing.on_retract,
    wire.Accepted: pairing.on_accepted,
    wire.Refused: pairing.on_refused,
    wire.Withdraw: pairing.on_withdraw,
    wire.Abort: pairing.on_peer_abort,
    wire.RejectHandle: pairing.on_reject,
    wire.Delivered: delivery.on_delivered,
    wire.Fetch: on_demand.on_fetch,
    wire.FetchFailed: on_demand.on_fetch_failed,
    wire.Idle: on_demand.on_idle,
    wire.Staged: staging.on_staged,
    wire.Pulled: staging.on_pulled,
}
