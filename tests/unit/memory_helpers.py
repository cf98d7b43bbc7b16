"""A stand-in for fabrics and a small pool, for tests of memory."""

from typing import Any

from kvd.errors import FabricError
from kvd.fabric.base import Region
from kvd.memory.arena import PAGE
from kvd.memory.pool import Pool

ARENA = 16 * PAGE


class Registrar:
    """Remembers what it was given; refuses once ``room`` regions exist."""

    def __init__(self, name: str = "tcp", room: int = 1000) -> None:
        self.name = name
        self.room = room
        self.regions: list[Region] = []
        self.made = 0

    def register(self, memory: memoryview) -> Region:
        if len(self.regions) >= self.room:
            raise FabricError("no more memory can be pinned; raise LimitMEMLOCK", limit=self.room)
        self.made += 1
        region = Region(self.made, memory)
        self.regions.append(region)
        return region

    def deregister(self, region: Region) -> None:
        self.regions.remove(region)


def small_pool(arenas: int = 4, **more: Any) -> Pool:
    """A pool without huge pages, of this many arenas."""
    return Pool(arenas * ARENA, ARENA, "never", **more)
