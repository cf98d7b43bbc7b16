"""Carries out the core's instructions about what lies in leases for the engine: tokens with their masks, metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from kvd.errors import FabricError, KvdError
from kvd.mask import mark, mask_view
from kvd.plan import plan_tokens
from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.mover import as_kvd_error
from kvd.transfer.parties import Record, Session
from kvd.types import Descriptors, Lane, TransferId
from kvd.wire.messages import Arrived, MetadataArrived
from kvd_client.spec import MASK_LOCAL


class Writer:
    """Part of the :class:`~kvd.transfer.engine.Engine`; ``submit`` takes events, ``sent`` counts bytes that a sink has
    confirmed."""

    def __init__(
        self,
        records: Mapping[TransferId, Record],
        sessions: Mapping[ev.SessionId, Session],
        submit: Callable[[ev.Event], None],
        sent: Callable[[int], None],
    ) -> None:
        self._records, self._sessions = records, sessions
        self._submit, self._sent = submit, sent

    def write_tokens(self, instruction: do.WriteTokens) -> None:
        record = self._records.get(instruction.transfer)
        if record is None or record.sink is None:
            self._failed(instruction, "transfer")
            return
        layer, ranges, lease, sink = instruction.layer, instruction.ranges, record.lease, record.sink
        # The sink's mask bytes are copied from the source's own: the fabric then needs no memory but the lease.
        mark(mask_view(lease.memory, record.layout, layer), ranges)
        plan = plan_tokens(record.layout, sink.layout, layer, ranges, source_offset=lease.offset)
        notify = Arrived(sink.sink, layer, list(ranges), instruction.path.value)
        self._write(instruction, record, instruction.lane, plan.data, plan.masks, notify)

    def write_metadata(self, instruction: do.WriteMetadata) -> None:
        record = self._records.get(instruction.transfer)
        if record is None or record.sink is None:
            self._failed(instruction, "transfer")
            return
        layer, mine, theirs = instruction.layer, record.layout, record.sink.layout
        flag = mine.metadata_mask_offset + layer
        record.lease.memory[flag] = MASK_LOCAL
        start, length = layer * mine.metadata_stride, mine.metadata_stride
        base = record.lease.offset
        arrays = [[base + mine.metadata_offset + start, theirs.metadata_offset + start, length]]
        masks = [[base + flag, theirs.metadata_mask_offset + layer, 1]]
        notify = MetadataArrived(record.sink.sink, layer)
        self._write(instruction, record, Lane.BULK, np.array(arrays), np.array(masks), notify)

    def _write(
        self,
        instruction: do.WriteTokens | do.WriteMetadata,
        record: Record,
        lane: Lane,
        data: Descriptors,
        masks: Descriptors,
        notify: Arrived | MetadataArrived,
    ) -> None:
        session = self._sessions.get(instruction.session)
        if session is None or record.sink is None:
            self._failed(instruction, "session")
            return
        lease = record.lease
        region = lease.region(session.fabric.name)
        try:
            operation = session.endpoint.write(
                lane, region, record.sink.grant, data, then=masks, notify=msgspec.msgpack.encode(notify)
            )
        except KvdError as error:
            self._submit(ev.WriteCompleted(instruction.transfer, instruction.write, error))
            return
        lease.hold()
        record.operations.add(operation)

        def done(future: asyncio.Future[None]) -> None:
            record.operations.discard(operation)
            lease.unhold()
            error = as_kvd_error(future.exception())
            if error is None:
                self._sent(instruction.nbytes)
            self._submit(ev.WriteCompleted(instruction.transfer, instruction.write, error))

        operation.done.add_done_callback(done)

    def _failed(self, instruction: do.WriteTokens | do.WriteMetadata, what: str) -> None:
        gone = FabricError(f"the {what} of a write has ended")
        self._submit(ev.WriteCompleted(instruction.transfer, instruction.write, gone))
