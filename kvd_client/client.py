"""The client of the local API: what an inference process opens transfers with."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kvd_client import forks
from kvd_client.arguments import seconds, whole, whole_numbers
from kvd_client.connection import Connection
from kvd_client.errors import DaemonLost, InvalidArgument, ProtocolError
from kvd_client.layouts import Placement
from kvd_client.opening import checked_blocks, head_of, layout_of, mode_of, ranges_of, table_of
from kvd_client.protocol import (
    ExportProfile,
    GetStatus,
    InstallProfile,
    OpenCache,
    OpenSink,
    OpenSource,
    ProfileData,
    Reject,
    Status,
)
from kvd_client.spec import KVSpec, MetadataSpec, TokenRange, part_layout

if TYPE_CHECKING:
    from kvd_client.cache import Cache
    from kvd_client.decode import DecodeTransfer
    from kvd_client.parts import Part
    from kvd_client.prefill import PrefillTransfer

T = TypeVar("T")

SYSTEM_SOCKET = "/run/kvd/kvd.sock"
_PIECE = 512 << 10
"""Bytes of a profile file in one message."""


class Client(forks.OfOneProcess):
    """The node's daemon, as seen by one inference process. Blocking; any thread may use it.

    ``socket_path`` defaults to :func:`default_socket`. ``name`` is what the process calls itself
    in status and logs. ``timeout_s`` bounds each request, not the life of a transfer.

    The connection is made by the first call that needs it, and made anew by the first call after it was lost;
    transfers that were open then have failed with :class:`DaemonLost`. Every call raises :class:`DaemonUnreachable`
    where no daemon answers, :class:`PermissionDenied` or :class:`VersionMismatch` where it refuses this process, and
    :class:`InvalidArgument` in a forked child, which needs a client of its own.
    """

    def __init__(self, socket_path: str | os.PathLike[str] | None = None, name: str = "", timeout_s: float = 10.0):
        try:
            self.socket_path = os.fsdecode(socket_path or default_socket())
            os.fsencode(self.socket_path)
        except (TypeError, ValueError):
            raise InvalidArgument(f"socket_path is {socket_path!r}; it must be a path") from None
        self.name = name or f"process {os.getpid()}"
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._pid = forks.pid
        self._lock = threading.RLock()  # a signal handler may close a client that is just connecting
        self._profile_lock = threading.Lock()  # the pieces of two files must not mix
        self._connection: Connection | None = None
        self._closed = False

    def status(self) -> Status:
        """The daemon at this moment: health, transfers, memory, peers and counters, as ``kvd status`` shows them."""
        reply = self._call(lambda connection: connection.request(GetStatus())[0])
        if not isinstance(reply, Status):
            raise ProtocolError(f"the daemon answered a status request with {type(reply).__name__}")
        return reply

    def reject(self, *, handle: str = "", request: str = "", source: str = "", reason: str = "") -> None:
        """Tell a source that nobody will fetch its transfer, so that its memory is free at once.

        Name it by the source's ``handle``, or by ``request`` and the ``source``'s node id. For transfers that this
        process has opened use their ``abort``. Raises :class:`InvalidArgument` where neither is given.
        """
        if not handle and not (request and source):
            raise InvalidArgument("reject needs the source's handle, or a request id and the source's node id")
        message = Reject(handle=handle, request=request, source=source, reason=reason)
        self._call(lambda connection: connection.request(message))

    def install_profile(self, data: bytes) -> None:
        """Give the daemon a profile file's bytes; it holds for transfers that begin from now on.

        Raises :class:`InvalidProfile` where they are no whole profile, :class:`InvalidArgument` where the daemon can't
        take them; the profile that was in use before stays.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgument(f"a profile file's bytes are needed, got a {type(data).__name__}")

        def upload(connection: Connection) -> None:
            for offset in range(0, max(len(data), 1), _PIECE):
                last = offset + _PIECE >= len(data)
                connection.request(InstallProfile(offset=offset, data=data[offset : offset + _PIECE], last=last))

        with self._profile_lock:
            self._call(upload)

    def export_profile(self, model: str, selector: str = "", *, learnt: bool = False) -> bytes:
        """The profile file of what processes reported to the daemon for a model and selector, as they named them when
        they opened their transfers; with ``learnt`` of what it has learnt by itself, and uses for new transfers. Raises
        :class:`NotFound`, with the names that there are."""

        def download(connection: Connection) -> bytes:
            data = bytearray()
            while True:
                ask = ExportProfile(model=model, selector=selector, offset=len(data), learnt=learnt)
                reply, _ = connection.request(ask)
                if not isinstance(reply, ProfileData) or not reply.data:
                    raise ProtocolError(f"the daemon answered an export with {type(reply).__name__} of no bytes")
                data += reply.data
                if len(data) >= reply.total:
                    return bytes(data)

        with self._profile_lock:
            return self._call(download)

    def prefill(
        self,
        request: str,
        spec: KVSpec,
        lengths: Sequence[int],
        *,
        capacity: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        heads: tuple[int, int] | None = None,
        sink: str = "",
        metadata: Sequence[MetadataSpec] = (),
        mode: str = "",
        selector: str = "",
        prefill_s: float = 0.0,
        deadline_s: float = 0.0,
        placement: Placement | None = None,
        cache: Cache | None = None,
        blocks: Sequence[Sequence[int]] = (),
        cache_head: int | None = None,
        mask: str = "token",
    ) -> PrefillTransfer:
        """Open one rank of a transfer as its source.

        ``lengths`` are the prompt tokens of each row, ``capacity`` (default: the longest row) the tokens for which
        each row has room. ``heads`` is this rank's ``(start, count)`` of the spec's KV heads, default all. ``sink``
        announces the transfer to that node; without it the sink finds this node by itself. ``deadline_s`` is the
        time until the transfer must be delivered, 0 for the daemon's default.

        For selective transfer: ``metadata`` are the arrays that travel ahead of each layer's entries, the same on
        both sides; ``mode`` (one of :data:`kvd_client.protocol.MODES`) decides what is pushed when, unless the sink
        has given one, empty for the daemon's default; ``selector`` is the KV selection algorithm's name, by which a
        profile is found; ``prefill_s`` says how many seconds prefill will take (T_p), 0 for what the profile says.

        ``placement`` puts the tensors on a device of this node, in the device's layout; with ``cache`` they are in an
        engine's cache already (:meth:`open_cache`), row ``r`` in its ``blocks[r]``. A transfer that has only some of
        the cache's heads says in ``cache_head`` which of them is its first; :mod:`kvd_client.parallel` does so.

        ``mask``, the same on both sides, says what is sent, ordered and marked by itself: a token of a layer with all
        its KV heads, or with ``head`` each head's entry of it. By head less is sent before the entries that attention
        wants, and what was fetched is not sent again; there are as many more pieces. ``auto`` is by head where
        selection gains by it (:func:`kvd_client.spec.mask_of`); :attr:`Transfer.mask_by` has what came of it.

        Raises :class:`InvalidArgument`, :class:`AlreadyExists`, :class:`OutOfMemory`, :class:`Busy`,
        :class:`PeerUnknown`, :class:`ShuttingDown`.
        """
        from kvd_client.prefill import PrefillTransfer  # here, since NumPy costs more than all the rest

        lengths, blocks = whole_numbers("lengths", lengths), checked_blocks(placement, cache, blocks)
        layout, start = layout_of(
            spec, lengths, capacity, heads, metadata, placed=placement is not None or cache is not None, mask=mask
        )
        message = OpenSource(
            request=request,
            spec=spec,
            lengths=lengths,
            capacity=layout.capacity,
            rank=rank,
            ranks=ranks,
            head_start=start,
            head_count=layout.kv_heads,
            metadata=layout.metadata,
            mode=mode_of(mode),
            selector=selector,
            prefill_s=prefill_s,
            sink=sink,
            deadline_s=deadline_s,
            placement=placement,
            cache=0 if cache is None else cache.id,
            table=table_of(blocks),
            cache_head=head_of(cache_head),
            mask=layout.mask_by,
        )

        def made(connection: Connection, part: Part) -> PrefillTransfer:
            transfer = PrefillTransfer(connection, part, layout, lengths)
            transfer._place(cache, blocks, cache_head)
            return transfer

        return self._open(message, layout.nbytes, cache, made)

    def decode(
        self,
        request: str,
        spec: KVSpec,
        lengths: Sequence[int],
        *,
        capacity: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        heads: tuple[int, int] | None = None,
        source: str = "",
        handle: str = "",
        held: Sequence[TokenRange | tuple[int, int, int]] = (),
        metadata: Sequence[MetadataSpec] = (),
        mode: str = "",
        selector: str = "",
        landing_entries: int = 0,
        landing_slots: int = 2,
        deadline_s: float = 0.0,
        placement: Placement | None = None,
        cache: Cache | None = None,
        blocks: Sequence[Sequence[int]] = (),
        cache_head: int | None = None,
        unit: str = "",
        pull: bool = False,
        mask: str = "token",
    ) -> DecodeTransfer:
        """Open one rank of a transfer as its sink; arguments as in :meth:`prefill`.

        ``source`` is the node to ask, empty to wait for its announcement. ``handle`` is the source's handle, where
        the request ids of both sides differ. ``held`` lists ``(row, start, stop)`` of tokens that this process has
        already, in every layer: they are never sent, and put in place by ``put_held`` or ``mark_held``.

        ``landing_entries`` is the most KV entries of a (row, head) that one ``select`` or ``begin_fetch`` brings, 0
        where nothing will be selected; ``landing_slots`` how many of them can be under way at a time.

        With ``placement`` or ``cache`` the tensors arrive on a device of this node, in the device's layout
        (:attr:`DecodeTransfer.tensors`). ``unit``, one of :data:`kvd_client.layouts.UNITS`, is what is regrouped and
        sent at once, default a layer; with ``pull`` this node reads what the source has regrouped.
        """
        from kvd_client.decode import DecodeTransfer

        lengths, blocks = whole_numbers("lengths", lengths), checked_blocks(placement, cache, blocks)
        slots = landing_slots if landing_entries else 0
        placed = placement is not None or cache is not None
        layout, start = layout_of(spec, lengths, capacity, heads, metadata, landing_entries, slots, placed, mask)
        ranges = ranges_of(held)
        message = OpenSink(
            request=request,
            spec=spec,
            lengths=lengths,
            capacity=layout.capacity,
            rank=rank,
            ranks=ranks,
            head_start=start,
            head_count=layout.kv_heads,
            metadata=layout.metadata,
            mode=mode_of(mode),
            selector=selector,
            landing_entries=layout.landing_entries,
            landing_slots=layout.landing_slots,
            source=source,
            handle=handle,
            held=ranges,
            deadline_s=deadline_s,
            placement=placement,
            cache=0 if cache is None else cache.id,
            table=table_of(blocks),
            cache_head=head_of(cache_head),
            unit=unit,
            pull=pull,
            mask=layout.mask_by,
        )

        def made(connection: Connection, part: Part) -> DecodeTransfer:
            transfer = DecodeTransfer(connection, part, layout, lengths, ranges, count_blocks=part.count_blocks)
            transfer._place(cache, blocks, cache_head)
            return transfer

        return self._open(message, layout.nbytes, cache, made)

    def open_cache(self, spec: KVSpec, placement: Placement, blocks: int, *, heads: int = 0) -> Cache:
        """Memory for an engine's KV cache on a device of this node: for each layer of ``spec`` tensors of ``blocks``
        blocks, into which transfers go by block table. ``heads``: how many of the spec's this rank has, 0 for all.

        It goes back with :meth:`Cache.close`, or with this client's connection. Raises :class:`InvalidArgument`,
        :class:`NotFound` for a device that the node does not have, :class:`UnsupportedLayout`, and
        :class:`OutOfMemory`, which names the channel.
        """
        from kvd_client.cache import Cache

        if not isinstance(placement, Placement):
            raise InvalidArgument(f"placement is a {type(placement).__name__}; it must be a Placement")
        blocks, heads = whole("blocks", blocks), whole("heads", heads)
        message = OpenCache(spec=spec, placement=placement, blocks=blocks, head_count=heads)
        connection, opened = self._call(lambda connection: (connection, connection.open_cache(message)))
        tokens = blocks * placement.block_tokens
        layout = part_layout(spec, heads=heads or spec.kv_heads, rows=1, capacity=tokens, placed=True)
        return Cache(connection, opened, layout, placement, blocks)

    def _open(
        self, message: OpenSource | OpenSink, nbytes: int, cache: Cache | None, made: Callable[[Connection, Part], T]
    ) -> T:
        def do(connection: Connection) -> T:
            if cache is not None:
                cache.check_of(connection)
            part = connection.open(message, nbytes)
            try:
                return made(connection, part)
            except BaseException:  # an interrupt: its traceback would keep the part open
                connection.drop(part)
                raise

        return self._call(do)

    def _call(self, do: Callable[[Connection], T]) -> T:
        connection = self._connected()
        try:
            return do(connection)
        except DaemonLost as error:
            # The daemon has restarted since the last call and never saw this one.
            if error.fields.get("sent", True):
                raise
        return do(self._connected())

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is not None and not connection.lost and self._pid == forks.pid:
            return connection
        forks.check(self._pid)
        with self._lock:
            if self._closed:
                raise InvalidArgument("this client has been closed; make a new one")
            connection = self._connection
            if connection is None or connection.lost:
                self._connection = connection = Connection(self.socket_path, self.name, self._timeout_s)
                if self._closed:  # by a signal handler, meanwhile
                    self.close()
            return connection

    def close(self) -> None:
        """End the connection, and with it every transfer still open. Idempotent."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def default_socket() -> str:
    """``$KVD_SOCKET``, else the system's daemon's socket, else, where only that one exists, the socket of a daemon
    that this user runs (``kvd serve`` without root)."""
    named = os.environ.get("KVD_SOCKET")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = os.path.join(runtime, "kvd", "kvd.sock") if runtime else f"/tmp/kvd-{os.getuid()}/kvd.sock"
    return own if os.path.exists(own) and not os.path.exists(SYSTEM_SOCKET) else SYSTEM_SOCKET
