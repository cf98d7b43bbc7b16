"""Tensors on this node's devices: memory for parts that open with a placement, and caches that outlive transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from kvd.errors import Busy, InvalidArgument, NotFound, UnsupportedLayout
from kvd.layout.descriptor import Placed
from kvd.memory.device import NpuDevice
from kvd.memory.pool import Pool
from kvd.memory.tensors import TensorMemory, lease_tensors
from kvd.tensors import MAX_BLOCKS, Tensors, block_count, block_table, device_layout, on_device
from kvd.transfer.parties import PartTensors
from kvd_client import protocol as api
from kvd_client.layouts import UNITS, DigitMap, Placement, Target, TensorMap
from kvd_client.spec import KVSpec, PartLayout, part_layout


@dataclasses.dataclass(slots=True, eq=False)
class Cache:
    """Tensors of an engine. Its parts hold the memory, so that it goes back after the last of them."""

    client: int
    spec: KVSpec
    placement: Placement
    heads: int
    blocks: int
    memory: TensorMemory
    parts: int = 0
    """That are open in it. Memory is held for a moment longer, until what was on its way has landed."""


class Placing:
    """One per daemon. ``devices`` by the name that placements have for them."""

    def __init__(self, pool: Pool, devices: Mapping[str, NpuDevice]) -> None:
        self._pool = pool
        self._devices = devices
        self._caches: dict[int, Cache] = {}
        self._next_cache = 1

    async def open(
        self, client: int, request: api.OpenSource | api.OpenSink, layout: PartLayout
    ) -> tuple[PartTensors | None, Target | None]:
        """Memory for the tensors of a part that is about to be opened, and what its source must know of them.

        The caller gives them back where the opening fails. Raises :class:`InvalidArgument`,
        :class:`UnsupportedLayout`, :class:`NotFound` for a cache, :class:`OutOfMemory` with the channel.
        """
        heads: tuple[int, int] | None = None
        if request.cache:
            cache = self._cache(client, request.cache)
            placement, memory, blocks = _cached(cache, request, layout), cache.memory, cache.blocks
            if request.cache_head >= 0:
                heads = cache.heads, request.cache_head
        elif request.placement is not None:
            placement = request.placement.check()
            if request.table or request.cache_head >= 0:
                raise InvalidArgument(
                    "a block table and cache_head need a cache to point into; open one, or leave them out"
                )
            blocks = layout.rows * block_count(layout, placement)
            memory = await self._lease(client, placement, layout, blocks)
        elif (
            request.table
            or request.cache_head >= 0
            or (isinstance(request, api.OpenSink) and (request.unit or request.pull))
        ):
            raise InvalidArgument(
                "table, cache_head, unit and pull go with a placement or a cache; give one, or leave them out"
            )
        else:
            return None, None
        owned = not request.cache
        try:
            table = block_table(layout, placement, blocks, request.table)
            tensors = _tensors(layout, request.lengths, request.head_start, placement, memory, blocks, table, heads)
            target = _target(request, placement, memory, blocks, heads) if isinstance(request, api.OpenSink) else None
            whole = layout if heads is None else msgspec.structs.replace(layout, heads=heads[0])
            found = _describe(whole, placement, memory, blocks)
            if layout.landing_slots and not found.item_bytes:
                raise UnsupportedLayout(
                    f"entries that are fetched one by one can't be put into {found.codec}, whose elements share "
                    "exponents; leave landing_entries out, or choose a plain codec",
                    codec=found.codec,
                )
        except BaseException:
            if owned:
                memory.release()
            raise
        if request.cache:
            memory.hold()
            self._caches[request.cache].parts += 1
        return PartTensors(placement, tensors, memory, owned, found, table, heads[1] if heads else 0), target

    async def open_cache(self, client: int, request: api.OpenCache) -> tuple[api.CacheOpened, list[int]]:
        """Errors as in :meth:`open`."""
        spec, placement = request.spec.check(), request.placement.check()
        heads = request.head_count or spec.kv_heads
        if not 1 <= request.blocks <= MAX_BLOCKS:
            raise InvalidArgument(f"a cache has 1 to {MAX_BLOCKS} blocks, not {request.blocks}", blocks=request.blocks)
        if heads > spec.kv_heads:
            raise InvalidArgument(f"a cache of {heads} heads; the model has {spec.kv_heads}", heads=heads)
        device = self._device(placement)
        channels, alignment = (device.channels, device.alignment) if device is not None else (1, 1)
        if not device_layout(placement, channels=channels, alignment=alignment).table:
            raise UnsupportedLayout(
                f"layout {placement.layout[:64]!r} has no block table, so that a cache in it would hold one sequence; "
                "choose one with blocks",
                layout=placement.layout[:64],
            )
        tokens = request.blocks * placement.block_tokens
        layout = part_layout(spec, heads=heads, rows=1, capacity=tokens, placed=True)
        memory = await self._lease(client, placement, layout, request.blocks)
        number, self._next_cache = self._next_cache, self._next_cache + 1
        self._caches[number] = Cache(client, spec, placement, heads, request.blocks, memory)
        fds = memory.descriptors
        found = _describe(layout, placement, memory, request.blocks)
        return api.CacheOpened(cache=number, tensors=found, descriptors=len(fds)), fds

    def close_cache(self, client: int, number: int) -> None:
        """Idempotent; raises :class:`Busy` while transfers into it are open."""
        cache = self._caches.get(number)
        if cache is None or cache.client != client:
            return
        if cache.parts:
            raise Busy(
                f"{cache.parts} transfers into cache {number} are open; release them first",
                cache=number,
                retry_after_s=0.1,
            )
        del self._caches[number]
        cache.memory.release()

    def left(self, number: int) -> None:
        """A part in a cache is forgotten."""
        cache = self._caches.get(number)
        if cache is not None:
            cache.parts -= 1

    def client_lost(self, client: int) -> None:
        """Its caches go, each after the last transfer into it."""
        for number in [n for n, cache in self._caches.items() if cache.client == client]:
            self._caches.pop(number).memory.release()

    async def _lease(self, client: int, placement: Placement, layout: PartLayout, blocks: int) -> TensorMemory:
        device = self._device(placement)
        table = np.arange(block_count(layout, placement), dtype=np.int64)[None]
        placed = on_device(
            layout,
            [layout.capacity],
            0,
            placement,
            channels=device.channels if device is not None else 1,
            alignment=device.alignment if device is not None else 1,
            blocks=blocks,
            table=table,
        ).rows[0]
        geometry = placed.geometry
        return await lease_tensors(self._pool, device, [geometry.tensor_stride] * geometry.tensors, client)

    def _device(self, placement: Placement) -> NpuDevice | None:
        if not placement.device:
            return None
        device = self._devices.get(placement.device)
        if device is None:
            known = ", ".join(sorted(self._devices)) or "none"
            raise NotFound(
                f"this node has no device {placement.device!r}, only {known}; add [npu.{placement.device}] to its "
                "configuration",
                device=placement.device,
            )
        return device

    def _cache(self, client: int, number: int) -> Cache:
        cache = self._caches.get(number)
        if cache is None or cache.client != client:
            raise NotFound(f"cache {number} is not open on this connection; open one", cache=number)
        return cache


def _cached(cache: Cache, request: api.OpenSource | api.OpenSink, layout: PartLayout) -> Placement:
    """The placement of a part in a cache; raises :class:`UnsupportedLayout` where it does not fit."""
    mine = {"layers": layout.layers, "heads": layout.heads, "entry_bytes": layout.entry_bytes}
    theirs = {"layers": cache.spec.layers, "heads": cache.heads, "entry_bytes": cache.spec.entry_bytes}
    if request.cache_head >= 0:  # some of them
        theirs["heads"] = min(layout.heads, cache.heads - request.cache_head)
    differ = {name: [mine[name], theirs[name]] for name in mine if mine[name] != theirs[name]}
    if differ:
        listed = ", ".join(f"{name} {one} and {other}" for name, (one, other) in differ.items())
        raise UnsupportedLayout(f"the transfer and the cache differ in {listed}; open a cache that fits", differ=differ)
    if request.placement is not None and request.placement != cache.placement:
        raise InvalidArgument("a transfer into a cache has the cache's placement; leave its own out")
    if not request.table:
        raise InvalidArgument("a transfer into a cache needs a block table: which of its blocks it may use")
    return cache.placement


def _tensors(
    layout: PartLayout,
    lengths: list[int],
    head_start: int,
    placement: Placement,
    memory: TensorMemory,
    blocks: int,
    table: npt.NDArray[np.int64],
    heads: tuple[int, int] | None = None,
) -> Tensors:
    return on_device(
        layout,
        lengths,
        head_start,
        placement,
        channels=memory.channels,
        alignment=memory.alignment,
        blocks=blocks,
        table=table,
        bases=memory.bases,
        heads=heads,
    )


def _target(
    request: api.OpenSink, placement: Placement, memory: TensorMemory, blocks: int, heads: tuple[int, int] | None
) -> Target:
    if request.unit and request.unit not in UNITS:
        unit = request.unit[:100]
        raise InvalidArgument(f"there is no unit {unit!r}; choose one of {', '.join(UNITS)}", unit=unit)
    return Target(
        placement=placement,
        channels=memory.channels,
        alignment=memory.alignment,
        blocks=blocks,
        table=request.table,
        unit=request.unit,
        pull=request.pull,
        heads=heads[0] if heads else 0,
        first_head=heads[1] if heads else 0,
        bases=memory.bases.astype("<i8").tobytes(),
    )


def _describe(layout: PartLayout, placement: Placement, memory: TensorMemory, blocks: int) -> TensorMap:
    table = np.arange(block_count(layout, placement), dtype=np.int64)[None]
    placed = _tensors(layout, [layout.capacity], 0, placement, memory, blocks, table).rows[0]
    return tensor_map(placed, memory, blocks)


def tensor_map(placed: Placed, memory: TensorMemory, blocks: int) -> TensorMap:
    """A :class:`Placed` in the form that processes get."""
    geometry, layout = placed.geometry, placed.layout
    digits = []
    for axis, of_axis in layout.axes:
        for position, digit in enumerate(of_axis):
            weight = geometry.weight[digit.name]
            digits.append(
                DigitMap(
                    axis=axis,
                    divisor=geometry.below[digit.name],
                    radix=0 if position == 0 else geometry.radix[digit.name],
                    tensor=weight if digit.name in layout.tensors else 0,
                    page=weight if digit.name in layout.pages else 0,
                    inner=weight if digit.name in layout.inner else 0,
                    looked_up=digit.name == layout.table,
                )
            )
    return TensorMap(
        axes={axis: stop - start for axis, (start, stop) in placed.held.items()},
        digits=digits,
        codec=layout.codec,
        item_bytes=0 if geometry.codec.is_block else geometry.codec.item_bytes,
        page_elements=geometry.page_elements,
        pages=geometry.pages,
        page_stride=geometry.page_stride,
        tensor_stride=geometry.tensor_stride,
        kind="striped" if geometry.turn_pages > 1 else layout.placement.kind,
        channels=geometry.channels,
        shard_pages=geometry.turn_pages if geometry.turn_pages > 1 else geometry.shard_pages,
        blocks=blocks,
        bases=memory.bases.astype("<i8").tobytes(),
        address=memory.origin,
        offset=memory.offset,
        nbytes=memory.nbytes,
    )
