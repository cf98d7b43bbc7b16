"""The control connection of a peer session, from the end of its handshake on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from kvd.errors import KvdError, PeerLost, ProtocolError
from kvd.peers.liveness import Liveness, Verdict
from kvd.throttle import Throttle
from kvd.types import NodeId
from kvd.wire import framing, guard
from kvd.wire.hello import printable
from kvd.wire.messages import Closing, FabricBlob, PeerMessage, Ping, Pong, SessionMessage, WireMessage
from kvd_client.protocol import LENGTH, MAX_FRAME

WRITE_LIMIT = 4 << 20
"""Bytes that may wait for a peer to read them; beyond it the session ends."""
EARLY_LIMIT = 2 * MAX_FRAME
"""Bytes of messages that may come before this side's fabric is connected."""
LINGER_S = 1.0
"""How long the last message may take to be sent."""
MAX_BLOB = 4096
MAX_BLOBS = 16


class Log(Protocol):
    """What is used of a structlog logger."""

    def debug(self, event: str, **fields: object) -> object: ...
    def info(self, event: str, **fields: object) -> object: ...
    def warning(self, event: str, **fields: object) -> object: ...
    def exception(self, event: str, **fields: object) -> object: ...


class ControlLink(asyncio.Protocol):
    """Frames in both directions, the heartbeat, and the fabrics' exchange.

    Ends once, for whatever reason: ``error`` is set, everything waiting fails, and ``on_end`` is called from the
    event loop (never from inside a call into this object).
    """

    def __init__(
        self,
        peer: NodeId,
        *,
        heartbeat_s: float,
        timeout_s: float,
        log: Log,
        protection: tuple[guard.Writer, guard.Parser] | None = None,
        messages_s: float = 0.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer, self._log = peer, log
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._writer, self._parser = protection or (guard.PlainWriter(), framing.FrameParser())
        self._throttle = Throttle(self._loop, messages_s, self._go_on)
        self._transport: asyncio.Transport | None = None
        self._liveness = Liveness(heartbeat_s=heartbeat_s, timeout_s=timeout_s, now=self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._pings = 0
        self._traffic_seen = 0
        self._deliver: Callable[[PeerMessage], None] | None = None
        self._early: list[PeerMessage] = []
        self._early_bytes = 0
        self._blobs: asyncio.Queue[bytes] = asyncio.Queue(MAX_BLOBS)
        self._told: Callable[[bytes], None] | None = None
        self.error: KvdError | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done as soon as ``error`` is set."""
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done once the socket is closed."""
        self.on_end: Callable[[KvdError], None] = lambda error: None
        self.traffic: Callable[[], int] = lambda: 0
        """A number that grows with what the peer sends outside this connection; it counts as a sign of life."""

    def start(self, deliver: Callable[[PeerMessage], None]) -> None:
        """Hand over the messages from now on, those that came early first."""
        self._deliver = deliver
        early, self._early = self._early, []
        for message in early:
            if self.error is None:
                self._guarded(message)

    def send(self, message: WireMessage) -> None:
        """Queue a message. Raises what ended the link if it has ended, and :class:`ProtocolError` if the message
        exceeds a frame. A peer that doesn't read what is queued loses the session."""
        if self.error is not None:
            raise PeerLost(
                f"the session with node {self._peer} has ended: {self.error.message}", peer=self._peer
            ) from self.error
        self._write(self._frame(message))

    async def exchange(self, blob: bytes) -> bytes:
        """As :meth:`kvd.fabric.base.Bringup.exchange`; raises what ended the link."""
        if len(blob) > MAX_BLOB:
            raise ProtocolError(f"the fabric exchanges a blob of {len(blob)} bytes; {MAX_BLOB} are allowed")
        self.send(FabricBlob(blob=blob))
        get = self._loop.create_task(self._blobs.get())
        try:
            either: list[asyncio.Future[Any]] = [get, self.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
        finally:
            get.cancel()
        assert self.error is not None
        raise self.error

    def tell(self, blob: bytes) -> None:
        """As :meth:`kvd.fabric.base.Bringup.tell`."""
        if self.error is None:
            self._write(self._frame(FabricBlob(blob=blob)))

    def listen(self, told: Callable[[bytes], None]) -> None:
        """As :meth:`kvd.fabric.base.Bringup.listen`."""
        self._told = told
        while not self._blobs.empty():
            self._loop.call_soon(self._tell_fabric, self._blobs.get_nowait())

    def end(self, error: KvdError, *, tell: bool) -> None:
        """End the session for ``error``; ``tell``: say so to the peer. Does nothing the second time."""
        if self.error is not None:
            return
        self.error = error
        self.ended.set_result(None)
        self._throttle.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            self.closed.set_result(None)
        elif tell and not self._transport.is_closing():
            self._transport.write(self._frame(Closing(code=error.code, message=printable(error.message))))
            self._transport.close()
            # A peer that reads nothing must not keep the socket open.
            self._timer = self._loop.call_later(LINGER_S, self._transport.abort)
        else:
            self._transport.abort()
        self._early.clear()
        self._loop.call_soon(self.on_end, error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_LIMIT)
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)

    def data_received(self, data: bytes) -> None:
        if self.error is not None:
            return
        self._parser.feed(data)
        self._take()

    def _take(self) -> None:
        """Act on the frames that are there, as fast as the peer's rate allows."""
        self._liveness.heard(self._loop.time())
        try:
            while self.error is None and not self._throttle.held and (body := self._parser.next()) is not None:
                self._receive(framing.decode(body), len(body) + LENGTH.size)
                if self.error is None and self._throttle.count() and self._transport is not None:
                    self._transport.pause_reading()
        except KvdError as error:
            self._log.warning("peer sent what it must not", peer=self._peer, reason=error.message)
            self.end(error, tell=True)

    def _go_on(self) -> None:
        if self.error is not None or self._transport is None:
            return
        self._take()
        if not self._throttle.held and self.error is None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool | None:
        self._lose("it closed the connection")
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc else "the connection was closed")
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    # Inside

    def _receive(self, message: PeerMessage | SessionMessage, nbytes: int) -> None:
        if isinstance(message, Ping):
            self._write(self._frame(Pong(number=message.number)))
        elif isinstance(message, Pong):
            pass
        elif isinstance(message, Closing):
            code, text = printable(message.code, 64), printable(message.message)
            self._lose(f"it ended the session with {code}: {text}", reason=code)
        elif isinstance(message, FabricBlob):
            if len(message.blob) > MAX_BLOB or self._blobs.full():
                raise ProtocolError(f"node {self._peer} exchanges more for its fabric than is allowed")
            if self._told is None:
                self._blobs.put_nowait(message.blob)
            else:
                self._loop.call_soon(self._tell_fabric, message.blob)
        elif self._deliver is not None:
            self._guarded(message)
        else:
            self._early_bytes += nbytes
            if self._early_bytes > EARLY_LIMIT:
                raise ProtocolError(f"node {self._peer} sent over {EARLY_LIMIT} bytes while still connecting")
            self._early.append(message)

    def _tell_fabric(self, blob: bytes) -> None:
        if self.error is not None:
            return
        assert self._told is not None
        try:
            self._told(blob)
        except KvdError as error:
            self._log.warning("peer's fabric refused", peer=self._peer, reason=error.message)
            self.end(error, tell=True)

    def _guarded(self, message: PeerMessage) -> None:
        """Deliver; what a handler raises ends this session and nothing else."""
        assert self._deliver is not None
        try:
            self._deliver(message)
        except KvdError as error:
            self._log.warning(
                "peer message refused", peer=self._peer, message=type(message).__name__, reason=error.message
            )
            self.end(error, tell=True)
        except Exception as error:
            name = type(message).__name__
            self._log.exception("peer message failed", peer=self._peer, message=name)
            self.end(
                KvdError(f"a {name} of node {self._peer} met a bug: {error!r}; see the log", peer=self._peer),
                tell=True,
            )

    def _frame(self, message: WireMessage) -> bytes:
        return self._writer.frame(msgspec.msgpack.encode(message))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > WRITE_LIMIT:
            self._lose(f"it does not read: {waiting} bytes wait for it", reason="not reading")

    def _tick(self) -> None:
        now, traffic = self._loop.time(), self.traffic()
        if traffic != self._traffic_seen:
            self._traffic_seen = traffic
            self._liveness.heard(now)
        verdict = self._liveness.tick(now)
        if verdict is Verdict.LOST:
            silence = self._liveness.silence(now)
            self._lose(f"it has been silent for {silence:.1f} s, {self._timeout_s:g} s are allowed", "silent")
            return
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)
        if verdict is Verdict.PROBE:
            self._pings += 1
            self._write(self._frame(Ping(number=self._pings)))

    def _lose(self, why: str, reason: str = "closed") -> None:
        self.end(
            PeerLost(f"the session with node {self._peer} is lost: {why}", peer=self._peer, reason=reason),
            tell=False,
        )
