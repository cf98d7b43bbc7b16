"""A lease: memory that one transfer owns, until nobody can write to it any more."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from kvd.errors import InvalidArgument, LeaseExpired
from kvd.fabric.base import Region

if TYPE_CHECKING:
    from kvd.memory.arena import Arena


class Lifetime(abc.ABC):
    """What every lease has in common: it is *open*, then *released* (nothing new may start), then *free* (the memory
    belongs to its pool or device again).

    Between released and free lie the holds: one for each operation that may still touch the bytes, so that late data
    never lands in memory that somebody else has been given.
    """

    __slots__ = ("_holds", "free", "generation", "nbytes", "owner", "released")

    def __init__(self, *, nbytes: int, generation: int, owner: Hashable) -> None:
        self.nbytes = nbytes
        self.generation = generation
        """Names the lease for as long as its pool or device lives; never used again."""
        self.owner = owner
        self.released = False
        self.free = False
        self._holds = 0

    def __repr__(self) -> str:
        state = "free" if self.free else "released" if self.released else "open"
        kind = type(self).__name__
        return f"<{kind} {self.generation} of {self.owner!r}: {self.nbytes} bytes, {state}, {self._holds} holds>"

    @property
    def holds(self) -> int:
        return self._holds

    def hold(self) -> None:
        """Keep the memory for an operation that begins now. Raises :class:`LeaseExpired` on a released lease."""
        if self.released:
            raise LeaseExpired(
                f"lease {self.generation} has been released; nothing new may read or write it",
                generation=self.generation,
            )
        self._holds += 1

    def unhold(self) -> None:
        """End one hold; the last one on a released lease gives the memory back."""
        if self._holds == 0:
            raise InvalidArgument(
                f"lease {self.generation} is not held; end each hold once", generation=self.generation
            )
        self._holds -= 1
        self._reclaim_if_idle()

    def release(self) -> None:
        """Nothing new starts from here on; the memory goes back when no hold is left. Idempotent."""
        if not self.released:
            self.released = True
            self._reclaim_if_idle()

    @abc.abstractmethod
    def _give_back(self) -> None:
        """Return the memory to where it came from; called once."""

    def _reclaim_if_idle(self) -> None:
        if not self.released or self._holds or self.free:
            return
        self.free = True
        self._give_back()

    def _check_not_free(self) -> None:
        if self.free:
            raise LeaseExpired(
                f"the memory of lease {self.generation} has gone back; open a new transfer",
                generation=self.generation,
            )


class Lease(Lifetime):
    """``nbytes`` bytes at ``offset`` of an arena's memfd; made by :meth:`kvd.memory.pool.Pool.lease`."""

    __slots__ = ("_arena", "_reclaim", "_regions", "mapped_bytes", "offset")

    def __init__(
        self,
        arena: Arena,
        regions: dict[str, Region],
        *,
        offset: int,
        nbytes: int,
        mapped_bytes: int,
        generation: int,
        owner: Hashable,
        reclaim: Callable[[Lease], None],
    ) -> None:
        super().__init__(nbytes=nbytes, generation=generation, owner=owner)
        self.offset = offset
        """Where the lease begins in the memfd and in each fabric's region: a multiple of ``page_size``."""
        self.mapped_bytes = mapped_bytes
        """What it takes of the pool: ``nbytes`` in whole pages."""
        self._arena = arena
        self._regions = regions
        self._reclaim = reclaim

    @property
    def memory(self) -> memoryview:
        """The bytes, writable, format ``B``. Raises :class:`LeaseExpired` once they have gone back to the pool."""
        self._check_not_free()
        return self._arena.memory[self.offset : self.offset + self.nbytes]

    @property
    def fd(self) -> int:
        """The memfd to pass to a process; owned by the arena. Raises :class:`LeaseExpired` as ``memory``."""
        self._check_not_free()
        return self._arena.fd

    @property
    def page_size(self) -> int:
        return self._arena.page_size

    def region(self, fabric: str) -> Region:
        """The arena's region with the named fabric; the lease's bytes begin at ``offset`` in it.

        Raises :class:`LeaseExpired` as ``memory``, and :class:`InvalidArgument` for a fabric that the pool was not
        given.
        """
        self._check_not_free()
        try:
            return self._regions[fabric]
        except KeyError:
            raise InvalidArgument(
                f"the pool's memory is not registered with fabric {fabric!r}, only with {sorted(self._regions)}",
                fabric=fabric,
            ) from None

    @contextlib.contextmanager
    def holding(self) -> Iterator[memoryview]:
        """A hold for the length of a ``with`` block, which gets the memory."""
        self.hold()
        try:
            yield self.memory
        finally:
            self.unhold()

    def _give_back(self) -> None:
        self._reclaim(self)
