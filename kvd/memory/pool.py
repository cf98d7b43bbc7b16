"""The daemon's registered memory: arenas made as they are needed, up to a limit, and leases carved from them.

Everything runs on the event loop's thread, without locks; only the making of an arena (:meth:`Pool.lease_soon`) goes
to a worker thread, since the kernel clears every page of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable

import structlog

from kvd.errors import Busy, InvalidArgument, KvdError, OutOfMemory, ShuttingDown
from kvd.fabric.base import Region
from kvd.memory.arena import PAGE, Arena, HugePages, create_arena
from kvd.memory.extents import Extents
from kvd.memory.holdings import Holdings, Turnover
from kvd.memory.leases import Lease
from kvd.memory.pages import Growth, PageSizes
from kvd.memory.registrar import Registrar
from kvd_client.statuses import MemoryStatus

log = structlog.get_logger("kvd.memory")

MAX_TRIES = 64
"""Arenas that one request has made before it gives up."""


@dataclasses.dataclass(slots=True, eq=False)
class _Slab:
    """An arena with its free space and its regions."""

    arena: Arena
    extents: Extents
    regions: dict[str, Region]


class Pool:
    """At most ``limit`` bytes of registered memory, in arenas of ``arena_bytes``.

    A larger lease gets an arena of its own. Arenas are kept when empty, up to ``keep_bytes`` (half of the limit where
    not given) for those of other than standard size; whatever is empty goes when the limit needs it for another size.
    ``client_limit`` bounds what one owner holds (0: no bound). ``huge_pages`` is ``auto`` (hugetlb pages if free ones
    exist, else transparent ones if the system gives them to shared memory), ``always`` (hugetlb or refuse), ``never``.
    Leases smaller than a huge page come from normal pages, so that a small one does not cost 2 MiB.
    """

    def __init__(
        self,
        limit: int,
        arena_bytes: int = 256 << 20,
        huge_pages: HugePages = "auto",
        fabrics: Iterable[Registrar] = (),
        *,
        client_limit: int = 0,
        keep_bytes: int | None = None,
        make_arena: Callable[..., Arena] = create_arena,
    ) -> None:
        if limit < PAGE or arena_bytes < PAGE:
            raise InvalidArgument(
                f"memory.pool is {limit} and memory.arena {arena_bytes}; both must be at least {PAGE} bytes",
                limit=limit,
                arena_bytes=arena_bytes,
            )
        self.limit = limit // PAGE * PAGE
        self.arena_bytes = min(arena_bytes // PAGE * PAGE, self.limit)
        self.client_limit = client_limit
        self.keep_bytes = self.limit // 2 if keep_bytes is None else keep_bytes
        self._pages = PageSizes(huge_pages, limit=self.limit, arena_bytes=self.arena_bytes)
        self._make_arena = make_arena
        self._fabrics = list(fabrics)
        self._slabs: list[_Slab] = []
        self._holdings: Holdings[Lease] = Holdings()
        self._turnover = Turnover()
        self._generations = itertools.count(1)
        self._growing: asyncio.Task[None] | None = None
        self._promised = 0
        self._closed = False
        self._said: set[str] = set()

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def registered(self) -> int:
        """Bytes of all arenas."""
        return sum(slab.arena.nbytes for slab in self._slabs)

    @property
    def in_use(self) -> int:
        """Bytes that leases take, released ones with a hold included."""
        return sum(lease.mapped_bytes for lease in self._holdings)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest lease that would be granted now, as far as the limit decides."""
        gap = max((slab.extents.largest for slab in self._slabs), default=0)
        return max(gap, self.limit - sum(s.arena.nbytes for s in self._slabs if not s.extents.empty))

    def status(self) -> MemoryStatus:
        return MemoryStatus(
            limit=self.limit,
            registered=self.registered,
            in_use=self.in_use,
            leases=len(self._holdings),
            huge_pages=any(slab.arena.kind == "hugetlb" for slab in self._slabs),
        )

    @property
    def retry_after_s(self) -> float:
        """When the next lease will go back, most likely: what a request that finds no room is told."""
        return self._turnover.retry_after_s

    def leases(self, owner: Hashable) -> list[Lease]:
        """The owner's leases whose memory has not gone back yet, oldest first."""
        return self._holdings.of(owner)

    # --- leases ---------------------------------------------------------------------------------------------------

    def lease(self, nbytes: int, owner: Hashable) -> Lease:
        """Memory for ``owner``, at a page boundary; its content is whatever was there before.

        May make an arena, which takes about 0.3 ms a MiB; :meth:`lease_soon` does that in a worker thread.

        Raises :class:`OutOfMemory` with ``need``, ``free``, ``largest_free`` and ``limit`` when there is no room (and
        ``retry_after_s`` if there will be), :class:`Busy` when the owner's other leases are in the way of
        ``client_limit``, and :class:`InvalidArgument` for a size that is not positive.
        """
        self._check_request(nbytes, owner)
        found = self._carve(nbytes, owner)
        if found is None:
            growth = self._next_arena(nbytes)
            if growth is not None:
                self._adopt(self._make(growth))
            found = self._carve(nbytes, owner, wasteful=True)
        if found is None:
            raise self._no_room(nbytes)
        return found

    async def lease_soon(self, nbytes: int, owner: Hashable, *, limited: bool = True) -> Lease:
        """As :meth:`lease`, without blocking the loop when an arena must be made first. Cancellation leaves nothing
        but that arena, which the pool keeps. Not ``limited``: the owner is the daemon itself, which no limit for
        clients concerns."""
        grown = 0
        while True:
            self._check_request(nbytes, owner, limited=limited)
            found = self._carve(nbytes, owner)
            if found is not None:
                return found
            if self._growing is not None:
                # Whoever asked for that arena hears of its failure; this request finds out for itself.
                with contextlib.suppress(KvdError):
                    await asyncio.shield(self._growing)
                continue
            growth = self._next_arena(nbytes)
            if growth is None:
                found = self._carve(nbytes, owner, wasteful=True)
                if found is None:
                    raise self._no_room(nbytes)
                return found
            # Each try makes an arena with room for this lease; that others are quicker this often means no room.
            grown += 1
            if grown > MAX_TRIES:
                raise self._no_room(nbytes)
            self._growing = asyncio.create_task(self._grow(growth))
            self._growing.add_done_callback(_heard)
            await asyncio.shield(self._growing)

    def prepare(self, nbytes: int) -> None:
        """Make standard arenas until ``nbytes`` (or all that the limit allows) are registered: for the start, before
        anybody waits. Errors as in :meth:`lease`."""
        while self.registered < nbytes:
            growth = self._pages.growth(min(self.arena_bytes, self._room()))
            # In whole pages, the last bit of the limit may be too small for one more.
            size = min(growth.nbytes, self._room() // growth.grain * growth.grain)
            if size <= 0:
                return
            self._adopt(self._make(dataclasses.replace(growth, nbytes=size)))

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release all leases and give all arenas back, held or not; close the fabrics first. Idempotent."""
        self._closed = True
        for lease in self._holdings:
            lease.release()
        for slab in list(self._slabs):
            self._drop(slab)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _check_request(self, nbytes: int, owner: Hashable, *, limited: bool = True) -> None:
        if self._closed:
            raise ShuttingDown("the daemon's memory pool is closed; no new transfer can be opened")
        if nbytes <= 0:
            raise InvalidArgument(f"a lease of {nbytes} bytes makes no sense; give a positive size", need=nbytes)
        if not self.client_limit or not limited:
            return
        held = sum(lease.mapped_bytes for lease in self._holdings.of(owner))
        if nbytes > self.client_limit:
            raise OutOfMemory(
                f"a lease of {nbytes} bytes exceeds what one process may hold, {self.client_limit}; "
                "raise memory.client_limit",
                need=nbytes,
                free=self.client_limit - held,
                limit=self.client_limit,
            )
        if held + nbytes > self.client_limit:
            raise Busy(
                f"this process holds {held} bytes and may hold {self.client_limit}; "
                f"release transfers before opening one of {nbytes}",
                need=nbytes,
                held=held,
                limit=self.client_limit,
                retry_after_s=self.retry_after_s,
            )

    def _carve(self, nbytes: int, owner: Hashable, wasteful: bool = False) -> Lease | None:
        slab = self._choose(nbytes, wasteful)
        if slab is None:
            return None
        offset = slab.extents.take(nbytes)
        assert offset is not None  # _choose has seen the gap
        lease = Lease(
            slab.arena,
            slab.regions,
            offset=offset,
            nbytes=nbytes,
            mapped_bytes=slab.extents.rounded(nbytes),
            generation=next(self._generations),
            owner=owner,
            reclaim=functools.partial(self._reclaim, slab),
        )
        self._holdings.add(lease)
        self._turnover.began(lease)
        return lease

    def _choose(self, nbytes: int, wasteful: bool) -> _Slab | None:
        """The arena with the tightest gap, among those with the widest pages; a huge page for less than one only
        where ``wasteful``."""
        best: tuple[int, int] | None = None
        chosen = None
        for slab in self._slabs:
            if slab.arena.page_size > max(nbytes, PAGE) and self._pages.small(nbytes) and not wasteful:
                continue
            fit = slab.extents.best(nbytes)
            if fit is None:
                continue
            rank = (-slab.arena.page_size, fit)
            if best is None or rank < best:
                best, chosen = rank, slab
        return chosen

    def _next_arena(self, nbytes: int) -> Growth | None:
        """The arena that would make room for ``nbytes``, ``None`` where the limit forbids one. Drops empty arenas
        where they are in the way."""
        need = self._pages.growth(nbytes, small=self._pages.small(nbytes))
        in_use = sum(slab.arena.nbytes for slab in self._slabs if not slab.extents.empty)
        if need.nbytes > self.limit - self._promised - in_use:
            return None
        for slab in sorted(self._slabs, key=lambda slab: slab.arena.nbytes):
            if self._room() >= need.nbytes:
                break
            if slab.extents.empty:
                self._drop(slab)
        # The last one may be shorter than the others, if it still holds the lease.
        size = max(need.nbytes, min(self.arena_bytes, self._room()) // need.grain * need.grain)
        return dataclasses.replace(need, nbytes=size)

    def _room(self) -> int:
        return self.limit - self.registered - self._promised

    def _make(self, growth: Growth) -> Arena:
        transparent = self._pages.transparent(growth)
        return self._make_arena(growth.nbytes, huge_page=growth.huge_page, transparent=transparent)

    async def _grow(self, growth: Growth) -> None:
        self._promised += growth.nbytes
        try:
            arena = await asyncio.to_thread(self._make, growth)
        finally:
            self._promised -= growth.nbytes
            self._growing = None
        if self._closed:
            arena.close()
        else:
            self._adopt(arena)

    def _adopt(self, arena: Arena) -> None:
        regions: dict[str, Region] = {}
        try:
            for fabric in self._fabrics:
                regions[fabric.name] = fabric.register(arena.memory)
        except BaseException:
            self._deregister(regions)
            arena.close()
            raise
        self._slabs.append(_Slab(arena, Extents(arena.nbytes, arena.page_size), regions))
        if arena.kind not in self._said:
            self._said.add(arena.kind)
            log.info(
                "memory.pages",
                kind=arena.kind,
                page_size=arena.page_size,
                hint=self._pages.hint(arena.kind),
            )

    def _reclaim(self, slab: _Slab, lease: Lease) -> None:
        self._holdings.remove(lease)
        self._turnover.ended(lease)
        if slab.arena.closed:
            return
        slab.extents.give(lease.offset, lease.mapped_bytes)
        standard = slab.arena.nbytes <= self.arena_bytes
        if slab.extents.empty and not standard and self.registered > self.keep_bytes:
            self._drop(slab)

    def _drop(self, slab: _Slab) -> None:
        self._slabs.remove(slab)
        self._deregister(slab.regions)
        slab.arena.close()

    def _deregister(self, regions: dict[str, Region]) -> None:
        for fabric in self._fabrics:
            if fabric.name in regions:
                fabric.deregister(regions[fabric.name])

    def _no_room(self, nbytes: int) -> OutOfMemory:
        free = self.limit - self.in_use
        largest = self.largest_free
        advice = (
            "raise memory.pool" if nbytes > self.limit else "release transfers, raise memory.pool, or split the batch"
        )
        hint = {"retry_after_s": self.retry_after_s} if nbytes <= self.limit else {}
        return OutOfMemory(
            f"no room for {nbytes} bytes: the pool's limit is {self.limit}, {free} are free, "
            f"{largest} in one piece; {advice}",
            need=nbytes,
            free=free,
            largest_free=largest,
            limit=self.limit,
            **hint,
        )


def _heard(task: asyncio.Task[None]) -> None:
    """Take note of a task's error, which nobody else may be left to do when the one who asked was cancelled."""
    if not task.cancelled():
        task.exception()
