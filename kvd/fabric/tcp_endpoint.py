"""One end of the two connections to a peer: what wakes it, and which lane sends how much when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from kvd.errors import ChecksumMismatch, FabricError, KvdError
from kvd.fabric.base import Endpoint, EndpointCounters, Grant, Operation, Region
from kvd.fabric.frames import MAX_MESSAGE, NO_TOKEN, Kind, Protection
from kvd.fabric.operations import check_message, check_parts, closed_error
from kvd.fabric.pacing import Pacer, Slice
from kvd.fabric.priority import go_first
from kvd.fabric.records import RecordReader, RecordWriter
from kvd.fabric.regions import TOKEN_BYTES, Refusal, access_error
from kvd.fabric.runs import Runs, checked_runs
from kvd.fabric.seals import Checksum, Gmac, NoSeal, Seal
from kvd.fabric.tcp_receive import LaneIn
from kvd.fabric.tcp_send import LaneOut
from kvd.fabric.tcp_work import TcpOperation
from kvd.types import Descriptors, Lane
from kvd.wire.keys import direction_key

if TYPE_CHECKING:
    from kvd.fabric.tcp import TcpFabric

MIN_PIECE_BYTES = 16 << 10
"""Least that a rate-limited link sends at once; smaller pieces cost more than the smoothness is worth."""
PIECE_S = 0.002
"""How long the link takes for a piece that a rate-limited link sends at once."""
MAX_OFFSET = 2**63 - 1
TIMER_S = 0.001
"""Event loops count milliseconds."""
BURST_BYTES = 2 << 20
"""How much is handed to the kernel before the event loop gets its turn."""
TURN_S = 0.0015
"""How long that may take, about: what is urgent can't go before what is being handed over."""
LEAST_SLICE_BYTES = 64 << 10
"""Of bulk, however slowly the kernel takes it: smaller ones would cost more than they save."""


class _LaneIo:
    """One connection: its socket and its two halves."""

    def __init__(self, sock: socket.socket, receiver: LaneIn, sender: LaneOut) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.receiver = receiver
        self.sender = sender
        self.full = False
        """The kernel takes no more for now."""
        self.watched = False


class TcpEndpoint(Endpoint):
    """One end of a pair of connections. It begins to receive when ``on_message`` is set."""

    def __init__(
        self, fabric: TcpFabric, streams: dict[Lane, socket.socket], secret: bytes = b"", dialled: bool = False
    ) -> None:
        self.counters = EndpointCounters()
        self.on_lost: Callable[[KvdError], None] = lambda error: None
        self.peer = _peer_name(streams[Lane.BULK])
        self._loop = asyncio.get_running_loop()
        self._fabric = fabric
        self._on_message: Callable[[Lane, bytes], None] | None = None
        self._pacer = Pacer(fabric.rate) if fabric.rate else None
        piece = max(MIN_PIECE_BYTES, int(fabric.rate * PIECE_S)) if fabric.rate else fabric.frame_bytes
        self._slice = Slice(LEAST_SLICE_BYTES, min(fabric.frame_bytes, piece), TURN_S)
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended = ""
        self._closed = asyncio.Event()
        for lane, sock in streams.items():
            # With a rate, what takes the link four pieces' time.
            _configure(sock, lane, min(fabric.unsent_bytes, 4 * piece))
        self._lanes = {lane: self._make_lane(lane, streams[lane], secret, dialled) for lane in Lane}
        fabric.endpoints.add(self)

    def _make_lane(self, lane: Lane, sock: socket.socket, secret: bytes, dialled: bool) -> _LaneIo:
        fd = sock.fileno()
        protection = self._fabric.protection
        # Derived even where no key is needed, and then not used: less to get wrong.
        ours = direction_key(secret, b"frames", lane, dialled)
        theirs = direction_key(secret, b"frames", lane, not dialled)
        encrypted = protection is Protection.SECRET
        sender = LaneOut(
            lane,
            fd,
            self._loop,
            self._fabric.table,
            self.counters,
            self._schedule,
            frame_bytes=self._fabric.frame_bytes,
            inflight_bytes=self._fabric.inflight_bytes,
            seal=_make_seal(protection, ours),
            records=RecordWriter(ours) if encrypted else None,
        )
        receiver = LaneIn(
            lane,
            sock,
            self._fabric.table,
            self.counters,
            sender,
            self._deliver,
            seal=_make_seal(protection, theirs),
            records=RecordReader(theirs) if encrypted else None,
        )
        return _LaneIo(sock, receiver, sender)

    @property
    def on_message(self) -> Callable[[Lane, bytes], None]:
        return self._on_message or (lambda lane, message: None)

    @on_message.setter
    def on_message(self, callback: Callable[[Lane, bytes], None]) -> None:
        first = self._on_message is None
        self._on_message = callback
        if first and not self._ended:
            for io in self._lanes.values():
                self._loop.add_reader(io.fd, self._on_readable, io)

    def write(
        self,
        lane: Lane,
        region: Region,
        token: bytes,
        descriptors: Descriptors,
        *,
        then: Descriptors | None = None,
        notify: bytes | None = None,
    ) -> Operation:
        base = self._usable(region)
        data = checked_runs(region, descriptors)
        last = None if then is None else checked_runs(region, then)
        stages: list[tuple[Kind, Runs | bytes]] = []
        if last is not None and last.nbytes:
            stages.append((Kind.THEN, last))
        if data.nbytes or not stages:
            stages.insert(0, (Kind.WRITE, data))
        if notify is not None:
            stages.append((Kind.NOTIFY, check_message(notify, MAX_MESSAGE)))
        return self._submit(lane, TcpOperation(self._lanes[lane].sender, stages, region, base, token))

    def write_parts(
        self,
        lane: Lane,
        region: Region,
        parts: Sequence[tuple[bytes, Descriptors]],
        *,
        then: tuple[bytes, Descriptors] | None = None,
        notify: bytes | None = None,
    ) -> Operation:
        # One operation on the wire, too, whose frames name different grants: the far side drops all that comes of it
        # behind a frame that it has refused.
        base = self._usable(region)
        check_parts(parts)
        stages: list[tuple[Kind, Runs | bytes]] = [(Kind.WRITE, checked_runs(region, rows)) for _, rows in parts]
        tokens = [token for token, _ in parts]
        if then is not None and (last := checked_runs(region, then[1])).nbytes:
            stages.append((Kind.THEN, last))
            tokens.append(then[0])
        if notify is not None:
            stages.append((Kind.NOTIFY, check_message(notify, MAX_MESSAGE)))
            tokens.append(NO_TOKEN)
        return self._submit(lane, TcpOperation(self._lanes[lane].sender, stages, region, base, tokens=tokens))

    def read(self, lane: Lane, region: Region, token: bytes, descriptors: Descriptors) -> Operation:
        base = self._usable(region)
        stages: list[tuple[Kind, Runs | bytes]] = [(Kind.READ, checked_runs(region, descriptors))]
        return self._submit(lane, TcpOperation(self._lanes[lane].sender, stages, region, base, token))

    def send(self, lane: Lane, message: bytes) -> Operation:
        self._usable(None)
        stages: list[tuple[Kind, Runs | bytes]] = [(Kind.MESSAGE, check_message(message, MAX_MESSAGE))]
        return self._submit(lane, TcpOperation(self._lanes[lane].sender, stages, token=NO_TOKEN))

    def revoke(self, grant: Grant) -> None:
        """The fabric has closed ``grant``: let no byte of it move any more."""
        for io in self._lanes.values():
            io.receiver.revoke(grant)
            io.sender.revoke(grant)

    def close(self) -> None:
        self._end(closed_error("this side closed it"))

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def _usable(self, region: Region | None) -> int:
        """The address of ``region``, if the endpoint and the region can be used."""
        if self._ended:
            raise closed_error(self._ended)
        return 0 if region is None else self._fabric.table.address(region)

    def _submit(self, lane: Lane, op: TcpOperation) -> Operation:
        # What no grant of this fabric can permit does not fit into a frame either.
        if any(len(stage.token) != TOKEN_BYTES for stage in op.stages):
            op.settle(access_error(op.what, Refusal.UNKNOWN_TOKEN, op.low, op.high))
            return op
        if op.high > MAX_OFFSET:
            op.settle(access_error(op.what, Refusal.OUT_OF_RANGE, op.low, op.high))
            return op
        return self._lanes[lane].sender.submit(op)

    # --- the event loop's callbacks -------------------------------------------------------------------------------

    def _on_readable(self, io: _LaneIo) -> None:
        try:
            io.receiver.receive()
        except (OSError, KvdError) as error:
            self._lose(io, error)
            return
        except Exception as error:  # a mistake in here must not leave a lane that is out of step
            self._loop.call_exception_handler({"message": "a lane of a tcp endpoint failed", "exception": error})
            self._lose(io, FabricError(f"an internal error ended the connection: {error!r}"))
            return
        if io.sender.dirty:
            # Urgent: an answer to what was received shares a batch with the acknowledgement, which saves both sides a
            # turn of the loop. Bulk: the acknowledgement opens the peer's window, and nothing else is to be said.
            if io.receiver.lane is Lane.URGENT:
                self._schedule()
            else:
                self._pump()

    def _on_writable(self, io: _LaneIo) -> None:
        try:
            io.sender.send()
        except OSError as error:
            self._lose(io, error)
            return
        io.full = io.sender.sending
        if not io.full:
            self._pump()

    def _schedule(self) -> None:
        # Not at once: operations that are submitted in a row share a batch.
        if not self._scheduled and not self._ended:
            self._scheduled = True
            self._loop.call_soon(self._on_scheduled)

    def _on_scheduled(self) -> None:
        self._scheduled = False
        self._pump()

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _deliver(self, lane: Lane, message: bytes) -> None:
        try:
            self.on_message(lane, message)
        except Exception as error:  # the owner's mistake must not stop the lane in the middle of a frame
            self._loop.call_exception_handler({"message": "on_message of a tcp endpoint failed", "exception": error})

    # --- sending --------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send what may be sent now, the urgent lane's before the bulk lane's."""
        budget, start = BURST_BYTES, monotonic()
        for io in self._lanes.values():
            if not (io.sender.dirty or io.watched):
                continue
            try:
                began = monotonic()
                while budget > 0 and not io.full and io.sender.dirty:
                    n = self._send_batch(io.sender)
                    if n == 0:
                        break
                    now = monotonic()
                    io.full = io.sender.sending
                    if not io.full:
                        self._slice.took(n, now - began)
                    began = now
                    budget = budget - n if now - start < TURN_S else 0
            except OSError as error:
                self._lose(io, error)
            if self._ended:
                return
            if io.full and not io.watched:
                self._loop.add_writer(io.fd, self._on_writable, io)
            elif io.watched and not io.full:
                self._loop.remove_writer(io.fd)
            io.watched = io.full
        if budget <= 0:
            self._schedule()

    def _send_batch(self, sender: LaneOut) -> int:
        """Go on with the lane's batch, or begin one if there is work and the rate permits; 0 if there is nothing."""
        if not sender.sending:
            pacer, now = self._pacer, 0.0
            wait = 0.0
            if pacer is not None:
                now = self._loop.time()
                wait = pacer.wait(now)
                if wait and self._timer is None and sender.has_payload:
                    self._timer = self._loop.call_later(max(wait, TIMER_S), self._on_timer)
            nbytes = sender.build(self._slice.nbytes, payload=not wait)
            if not nbytes:
                sender.dirty = wait > 0 and sender.has_payload
                return 0
            if pacer is not None:
                pacer.sent(nbytes, now)
        return sender.send()

    # --- the end --------------------------------------------------------------------------------------------------

    def _lose(self, io: _LaneIo, error: Exception) -> None:
        lane = io.receiver.lane.name.lower()
        if isinstance(error, ChecksumMismatch):
            self.counters.checksum_errors += 1
        if isinstance(error, KvdError):
            reason = error.message
        else:
            reason = f"the {lane} connection failed: {error}"
            if isinstance(error, TimeoutError):  # ETIMEDOUT
                reason += (
                    ". What was sent was not acknowledged; if the peer answers otherwise, something on the way drops "
                )
                reason += "large packets: compare the MTU of both hosts and of the network"
            error = FabricError(reason)
        error.fields |= {"peer": self.peer, "lane": lane}
        self._end(closed_error(reason), error)

    def _end(self, error: KvdError, lost: KvdError | None = None) -> None:
        if self._ended:
            return
        self._ended = error.fields["reason"]
        self._fabric.endpoints.discard(self)
        self._fabric.past_checksum_errors += self.counters.checksum_errors
        if self._timer is not None:
            self._timer.cancel()
        for io in self._lanes.values():
            self._loop.remove_reader(io.fd)
            self._loop.remove_writer(io.fd)
            io.sock.close()
            io.receiver.end()
        for io in self._lanes.values():
            io.sender.end(error)
        self.counters.bytes_in_flight = dict.fromkeys(Lane, 0)
        if lost is not None:
            self._loop.call_soon(self._tell_lost, lost)  # after the operations' own callbacks
        self._closed.set()

    def _tell_lost(self, error: KvdError) -> None:
        self.on_lost(error)


def _make_seal(protection: Protection, key: bytes) -> Seal:
    if protection is Protection.AUTHENTIC:
        return Gmac(key)
    # Records carry tags of their own.
    return Checksum() if protection is Protection.CHECKSUM else NoSeal()


def _configure(sock: socket.socket, lane: Lane, unsent_bytes: int) -> None:
    sock.setblocking(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # On both: an acknowledgement must not wait for the peer's delayed one.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if lane is Lane.BULK:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)
    else:
        go_first(sock)  # what has been handed over of bulk can't be taken back, but may be passed


def _peer_name(sock: socket.socket) -> str:
    name = sock.getpeername()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "local")
