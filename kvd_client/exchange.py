"""Requests to the daemon and their replies over one socket, and waiting for whatever else it says.

There is no thread behind it. Whichever caller waits, for a reply or for masks to change, pumps the socket and the
wake-up eventfd for everybody, and hands the pump on when it has what it came for.

Signal handlers run in the middle of all that, and may raise, or call in here themselves. Locks are therefore taken by
``with``, and given up inside the ``try`` that takes them back: CPython looks for signals behind a call, never between
these. A handler that raises while one waits costs nothing; in the few instructions that hand out what has arrived it
ends the connection, as nobody could say what was lost. A handler that calls while its own thread waits pumps in its
place.
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
from kvd_client.errors import Busy, DaemonLost, DaemonUnreachable, KvdError, error_from_code
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
    """A connected stream to the daemon at ``path``. Any thread may use it; a forked child may not.

    A subclass says what becomes of transfers that end (:meth:`_ended`) and of the end itself (:meth:`_was_lost`).
    Raises :class:`DaemonUnreachable` where nobody answers within ``timeout_s`` seconds.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self._pid = forks.pid
        self._timeout_s = timeout_s = min(seconds("timeout_s", timeout_s), _MAX_WAIT_S)
        self._timeout_ms = int(timeout_s * 1000) + 1
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._cond = threading.Condition(self._lock)
        self._waiters = 0
        self._pumping = threading.Lock()
        """Taken under the lock alone, and only where it is free."""
        self._pumper = 0
        """The thread that pumps, while one does."""
        self._handing_out = False
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
        self._replies[number] = None
        got = None
        try:
            if self._orphans:
                self._release_orphans(deadline)
            self._send(frame, deadline)
            # Nearly always nobody else pumps, and what arrives next is the reply. Going straight for it saves a
            # quarter of a round trip, which is mostly made of instructions that are in no cache.
            with self._lock:
                got = self._replies[number]  # another thread's pump may have brought it already
                if got is None and not self._pumping.locked():
                    self._pump(self._timeout_ms)
                    got = self._replies[number]
            if got is None:
                got = self.wait(functools.partial(self._replies.get, number), deadline)
        finally:
            if got is None:
                self.forget(number)
            else:
                del self._replies[number]
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
        """The reply to a submitted request if it has been read from the socket, which :meth:`wait` and :meth:`look`
        do."""
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
        with self._lock:
            while True:
                result = ready()
                if result is not None:
                    return result
                if self._lost is not None:
                    raise self._lost_error(sent=True)
                left = left_ms = None
                if deadline is not None:
                    left = min(deadline - time.monotonic(), _MAX_WAIT_S)
                    if left <= 0:
                        return None
                    # Rounded up, so that the deadline has come when the poll returns without anything.
                    left_ms = int(left * 1000) + 1
                if not self._pumping.locked():
                    self._pump(left_ms)
                elif self._pumper == threading.get_ident():
                    self._pump_in_handler(left_ms)
                else:
                    self._waiters += 1
                    try:
                        self._cond.wait(left)
                    finally:
                        self._waiters -= 1

    def look(self) -> None:
        """Hand out what has arrived, without waiting for more."""
        with self._lock:
            if not self._pumping.locked():  # else somebody else does
                self._pump(0)

    def nudge(self) -> None:
        """Make every waiting thread call its ``ready`` again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def _pump(self, timeout_ms: int | None) -> None:
        """Wait for the socket or the eventfd once and hand out what arrived. The caller holds the lock, which is given
        up while this waits, and has found the pump free."""
        self._pumper = threading.get_ident()
        with self._pumping:
            try:
                self._take_in(self._poll, timeout_ms)
            finally:
                if self._waiters:
                    self._cond.notify_all()

    def _pump_in_handler(self, timeout_ms: int | None) -> None:
        """The same from a signal handler that has interrupted this very thread's pump."""
        if self._handing_out:
            raise Busy(
                "this signal handler has interrupted its own thread while that read a reply; set a flag in the "
                "handler, and make the call where that is looked at",
                socket=self.path,
                retry_after_s=0.001,
            )
        poll = select.poll()  # the thread's own is in use
        for fd in (self._stream.fileno(), self._wake_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        self._take_in(poll, timeout_ms)
        self.nudge()  # what the thread waits for may have come here

    def _take_in(self, poll: select.poll, timeout_ms: int | None) -> None:
        try:
            self._lock.release()
            found = poll.poll(timeout_ms)
        finally:
            self._lock.acquire()
        arrived: list[tuple[Reply, list[int]]] = []
        cause: str | None = "a signal handler raised an exception while a reply was read"
        self._handing_out = True
        try:
            for fd, _ in found:
                if fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):  # a signal handler has read it
                        os.eventfd_read(fd)
                else:
                    self._stream.receive(arrived)
            self._hand_out(arrived)
            cause = None
        except StreamEnded as end:
            self._hand_out(arrived)
            cause = str(end)
        finally:
            self._handing_out = False
            if cause is not None:
                self._lose(cause)

    def _hand_out(self, arrived: list[tuple[Reply, list[int]]]) -> None:
        for item in arrived:
            number = item[0].id
            if number in self._replies:
                self._replies[number] = item
            else:
                self._unasked(*item)

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
        forks.check(self._pid)

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
