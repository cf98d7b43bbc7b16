"""An engine's KV cache on a device, which outlives the transfers into it."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from kvd_client.connection import Connection
from kvd_client.errors import InvalidArgument
from kvd_client.forks import OfOneProcess
from kvd_client.layouts import Placement
from kvd_client.parts import OpenedCache
from kvd_client.spec import PartLayout
from kvd_client.tensors import DeviceTensors, Indices


class Cache(OfOneProcess):
    """Blocks of a device's memory; made by :meth:`kvd_client.Client.open_cache`. Any thread may use it."""

    def __init__(
        self, connection: Connection, opened: OpenedCache, layout: PartLayout, placement: Placement, blocks: int
    ) -> None:
        self.placement = placement
        self.blocks = blocks
        self.layout = layout
        """The whole cache as one row of ``blocks`` blocks."""
        self._connection, self._opened = connection, opened
        self._buffers = [np.asarray(mapping) for mapping in opened.channels]

    @property
    def id(self) -> int:
        """The daemon's number of this cache."""
        return self._opened.cache

    @property
    def tensors(self) -> DeviceTensors:
        """All blocks, in their order."""
        return self.of(self.layout, np.arange(self.blocks, dtype=np.int64)[None])

    def of(self, layout: PartLayout, table: Indices, head: int = 0) -> DeviceTensors:
        """The blocks that ``table`` (rows, blocks of a row) names, as tensors of a part; ``head`` is the cache's that
        is the part's first."""
        return DeviceTensors(self._opened.tensors, self._buffers, layout, table, head)

    def check_of(self, connection: Connection) -> None:
        """Raise :class:`InvalidArgument` unless the cache was opened over this connection: another daemon, or the same
        one after a restart, may have another cache of the same number."""
        if connection is not self._connection:
            raise InvalidArgument(
                f"cache {self.id} is another client's, or of a daemon that has restarted; open one with this client",
                cache=self.id,
            )

    def close(self) -> None:
        """Give the memory back; its arrays read zeros from now on. Raises :class:`~kvd_client.errors.Busy` while
        transfers into it are open. Idempotent."""
        self._connection.close_cache(self._opened)

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
