"""What must hold of a node: after an event, before a write, and at the end.

Every rule that the core and its surroundings must keep is checked at the moment at which it could be broken;
:class:`Violation` tells which one was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.transfer import instructions as do
from kvd.transfer.book import Book
from kvd_client.spec import TokenRange

from .links import End, Record, Violation
from .memory import every, some

if TYPE_CHECKING:
    from .node import Node


def timers(node: Node, due: float | None) -> None:
    """What the core keeps in order is what looking at all parts would find."""
    running = [part for part in node.core.parts.values() if not part.ended]
    limits = [part.expiry for part in running]
    limits += [waiting.until for waiting in node.core._book.rendezvous._opens.values()]
    first = min(limits, default=None)
    if due != first:
        raise Violation(f"{node.name}: the next timer is {due}, and something waits until {first}")
    if node.core.unfinished != len(running):
        raise Violation(f"{node.name}: {node.core.unfinished} parts unfinished, and {len(running)} have not ended")


def siblings(node: Node) -> None:
    """A part that failed has ended the other ranks of its transfer."""
    for record in node.failed:
        for other in node.records.values():
            same = (other.role, other.attempt.request) == (record.role, record.attempt.request)
            if same and not other.code:
                raise Violation(
                    f"{node.name}: part {record.transfer} failed and its sibling {other.transfer} runs on",
                    record.request,
                )
    node.failed.clear()


def sent(node: Node, record: Record, layer: int, r: TokenRange, piece: Any) -> None:
    """Note tokens as sent; each may be, once."""
    name = node.name
    if not 0 <= r.start < r.stop <= record.lengths[r.row] or not every(record.lease.known[piece]):
        raise Violation(f"{name}: part {record.transfer} sends {r}, which was never rung", record.request)
    if some(record.lease.sent[piece]):
        raise Violation(f"{name}: part {record.transfer} sends {r} of layer {layer} twice", record.request)
    record.lease.sent[piece] = True
    if record.sink is not None:
        if some(record.sink.known[piece]):
            raise Violation(f"{name}: part {record.transfer} sends {r}, which the sink holds", record.request)
        record.sink.sent[piece] = True


def write(
    node: Node, record: Record, instruction: do.WriteTokens | do.WriteTensors | do.WriteMetadata, turn: int
) -> End:
    """What holds for every bulk write; the end that it goes to."""
    end = node.ends.get(instruction.session)
    if end is None or instruction.session != record.bound:
        raise Violation(f"{node.name}: a write of part {record.transfer} goes to the wrong session", record.request)
    if instruction.write in node.writes:
        raise Violation(f"{node.name}: write number {instruction.write} is used twice", record.request)
    if end.in_flight + instruction.nbytes >= node.settings.window + turn:
        raise Violation(f"{node.name}: {end.in_flight} bytes in flight, and another write", record.request)
    end.in_flight += instruction.nbytes
    return end


def empty(node: Node, sessions: bool) -> None:
    """Everything has ended and been given back. ``sessions``: they have ended, too."""
    book: Book = node.core._book
    left: dict[str, Any] = {
        "parts": book.parts,
        "by_rank": book.by_rank,
        "by_handle": book.by_handle,
        "opens": book.rendezvous._opens,
        "opens by rank": book.rendezvous._opens_for,
        "opens by session": book.rendezvous._opens_on,
        "writes": book.writes,
        "in flight": [link for link in book.links.values() if link.in_flight or link.writes or link.turns or link.late],
        "fetches in service": [link for link in book.links.values() if link.urgent],
        "grants": node.memory.grants,
        "operations": node.writes,
        "stages": node.stages,
    }
    if sessions:
        left |= {
            "links": book.links,
            "announcements": book.rendezvous._announced,
            "announcements by session": book.rendezvous._announced_on,
        }
    for name, things in left.items():
        if things:
            raise Violation(f"{node.name}: at the end there are still {name}: {things}", _whose(node, things))
    if node.core.unfinished or node.core.next_timer() is not None:
        raise Violation(f"{node.name}: at the end something is unfinished")
    if node.memory.taken:
        raise Violation(f"{node.name}: {node.memory.taken} leases were not given back")
    for record in node.records.values():
        if not record.code or not record.freed:
            raise Violation(f"{node.name}: part {record.transfer} never ended", record.request)


def _whose(node: Node, things: Any) -> str:
    parts = [number for number in things if isinstance(number, int) and number in node.records]
    return node.records[parts[0]].request if parts else ""
