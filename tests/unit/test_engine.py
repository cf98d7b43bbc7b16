"""The engine between its parties: what it does while a session has ended and has not been reported yet."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.errors import DeadlineExceeded, KvdError, PeerLost
from kvd.fabric.loopback import LoopbackFabric
from kvd.memory.pool import Pool
from kvd.transfer import events as ev
from kvd.transfer.core import Settings, TransferCore
from kvd.transfer.engine import Engine
from kvd.types import Lane, Role
from kvd.wire import messages as wire
from kvd_client.spec import MASK_LOCAL, KVSpec, MetadataSpec, PartLayout, TokenRange, part_layout

SPEC = KVSpec(layers=2, kv_heads=1, entry_bytes=8, dtype="fp16", model="m")
LAYOUT = part_layout(
    SPEC,
    heads=1,
    rows=1,
    capacity=8,
    metadata=(MetadataSpec(name="keys", layer_bytes=4),),
    landing_entries=4,
    landing_slots=1,
)


class EndedSession:
    """A session whose end its owner reports a little later, as those of peers do."""

    node = "p"
    endpoint: Any = None

    def __init__(self, fabric: LoopbackFabric) -> None:
        self.fabric = fabric
        self.error: KvdError | None = None
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    def close(self, error: KvdError) -> None:
        self.error = error


class Log:
    """A process that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def progress(self, transfer: int, bytes_done: int) -> None:
        self.told.append(("progress", bytes_done))

    def ended(self, transfer: int, code: str, message: str, fields: dict[str, Any]) -> None:
        self.told.append(("ended", code))

    def freed(self, transfer: int) -> None:
        self.told.append(("freed",))

    def fetched(self, transfer: int, fetch: int, error: KvdError | None) -> None:
        self.told.append(("fetched", fetch, error.code if error else "OK"))

    def want_windows(self, transfer: int, wanted: bool) -> None:
        self.told.append(("windows", wanted))


class Sink:
    """An engine with one running sink part, number 1."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.pool = Pool(1 << 22, 1 << 20, "never", [self.fabric])
        self.session = EndedSession(self.fabric)
        self.process = Log()
        core = TransferCore("d", "00000000000000aa", Settings())
        self.engine = Engine(core=core, node="d", boot="00000000000000aa", pool=self.pool, connect=self.connect)

    async def connect(self, node: str) -> EndedSession:
        return self.session

    async def open(self, layout: PartLayout = LAYOUT, mode: str = "speculative", deadline_s: float = 60.0) -> None:
        _, _, self.lease = await self.engine.open(
            role=Role.SINK, process=self.process, client=1, request="r", rank=0, ranks=1, head_start=0, spec=SPEC,
            layout=layout, lengths=(6,), peer="p", deadline_s=deadline_s, still_there=lambda: True,
            opened=lambda transfer, generation: None,
        )  # fmt: skip
        while self.engine._tasks:
            await next(iter(self.engine._tasks))
        self.engine.session_message(self.session, wire.Accepted(transfer=1, source=9, mode=mode))

    def arrive(self) -> None:
        """Everything, as the fabric places it."""
        for layer in range(2):
            mask, data = LAYOUT.mask_offset(layer), LAYOUT.layer_offset(layer)
            self.lease.memory[data : data + 48] = bytes(range(48))
            self.lease.memory[mask : mask + 6] = bytes([MASK_LOCAL]) * 6
            self.notify(wire.Arrived(1, layer, [TokenRange(0, 0, 6)]))
            self.lease.memory[LAYOUT.metadata_mask_offset + layer] = MASK_LOCAL
            self.notify(wire.MetadataArrived(1, layer))

    def notify(self, notification: Any) -> None:
        self.engine.fabric_message(self.session, Lane.BULK, msgspec.msgpack.encode(notification))

    def fetch(self, number: int = 7) -> None:
        request = ev.FetchRequested(
            1, number, 1, np.array([2], np.int32).tobytes(), np.array([5, 0], np.int32).tobytes(),
            LAYOUT.landing_offset(0), LAYOUT.landing_row_bytes,
        )  # fmt: skip
        self.engine.submit(request)


async def test_the_deadline_begins_when_the_process_asks() -> None:
    """Memory had to be made first: that time counts, and where it takes all there is, nothing has been begun."""
    sink = Sink()
    with pytest.raises(DeadlineExceeded, match="waited"):
        await sink.open(deadline_s=1e-9)
    assert sink.pool.in_use == 0
    assert not sink.engine.core.parts
    await sink.open(deadline_s=60.0)
    (part,) = sink.engine.core.parts.values()
    assert part.deadline - part.opened < 60.0
    sink.engine.submit(ev.ReleaseRequested(part.transfer))
    await sink.engine.close()


@pytest.mark.parametrize("event", [ev.ReleaseRequested(1), ev.ClientLost(1)])
async def test_a_session_that_has_just_ended_does_not_keep_memory_from_going_back(event: ev.Event) -> None:
    sink = Sink()
    await sink.open()
    sink.fetch()
    sink.session.error = PeerLost("the connection was closed", peer="p")
    sink.engine.submit(event)
    assert sink.process.told[0] == ("windows", True)
    assert ("windows", False) in sink.process.told
    assert [what for what in sink.process.told if what[0] == "fetched"] == [("fetched", 7, sink.process.told[-2][-1])]
    assert sink.process.told[-1] == ("freed",)
    sink.engine.session_lost(sink.session, sink.session.error)
    await sink.engine.close()
    assert sink.lease.free


async def test_a_fetch_on_a_session_that_has_just_ended_is_answered_when_that_is_reported() -> None:
    sink = Sink()
    await sink.open()
    sink.session.error = PeerLost("the connection was closed", peer="p")
    sink.fetch()
    sink.engine.submit(ev.IdleWindow(1, 0))
    assert sink.process.told == [("windows", True)]
    sink.engine.session_lost(sink.session, sink.session.error)
    assert ("fetched", 7, "PEER_LOST") in sink.process.told
    assert sink.process.told[-1] == ("ended", "PEER_LOST")


async def test_a_delivered_sink_fills_a_fetch_with_its_own_bytes_though_its_source_is_gone() -> None:
    sink = Sink()
    await sink.open()
    sink.fetch(7)
    sink.arrive()
    assert sink.process.told[-1] == ("ended", "OK")
    assert bytes(sink.lease.memory[LAYOUT.landing_offset(0) :][:16]) == bytes(16)
    sink.session.error = PeerLost("the connection was closed", peer="p")
    sink.engine.session_lost(sink.session, sink.session.error)
    assert sink.process.told[-1] == ("fetched", 7, "OK")
    expected = bytes(range(40, 48)) + bytes(range(8))
    assert bytes(sink.lease.memory[LAYOUT.landing_offset(0) :][:16]) == expected
    sink.lease.memory[LAYOUT.landing_offset(0) : LAYOUT.landing_offset(0) + 16] = bytes(16)
    sink.fetch(8)
    assert sink.process.told[-1] == ("fetched", 8, "OK")
    assert bytes(sink.lease.memory[LAYOUT.landing_offset(0) :][:16]) == expected


@pytest.mark.parametrize("lie", [wire.Arrived(1, 0, [TokenRange(0, 0, 6)]), wire.MetadataArrived(1, 0)])
async def test_a_peer_that_only_says_that_bytes_have_arrived_ends_the_transfer(lie: Any) -> None:
    """Without this the process would wait for masks that nobody writes, beyond its deadline."""
    sink = Sink()
    await sink.open()
    if isinstance(lie, wire.Arrived):  # all but one
        mask = LAYOUT.mask_offset(0)
        sink.lease.memory[mask : mask + 5] = bytes([MASK_LOCAL]) * 5
    sink.notify(lie)
    assert sink.process.told[-1] == ("ended", "PROTOCOL")
    assert sink.session.error is None


@pytest.mark.parametrize("layer", [-1, 2, 1 << 40])
async def test_news_of_a_layer_that_does_not_exist_is_the_cores_to_refuse(layer: int) -> None:
    sink = Sink()
    await sink.open()
    sink.notify(wire.Arrived(1, layer, [TokenRange(0, 0, 6)]))
    assert sink.session.error is not None
