"""A part's tensors as layouts: block tables, sizes, and plans that move from layer to layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgument, KvdError, UnsupportedLayout
from kvd.layout import kept
from kvd.layout.execute import regroup
from kvd.layout.kept import Plans
from kvd.layout.steps import RegroupPlan
from kvd.tensors import Route, Tensors, block_table, in_lease, on_device
from kvd_client.layouts import Placement
from kvd_client.spec import PartLayout, TokenRange

TILES = Placement(layout="tenstorrent")
SHARDS = """
name = "shards"
order = "l kv || B h T D | F G r c"
axes = { t = "B:* T:1 F:2 r:16", d = "D:* G:2 c:16" }
codec = "bf16"
padding = true
table = "B"
placement = { kind = "round-robin", channels = CHANNELS, alignment = 64, shard_pages = 3 }
"""
LAYOUT = PartLayout(layers=5, heads=2, entry_bytes=128, rows=2, capacity=80)
LENGTHS = (80, 33)


def device(
    placement: Placement = TILES, layout: PartLayout = LAYOUT, bases: Any = None, channels: int = 7, **other: Any
) -> Tensors:
    blocks = other.get("blocks", 9)
    table = other.get("table", np.array([[4, 1, 7], [0, 8, 2]]))
    return on_device(
        layout, LENGTHS, 0, placement, channels=channels, alignment=64, blocks=blocks, table=table, bases=bases
    )


def same(one: RegroupPlan, other: RegroupPlan, sources: list[Any]) -> None:
    assert np.array_equal(one.requests, other.requests)
    staged = [np.zeros(plan.staging_bytes, np.uint8) for plan in (one, other)]
    for plan, staging in zip((one, other), staged, strict=True):
        regroup(plan, sources, staging)
    assert np.array_equal(*staged)


@pytest.mark.parametrize("back", [False, True], ids=["into tiles", "out of tiles"])
@pytest.mark.parametrize("spread", ["even", "layers", "anyhow"])
def test_a_plan_that_was_moved_is_the_one_that_would_be_made(spread: str, back: bool) -> None:
    bases = {
        "even": np.arange(10) * 10240,
        "layers": (np.array([7, 0, 3, 9, 5])[:, None] * 20480 + np.array([0, 10240])).ravel(),
        "anyhow": np.random.default_rng(1).permutation(20)[:10] * 10240,
    }[spread].astype(np.int64)
    lease, tiles = in_lease(LAYOUT, LENGTHS, 0, TILES), device(bases=bases)
    one, other = (tiles, lease) if back else (lease, tiles)
    rng = np.random.default_rng(2)
    nbytes, count = (300_000, 7) if back else (LAYOUT.nbytes, 1)
    sources = [rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(count)]
    plans = Plans()
    route = Route(one, other, plans=plans)
    asked = 0
    for layers in ([2], [0], [4], [1], [3], [1, 2], [0, 1], [3, 4], [0, 1, 2, 3, 4]):
        for ranges in ([TokenRange(0, 0, 80), TokenRange(1, 32, 33)], [TokenRange(0, 32, 64)]):
            moved, made = (
                r.plan([(layer, ranges) for layer in layers]) for r in (route, Route(one, other, plans=Plans()))
            )
            assert len(moved) == len(made) == len({r.row for r in ranges})
            asked += len(moved)
            for a, b in zip(moved, made, strict=True):
                same(a, b, sources)
    # nine, and once more those of which a lower layer came second
    assert plans.made == 15 if spread == "even" else 15 <= plans.made <= asked


def test_a_plan_serves_transfers_of_the_same_form() -> None:
    """Elsewhere in the device's memory, or of other blocks, lengths or heads: the former is moved, the latter not."""
    plans, layers = Plans(), [(1, [TokenRange(0, 0, 80)])]
    lease = in_lease(LAYOUT, LENGTHS, 0, TILES)
    memory = np.random.default_rng(4).integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)
    for base, made in ((40960, 1), (81920, 1), (0, 1)):
        tiles = device(bases=base + np.arange(10) * 10240)
        (plan,) = Route(lease, tiles, plans=plans).plan(layers)
        (wanted,) = Route(lease, tiles, plans=Plans()).plan(layers)
        same(plan, wanted, [memory])
        assert plans.made == made
    for other in (device(table=np.array([[4, 1, 6], [0, 8, 2]])), device(channels=8), device(blocks=10)):
        Route(lease, other, plans=plans).plan(layers)
        made += 1
        assert plans.made == made
    Route(lease, tiles, (0, 1), plans).plan(layers)
    assert plans.made == made + 1


def test_what_fits_once_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the device's memory; what doesn't fit is refused each time."""
    looks: list[Any] = []
    properly = kept.check_convertible
    monkeypatch.setattr(kept, "check_convertible", lambda *ends: (looks.append(ends), properly(*ends)))
    plans, lease = Plans(), in_lease(LAYOUT, LENGTHS, 0, TILES)
    for base in (0, 40960):
        for one, other in zip(lease.rows, device(bases=base + np.arange(10) * 10240).rows, strict=True):
            plans.check(one, other)
    assert len(looks) == len(LENGTHS)
    half = dataclasses.replace(lease.rows[0], held={**lease.rows[0].held, "t": (0, 40)})  # ends inside a tile
    for _ in range(2):
        with pytest.raises(UnsupportedLayout):
            plans.check(half, device().rows[0])
    assert len(looks) == len(LENGTHS) + 2
    # how the elements convert is not asked where the core doesn't know what the source has
    blocks = device(Placement(layout="tenstorrent", codec="bfp8_b")).rows[0]
    for ends in ((blocks, lease.rows[0]), (lease.rows[0], blocks)):
        plans.check(*ends, pages_only=True)


def test_plans_that_were_not_used_for_long_go() -> None:
    lease, tiles = in_lease(LAYOUT, LENGTHS, 0, TILES), device()
    plans = Plans()
    route = Route(lease, tiles, plans=plans)
    for number, start in enumerate((0, 32, 0, 64, 0, 32, 64)):
        route.plan([(0, [TokenRange(0, start, min(start + 32, 80))])])
        plans.limit = plans.limit if number else 5 * plans.nbytes // 2  # two have room
        assert plans.nbytes <= plans.limit
    assert plans.made == 5
    small = Route(lease, tiles, plans=Plans(limit=0))
    assert small.plan([(0, [TokenRange(0, 0, 32)])])[0].payload_bytes == 32 * 2 * 128


def test_layers_of_which_the_same_goes_are_one_plan() -> None:
    route = Route(in_lease(LAYOUT, LENGTHS, 0, TILES), device())
    whole, part = [TokenRange(0, 0, 80)], [TokenRange(0, 0, 32)]
    assert len(route.plan([(layer, whole) for layer in range(5)])) == 1
    assert len(route.plan([(0, whole), (1, whole), (3, whole), (4, part)])) == 3
    assert sum(p.payload_bytes for p in route.plan([(1, whole), (2, part)])) == (80 + 32) * 2 * 128


@given(
    channels=st.integers(1, 12),
    heads=st.integers(1, 3),
    dim=st.sampled_from([16, 40, 64]),
    shards=st.booleans(),
    lengths=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_token_gets_to_its_tile_and_no_byte_elsewhere(
    channels: int, heads: int, dim: int, shards: bool, lengths: st.DataObject
) -> None:
    """Against the addresses that the client computes by itself, from the digits."""
    from kvd.placing import tensor_map
    from kvd_client.tensors import DeviceTensors

    count = lengths.draw(st.integers(1, 3))
    of_rows = tuple(lengths.draw(st.integers(1, 70)) for _ in range(count))
    layout = PartLayout(layers=2, heads=heads, entry_bytes=4 * dim, rows=count, capacity=max(of_rows))
    each = -(-max(of_rows) // 32)
    blocks = count * each + 2
    order = np.random.default_rng(sum(of_rows)).permutation(blocks)[: count * each].reshape(count, each)
    lease = in_lease(layout, of_rows, 0, TILES)
    form = Placement(layout=SHARDS.replace("CHANNELS", str(channels))) if shards else TILES
    tiles = on_device(layout, of_rows, 0, form, channels=channels, alignment=64, blocks=blocks, table=order)
    geometry = tiles.rows[0].geometry
    memory = np.random.default_rng(3).integers(0, 256, layout.nbytes, dtype=np.uint8)
    banks = [np.full(geometry.channel_bytes, 0xEE, np.uint8) for _ in range(channels)]
    touched = 0
    for layer in range(2):
        for plan in Route(lease, tiles).plan([(layer, [TokenRange(row, 0, n) for row, n in enumerate(of_rows)])]):
            staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
            regroup(plan, [memory], staging)
            for start, channel, to, length in plan.requests.tolist():
                banks[channel][to : to + length] = staging[start : start + length]
                touched += length
    found = tensor_map(tiles.rows[0], _Memory(geometry.bases), blocks)  # type: ignore[arg-type]
    view = DeviceTensors(found, banks, layout, order)
    for layer in range(2):
        wanted = memory[layout.layer_offset(layer) :][: layout.layer_bytes]
        wanted = wanted.reshape(count, layout.capacity, heads, 4 * dim)
        for row, n in enumerate(of_rows):
            assert np.array_equal(view.read(layer)[row, :n], wanted[row, :n])
    written = sum(int((bank != 0xEE).sum()) for bank in banks)
    assert written <= touched <= sum(len(bank) for bank in banks)


def test_tensors_that_can_not_be_mapped_have_addresses() -> None:
    from kvd.placing import tensor_map
    from kvd_client.tensors import DeviceTensors

    tiles = device()
    memory = _Memory(tiles.rows[0].geometry.bases)
    memory.origin = 0x1000
    view = DeviceTensors(tensor_map(tiles.rows[0], memory, 9), (), LAYOUT, np.array([[4, 1, 7], [0, 8, 2]]))  # type: ignore[arg-type]
    assert view.address(0, 0) == 0x1000
    assert view.address(2, 1) == 0x1000 + 5 * tiles.rows[0].geometry.tensor_stride
    for look in (lambda: view.share(0, 0, 0), lambda: view.read(0), lambda: view.gather(0, np.arange(1))):
        with pytest.raises(InvalidArgument, match="0x1000 for the first tensor"):
            look()


class _Memory:
    """What a map says of memory."""

    origin = offset = nbytes = 0

    def __init__(self, bases: Any) -> None:
        self.bases = bases


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([0, 1, 2], "3 entries; 2 rows of 3 blocks need 6"),
        ([0, 1, 2, 3, 4, 4], "each of 6 blocks once"),
        ([0, 1, 2, 3, 4, 9], "blocks 0 to 9"),
        ([0, 1, 2, 3, 4, -1], "blocks -1 to 4"),
    ],
)
def test_block_tables_that_make_no_sense(table: list[int], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        block_table(LAYOUT, TILES, 9, np.array(table, "<i4").tobytes())


@pytest.mark.parametrize(
    ("placement", "error", "says"),
    [
        (Placement(layout="nothing"), InvalidArgument, "no layout"),
        (Placement(layout="nhd"), UnsupportedLayout, "one channel"),
        (Placement(layout="tenstorrent", dtype="bfp8_b"), UnsupportedLayout, "vectors of bfp8_b"),
        (Placement(layout="tenstorrent", dtype="raw:48"), UnsupportedLayout, "vectors of raw:48"),
        (Placement(layout="tenstorrent-tiled"), UnsupportedLayout, "one sequence, not 2"),
        (Placement(layout="tenstorrent", block_tokens=20), InvalidArgument, "multiple of 32"),
    ],
)
def test_layouts_that_do_not_fit(placement: Placement, error: type[KvdError], says: str) -> None:
    with pytest.raises(error, match=says):
        device(placement)
