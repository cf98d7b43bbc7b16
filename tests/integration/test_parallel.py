"""Tensor-parallel degrees that differ, through two real daemons: every rank gets its heads, whatever the layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd_client import Client, KVSpec, Placement
from kvd_client import parallel as tp
from kvd_client.errors import Aborted, UnsupportedLayout
from kvd_client.parallel import heads_of
from tests.integration.daemons import DaemonProcess, nothing_is_left, random_layer, two_daemons

WAIT_S = 60.0
SPEC = KVSpec(layers=3, kv_heads=4, entry_bytes=256, dtype="bfloat16", model="test")
"""Heads of 64 elements, K and V."""
LENGTHS = [150, 37]
PACKED = Placement(layout="vllm-lbnhc", block_tokens=16)
APART = Placement(layout="hnd", block_tokens=64)
TILES = Placement(layout="tenstorrent", device="bh", block_tokens=64)
CONFIG: dict[str, dict[str, Any]] = {"npu.bh": {"channels": 7, "channel_bytes": "4MiB", "alignment": 64}}
DEGREES = [(2, 4), (4, 2)]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), **CONFIG) as pair:
        yield pair


@pytest.fixture
def clients(daemons: tuple[DaemonProcess, DaemonProcess]) -> Iterator[tuple[Client, Client]]:
    with daemons[0].client("prefill") as source, daemons[1].client("decode") as sink:
        yield source, sink
    nothing_is_left(*daemons)


def reference(layer: int) -> np.ndarray[Any, Any]:
    """All heads of a layer: (rows, tokens, heads, entry_bytes)."""
    return random_layer(layer, len(LENGTHS), max(LENGTHS), SPEC.kv_heads, SPEC.entry_bytes)


def check(transfer: Any, rank: int, ranks: int) -> None:
    """A rank at the sink has its heads of every token."""
    start, count = heads_of(SPEC.kv_heads, rank, ranks)
    for layer in range(SPEC.layers):
        for found in [transfer.layer(layer)] + ([transfer.tensors.read(layer)] if transfer.layout.placed else []):
            for row, length in enumerate(LENGTHS):
                wanted = reference(layer)[row, :length, start : start + count]
                assert np.array_equal(found[row, :length], wanted), (rank, layer, row)


def put(transfer: tp.ParallelPrefill, rank: int, ranks: int) -> None:
    start, count = heads_of(SPEC.kv_heads, rank, ranks)
    for layer in range(SPEC.layers):
        heads = reference(layer)[:, :, start : start + count]
        if layer:
            transfer.put_layer(layer, entries=heads)
        else:
            k, v = (half.transpose(0, 2, 1, 3).view(np.uint16) for half in np.split(heads, 2, axis=-1))
            transfer.put_layer(layer, k=k, v=v)


@pytest.mark.parametrize(
    ("at_source", "at_sink", "pull"),
    [
        pytest.param(None, None, False, id="leases"),
        pytest.param(PACKED, TILES, False, id="packed of 16 into tiles of 64, push"),
        pytest.param(PACKED, TILES, True, id="packed of 16 into tiles of 64, pull"),
        pytest.param(PACKED, APART, False, id="packed of 16 into K and V apart of 64"),
        pytest.param(TILES, None, False, id="tiles into leases"),
    ],
)
@pytest.mark.parametrize("degrees", DEGREES, ids=["2 to 4", "4 to 2"])
def test_every_rank_gets_its_heads(
    clients: tuple[Client, Client], degrees: tuple[int, int], at_source: Any, at_sink: Any, pull: bool
) -> None:
    source, sink = clients
    mine, theirs = degrees
    with contextlib.ExitStack() as stack:
        sinks = [
            stack.enter_context(
                tp.decode(sink, "r", SPEC, LENGTHS, rank=rank, ranks=theirs, peer_ranks=mine, source="prefill",
                          placement=at_sink, pull=pull)
            )
            for rank in range(theirs)
        ]  # fmt: skip
        sources = [
            stack.enter_context(
                tp.prefill(source, "r", SPEC, LENGTHS, rank=rank, ranks=mine, peer_ranks=theirs, placement=at_source)
            )
            for rank in range(mine)
        ]
        for rank, transfer in enumerate(sources):
            put(transfer, rank, mine)
        for transfer in sources:
            transfer.finish(timeout_s=WAIT_S)
        for rank, transfer in enumerate(sinks):
            transfer.wait_ready(timeout_s=WAIT_S)
            assert all(transfer.poll_ready(layer) for layer in range(SPEC.layers))
            check(transfer, rank, theirs)
            for layer in range(SPEC.layers):
                mask = transfer.mask(layer)
                assert [(row == 1).sum() for row in mask] == LENGTHS
                assert (mask != 2).all()


@pytest.mark.parametrize("degrees", DEGREES, ids=["2 to 4", "4 to 2"])
def test_from_cache_to_cache_by_their_block_tables(clients: tuple[Client, Client], degrees: tuple[int, int]) -> None:
    """Both ends' engines keep their own blocks; nothing but the named blocks of the sink is written."""
    source, sink = clients
    mine, theirs = degrees
    tables = [[14, 3, 9, 1, 0, 11, 7, 2, 13, 5], [4, 6, 8, 10, 12, 15, 16, 17, 18, 19]], [[5, 0, 3], [1, 4, 6]]
    with contextlib.ExitStack() as stack:
        engines = []
        for rank in range(mine):
            cache = stack.enter_context(source.open_cache(SPEC, PACKED, 20, heads=SPEC.kv_heads // mine))
            transfer = tp.prefill(
                source, "r", SPEC, LENGTHS, rank=rank, ranks=mine, peer_ranks=theirs, cache=cache, blocks=tables[0]
            )
            stack.enter_context(transfer)
            engines.append(transfer)
        sinks = []
        for rank in range(theirs):
            cache = stack.enter_context(sink.open_cache(SPEC, TILES, 8, heads=SPEC.kv_heads // theirs))
            whole = np.full((8 * 64 * cache.layout.heads, SPEC.entry_bytes), 0xEE, np.uint8)
            for layer in range(SPEC.layers):
                cache.tensors.scatter(layer, np.arange(len(whole)), whole)
            transfer = tp.decode(
                sink, "r", SPEC, LENGTHS, rank=rank, ranks=theirs, peer_ranks=mine, source="prefill", cache=cache,
                blocks=tables[1],
            )  # fmt: skip
            stack.enter_context(transfer)
            sinks.append((transfer, cache))
        for rank, transfer in enumerate(engines):
            put(transfer, rank, mine)
            transfer.finish(wait=False)
        for rank, (transfer, cache) in enumerate(sinks):
            transfer.wait_ready(timeout_s=WAIT_S)
            check(transfer, rank, theirs)
            for layer in range(SPEC.layers):
                untouched = cache.tensors.read(layer)[0].reshape(8, -1)[[2, 7]]
                assert (untouched == 0xEE).all()


def test_a_prefix_that_the_sink_holds_is_not_sent(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    held = [(0, 0, 64), (1, 0, 37)]
    with contextlib.ExitStack() as stack:
        sinks = [
            stack.enter_context(
                tp.decode(sink, "r", SPEC, LENGTHS, rank=rank, ranks=2, peer_ranks=4, source="prefill", held=held,
                          placement=TILES)
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank, transfer in enumerate(sinks):
            start, count = heads_of(SPEC.kv_heads, rank, 2)
            for layer in range(SPEC.layers):
                for row, first, last in held:
                    transfer.put_held(layer, row, first, reference(layer)[row, first:last, start : start + count])
        for rank in range(4):
            prefill = tp.prefill(source, "r", SPEC, LENGTHS, rank=rank, ranks=4, peer_ranks=2)
            stack.enter_context(prefill)
            put(prefill, rank, 4)
        for rank, transfer in enumerate(sinks):
            transfer.wait_ready(timeout_s=WAIT_S)
            check(transfer, rank, 2)


# --- what can not be, and what went wrong -----------------------------------------------------------------------------


SHARED = """
name = "shared"
order = "l kv || B | r h d"
axes = { t = "B:* r:32" }
codec = "bf16"
padding = true
table = "B"
"""
"""Pages with every head of 32 tokens, padding included: one head alone can't be written."""


def test_what_can_not_be_is_refused_with_the_fields(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with pytest.raises(UnsupportedLayout, match="4 KV heads can't be divided among 3 ranks") as caught:
        tp.decode(sink, "r", SPEC, LENGTHS, rank=0, ranks=2, peer_ranks=3)
    assert caught.value.fields == {"kv_heads": 4, "ranks": 3}
    shared = msgspec.structs.replace(PACKED, layout=SHARED, block_tokens=32)
    single = msgspec.structs.replace(TILES, tensors=1)
    cases: list[tuple[Any, Any, int, str]] = [
        (None, None, 2, "ranks"),  # the sink is wrong about the source's ranks
        (None, shared, 4, "axis"),
        (PACKED, shared, 4, "axis"),
        (PACKED, single, 4, "kv"),
    ]
    for at_source, at_sink, believed, field in cases:
        prefill = tp.prefill(source, "r", SPEC, LENGTHS, rank=0, ranks=4, peer_ranks=2, placement=at_source)
        with tp.decode(
            sink, "r", SPEC, LENGTHS, rank=0, ranks=2, peer_ranks=believed, source="prefill", placement=at_sink
        ) as decode:
            with pytest.raises(UnsupportedLayout) as caught:
                decode.wait_ready(timeout_s=WAIT_S)
            assert field in (caught.value.fields.get("differ") or caught.value.fields)
        prefill.release()


def test_a_piece_that_fails_ends_the_others(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    sources = [
        tp.prefill(source, "r", SPEC, LENGTHS, rank=rank, ranks=4, peer_ranks=2, placement=TILES) for rank in range(2)
    ]
    with tp.decode(
        sink, "r", SPEC, LENGTHS, rank=0, ranks=2, peer_ranks=4, source="prefill", placement=TILES
    ) as decode:
        put(sources[0], 0, 4)
        sources[0].finish(timeout_s=WAIT_S)
        sources[1].abort("changed its mind")
        with pytest.raises(Aborted, match="changed its mind"):
            decode.wait_ready(timeout_s=WAIT_S)
    for transfer in sources:
        transfer.release()
