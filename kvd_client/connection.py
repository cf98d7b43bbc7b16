"""One connection to the node's daemon: handshake, what is opened over it, descriptors, and how all of it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
import weakref
from collections import OrderedDict

from kvd_client.doorbell import Doorbell
from kvd_client.errors import AlreadyExists, Busy, DaemonLost, DaemonUnreachable, ProtocolError
from kvd_client.exchange import NOTICE_S, Exchange, close_fds, error_of
from kvd_client.mapping import Mapping
from kvd_client.parts import OpenedCache, Part, map_channels, raise_if_failed, released_error
from kvd_client.protocol import (
    PROTOCOL_VERSION,
    CacheOpened,
    CloseCache,
    Ended,
    Hello,
    OpenCache,
    Opened,
    OpenSink,
    OpenSource,
    Release,
    Reply,
    Welcome,
)
from kvd_client.ring import RING_SLOTS, SLOT_FAILED

_ENDED_KEPT = 1024


class Connection(Exchange):
    """A connected, welcomed stream to the daemon at ``path``. Any thread may use it; a forked child may not.

    Raises :class:`DaemonUnreachable` where nobody answers within ``timeout_s`` seconds, and what the daemon says
    where it refuses (:class:`PermissionDenied`, :class:`VersionMismatch`, :class:`Busy`).
    """

    def __init__(self, path: str, name: str, timeout_s: float) -> None:
        super().__init__(path, timeout_s)
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._caches: weakref.WeakSet[OpenedCache] = weakref.WeakSet()
        self._early: OrderedDict[int, Ended] = OrderedDict()
        """How transfers ended whose opening is in the hands of another thread still."""
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
                raise error_of(self._refusal) from None
            raise DaemonUnreachable(
                f"what listens at {self.path} ended the connection before its greeting ({self._lost}); "
                "see the daemon's log",
                socket=self.path,
            ) from error
        self._owned.extend(fds)
        if isinstance(reply, Welcome):
            self._check_descriptors(reply, fds)
        if not isinstance(reply, Welcome) or len(fds) != 3:
            raise ProtocolError(f"what listens at {self.path} answers, but not as a kvd daemon", socket=self.path)
        self.node, self.boot = reply.node, reply.boot
        ring_fd, wake_daemon, self._wake_fd = fds
        self._poll.register(self._wake_fd, select.POLLIN)
        try:
            doorbell = Doorbell(ring_fd, wake_daemon)
        except OSError as error:  # a mapping has a descriptor of its own
            message = f"this process can't map its ring at the daemon: {error.strerror}; see ulimit -n and ulimit -v"
            raise Busy(message, socket=self.path, errno=error.errno, retry_after_s=1.0) from None
        os.close(ring_fd)
        self._owned.remove(ring_fd)
        return doorbell

    def _check_descriptors(self, reply: Welcome | Opened | CacheOpened, fds: list[int]) -> None:
        if len(fds) < reply.descriptors:
            raise Busy(
                f"this process has no room for {reply.descriptors} more descriptors of its daemon; close files, or "
                "raise its limit (ulimit -n)",
                socket=self.path,
                descriptors=reply.descriptors,
                retry_after_s=1.0,
            )

    # --- what is opened -------------------------------------------------------------------------------------------

    def open(self, message: OpenSource | OpenSink, nbytes: int) -> Part:
        """Open a transfer whose lease must have ``nbytes`` bytes, and map it."""
        reply, fds = self._request_open(message)
        try:
            try:
                part = self._part(message, nbytes, reply, fds)
            finally:
                close_fds(fds)
            with self._lock:
                self._parts[part.transfer] = part
                part.ended = self._early.pop(part.transfer, None)
            return part
        except BaseException:  # an interrupt, too: nobody else could ever give it back
            if isinstance(reply, Opened):
                self._orphans.append(Release(transfer=reply.transfer))
            raise

    def _part(self, message: OpenSource | OpenSink, nbytes: int, reply: Reply, fds: list[int]) -> Part:
        if not isinstance(reply, Opened) or not reply.descriptors:
            raise ProtocolError(f"the daemon answered an open with {type(reply).__name__}")
        self._check_descriptors(reply, fds)
        if reply.nbytes < nbytes or not 0 <= reply.slot < RING_SLOTS:
            raise ProtocolError(
                f"the daemon opened {reply.nbytes} bytes in slot {reply.slot} for a part of {nbytes} bytes",
                nbytes=reply.nbytes,
                need=nbytes,
            )
        dropped = functools.partial(self._orphans.append, Release(transfer=reply.transfer))
        channels = map_channels(reply.tensors, fds[1:])
        # A source writes every page; a sink may read few, and the kernel maps its faults' neighbours with them.
        source = isinstance(message, OpenSource)
        return Part(reply, Mapping(fds[0], reply.offset, nbytes, dropped, whole=source), channels)

    def drop(self, part: Part) -> None:
        """Give a part back, with the next request, for a caller who never got it."""
        self._orphans.append(Release(transfer=part.transfer))

    def _request_open(self, message: OpenSource | OpenSink) -> tuple[Reply, list[int]]:
        while True:
            try:
                return self.request(message)
            except AlreadyExists:
                # An earlier attempt, which a timeout or a signal handler has ended before its reply came, has been
                # carried out all the same. That reply came before this one, and what it opened goes back with the
                # next request.
                if not self._orphans:
                    raise

    def open_cache(self, message: OpenCache) -> OpenedCache:
        """Open a cache, and map its channels where that is possible."""
        reply, fds = self.request(message)
        try:
            if not isinstance(reply, CacheOpened):
                raise ProtocolError(f"the daemon answered the opening of a cache with {type(reply).__name__}")
            try:
                self._check_descriptors(reply, fds)
                opened = OpenedCache(reply, map_channels(reply.tensors, fds))
            except BaseException:  # an interrupt, too: nobody else could ever give it back
                self._orphans.append(CloseCache(cache=reply.cache))
                raise
        finally:
            close_fds(fds)
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
        try:
            with self._lock:
                if part.released:
                    return
                part.released = True
                self._parts.pop(part.transfer, None)
            # In this order: from the daemon's answer on, the memory may be somebody else's.
            part.retire()
            if self._lost is None:
                self.request(Release(transfer=part.transfer))
        except DaemonLost:
            return
        except BaseException:  # no answer in time, or a signal handler's: what is released twice is released once
            self._orphans.append(Release(transfer=part.transfer))
            raise

    def _ended(self, notice: Ended) -> None:
        part = self._parts.get(notice.transfer)
        if part is not None:
            part.ended = notice
            return
        self._early[notice.transfer] = notice
        if len(self._early) > _ENDED_KEPT:
            self._early.popitem(last=False)

    def check_part(self, part: Part) -> None:
        """Raise what ended the part: its release, the loss of the daemon, or its failure. No system call if alive."""
        self.check()
        if part.released or part.mapping.retired:
            if self._lost is not None and not part.released:
                raise self._lost_error(sent=True)
            raise released_error(part)
        if self.doorbell.closed and self._lost is None:
            self._was_lost()
            with contextlib.suppress(DaemonLost):
                self.wait(lambda: None, time.monotonic() + NOTICE_S)  # reads the reason, then the end
            self._lose("it closed the connection")
        if self._lost is not None:
            raise self._lost_error(sent=True)
        if part.ended is None and self.doorbell.state(part.slot) == SLOT_FAILED:
            # The slot says so without a round trip; the reason is in a message that is on its way.
            self.wait(lambda: part.ended, time.monotonic() + NOTICE_S)
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

    # --- the end --------------------------------------------------------------------------------------------------

    def _was_lost(self) -> None:
        # Where the daemon died, nobody will use the leases' memory again: then its last bytes stay to be read.
        doorbell = getattr(self, "doorbell", None)
        if doorbell is not None and doorbell.closed:
            self._retire()

    def _retire(self) -> None:
        for part in list(self._parts.values()):
            part.retire()
        for cache in list(self._caches):
            cache.retire()

    def close(self) -> None:
        """End the connection; the daemon takes back everything opened over it. Idempotent."""
        for part in list(self._parts.values()):
            part.released = True
        self._retire()
        self._lose("this process closed it")
