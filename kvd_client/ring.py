"""The ring that an inference process and its daemon share: where everything lies in it.

One memfd per connection, made and sealed by the daemon. The process appends events, the daemon consumes them; no byte
of it is trusted by the daemon. Layout: a header page, :data:`RING_EVENTS` records, :data:`RING_SLOTS` slots. Numbers
are little-endian and aligned, and each is written with one store.
"""

import struct

RING_MAGIC = 0x6B766431
RING_EVENTS = 4096
"""Capacity of the ring; a power of two."""
RING_SLOTS = 1024
"""Most transfers that one connection can have open."""

RING_HEADER = struct.Struct("<IIII")
"""At offset 0: magic, protocol version, RING_EVENTS, RING_SLOTS."""
RING_HEAD_OFFSET = 64
"""u64, written by the process: number of events ever appended."""
RING_TAIL_OFFSET = 128
"""u64, written by the daemon: number of events ever consumed."""
RING_WAKE_OFFSET = 192
"""u32, written by the daemon: bit 0, wake it for LAYER_READY; bit 1, wake it for IDLE (it has work queued)."""
WAKE_LAYER_READY, WAKE_IDLE = 1, 2
RING_CLOSED_OFFSET = 256
"""u32, set to 1 by the daemon before it ends a connection of its own accord and takes the leases back. Where it is
still 0 after the connection has ended, the daemon died, and nobody will use the leases' memory again."""

RING_EVENTS_OFFSET = 4096
RING_EVENT = struct.Struct("<HHIIIIxxxxxxxxxxxx")
"""kind u16, layer u16, transfer u32, row u32, start u32, stop u32: 32 bytes."""
EVENT_LAYER_READY, EVENT_IDLE, EVENT_METADATA_READY = 1, 2, 3
"""LAYER_READY and METADATA_READY come from sources, IDLE from sinks: attention of ``layer`` begins, and leaves the
network alone for a while. METADATA_READY: the layer's metadata arrays are complete."""
ALL_ROWS = 0xFFFFFFFF
"""``row`` of an event that concerns the range in every row, clipped to the row's length."""

RING_SLOTS_OFFSET = RING_EVENTS_OFFSET + RING_EVENTS * RING_EVENT.size
SLOT = struct.Struct("<IIQQ")
"""state u32 (a SLOT_ constant), generation u32, progress u64 (grows by one whenever masks have changed), bytes u64."""
SLOT_BYTES = 64
SLOT_FREE, SLOT_OPEN, SLOT_DELIVERED, SLOT_FAILED = 0, 1, 2, 3
RING_BYTES = RING_SLOTS_OFFSET + RING_SLOTS * SLOT_BYTES
