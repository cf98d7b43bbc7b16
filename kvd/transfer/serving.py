"""Serving fetches: gather a fetch's entries in one pass and send them to the landing slot they are wanted in."""

from __future__ import annotations

import asyncio
from typing import Protocol

import kvd_kernels
import msgspec
import numpy as np

from kvd.errors import InvalidArgument
from kvd.fabric.base import Endpoint, Fabric
from kvd.mask import mask_view
from kvd.memory.leases import Lease
from kvd.memory.pool import Pool
from kvd.transfer.events import FetchRequested
from kvd.transfer.gathering import fetch_entries, landing_descriptors
from kvd.transfer.instructions import KeepFetched
from kvd.types import Lane, TransferId
from kvd.wire.messages import Fetch, FetchArrived
from kvd_client.spec import MASK_LOCAL, PartLayout
from kvd_client.tensors import DeviceTensors

INLINE_BYTES = 256 << 10
"""Gathered on the event loop's thread: handing less to a worker thread takes longer than the gather itself."""

_MAX_OFFSET = 1 << 62

STAGING = "staging"
"""Owner of the leases in which entries are gathered."""


class Peer(Protocol):
    """What serving needs of a session."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def fabric(self) -> Fabric: ...


async def serve_fetch(
    pool: Pool,
    session: Peer,
    message: Fetch,
    *,
    layout: PartLayout,
    lengths: tuple[int, ...],
    lease: Lease,
    token: bytes,
    sink: TransferId,
) -> int:
    """Send what ``message`` asks for from ``lease``; returns the bytes sent, once they are placed.

    Raises :class:`InvalidArgument` for a fetch that names what does not exist, :class:`OutOfMemory` where there is no
    room to gather, and what the fabric says. The caller holds ``lease``.
    """
    entries, counts = fetch_entries(layout, lengths, message.counts, message.index)
    nbytes = len(entries) * layout.entry_bytes
    notify = msgspec.msgpack.encode(FetchArrived(sink, message.fetch))
    if not nbytes:
        await session.endpoint.send(Lane.URGENT, notify).done
        return 0
    if message.stride < int(counts.max()) * layout.entry_bytes:
        raise InvalidArgument(f"a fetch's rows are {message.stride} bytes apart and need more", stride=message.stride)
    if message.offset < 0 or message.offset + len(counts) * message.stride > _MAX_OFFSET:
        raise InvalidArgument(
            f"a fetch's rows begin at {message.offset}, {message.stride} bytes apart, where no memory can be",
            offset=message.offset,
            stride=message.stride,
        )
    staging = await pool.lease_soon(nbytes, STAGING, limited=False)
    try:
        start = layout.layer_offset(message.layer)
        source = np.frombuffer(lease.memory[start : start + layout.layer_bytes], np.uint8)
        gathered = np.frombuffer(staging.memory, np.uint8)
        if nbytes <= INLINE_BYTES:
            kvd_kernels.gather(source, layout.entry_bytes, entries, gathered)
        else:
            await asyncio.to_thread(kvd_kernels.gather, source, layout.entry_bytes, entries, gathered)
        descriptors = landing_descriptors(
            counts, layout.entry_bytes, source=staging.offset, target=message.offset, stride=message.stride
        )
        region = staging.region(session.fabric.name)
        await session.endpoint.write(Lane.URGENT, region, token, descriptors, notify=notify).done
    finally:
        staging.release()
    return nbytes


def keep_fetched(instruction: KeepFetched, *, layout: PartLayout, lease: Lease) -> None:
    """Copy fetched entries from their landing slot to their places in the layer, then mark them."""
    start, offset = layout.layer_offset(instruction.layer), instruction.offset
    slot = np.frombuffer(
        lease.memory[offset : offset + layout.rows * layout.heads * layout.landing_row_bytes], np.uint8
    )
    target = np.frombuffer(lease.memory[start : start + layout.layer_bytes], np.uint8)
    kvd_kernels.gather(slot, layout.entry_bytes, instruction.entries, target, instruction.places)
    mask_view(lease.memory, layout, instruction.layer).reshape(-1)[instruction.places] = MASK_LOCAL


def fill_fetch(
    request: FetchRequested,
    *,
    layout: PartLayout,
    lengths: tuple[int, ...],
    lease: Lease,
    tensors: DeviceTensors | None = None,
) -> None:
    """Take a fetch's entries from the sink's own memory, where everything has arrived meanwhile; raises as above."""
    entries, counts = fetch_entries(layout, lengths, request.counts, request.index)
    if not len(entries):
        return
    if tensors is not None:
        gathered = tensors.gather(request.layer, entries).ravel()
    else:
        start = layout.layer_offset(request.layer)
        source = np.frombuffer(lease.memory[start : start + layout.layer_bytes], np.uint8)
        gathered = np.empty(len(entries) * layout.entry_bytes, np.uint8)
        kvd_kernels.gather(source, layout.entry_bytes, entries, gathered)
    descriptors = landing_descriptors(
        counts, layout.entry_bytes, source=0, target=request.offset, stride=request.stride
    )
    kvd_kernels.copy_runs(gathered, lease.memory, descriptors)
