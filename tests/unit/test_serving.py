"""Serving fetches on the loopback fabric: real bytes from a source's lease into a sink's landing slot."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvd.errors import FabricError, InvalidArgument, KvdError, LeaseExpired, OutOfMemory, RemoteAccessError
from kvd.fabric.base import Endpoint, Fabric, Grant
from kvd.fabric.conformance import Side, memory_bringups
from kvd.fabric.loopback import LoopbackFabric
from kvd.memory.arena import PAGE
from kvd.memory.leases import Lease
from kvd.memory.pool import Pool
from kvd.transfer import serving
from kvd.transfer.events import FetchRequested
from kvd.transfer.serving import STAGING, fill_fetch, serve_fetch
from kvd.types import Lane
from kvd.wire.messages import Fetch, FetchArrived
from kvd_client.spec import PartLayout

SOURCE = PartLayout(layers=3, heads=2, entry_bytes=64, rows=2, capacity=40)
SINK = PartLayout(layers=3, heads=2, entry_bytes=64, rows=2, capacity=50, landing_entries=16, landing_slots=2)
LENGTHS = (40, 25)
LAYER = 2

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass
class Peer:
    """What serving needs of a session."""

    endpoint: Endpoint
    fabric: Fabric


@dataclasses.dataclass
class Setting:
    """A source's pool and lease, and a sink's lease behind a grant at the other end of a connection."""

    pool: Pool
    peer: Peer
    lease: Lease
    sink: Lease
    grant: Grant
    far: Side

    @property
    def cache(self) -> Bytes:
        """The source's layer: (rows, capacity, heads, entry bytes)."""
        start = SOURCE.layer_offset(LAYER)
        layer = np.frombuffer(self.lease.memory[start : start + SOURCE.layer_bytes], np.uint8)
        return layer.reshape(SOURCE.rows, SOURCE.capacity, SOURCE.heads, SOURCE.entry_bytes)

    def landing(self, slot: int) -> Bytes:
        """(rows * heads, landing entries, entry bytes)."""
        start = SINK.landing_offset(slot)
        memory = np.frombuffer(self.sink.memory[start : start + SINK.landing_stride], np.uint8)
        return memory.reshape(SINK.rows * SINK.heads, SINK.landing_entries, SINK.entry_bytes)

    async def serve(self, message: Fetch, token: bytes = b"") -> int:
        with self.lease.holding():
            return await serve_fetch(
                self.pool,
                self.peer,
                message,
                layout=SOURCE,
                lengths=LENGTHS,
                lease=self.lease,
                token=token or self.grant.token,
                sink=21,
            )

    @property
    def arrived(self) -> list[FetchArrived]:
        return [msgspec.msgpack.decode(m, type=FetchArrived) for lane, m in self.far.messages if lane is Lane.URGENT]


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    fabrics = LoopbackFabric(), LoopbackFabric()
    bringups = memory_bringups(())
    near, far = await asyncio.gather(*(f.connect(b) for f, b in zip(fabrics, bringups, strict=True)))
    side = Side(fabrics[1], far)
    Side(fabrics[0], near)
    pools = [Pool(1 << 24, 1 << 20, "never", [fabric]) for fabric in fabrics]
    lease, sink = pools[0].lease(SOURCE.nbytes, "source"), pools[1].lease(SINK.nbytes, "sink")
    rng = np.random.default_rng(5)
    lease.memory[:] = rng.integers(0, 256, SOURCE.nbytes, np.uint8).tobytes()
    sink.memory[:] = bytes([0xEE]) * SINK.nbytes
    grant = fabrics[1].grant(sink.region("loopback"), sink.offset, sink.nbytes)
    yield Setting(pools[0], Peer(near, fabrics[0]), lease, sink, grant, side)
    assert pools[0].leases(STAGING) == []
    assert lease.holds == 0
    for fabric in fabrics:
        await fabric.close()
    for pool in pools:
        pool.close()


def wanted(*counts: int, seed: int = 0) -> tuple[list[list[int]], bytes, bytes]:
    """Random tokens for each (row, head), and as counts and index."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, LENGTHS[group // 2], count).tolist() for group, count in enumerate(counts)]
    flat = [token for row in tokens for token in row]
    return tokens, np.array(counts, np.int32).tobytes(), np.array(flat, np.int32).tobytes()


def fetch(counts: bytes, index: bytes, slot: int = 0, **other: Any) -> Fetch:
    fields: dict[str, Any] = {
        "transfer": 1, "sink": 21, "fetch": 7, "layer": LAYER, "counts": counts, "index": index,
        "offset": SINK.landing_offset(slot), "stride": SINK.landing_row_bytes,
    }  # fmt: skip
    return Fetch(**(fields | other))


def check(setting: Setting, tokens: list[list[int]], slot: int) -> None:
    landing = setting.landing(slot)
    for group, row in enumerate(tokens):
        for place, token in enumerate(row):
            assert (landing[group, place] == setting.cache[group // 2, token, group % 2]).all()
        assert (landing[group, len(row) :] == 0xEE).all()


@pytest.mark.parametrize("inline", [True, False])
async def test_entries_land_at_the_head_of_their_rows(
    setting: Setting, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "INLINE_BYTES", (1 << 20) if inline else 0)
    tokens, counts, index = wanted(16, 3, 0, 9)
    assert await setting.serve(fetch(counts, index, slot=1)) == 28 * 64
    assert setting.arrived == [FetchArrived(21, 7)]
    check(setting, tokens, 1)
    untouched = bytes(setting.sink.memory[: SINK.landing_offset(1)])
    assert untouched == bytes([0xEE]) * len(untouched)


async def test_several_fetches_at_a_time(setting: Setting) -> None:
    first, second = wanted(4, 4, 4, 4, seed=1), wanted(0, 16, 1, 2, seed=2)
    sent = await asyncio.gather(
        setting.serve(fetch(*first[1:], slot=0, fetch=7)), setting.serve(fetch(*second[1:], slot=1, fetch=8))
    )
    assert sent == [16 * 64, 19 * 64]
    assert sorted(arrived.fetch for arrived in setting.arrived) == [7, 8]
    check(setting, first[0], 0)
    check(setting, second[0], 1)


async def test_a_fetch_of_nothing_is_answered(setting: Setting) -> None:
    _, counts, index = wanted(0, 0, 0, 0)
    assert await setting.serve(fetch(counts, index)) == 0
    assert setting.arrived == [FetchArrived(21, 7)]
    assert (setting.landing(0) == 0xEE).all()


@pytest.mark.parametrize(
    "other",
    [
        {"counts": b""},
        {"index": np.array([40] * 10, np.int32).tobytes()},
        {"index": np.array([-1] * 10, np.int32).tobytes()},
        {"stride": 3 * 64 - 1},
        {"stride": 0},
        {"stride": -64},
        {"offset": -1},
        {"offset": (1 << 64) - 1},
        {"stride": (1 << 64) - 1},
        {"offset": (1 << 63) - 64, "stride": 1 << 60},
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_is_touched(setting: Setting, other: dict[str, Any]) -> None:
    _, counts, index = wanted(3, 3, 1, 3)
    with pytest.raises(InvalidArgument):
        await setting.serve(fetch(**({"counts": counts, "index": index} | other)))
    assert setting.arrived == []
    assert bytes(setting.sink.memory) == bytes([0xEE]) * SINK.nbytes


async def test_a_landing_slot_outside_the_grant_is_refused_by_the_fabric(setting: Setting) -> None:
    _, counts, index = wanted(3, 3, 1, 3)
    with pytest.raises(RemoteAccessError):
        await setting.serve(fetch(counts, index, offset=SINK.nbytes - 64))
    assert bytes(setting.sink.memory) == bytes([0xEE]) * SINK.nbytes
    assert await setting.serve(fetch(counts, index)) == 10 * 64


async def test_nothing_lands_in_memory_that_was_given_back(setting: Setting) -> None:
    await setting.far.fabric.revoke(setting.grant)
    _, counts, index = wanted(3, 3, 1, 3)
    with pytest.raises(RemoteAccessError):
        await setting.serve(fetch(counts, index))
    assert setting.arrived == []
    assert bytes(setting.sink.memory) == bytes([0xEE]) * SINK.nbytes


@pytest.mark.parametrize("counts", [(1, 0, 0, 0), (0, 0, 0, 0)])
async def test_a_connection_that_breaks_is_an_error(setting: Setting, counts: tuple[int, ...]) -> None:
    setting.peer.endpoint.close()
    _, many, index = wanted(*counts)
    with pytest.raises(FabricError):
        await setting.serve(fetch(many, index))


async def test_no_room_to_gather_is_an_error_and_leaves_nothing(setting: Setting) -> None:
    rest = []
    with contextlib.suppress(OutOfMemory):
        while True:
            rest.append(setting.pool.lease(PAGE, "others"))
    _, counts, index = wanted(3, 3, 1, 3)
    with pytest.raises(OutOfMemory):
        await setting.serve(fetch(counts, index))
    rest.pop().release()
    assert await setting.serve(fetch(counts, index)) == 10 * 64


async def test_a_released_lease_is_not_read(setting: Setting) -> None:
    setting.lease.release()
    _, counts, index = wanted(1, 0, 0, 0)
    with pytest.raises(LeaseExpired):
        await setting.serve(fetch(counts, index))


# --- filling at the sink ----------------------------------------------------------------------------------------------


def filled(setting: Setting, counts: bytes, index: bytes, slot: int = 0, **other: Any) -> None:
    fields: dict[str, Any] = {"offset": SINK.landing_offset(slot), "stride": SINK.landing_row_bytes}
    request = FetchRequested(1, 7, LAYER, counts, index, **(fields | other))
    fill_fetch(request, layout=SINK, lengths=LENGTHS, lease=setting.sink)


async def test_a_delivered_sink_fills_its_landing_rows_itself(setting: Setting) -> None:
    start = SINK.layer_offset(LAYER)
    mine = np.frombuffer(setting.sink.memory[start : start + SINK.layer_bytes], np.uint8)
    mine.reshape(SINK.rows, SINK.capacity, SINK.heads, SINK.entry_bytes)[:, : SOURCE.capacity] = setting.cache
    tokens, counts, index = wanted(2, 16, 0, 5)
    filled(setting, counts, index, slot=1)
    check(setting, tokens, 1)
    assert (setting.landing(0) == 0xEE).all()
    filled(setting, *wanted(0, 0, 0, 0)[1:], slot=0)
    assert (setting.landing(0) == 0xEE).all()


async def test_what_a_delivered_sink_cannot_fill_is_refused(setting: Setting) -> None:
    with pytest.raises(InvalidArgument):
        filled(setting, *wanted(3, 0, 0)[1:])
    with pytest.raises(InvalidArgument):
        filled(setting, wanted(1, 0, 0, 0)[1], np.array([40], np.int32).tobytes())
    assert (setting.landing(0) == 0xEE).all()
    setting.sink.release()
    with pytest.raises(KvdError):
        filled(setting, *wanted(1, 0, 0, 0)[1:])
