"""Tensors in a device's channels, as the process that owns them sees them where it can map the device's memory.

:class:`DeviceTensors` finds elements by the few numbers of a :class:`~kvd_client.layouts.TensorMap`: an element's page
and its place in the page are sums of one term for each digit of each axis. It reads and writes entries, which is what
tests, tools and the reference engine need; a device's own kernels read the tensors as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_client.arguments import position
from kvd_client.arrays import Bytes
from kvd_client.errors import InvalidArgument, UnsupportedLayout
from kvd_client.layouts import TensorMap
from kvd_client.spec import PartLayout

Indices = npt.NDArray[np.int64]


class DeviceTensors:
    """The tensors of a part, or of a cache.

    ``buffers``: each channel's bytes, uint8; none where only the device's own runtime can map them: then the tensors
    have addresses, and every look at bytes raises :class:`InvalidArgument`.
    ``table``: int64 (rows, blocks of a row), the block that each is. ``head``: which of the tensors' heads is the
    part's first, where it is in a cache that has more.
    """

    def __init__(
        self, found: TensorMap, buffers: Sequence[Bytes], layout: PartLayout, table: Indices, head: int = 0
    ) -> None:
        self.map = found
        self.buffers = tuple(buffers)
        self.layout = layout
        self.table = table
        self.head = head
        self._bases = np.frombuffer(found.bases, "<i8")
        self._block = next((digit.divisor for digit in found.digits if digit.looked_up), 0)

    @property
    def channels(self) -> int:
        return self.map.channels

    def index(self, layer: int, kv: int = 0) -> int:
        """The number of a layer's K (0) or V (1) tensor among all. Raises :class:`InvalidArgument` for one that does
        not exist."""
        layer, kv = position("layer", layer, self.layout.layers), position("kv", kv, self.map.axes["kv"])
        number, _, _ = self._sums(l=np.array(layer), kv=np.array(kv))
        return int(number)

    def address(self, layer: int, kv: int = 0) -> int:
        """Where the device finds a tensor: the same address in every channel. Raises as :meth:`index`."""
        return int(self._bases[self.index(layer, kv)]) + self.map.address

    def share(self, layer: int, kv: int, channel: int) -> Bytes:
        """A tensor's bytes in a channel, as the device sees them, pages and padding: uint8 (bytes,), a view.

        Raises :class:`InvalidArgument` for what does not exist, or can't be mapped.
        """
        self._check_mapped()
        channel = position("channel", channel, self.channels)
        start = int(self._bases[self.index(layer, kv)])
        return self.buffers[channel][start : start + self.map.tensor_stride]

    def read(self, layer: int) -> Bytes:
        """A layer's entries, token-major: uint8 (rows, capacity, heads, entry_bytes), a copy; raises as
        :meth:`gather`."""
        p = self.layout
        entries = np.arange(p.rows * p.capacity * p.heads, dtype=np.int64)
        found = self.gather(layer, entries)
        return found.reshape(p.rows, p.capacity, p.heads, p.entry_bytes)

    def gather(self, layer: int, entries: Indices) -> Bytes:
        """Entries by their flat numbers in (rows, capacity, heads): uint8 (n, entry_bytes), a copy.

        Raises :class:`InvalidArgument` for entries that do not exist or can't be mapped, :class:`UnsupportedLayout` for
        a codec whose entries have no bytes of their own.
        """
        channel, offset, unit = self._units(layer, entries)
        found = np.empty((channel.size, unit), np.uint8)
        for c in range(len(self.buffers)):
            here = np.flatnonzero(channel == c)
            if here.size:
                found[here] = _units_of(self.buffers[c], unit)[offset[here] // unit]
        return found.reshape(len(entries), self.layout.entry_bytes)

    def scatter(self, layer: int, entries: Indices, values: Bytes) -> None:
        """Put entries in their places; ``values`` as :meth:`gather` returns them. Nothing else changes; raises as
        that, before anything does."""
        channel, offset, unit = self._units(layer, entries)
        given = np.ascontiguousarray(values, np.uint8)
        if given.size != channel.size * unit:
            raise InvalidArgument(f"{given.size} bytes for {len(entries)} entries of {self.layout.entry_bytes} bytes")
        given = given.reshape(channel.size, unit)
        for c in range(len(self.buffers)):
            here = np.flatnonzero(channel == c)
            if here.size:
                _units_of(self.buffers[c], unit)[offset[here] // unit] = given[here]

    # --- addresses --------------------------------------------------------------------------------------------------

    def _check_mapped(self) -> None:
        if not self.buffers:
            raise InvalidArgument(
                f"the device's memory can't be mapped by this process; give its runtime the address, "
                f"{int(self._bases[0]) + self.map.address:#x} for the first tensor"
            )

    def _units(self, layer: int, entries: Indices) -> tuple[Indices, Indices, int]:
        """Channel and byte offset of each contiguous piece of entries, in their order, and the pieces' size."""
        self._check_mapped()
        count = self.layout.rows * self.layout.capacity * self.layout.heads
        entries = np.asarray(entries)
        if entries.dtype.kind not in "iu" and entries.size:
            raise InvalidArgument(f"entries are whole numbers in an array, not {entries.dtype}")
        if entries.size and not 0 <= int(entries.min()) <= int(entries.max()) < count:
            raise InvalidArgument(f"entries {entries.min()} to {entries.max()} where there are 0 to {count - 1}")
        item = self.map.item_bytes
        if not item:
            raise UnsupportedLayout(
                f"single entries of {self.map.codec} have no bytes of their own; read the whole tensor with the "
                "device's library",
                codec=self.map.codec,
            )
        p, axes = self.layout, self.map.axes
        layer = position("layer", layer, p.layers)
        tokens, head = np.divmod(np.asarray(entries, np.int64), p.heads)
        row, token = np.divmod(tokens, p.capacity)
        kv, d = np.arange(axes["kv"]), np.arange(axes["d"])
        tensor, page, inner = self._sums(
            row=row[:, None, None],
            l=np.array(layer),
            kv=kv[:, None],
            h=self.head + head[:, None, None],
            t=token[:, None, None],
            d=d,
        )
        run = self._run()
        shape = (len(token), len(kv), len(d))
        tensor, page, inner = (np.broadcast_to(x, shape)[..., ::run].ravel() for x in (tensor, page, inner))
        channel, slot = self._channel_slot(page)
        offset = self._bases[tensor] + slot * self.map.page_stride + inner * item
        unit = run * item
        common = int(np.gcd.reduce(offset, initial=unit)) if offset.size else unit
        if common < unit:
            offset = (offset[:, None] + np.arange(0, unit, common)).ravel()
            channel = np.repeat(channel, unit // common)
        return channel, offset, common

    def _run(self) -> int:
        """Neighbouring elements of a vector that are neighbours in memory, everywhere."""
        dims = np.arange(self.map.axes["d"])
        page, inner = (np.broadcast_to(x, dims.shape) for x in self._sums(d=dims)[1:])
        breaks = np.flatnonzero((np.diff(page) != 0) | (np.diff(inner) != 1)) + 1
        return int(np.gcd.reduce(breaks, initial=len(inner)))

    def _sums(self, row: Indices | None = None, **positions: npt.NDArray[np.int64]) -> tuple[Indices, Indices, Indices]:
        """Tensor, page and place in the page of elements: axes that are not named are at 0."""
        zero = np.zeros((), np.int64)
        sums = [zero, zero, zero]
        for digit in self.map.digits:
            at = positions.get(digit.axis)
            if at is None:
                continue
            value = at // digit.divisor
            if digit.radix:
                value = value % digit.radix
            if digit.looked_up:
                value = self.table[0 if row is None else row, value]
            for i, weight in enumerate((digit.tensor, digit.page, digit.inner)):
                if weight:
                    sums[i] = sums[i] + value * weight
        return sums[0], sums[1], sums[2]

    def _channel_slot(self, page: Indices) -> tuple[Indices, Indices]:
        if self.map.kind == "round-robin":
            slot, channel = np.divmod(page, self.map.channels)
            return channel, slot
        if self.map.kind == "flat":
            return np.zeros_like(page), page
        shard, slot = np.divmod(page, self.map.shard_pages)
        if self.map.kind == "striped":
            turn, shard = np.divmod(shard, self.map.channels)
            slot = slot + turn * self.map.shard_pages
        return shard, slot


def _units_of(buffer: Bytes, unit: int) -> Bytes:
    """A buffer as rows of ``unit`` bytes, without the rest that is none."""
    whole = len(buffer) // unit * unit
    return buffer[:whole].reshape(-1, unit)
