"""One node: the real transfer core, and its instructions carried out on modelled NICs.

Memory is not modelled byte by byte: that no byte is sent twice or comes late is what the tests' simulator checks. Here
an instruction takes as long as it would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvd.errors import Aborted, KvdError
from kvd.sim.clock import Clock
from kvd.sim.network import Nic, Piece
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.core import Settings, TransferCore
from kvd.transfer.handle import make_handle
from kvd.types import Role
from kvd.wire import messages as wire
from kvd_client.spec import KVSpec, PartLayout, TokenRange

GATHER_RATE = 4e9
"""Bytes a second at which a source gathers scattered entries."""
TURN_S = 50e-6
"""What a daemon needs to take a message and act on it; twice that and the delay make a round trip."""
TICK_S = 1.0

Arrived = Callable[[int, tuple[TokenRange, ...]], None]


class Broken(AssertionError):
    """The core did something that it must never do; a fault of kvd."""


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """What the node's process and the model know of one end of a transfer."""

    arrived: Arrived | None = None
    """Sink: tokens of a layer are in place."""
    ended: Callable[[str], None] | None = None
    fetched: dict[int, Callable[[KvdError | None], None]] = dataclasses.field(default_factory=dict)
    sink: do.BindSink | None = None
    wants_windows: bool = False
    metadata: int = 0
    """Sink: layers whose metadata has arrived."""
    metadata_arrived: Callable[[], None] | None = None
    pieces: dict[int, Piece] = dataclasses.field(default_factory=dict)
    """Source: bulk writes by number, until they are confirmed."""


class Node:
    """A node of the cluster."""

    def __init__(self, clock: Clock, name: str, settings: Settings, rate: float, delay_s: float) -> None:
        self.name = name
        self.nic = Nic(clock, rate, delay_s)
        self.core = TransferCore(name, f"{name}-boot", settings)
        self.parts: dict[int, Part] = {}
        self.nodes: dict[str, Node] = {}
        """All nodes by name; filled by the cluster."""
        self._clock = clock
        self._sessions: dict[ev.SessionId, tuple[Node, ev.SessionId]] = {}
        """The far node and its number of the same session."""
        self._by_node: dict[str, ev.SessionId] = {}
        self._numbers = 0
        self._fetches = 0
        self._ticking = False
        self._execute: dict[type, Callable[[Any], None]] = {
            do.Connect: self._connect,
            do.SendMessage: lambda i: self._transmit(i.session, i.message),
            do.SendOpen: lambda i: self._transmit(i.session, msgspec.structs.replace(i.message, grant=b"memory")),
            do.BindSink: self._bind,
            do.WriteTokens: self._write_tokens,
            do.WriteMetadata: self._write_metadata,
            do.ServeFetch: self._serve_fetch,
            do.FillFetch: lambda i: self._fetch_ended(do.FetchEnded(i.transfer, i.request.fetch)),
            do.FetchEnded: self._fetch_ended,
            do.WantWindows: self._want_windows,
            do.CancelWrites: self._cancel,
            do.Publish: lambda i: None,
            do.ReportEnd: self._report_end,
            do.FreeMemory: self._free,
            do.CloseSession: self._close,
        }

    # --- what the processes do ------------------------------------------------------------------------------------

    def open(
        self,
        role: Role,
        request: str,
        spec: KVSpec,
        layout: PartLayout,
        tokens: int,
        part: Part,
        *,
        peer: str = "",
        mode: str = "",
        prefill_s: float = 0.0,
        deadline_s: float = 3600.0,
    ) -> int:
        """Open one end of a transfer; its number here."""
        self._numbers += 1
        transfer = self._numbers
        self.parts[transfer] = part
        event = ev.PartOpened(
            transfer=transfer,
            role=role,
            client=transfer,
            request=request,
            rank=0,
            ranks=1,
            head_start=0,
            spec=spec,
            layout=layout,
            lengths=(tokens,),
            handle=make_handle(self.name, f"{self.name}-boot", transfer) if role is Role.SOURCE else "",
            peer=peer,
            mode=mode,
            prefill_s=prefill_s,
            deadline_s=deadline_s,
        )
        self.core.check_open(event)
        self.feed(event)
        return transfer

    def fetch(self, transfer: int, layer: int, entries: int, then: Callable[[KvdError | None], None]) -> None:
        """Ask for entries of a layer, as many in all heads together."""
        self._fetches += 1
        part = self.parts[transfer]
        part.fetched[self._fetches] = then
        self.feed(ev.FetchRequested(transfer, self._fetches, layer, b"", bytes(4 * entries), 0, 0))

    def feed(self, event: ev.Event) -> None:
        for instruction in self.core.handle(event, self._clock.now):
            self._execute[type(instruction)](instruction)
        if not self._ticking and self.core.unfinished:
            self._ticking = True
            self._clock.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.feed(ev.Tick())

    # --- instructions ---------------------------------------------------------------------------------------------

    def _connect(self, instruction: do.Connect) -> None:
        peer = self.nodes[instruction.node]
        number = self._by_node.get(peer.name)
        wait = TURN_S
        if number is None:
            number, theirs = self._session(peer), peer._session(self)
            self._sessions[number] = (peer, theirs)
            peer._sessions[theirs] = (self, number)
            wait = 4 * self.nic.delay_s  # the connection, and the handshake
        self._clock.after(wait, self.feed, ev.SessionReady(instruction.transfer, number, peer.name))

    def _session(self, peer: Node) -> ev.SessionId:
        self._numbers += 1
        self._by_node[peer.name] = self._numbers
        return self._numbers

    def _transmit(self, session: ev.SessionId, message: Any) -> None:
        peer, number = self._sessions[session]
        event = ev.MessageReceived(number, self.name, message)
        self._clock.after(self.nic.delay_s + TURN_S, peer.feed, event)

    def _bind(self, instruction: do.BindSink) -> None:
        self.parts[instruction.transfer].sink = instruction

    def _write_tokens(self, instruction: do.WriteTokens) -> None:
        part = self.parts[instruction.transfer]
        peer, number = self._sessions[instruction.session]
        assert part.sink is not None
        sink, layer, ranges = part.sink.sink, instruction.layer, instruction.ranges

        def arrived() -> None:
            theirs = peer.parts.get(sink)
            if theirs is not None and theirs.arrived is not None:
                theirs.arrived(layer, ranges)
            peer.feed(ev.TokensArrived(number, wire.Arrived(sink, layer, list(ranges), instruction.path.value)))
            self._confirm(instruction.transfer, instruction.write)

        self._send(part, instruction.write, Piece(peer.nic, instruction.nbytes, arrived))

    def _write_metadata(self, instruction: do.WriteMetadata) -> None:
        part = self.parts[instruction.transfer]
        peer, number = self._sessions[instruction.session]
        assert part.sink is not None
        sink = part.sink.sink

        def arrived() -> None:
            theirs = peer.parts.get(sink)
            if theirs is not None:
                theirs.metadata += 1
                if theirs.metadata_arrived is not None:
                    theirs.metadata_arrived()
            peer.feed(ev.MetadataArrived(number, wire.MetadataArrived(sink, instruction.layer)))
            self._confirm(instruction.transfer, instruction.write)

        self._send(part, instruction.write, Piece(peer.nic, instruction.nbytes, arrived))

    def _send(self, part: Part, write: int, piece: Piece) -> None:
        part.pieces[write] = piece
        self.nic.send(piece, urgent=False)

    def _confirm(self, transfer: int, write: int) -> None:
        part = self.parts.get(transfer)
        if part is not None:
            part.pieces.pop(write, None)
        self._clock.after(self.nic.delay_s + TURN_S, self.feed, ev.WriteCompleted(transfer, write))

    def _serve_fetch(self, instruction: do.ServeFetch) -> None:
        message = instruction.message
        peer, number = self._sessions[instruction.session]
        source = self.core.parts.get(instruction.transfer)
        nbytes = len(message.index) // 4 * (source.layout.entry_bytes if source is not None else 0)

        def arrived() -> None:
            peer.feed(ev.FetchArrived(number, wire.FetchArrived(instruction.sink, message.fetch)))
            served = ev.FetchServed(instruction.transfer, instruction.session, message.fetch, instruction.sink, nbytes)
            self._clock.after(self.nic.delay_s + TURN_S, self.feed, served)

        piece = Piece(peer.nic, nbytes, arrived)
        self._clock.after(TURN_S + nbytes / GATHER_RATE, partial(self.nic.send, piece, urgent=True))

    def _fetch_ended(self, instruction: do.FetchEnded) -> None:
        part = self.parts.get(instruction.transfer)
        then = part.fetched.pop(instruction.fetch, None) if part is not None else None
        if then is not None:
            self._clock.after(TURN_S, then, instruction.error)

    def _want_windows(self, instruction: do.WantWindows) -> None:
        self.parts[instruction.transfer].wants_windows = instruction.wanted

    def _cancel(self, instruction: do.CancelWrites) -> None:
        part = self.parts[instruction.transfer]
        for write, piece in list(part.pieces.items()):
            if not piece.begun and not piece.dropped:
                piece.dropped = True
                del part.pieces[write]
                cancelled = ev.WriteCompleted(instruction.transfer, write, Aborted("the write was cancelled"))
                self._clock.after(0.0, self.feed, cancelled)

    def _report_end(self, instruction: do.ReportEnd) -> None:
        part = self.parts.get(instruction.transfer)
        if part is not None and part.ended is not None:
            part.ended(instruction.code)

    def _free(self, instruction: do.FreeMemory) -> None:
        del self.parts[instruction.transfer]

    def _close(self, instruction: do.CloseSession) -> None:
        raise Broken(f"node {self.name} closes session {instruction.session}: {instruction.reason}")
