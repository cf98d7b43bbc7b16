"""One connection to an inference process: its frames, its requests, its ring.

Everything runs on the event loop's thread. Nothing that the process sends may do more than end its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from kvd.api.access import Peer
from kvd.api.doorbell import Ring
from kvd.api.outbox import Outbox
from kvd.api.service import Answer, ApiLimits, Log, Service
from kvd.errors import Busy, KvdError, ProtocolError, VersionMismatch
from kvd.fabric.pacing import Pacer
from kvd_client.framing import decode_request, encode
from kvd_client.protocol import LENGTH, MAX_FRAME, PROTOCOL_VERSION, Failure, Hello, Reply, Request, Welcome
from kvd_client.ring import (
    EVENT_IDLE,
    EVENT_LAYER_READY,
    EVENT_METADATA_READY,
    RING_EVENTS,
    RING_SLOTS,
    SLOT_FREE,
    WAKE_LAYER_READY,
)

_KINDS = (EVENT_LAYER_READY, EVENT_IDLE, EVENT_METADATA_READY)
_RECEIVE = 1 << 16
_MAX_HELLO = 4096
"""Largest first frame, so that who has not been welcomed can't make the daemon hold more."""

HOLD_S = 0.01
"""Least time for which a client over its rate is not read: event loops count milliseconds."""
RETRY_S = 0.1
"""When to come back to a limit that the process itself keeps."""
EVENTS_A_PASS = 512
"""Events of one ring taken in one turn of the loop; others get theirs in between."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What all sessions of a server share."""

    loop: asyncio.AbstractEventLoop
    service: Service
    log: Log
    limits: ApiLimits
    node: str
    boot: str
    welcomed: Callable[[ClientSession], None]
    """May raise a :class:`KvdError` to refuse."""
    gone: Callable[[ClientSession], None]
    """The session has ended, ``client_lost`` included."""


class ClientSession:
    """A connected process. The service may keep it as a key and use the methods down to :meth:`close`."""

    def __init__(self, context: Context, number: int, sock: socket.socket, peer: Peer) -> None:
        self.id = number
        self.pid, self.uid, self.gid = peer.pid, peer.uid, peer.gid
        self.name = ""
        self.closed = False
        self.welcomed = False
        self._context = context
        self._sock = sock
        self._fd = sock.fileno()
        self._partial = bytearray()
        self._max_frame = _MAX_HELLO
        self._outbox = Outbox(context.loop, sock, context.limits.write_buffer, stuck=self.close, left=self._left)
        self._tasks: set[asyncio.Future[Answer]] = set()
        self._ring: Ring | None = None
        self._free_slots: deque[int] = deque()
        self._wake_flags = WAKE_LAYER_READY
        self._draining = False
        rate = context.limits.requests_s
        self._pacer = Pacer(rate, burst_s=1.0) if rate else None
        self._held: asyncio.TimerHandle | None = None
        """Runs while the client is over its rate and nothing is read from it."""
        self._hello_timer: asyncio.TimerHandle | None = context.loop.call_later(
            context.limits.hello_s, self.close, "no first message in time"
        )
        context.loop.add_reader(self._fd, self._readable)

    def __repr__(self) -> str:
        return f"<client {self.id} {self.name!r} pid {self.pid}>"

    # --- for the service ------------------------------------------------------------------------------------------

    def push(self, reply: Reply) -> None:
        """Send an unasked message; its ``id`` is 0."""
        reply.id = 0
        self._send(reply, ())

    def take_slot(self) -> int:
        """An unused slot of the ring's memory; raises :class:`Busy` when all are in use."""
        if not self._free_slots:
            raise Busy(
                f"this process has {RING_SLOTS} transfers open, the most that one connection can have; release some",
                slots=RING_SLOTS,
                retry_after_s=RETRY_S,
            )
        return self._free_slots.popleft()

    def free_slot(self, index: int) -> None:
        """Give a slot back. The longest unused one is taken next, so that a late look finds it free."""
        if self._ring is not None:
            self._ring.set_slot(index, SLOT_FREE, 0, 0, 0)
            self._free_slots.append(index)

    def set_slot(self, index: int, state: int, generation: int, progress: int, nbytes: int) -> None:
        """Publish a transfer's state (``SLOT_`` constant), visible at once; :meth:`wake` the process if it waits."""
        if self._ring is not None:
            self._ring.set_slot(index, state, generation, progress, nbytes)

    def wake(self) -> None:
        """Make the process look at its slots and masks."""
        if self._ring is not None:
            self._ring.wake_process()

    def set_wake(self, flags: int) -> None:
        """For which events to be woken, a sum of ``WAKE_`` bits; ``WAKE_LAYER_READY`` at first. The process appends
        idle events only while ``WAKE_IDLE`` is set."""
        if flags != self._wake_flags and self._ring is not None:
            self._wake_flags = flags
            self._arm()

    def close(self, reason: str) -> None:
        """End the connection; ``client_lost`` follows in a later turn of the loop. Idempotent."""
        self._close(reason, self._context.log.warning)

    # --- frames in ------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            # A plain receive: descriptors that a process sends along are closed by the kernel, never opened here.
            data = self._sock.recv(_RECEIVE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._left(error.strerror or str(error))
            return
        if not data:
            self._left("")
        elif self._partial:
            self._partial += data
            del self._partial[: self._frames(self._partial)]
        else:
            used = self._frames(data)
            if used < len(data):
                self._partial += data[used:]

    def _left(self, why: str) -> None:
        if self._partial:
            self.close("the connection ended inside a frame")
        else:
            self._close(why or "the process closed the connection", self._context.log.info)

    def _frames(self, data: bytes | bytearray) -> int:
        at, size = 0, len(data)
        while size - at >= LENGTH.size and not self.closed and self._held is None:
            (length,) = LENGTH.unpack_from(data, at)
            if length > self._max_frame:
                message = f"a frame of {length} bytes; the limit is {self._max_frame}"
                self._violate(ProtocolError(message, size=length))
                break
            stop = at + LENGTH.size + length
            if stop > size:
                break
            self._frame(data[at + LENGTH.size : stop])
            at = stop
            self._count(1.0)
        return size if self.closed else at

    def _count(self, requests: float) -> None:
        """Account for what was taken; over the rate, the client's bytes are left in its socket for a while."""
        if self._pacer is None or self.closed:
            return
        now = self._context.loop.time()
        self._pacer.sent(requests, now)
        wait_s = self._pacer.wait(now)
        if wait_s and self._held is None:
            self._context.loop.remove_reader(self._fd)
            self._held = self._context.loop.call_later(max(wait_s, HOLD_S), self._go_on)

    def _go_on(self) -> None:
        self._held = None
        if self.closed:
            return
        del self._partial[: self._frames(self._partial)]
        if self._held is None and not self.closed:
            self._context.loop.add_reader(self._fd, self._readable)
            self._arm()

    def _frame(self, body: bytes | bytearray) -> None:
        try:
            request = decode_request(body)
            if self._ring is None:
                self._greet(request)
                return
            if type(request) is Hello:
                raise ProtocolError("a second greeting on one connection")
            if self._ring.pending():
                self._drain(RING_EVENTS)
        except ProtocolError as error:
            self._violate(error)
            return
        if not self.closed:
            self._handle(request)

    def _violate(self, error: ProtocolError) -> None:
        self._send(Failure(code=error.code, message=error.message, fields=error.fields), ())
        self.close(error.message)

    def refuse(self, error: KvdError, number: int = 0) -> None:
        """Answer with ``error`` and end the connection."""
        self._send(Failure(id=number, code=error.code, message=error.message, fields=error.fields), ())
        self.close(f"{error.code}: {error.message}")

    def _greet(self, request: Request) -> None:
        context = self._context
        if not isinstance(request, Hello):
            raise ProtocolError(f"the first message is {type(request).__name__} where Hello is needed")
        self.name = request.name[:128]
        try:
            if request.version != PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"this client speaks version {request.version} of the local API, the daemon {PROTOCOL_VERSION}; "
                    "install the same version of kvd-transport on both sides",
                    client=request.version,
                    daemon=PROTOCOL_VERSION,
                )
            context.welcomed(self)
            ring = Ring()
        except KvdError as error:
            self.refuse(error, request.id)
            return
        except OSError as error:
            message = f"the daemon has no descriptors or memory for another client ({error.strerror}); try again later"
            self.refuse(Busy(message, errno=error.errno, retry_after_s=1.0), request.id)
            return
        self._ring = ring
        self._max_frame = MAX_FRAME
        self.welcomed = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        self._free_slots.extend(range(RING_SLOTS))
        ring.set_wake(self._wake_flags)
        context.loop.add_reader(ring.wake_daemon_fd, self._rung)
        self._send(
            Welcome(id=request.id, version=PROTOCOL_VERSION, node=context.node, boot=context.boot),
            ring.descriptors,
        )
        if not self.closed:
            ring.drop_memfd()
            context.log.info("client", client=self.id, name=self.name, pid=self.pid, uid=self.uid)

    # --- requests -------------------------------------------------------------------------------------------------

    def _handle(self, request: Request) -> None:
        context = self._context
        number = request.id
        try:
            if len(self._tasks) >= context.limits.requests:
                raise Busy(
                    f"this process has {len(self._tasks)} requests in progress, the most it may have; wait for some",
                    requests=len(self._tasks),
                    retry_after_s=RETRY_S,
                )
            answer = context.service.handle(self, request)
        except Exception as error:
            self._fail(number, request, error)
            return
        if not hasattr(answer, "__await__"):  # a fraction of what isinstance costs on these classes
            self._reply(number, answer)
            return
        task = asyncio.ensure_future(cast(Awaitable[Answer], answer), loop=context.loop)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._handled(number, request, task))

    def _handled(self, number: int, request: Request, task: asyncio.Future[Answer]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if not self.closed:
                self._fail(number, request, KvdError(f"{type(request).__name__} was cancelled inside the daemon"))
        elif (error := task.exception()) is not None:
            self._fail(number, request, error)
        else:
            self._reply(number, task.result())
        if self.closed and not self._tasks:
            self._context.loop.call_soon(self._report_lost)

    def _reply(self, number: int, answer: Answer) -> None:
        if isinstance(answer, tuple):
            reply, fds = answer
            reply.id = number
            self._send(reply, fds)
        else:
            answer.id = number
            self._send(answer, ())

    def _fail(self, number: int, request: Request, error: BaseException) -> None:
        if isinstance(error, KvdError):
            failure = Failure(id=number, code=error.code, message=error.message, fields=error.fields)
        else:
            name = type(request).__name__
            self._context.log.exception("request failed", request=name, client=self.id, exc_info=error)
            message = f"{name} failed inside the daemon ({type(error).__name__}); see its log"
            failure = Failure(id=number, code=KvdError.code, message=message)
        self._send(failure, ())

    # --- frames out -----------------------------------------------------------------------------------------------

    def _send(self, reply: Reply, fds: Sequence[int]) -> None:
        if self.closed:
            return
        try:
            frame = encode(reply)
        except Exception as error:  # too large, or a field of an error that msgpack has no form for
            self._context.log.exception("reply can't be sent", reply=type(reply).__name__, client=self.id)
            frame = encode(Failure(id=reply.id, code=KvdError.code, message=f"the daemon's reply: {error}"))
            fds = ()
        self._outbox.send(frame, fds)

    # --- the ring -------------------------------------------------------------------------------------------------

    def _rung(self) -> None:
        if self._ring is not None:
            self._ring.clear_daemon_wake()
            self.sweep()

    def sweep(self) -> None:
        """Take what is in the ring, a bounded number of events in this turn of the loop."""
        if self._draining or self.closed or self._ring is None or self._held is not None:
            return
        try:
            self._drain(EVENTS_A_PASS)
        except ProtocolError as error:
            self._violate(error)

    def _drain(self, most: int) -> None:
        ring = self._ring
        if ring is None:
            return
        pending = ring.pending()
        if pending:
            if self._wake_flags & WAKE_LAYER_READY:
                ring.set_wake(self._wake_flags & ~WAKE_LAYER_READY)  # awake already; IDLE says what is wanted
            events = ring.take(min(pending, most))
            # Whoever found the ring full did so at a moment when at least half of it shows up in one of these passes.
            if pending >= RING_EVENTS // 2:
                ring.wake_process()
            service = self._context.service
            for kind, layer, transfer, row, start, stop in events:
                if kind not in _KINDS:
                    raise ProtocolError(f"a ring event of the unknown kind {kind}", kind=kind)
                try:
                    service.ring_event(self, kind, layer, transfer, row, start, stop)
                except KvdError as error:
                    raise ProtocolError(f"a ring event: {error.message}", **error.fields) from error
                except Exception:
                    self._context.log.exception("ring event failed", client=self.id, kind=kind, transfer=transfer)
                    self.close("a ring event failed inside the daemon")
                if self.closed:
                    return
        self._arm()

    def _arm(self) -> None:
        # Flags first, then the look at the head: an event between the two is seen by one side or the other.
        if self._ring is None or self._draining or self._held is not None:
            return
        self._ring.set_wake(self._wake_flags)
        if self._ring.pending():
            self._draining = True
            self._context.loop.call_soon(self._drain_more)

    def _drain_more(self) -> None:
        self._draining = False
        self.sweep()

    # --- the end --------------------------------------------------------------------------------------------------

    def _close(self, reason: str, log: Callable[..., Any]) -> None:
        if self.closed:
            return
        self.closed = True
        loop = self._context.loop
        log("client closed", reason=reason, client=self.id, name=self.name, pid=self.pid, uid=self.uid)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._held is not None:
            self._held.cancel()
        loop.remove_reader(self._fd)
        self._outbox.close()
        if self._ring is not None:
            ring, self._ring = self._ring, None
            ring.mark_closed()
            loop.remove_reader(ring.wake_daemon_fd)
            ring.close()
        self._sock.close()
        if self._tasks:
            for task in self._tasks:
                task.cancel()
        else:
            loop.call_soon(self._report_lost)

    def _report_lost(self) -> None:
        if self.welcomed:
            self.welcomed = False
            with contextlib.ExitStack() as after:
                after.callback(self._context.gone, self)
                try:
                    self._context.service.client_lost(self)
                except Exception:
                    self._context.log.exception("client_lost failed", client=self.id)
            return
        self._context.gone(self)
