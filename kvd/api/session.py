"""One connection to an inference process: its greeting, its requests, its end.

Everything runs on the event loop's thread. Nothing that the process sends may do more than end its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import select
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from kvd.api.access import Peer
from kvd.api.client_ring import RETRY_S, ClientRing
from kvd.api.doorbell import Event
from kvd.api.inbox import Inbox
from kvd.api.outbox import Outbox
from kvd.api.service import Answer, ApiLimits, Log, Service
from kvd.errors import Busy, KvdError, ProtocolError, VersionMismatch
from kvd_client.framing import decode_request, encode
from kvd_client.protocol import (
    MAX_FRAME,
    PROTOCOL_VERSION,
    Failure,
    Fetch,
    GetStatus,
    Hello,
    Reply,
    Request,
    Welcome,
)
from kvd_client.ring import EVENT_IDLE, EVENT_LAYER_READY, EVENT_METADATA_READY

_KINDS = (EVENT_LAYER_READY, EVENT_IDLE, EVENT_METADATA_READY)
_MAX_HELLO = 4096
"""Largest first frame, so that who has not been welcomed can't make the daemon hold more."""


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
    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    """Requests that failed, by code."""


class ClientSession:
    """A connected process. The service may keep it as a key and use the methods down to :meth:`close`."""

    def __init__(self, context: Context, number: int, sock: socket.socket, peer: Peer) -> None:
        self.id = number
        self.pid, self.uid, self.gid = peer.pid, peer.uid, peer.gid
        self.name = ""
        self.closed = False
        self.welcomed = False
        self.looks_only = False
        """It is one above the limit, and may ask for the status, nothing else."""
        self._context = context
        self._sock = sock
        self._outbox = Outbox(context.loop, sock, context.limits.write_buffer, stuck=self.close, left=self._left)
        self._tasks: set[asyncio.Future[Answer]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        """For :meth:`wait_gone`."""
        self._inbox = Inbox(
            context.loop,
            sock,
            _MAX_HELLO,
            context.limits.requests_s,
            frame=self._frame,
            resumed=lambda: self._ring.arm(),
            violated=self._violate,
            left=self._left,
        )
        self._ring = ClientRing(
            context.loop, take=self._ring_events, held=lambda: self._inbox.held, violated=self._violate
        )
        self._hello_timer: asyncio.TimerHandle | None = context.loop.call_later(
            context.limits.hello_s, self.close, "no first message in time"
        )

    def __repr__(self) -> str:
        return f"<client {self.id} {self.name!r} pid {self.pid}>"

    # --- for the service ------------------------------------------------------------------------------------------

    def push(self, reply: Reply) -> None:
        """Send an unasked message; its ``id`` is 0."""
        reply.id = 0
        self._send(reply, ())

    def take_slot(self) -> int:
        """An unused slot of the ring's memory; raises :class:`Busy` when all are in use."""
        return self._ring.take_slot()

    def free_slot(self, index: int) -> None:
        """Give a slot back."""
        self._ring.free_slot(index)

    def set_slot(self, index: int, state: int, generation: int, progress: int, nbytes: int) -> None:
        """Publish a transfer's state (``SLOT_`` constant), visible at once; :meth:`wake` the process if it waits."""
        self._ring.set_slot(index, state, generation, progress, nbytes)

    def wake(self) -> None:
        """Make the process look at its slots and masks."""
        self._ring.wake()

    def set_wake(self, flags: int) -> None:
        """For which events to be woken, a sum of ``WAKE_`` bits; ``WAKE_LAYER_READY`` at first. The process appends
        idle events only while ``WAKE_IDLE`` is set."""
        self._ring.set_wake(flags)

    def sweep(self) -> None:
        """Look at the ring, whether or not it rang."""
        self._ring.sweep()

    def close(self, reason: str) -> None:
        """End the connection; ``client_lost`` follows in a later turn of the loop. Idempotent."""
        self._close(reason, self._context.log.warning)

    @property
    def leaving(self) -> bool:
        """The process has gone, whether or not that has been noticed, and ``client_lost`` will follow."""
        if self.closed:
            return self.welcomed
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    async def wait_gone(self) -> None:
        """Return once ``client_lost`` has been called for a process that is leaving."""
        if self.welcomed:
            waiting = self._context.loop.create_future()
            self._waiting.append(waiting)
            await waiting

    # --- frames in ------------------------------------------------------------------------------------------------

    def _left(self, why: str) -> None:
        if self._inbox.inside_frame:
            self.close("the connection ended inside a frame")
        else:
            self._close(why or "the process closed the connection", self._context.log.info)

    def _frame(self, body: bytes | bytearray) -> None:
        try:
            request = decode_request(body)
            if not self.welcomed:
                self._greet(request)
                return
            if type(request) is Hello:
                raise ProtocolError("a second greeting on one connection")
            self._ring.catch_up()
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
            descriptors = self._ring.open()
        except KvdError as error:
            self.refuse(error, request.id)
            return
        except OSError as error:
            message = f"the daemon has no descriptors or memory for another client ({error.strerror}); try again later"
            self.refuse(Busy(message, errno=error.errno, retry_after_s=1.0), request.id)
            return
        self._inbox.max_frame = MAX_FRAME
        self.welcomed = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        self._send(
            Welcome(id=request.id, version=PROTOCOL_VERSION, node=context.node, boot=context.boot),
            descriptors,
        )
        if not self.closed:
            self._ring.passed()
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
            if self.looks_only and type(request) is not GetStatus:
                raise Busy("this connection was admitted above the limit, for the status only", retry_after_s=1.0)
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
            # A fetch fails with its transfer, whose end has a line of its own.
            if type(request) is not Fetch:
                self._context.log.warning(
                    "request refused",
                    request=getattr(request, "request", ""),
                    kind=type(request).__name__,
                    code=error.code,
                    reason=error.message,
                    client=self.id,
                    name=self.name,
                    pid=self.pid,
                )
        else:
            name = type(request).__name__
            self._context.log.exception("request failed", request=name, client=self.id, exc_info=error)
            message = f"{name} failed inside the daemon ({type(error).__name__}); see its log"
            failure = Failure(id=number, code=KvdError.code, message=message)
        self._context.failures[failure.code] += 1
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

    def _ring_events(self, events: Sequence[Event]) -> None:
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

    # --- the end --------------------------------------------------------------------------------------------------

    def _close(self, reason: str, log: Callable[..., Any]) -> None:
        if self.closed:
            return
        self.closed = True
        loop = self._context.loop
        log("client closed", reason=reason, client=self.id, name=self.name, pid=self.pid, uid=self.uid)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._inbox.close()
        self._outbox.close()
        self._ring.close()
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
                after.callback(self._tell_waiting)
                try:
                    self._context.service.client_lost(self)
                except Exception:
                    self._context.log.exception("client_lost failed", client=self.id)
            return
        self._context.gone(self)

    def _tell_waiting(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
