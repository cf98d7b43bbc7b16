"""Requests to the daemon and their replies over one socket, and waiting for whatever else it says.

There is no thread behind it. Whichever caller waits, for a reply or for masks to change, pumps the socket and the
wake-up eventfd for everybody, and hands the pump on when it has what it came for.

A Ctrl-C raises KeyboardInterrupt wherever a call has returned, also one that has taken a lock: nobody would know. So
the pump is taken by a store, inside the ``try`` whose end gives it back, and what has been read lies where the next one
to pump finds it. No other thread loses a reply by it, or waits for somebody who has left.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvd_client import forks
from kvd_client.arguments import seconds
from kvd_client.errors import DaemonLost, DaemonUnreachable, InvalidArgument, KvdError, error_from_code
from kvd_client.framing import encode, encode_request
from kvd_client.protocol import CacheOpened, CloseCache, Ended, Failure, Opened, Release, Reply, Request
from kvd_client.stream import Stream, StreamEnded

T = TypeVar("T")

NOTICE_S = 5.0
"""How long a message may take to arrive that explains what shared memory says already."""
_MAX_WAIT_S = 1e6
"""Longest wait in one go: poll and locks refuse what their integers can't hold."""

_live: weakref.WeakSet[Exchange] = weakref.WeakSet()


class Exchange:
    """A connected stream to the daemon at ``path``. Any thread may use it; a forked child and a signal handler may not.

    A subclass says what becomes of transfers that end (:meth:`_ended`) and of the end itself (:meth:`_was_lost`).
    Raises :class:`DaemonUnreachable` where nobody answers within ``timeout_s`` seconds.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self._pid = forks.pid
        self._timeout_s = timeout_s = min(seconds("timeout_s", timeout_s), _MAX_WAIT_S)
        self._timeout_ms = int(timeout_s * 1000) + 1
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pumper = 0
        """The thread that pumps; 0: none."""
        self._gates: list[threading.Lock] = []
        """Locked ones, one for each thread that waits for the pump; unlocked by who gives it back."""
        self._arrived: list[tuple[Reply, list[int]]] = []
        """Read and not handed out yet."""
        self._lost: str | None = None
        self._refusal: Failure | None = None
        self._replies: dict[int, tuple[Reply, list[int]] | None] = {}
        self._orphans: deque[Release | CloseCache] = deque()
        """Give back what was opened for a caller that is gone; sent before the next request."""
        self._owned: list[int] = []
        """Descriptors that live as long as the exchange."""
        self._stream = Stream(path, timeout_s)
        self._close = weakref.finalize(self, _close_all, self._stream, self._owned)
        self._poll = select.poll()
        self._poll.register(self._stream, select.POLLIN)
        self._wake_fd = -1
        _live.add(self)

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether the connection is known to have ended."""
        return self._lost is not None

    def request(self, message: Request) -> tuple[Reply, list[int]]:
        """Send a request and wait for its reply and the reply's descriptors, which become the caller's.

        Raises the error that the daemon answers; :class:`DaemonLost` with ``fields['sent']`` telling whether the
        daemon can have seen the request; :class:`DaemonUnreachable` after the timeout (the request may still be
        carried out; memory that a late reply opens is given back).
        """
        if self._pid != forks.pid:
            self.check()
        number = message.id = next(self._ids)
        frame = encode_request(message)
        deadline = time.monotonic() + self._timeout_s
        me = threading.get_ident()
        self._replies[number] = None
        try:
            if self._orphans:
                self._release_orphans(deadline)
            self._send(frame, deadline)
            # Nearly always nobody else pumps, and what arrives next is the reply. Going straight for it saves a
            # quarter of a round trip, which is mostly made of instructions that are in no cache.
            with self._lock:
                if self._replies[number] is None and not self._pumper:
                    self._pumper = me
            if self._pumper == me:
                self._pump(self._timeout_ms)
            got = self._replies[number]
            if got is None:
                got = self.wait(functools.partial(self._replies.get, number), deadline)
            if got is None:
                raise DaemonUnreachable(
                    f"the daemon at {self.path} did not answer {type(message).__name__} within {self._timeout_s:g} s; "
                    "see its log",
                    socket=self.path,
                    timeout_s=self._timeout_s,
                )
            reply = got[0]
            if type(reply) is Failure:
                raise error_of(reply)
        except BaseException:
            self._let_go(me)
            self.forget(number)
            raise
        del self._replies[number]
        return got

    def submit(self, message: Request) -> int:
        """Send a request and don't wait: :meth:`answer` has its reply under the returned number once it came, until
        :meth:`forget`. Raises as :meth:`request` does while sending."""
        self.check()
        number = message.id = next(self._ids)
        frame = encode_request(message)
        self._replies[number] = None
        try:
            self._send(frame, time.monotonic() + self._timeout_s)
        except BaseException:
            self.forget(number)
            raise
        return number

    def answer(self, number: int) -> Reply | None:
        """The reply to a submitted request if it has been read from the socket, which :meth:`wait` does."""
        got = self._replies.get(number)
        return None if got is None else got[0]

    def forget(self, number: int) -> None:
        """Expect no reply to a submitted request any more. Idempotent."""
        with self._lock:  # a reply that is just being handed out comes either before this or as one not asked for
            late = self._replies.pop(number, None)
        if late is not None:
            self._abandon(*late)

    def _release_orphans(self, deadline: float) -> None:
        while self._orphans:
            message = self._orphans.popleft()
            message.id = next(self._ids)  # nobody waits for this id, so the answer is dropped
            self._send(encode(message), deadline)

    def _send(self, frame: bytes, deadline: float) -> None:
        if self._lost is not None:
            raise self._lost_error(sent=False)
        try:
            self._stream.send(frame, deadline)
        except StreamEnded as end:
            # The daemon may have said why before it closed; whoever pumps will read it.
            with contextlib.suppress(DaemonLost):
                self.wait(lambda: None, min(deadline, time.monotonic() + NOTICE_S))
            self._lose(str(end))
            raise self._lost_error(sent=False) from None

    # --- waiting --------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], T | None], deadline: float | None) -> T | None:
        """Wait until ``ready()`` returns something, and return that; None at the ``deadline`` (monotonic clock).

        ``ready`` is called under a lock, whenever something arrived. Raises what it raises, and
        :class:`DaemonLost` when the connection ends first.
        """
        me = threading.get_ident()
        try:
            while True:
                gate = left = left_ms = None
                with self._lock:
                    result = ready()
                    if result is not None:
                        return result
                    if self._lost is not None:
                        raise self._lost_error(sent=True)
                    if deadline is not None:
                        left = min(deadline - time.monotonic(), _MAX_WAIT_S)
                        if left <= 0:
                            return None
                        # Rounded up, so that the deadline has come when the poll returns without anything.
                        left_ms = int(left * 1000) + 1
                    if self._pumper:
                        gate = threading.Lock()
                        gate.acquire()
                        self._gates.append(gate)
                    else:
                        self._pumper = me
                if gate is None:
                    self._pump(left_ms)
                else:
                    gate.acquire(True, -1 if left is None else left)
        except BaseException:
            self._let_go(me)
            raise

    def nudge(self) -> None:
        """Make every waiting thread call its ``ready`` again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def _pump(self, timeout_ms: int | None) -> None:
        """Wait for the socket or the eventfd once, hand out what arrived, and give the pump back. By the thread that
        has it, without the lock. After an exception :meth:`_let_go` is needed."""
        if not self._arrived:  # else an interrupt came before it could be handed out
            self._receive(timeout_ms)
        with self._lock:
            arrived = self._arrived
            while arrived:
                item = arrived[0]
                number = item[0].id
                if number in self._replies:
                    self._replies[number] = item
                    del arrived[0]
                else:
                    del arrived[0]
                    self._unasked(*item)
            self._pumper = 0
            if self._gates:
                self._open_gates()

    def _receive(self, timeout_ms: int | None) -> None:
        reading = False
        try:
            for fd, _ in self._poll.poll(timeout_ms):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)  # the pump is its only reader, so it is readable still
                else:
                    reading = True
                    self._stream.receive(self._arrived)
                    reading = False
        except StreamEnded as end:
            self._lose(str(end))
        except BaseException:
            if reading:  # nobody knows what was read, and where the next frame begins
                self._lose("an interrupt came while it was being read")
            raise

    def _let_go(self, me: int) -> None:
        """Give the pump back, if this thread has it, and let another one take it."""
        if self._pumper == me:
            self._pumper = 0
        with self._lock:
            self._open_gates()

    def _open_gates(self) -> None:
        """Let all threads that wait for the pump look again. Under the lock."""
        while self._gates:
            gate = self._gates[-1]
            if gate.locked():
                gate.release()
            del self._gates[-1]

    def _unasked(self, reply: Reply, fds: list[int]) -> None:
        if isinstance(reply, Ended):
            self._ended(reply)
        elif isinstance(reply, Failure) and reply.id == 0:
            self._refusal = reply
        else:
            self._abandon(reply, fds)

    def _ended(self, notice: Ended) -> None:
        """A transfer has ended. Called under the lock."""

    def _abandon(self, reply: Reply, fds: list[int]) -> None:
        # A reply that came after its caller had given up; what it opens must not stay open.
        close_fds(fds)
        if isinstance(reply, Opened):
            self._orphans.append(Release(transfer=reply.transfer))
        elif isinstance(reply, CacheOpened):
            self._orphans.append(CloseCache(cache=reply.cache))

    # --- the end --------------------------------------------------------------------------------------------------

    def _lose(self, cause: str) -> None:
        if self._lost is not None:
            return
        self._lost = cause
        # Wakes whoever polls. The descriptors stay open until the last user of this object is gone: closing them
        # here could hit a stranger's descriptor of the same number in another thread.
        self._stream.shutdown()
        self._was_lost()

    def _was_lost(self) -> None:
        """The connection has ended."""

    def _lost_error(self, *, sent: bool) -> DaemonLost:
        cause = self._lost
        if self._refusal is not None:
            cause = f"{self._refusal.code}: {self._refusal.message}"
        return DaemonLost(
            f"the connection to the daemon at {self.path} has ended ({cause}); every transfer opened over it has "
            "ended with it, open them again",
            socket=self.path,
            sent=sent,
        )

    def check(self) -> None:
        """Raise :class:`InvalidArgument` in a forked child."""
        if self._pid != forks.pid:
            raise InvalidArgument(
                f"this client belongs to process {self._pid} and was used in its forked child {forks.pid}; "
                "make a new Client after the fork",
                pid=self._pid,
            )

    def _leave_in_child(self) -> None:
        # A child that kept the socket open would hide its parent's death from the daemon.
        self._lost = "this is a forked child"
        self._close()


def error_of(failure: Failure) -> KvdError:
    """The error that the daemon answers."""
    return error_from_code(failure.code, failure.message, failure.fields)


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _close_all(stream: Stream, owned: list[int]) -> None:
    stream.close()
    while owned:
        os.close(owned.pop())


def _after_fork_in_child() -> None:
    for exchange in list(_live):
        exchange._leave_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
