"""What memory needs of a fabric."""

from __future__ import annotations

from typing import Protocol

from kvd.fabric.base import Region


class Registrar(Protocol):
    """A :class:`kvd.fabric.base.Fabric`, as far as pools and devices are concerned."""

    @property
    def name(self) -> str: ...

    def register(self, memory: memoryview) -> Region: ...

    def deregister(self, region: Region) -> None: ...
