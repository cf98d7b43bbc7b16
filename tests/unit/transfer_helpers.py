"""Short ways to bring a transfer core into a state, and to read what it wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvd.errors import KvdError, PeerLost
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings, TransferCore
from kvd.transfer.handle import Handle
from kvd.transfer.part import Part, State
from kvd.types import Role
from kvd.wire import messages as wire
from kvd_client.spec import KVSpec, TokenRange, part_layout

BOOT = "00000000000000aa"
SESSION = 5
SPEC = KVSpec(layers=2, kv_heads=2, entry_bytes=8, dtype="fp16", model="m")
TOKEN = 16
"""Bytes of a token in one layer, for the layout of :func:`opened`."""
SETTINGS = Settings(rendezvous_s=10.0, chunk=2 * TOKEN, window=4 * TOKEN)

Kind = TypeVar("Kind")


def layout(rows: int = 1, capacity: int = 8, heads: int = 2, spec: KVSpec = SPEC) -> Any:
    return part_layout(spec, heads=heads, rows=rows, capacity=capacity)


def handle(transfer: int, node: str = "p", boot: str = BOOT) -> str:
    return str(Handle(node, boot, transfer, "0123456789abcdef"))


def opened(role: Role, transfer: int = 1, **other: Any) -> ev.PartOpened:
    """A part of one row with four tokens; a sink waits for an announcement unless it gets a ``peer``."""
    fields: dict[str, Any] = {
        "transfer": transfer, "role": role, "client": 1, "request": "r", "rank": 0, "ranks": 1, "head_start": 0,
        "spec": SPEC, "layout": layout(), "lengths": (4,), "peer": "", "deadline_s": 100.0,
        "handle": handle(transfer) if role is Role.SOURCE else "",
    }  # fmt: skip
    return ev.PartOpened(**(fields | other))


def open_message(sink: int = 21, **other: Any) -> wire.Open:
    fields: dict[str, Any] = {
        "sink": sink, "request": "r", "handle": "", "rank": 0, "ranks": 1, "head_start": 0, "spec": SPEC,
        "layout": layout(), "lengths": [4], "held": [], "grant": b"grant", "deadline_s": 100.0,
    }  # fmt: skip
    return wire.Open(**(fields | other))


def why(code: str = "ABORTED") -> dict[str, Any]:
    return {"code": code, "message": "the other side says so", "fields": {"request": "r"}}


def only(out: list[do.Instruction], kind: type[Kind]) -> list[Kind]:
    return [instruction for instruction in out if isinstance(instruction, kind)]


def sent(out: list[do.Instruction], kind: type[Kind]) -> list[Kind]:
    """Messages of a kind, whatever session they go to."""
    return [i.message for i in out if isinstance(i, do.SendMessage | do.SendOpen) and isinstance(i.message, kind)]


def kinds(out: list[do.Instruction]) -> list[str]:
    return [f"Send{type(i.message).__name__}" if isinstance(i, do.SendMessage) else type(i).__name__ for i in out]


class Node:
    """A core with a clock to set."""

    def __init__(self, name: str = "p", settings: Settings = SETTINGS) -> None:
        self.core = TransferCore(name, BOOT, settings)
        self.now = 0.0

    def __call__(self, event: ev.Event) -> list[do.Instruction]:
        return self.core.handle(event, self.now)

    def source(self, transfer: int = 1, **other: Any) -> list[do.Instruction]:
        return self(opened(Role.SOURCE, transfer, **other))

    def sink(self, transfer: int = 1, **other: Any) -> list[do.Instruction]:
        return self(opened(Role.SINK, transfer, **other))

    def hear(self, message: Any, session: int = SESSION, node: str = "peer") -> list[do.Instruction]:
        return self(ev.MessageReceived(session, node, message))

    def ring(
        self, layer: int, start: int, stop: int, row: int | None = None, transfer: int = 1
    ) -> list[do.Instruction]:
        return self(ev.LayerReady(transfer, layer, row, start, stop))

    def arrive(
        self, layer: int, start: int, stop: int, row: int = 0, transfer: int = 1, session: int = SESSION
    ) -> list[do.Instruction]:
        return self(ev.TokensArrived(session, wire.Arrived(transfer, layer, [TokenRange(row, start, stop)])))

    def done(self, write: int, error: KvdError | None = None, transfer: int = 1) -> list[do.Instruction]:
        return self(ev.WriteCompleted(transfer, write, error))

    def lose(self, session: int = SESSION) -> list[do.Instruction]:
        return self(ev.SessionLost(session, PeerLost("the session ended", peer="peer")))

    def tick(self, now: float) -> list[do.Instruction]:
        self.now = now
        return self(ev.Tick())

    def part(self, transfer: int = 1) -> Part:
        return self.core.parts[transfer]

    def state(self, transfer: int = 1) -> State:
        return self.part(transfer).state

    @property
    def left(self) -> list[str]:
        """What the core still keeps; empty once all is over."""
        book = self.core._book
        things: dict[str, Any] = {
            "parts": book.parts,
            "by_rank": book.by_rank,
            "by_handle": book.by_handle,
            "opens": book.rendezvous._opens,
            "opens_for": book.rendezvous._opens_for,
            "opens_on": book.rendezvous._opens_on,
            "announced": book.rendezvous._announced,
            "announced_on": book.rendezvous._announced_on,
            "writes": book.writes,
            "links": [link for link in book.links.values() if link.in_flight or link.writes or link.turns or link.late],
        }
        return [name for name, thing in things.items() if thing]


def source_waiting() -> Node:
    node = Node()
    node.source()
    return node


def source_running() -> Node:
    node = source_waiting()
    node.hear(open_message())
    return node


def source_ended() -> Node:
    node = source_running()
    node.hear(wire.Delivered(transfer=1))
    return node


def sink_waiting() -> Node:
    node = Node("d")
    node.sink()
    return node


def sink_connecting() -> Node:
    node = Node("d")
    node.sink(peer="p")
    return node


def sink_opening() -> Node:
    node = sink_connecting()
    node(ev.SessionReady(1, SESSION, "p"))
    return node


def sink_running() -> Node:
    node = sink_opening()
    node.hear(wire.Accepted(transfer=1, source=9))
    return node


def sink_ended() -> Node:
    node = sink_running()
    node.arrive(0, 0, 4)
    node.arrive(1, 0, 4)
    return node


STATES: dict[str, Callable[[], Node]] = {
    "source waiting": source_waiting,
    "source running": source_running,
    "source ended": source_ended,
    "sink waiting": sink_waiting,
    "sink connecting": sink_connecting,
    "sink opening": sink_opening,
    "sink running": sink_running,
    "sink ended": sink_ended,
}
"""Every role and state, with the part's number always 1 and its session, where it has one, :data:`SESSION`."""

TOLD = {
    "source waiting": [],
    "source running": ["SendAbort"],
    "source ended": [],
    "sink waiting": [],
    "sink connecting": [],
    "sink opening": ["SendWithdraw"],
    "sink running": ["SendAbort"],
    "sink ended": [],
}
"""What the other side hears when a part fails in each state."""
