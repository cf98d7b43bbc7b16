"""One connection to the node's daemon: handshake, requests and their replies, descriptors, waiting.

There is no thread behind it. Whichever caller waits, for a reply or for masks to change, pumps the socket and the
wake-up eventfd for everybody, and hands the pump on when it has what it came for.
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
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvd_client import forks
from kvd_client.doorbell import Doorbell
from kvd_client.errors import (
    Busy,
    DaemonLost,
    DaemonUnreachable,
    InvalidArgument,
    KvdError,
    LeaseExpired,
    ProtocolError,
    error_from_code,
)
from kvd_client.layouts import TensorMap
from kvd_client.mapping import Mapping
from kvd_client.protocol import (
    PROTOCOL_VERSION,
    CacheOpened,
    CloseCache,
    Ended,
    Failure,
    Hello,
    OpenCache,
    Opened,
    OpenSink,
    OpenSource,
    Release,
    Reply,
    Request,
    Welcome,
    encode,
)
from kvd_client.ring import RING_SLOTS, SLOT_FAILED
from kvd_client.stream import Stream, StreamEnded

T = TypeVar("T")

_ENDED_KEPT = 1024
_MAX_WAIT_S = 1e6
"""Longest wait in one go: poll and locks refuse what their integers can't hold."""
_NOTICE_S = 5.0
"""How long a message may take to arrive that explains what shared memory says already."""

_live: weakref.WeakSet[Connection] = weakref.WeakSet()


class Part:
    """One open transfer, as the connection knows it: its numbers, its memory, and how it ended."""

    __slots__ = (
        "__weakref__",
        "channels",
        "count_blocks",
        "ended",
        "handle",
        "mapping",
        "nbytes",
        "released",
        "slot",
        "tensors",
        "transfer",
    )

    def __init__(self, opened: Opened, mapping: Mapping, channels: Sequence[Mapping] = ()) -> None:
        self.transfer, self.handle, self.slot = opened.transfer, opened.handle, opened.slot
        self.nbytes, self.count_blocks = opened.nbytes, opened.count_blocks
        self.mapping = mapping
        self.tensors = opened.tensors
        self.channels = channels
        """The device's channels, where the part has tensors of its own there and the device can be mapped."""
        self.ended: Ended | None = None
        self.released = False

    def retire(self) -> None:
        """Zero pages instead of the memory, before it may be somebody else's. Idempotent."""
        for mapping in (self.mapping, *self.channels):
            mapping.retire()


class OpenedCache:
    """A cache of this connection."""

    __slots__ = ("__weakref__", "cache", "channels", "tensors")

    def __init__(self, opened: CacheOpened, channels: list[Mapping]) -> None:
        self.cache, self.tensors, self.channels = opened.cache, opened.tensors, channels

    def retire(self) -> None:
        for mapping in self.channels:
            mapping.retire()


class Connection:
    """A connected, welcomed stream to the daemon at ``path``. Any thread may use it; a forked child may not.

    Raises :class:`DaemonUnreachable` where nobody answers within ``timeout_s`` seconds, and what the daemon says
    where it refuses (:class:`PermissionDenied`, :class:`VersionMismatch`, :class:`Busy`).
    """

    def __init__(self, path: str, name: str, timeout_s: float) -> None:
        self.path = path
        self._pid = forks.pid
        self._timeout_s = timeout_s = min(timeout_s, _MAX_WAIT_S)
        self._timeout_ms = int(timeout_s * 1000) + 1
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._cond = threading.Condition(self._lock)
        self._waiters = 0
        self._pumping = threading.Lock()
        self._lost: str | None = None
        self._refusal: Failure | None = None
        self._replies: dict[int, tuple[Reply, list[int]] | None] = {}
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._caches: weakref.WeakSet[OpenedCache] = weakref.WeakSet()
        self._ended: OrderedDict[int, Ended] = OrderedDict()
        self._orphans: deque[Release | CloseCache] = deque()
        self._owned: list[int] = []
        self._stream = Stream(path, timeout_s)
        self._close = weakref.finalize(self, _close_all, self._stream, self._owned)
        self._poll = select.poll()
        self._poll.register(self._stream, select.POLLIN)
        self._wake_fd = -1
        _live.add(self)
        try:
            self.doorbell = self._handshake(name)
        except BaseException:
            self._close()
            raise

    def _handshake(self, name: str) -> Doorbell:
        try:
            reply, fds = self.request(Hello(version=PROTOCOL_VERSION, name=name))
        except DaemonLost as error:
            if self._refusal is not None:
                raise _error_of(self._refusal) from None
            raise DaemonUnreachable(
                f"what listens at {self.path} ended the connection before its greeting ({self._lost}); "
                "see the daemon's log",
                socket=self.path,
            ) from error
        self._owned.extend(fds)
        if not isinstance(reply, Welcome) or len(fds) != 3:
            raise ProtocolError(f"what listens at {self.path} answers, but not as a kvd daemon", socket=self.path)
        self.node, self.boot = reply.node, reply.boot
        ring_fd, wake_daemon, self._wake_fd = fds
        self._poll.register(self._wake_fd, select.POLLIN)
        doorbell = Doorbell(ring_fd, wake_daemon)
        os.close(ring_fd)
        self._owned.remove(ring_fd)
        return doorbell

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
        frame = encode(message)
        deadline = time.monotonic() + self._timeout_s
        self._replies[number] = None
        got = None
        try:
            if self._orphans:
                self._release_orphans(deadline)
            self._send(frame, deadline)
            # Nearly always nobody else pumps, and what arrives next is the reply. Going straight for it saves a
            # quarter of a round trip, which is mostly made of instructions that are in no cache.
            if self._pumping.acquire(False):
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
            raise _error_of(reply)
        return got

    def submit(self, message: Request) -> int:
        """Send a request and don't wait: :meth:`answer` has its reply under the returned number once it came, until
        :meth:`forget`. Raises as :meth:`request` does while sending."""
        self.check()
        number = message.id = next(self._ids)
        frame = encode(message)
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

    def open(self, message: OpenSource | OpenSink, nbytes: int) -> Part:
        """Open a transfer whose lease must have ``nbytes`` bytes, and map it."""
        reply, fds = self.request(message)
        try:
            if not isinstance(reply, Opened) or not fds:
                raise ProtocolError(f"the daemon answered an open with {type(reply).__name__}, {len(fds)} descriptors")
            try:
                if reply.nbytes < nbytes or not 0 <= reply.slot < RING_SLOTS:
                    raise ProtocolError(
                        f"the daemon opened {reply.nbytes} bytes in slot {reply.slot} for a part of {nbytes} bytes",
                        nbytes=reply.nbytes,
                        need=nbytes,
                    )
                dropped = functools.partial(self._orphans.append, Release(transfer=reply.transfer))
                channels = _map_channels(reply.tensors, fds[1:])
                part = Part(reply, Mapping(fds[0], reply.offset, nbytes, dropped), channels)
            except KvdError:
                self._orphans.append(Release(transfer=reply.transfer))
                raise
        finally:
            _close_fds(fds)
        with self._lock:
            self._parts[part.transfer] = part
            part.ended = self._ended.pop(part.transfer, None)
        return part

    def open_cache(self, message: OpenCache) -> OpenedCache:
        """Open a cache, and map its channels where that is possible."""
        reply, fds = self.request(message)
        try:
            if not isinstance(reply, CacheOpened):
                raise ProtocolError(f"the daemon answered the opening of a cache with {type(reply).__name__}")
            try:
                opened = OpenedCache(reply, _map_channels(reply.tensors, fds))
            except KvdError:
                self._orphans.append(CloseCache(cache=reply.cache))
                raise
        finally:
            _close_fds(fds)
        self._caches.add(opened)
        return opened

    def close_cache(self, opened: OpenedCache) -> None:
        """Give a cache's memory back; raises :class:`Busy` while transfers into it are open. Idempotent."""
        self.check()
        if opened not in self._caches:
            return
        opened.retire()  # in this order, as in release
        if self._lost is None:
            with contextlib.suppress(DaemonLost):
                self.request(CloseCache(cache=opened.cache))
        self._caches.discard(opened)

    def release(self, part: Part) -> None:
        """Zero the views of the part's memory, then give the memory back. Idempotent, also on a lost connection."""
        self.check()
        with self._lock:
            if part.released:
                return
            part.released = True
            self._parts.pop(part.transfer, None)
        # In this order: from the daemon's answer on, the memory may be somebody else's.
        part.retire()
        if self._lost is None:
            with contextlib.suppress(DaemonLost):
                self.request(Release(transfer=part.transfer))

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
                self.wait(lambda: None, min(deadline, time.monotonic() + _NOTICE_S))
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
                left = None
                if deadline is not None:
                    left = min(deadline - time.monotonic(), _MAX_WAIT_S)
                    if left <= 0:
                        return None
                if not self._pumping.acquire(False):
                    self._waiters += 1
                    try:
                        self._cond.wait(left)
                    finally:
                        self._waiters -= 1
                    continue
                self._lock.release()
                try:
                    # Rounded up, so that the deadline has come when the poll returns without anything.
                    self._pump(None if left is None else int(left * 1000) + 1)
                finally:
                    self._lock.acquire()

    def nudge(self) -> None:
        """Make every waiting thread call its ``ready`` again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def _pump(self, timeout_ms: int | None) -> None:
        """Wait for the socket or the eventfd once and hand out what arrived. The caller has acquired ``_pumping``
        and does not hold the lock; both have been given up on return."""
        arrived: list[tuple[Reply, list[int]]] = []
        try:
            for fd, _ in self._poll.poll(timeout_ms):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)  # the pump is its only reader, so it is readable still
                else:
                    self._stream.receive(arrived)
        except StreamEnded as end:
            self._lose(str(end))
        finally:
            with self._lock:
                for item in arrived:
                    number = item[0].id
                    if number in self._replies:
                        self._replies[number] = item
                    else:
                        self._unasked(*item)
                self._pumping.release()
                if self._waiters:
                    self._cond.notify_all()

    def _unasked(self, reply: Reply, fds: list[int]) -> None:
        if isinstance(reply, Ended):
            part = self._parts.get(reply.transfer)
            if part is not None:
                part.ended = reply
                return
            # The reply that opens this transfer may be in the hands of another thread still.
            self._ended[reply.transfer] = reply
            if len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)
        elif isinstance(reply, Failure) and reply.id == 0:
            self._refusal = reply
        else:
            self._abandon(reply, fds)

    def _abandon(self, reply: Reply, fds: list[int]) -> None:
        # A reply that came after its caller had given up; what it opens must not stay open.
        _close_fds(fds)
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
        self._retire_if_closed()

    def _retire_if_closed(self) -> None:
        doorbell = getattr(self, "doorbell", None)
        if doorbell is not None and doorbell.closed:
            for part in list(self._parts.values()):
                part.retire()
            for cache in list(self._caches):
                cache.retire()

    def close(self) -> None:
        """End the connection; the daemon takes back everything opened over it. Idempotent."""
        for part in list(self._parts.values()):
            part.released = True
            part.retire()
        for cache in list(self._caches):
            cache.retire()
        self._lose("this process closed it")

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

    def check_part(self, part: Part) -> None:
        """Raise what ended the part: its release, the loss of the daemon, or its failure. No system call if alive."""
        self.check()
        if part.released or part.mapping.retired:
            if self._lost is not None and not part.released:
                raise self._lost_error(sent=True)
            raise LeaseExpired(
                f"transfer {part.transfer} has been released; its memory is gone", transfer=part.transfer
            )
        if self.doorbell.closed and self._lost is None:
            self._retire_if_closed()
            with contextlib.suppress(DaemonLost):
                self.wait(lambda: None, time.monotonic() + _NOTICE_S)  # reads the reason, then the end
            self._lose("it closed the connection")
        if self._lost is not None:
            raise self._lost_error(sent=True)
        if part.ended is None and self.doorbell.state(part.slot) == SLOT_FAILED:
            # The slot says so without a round trip; the reason is in a message that is on its way.
            self.wait(lambda: part.ended, time.monotonic() + _NOTICE_S)
        raise_if_failed(part)

    def ring(self, part: Part, kind: int, layer: int, row: int, start: int, stop: int) -> None:
        """Append an event; waits for room if the ring is full, :class:`Busy` if there is none within the timeout."""
        if self.doorbell.ring(kind, layer, part.transfer, row, start, stop):
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.doorbell.wake()
            if not self.wait(lambda: self.doorbell.has_room() or None, deadline):
                raise Busy(
                    f"the daemon at {self.path} has not taken an event for {self._timeout_s:g} s; see its log",
                    socket=self.path,
                    transfer=part.transfer,
                    retry_after_s=self._timeout_s,
                )
            if self.doorbell.ring(kind, layer, part.transfer, row, start, stop):
                return

    def _leave_in_child(self) -> None:
        # A child that kept the socket open would hide its parent's death from the daemon.
        self._lost = "this is a forked child"
        self._close()


def raise_if_failed(part: Part) -> None:
    """Raise the error with which the part ended, if it did."""
    ended = part.ended
    if ended is not None and ended.code != "OK":
        raise error_from_code(ended.code, ended.message, ended.fields)


def _error_of(failure: Failure) -> KvdError:
    return error_from_code(failure.code, failure.message, failure.fields)


def _map_channels(tensors: TensorMap | None, fds: list[int]) -> list[Mapping]:
    """A mapping for each channel's descriptor."""
    if tensors is None or not fds:
        return []
    return [Mapping(fd, tensors.offset, tensors.nbytes) for fd in fds]


def _close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _close_all(stream: Stream, owned: list[int]) -> None:
    stream.close()
    while owned:
        os.close(owned.pop())


def _after_fork_in_child() -> None:
    for connection in list(_live):
        connection._leave_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
