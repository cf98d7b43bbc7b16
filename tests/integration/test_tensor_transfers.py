"""Tensors in a device's layout through two real daemons: pushed, pulled, paged, back again, and every end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.layout import ttnn
from kvd.layout.notation import to_toml
from kvd_client import Client, KVSpec, Placement, TokenRange
from kvd_client.activations import receive_tensor, send_tensor
from kvd_client.errors import (
    Busy,
    FingerprintMismatch,
    InvalidArgument,
    KvdError,
    NotFound,
    OutOfMemory,
    UnsupportedLayout,
)
from kvd_client.layouts import UNITS, TensorMap
from tests.integration.daemons import DaemonProcess, nothing_is_left, random_layer, two_daemons

WAIT_S = 20.0
VECTORS = Path(__file__).parents[1] / "data" / "tenstorrent"
SPEC = KVSpec(layers=4, kv_heads=2, entry_bytes=256, dtype="bfloat16", model="test")
"""Heads of 64 elements, K and V."""
LENGTHS = [100, 37]
TILES = Placement(layout="tenstorrent", device="bh")
CONFIG: dict[str, dict[str, Any]] = {
    "npu.bh": {"channels": 8, "channel_bytes": "8MiB", "alignment": 64},
    "npu.wh": {"channels": 12, "channel_bytes": "4MiB", "alignment": 32},
    "transfer": {"rendezvous_s": 5.0},
}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), **CONFIG) as pair:
        yield pair


@pytest.fixture
def clients(daemons: tuple[DaemonProcess, DaemonProcess]) -> Iterator[tuple[Client, Client]]:
    with daemons[0].client("prefill") as source, daemons[1].client("decode") as sink:
        yield source, sink
    nothing_is_left(*daemons)


def put(transfer: Any, seed: int = 0, lengths: list[int] = LENGTHS) -> None:
    for layer in range(SPEC.layers):
        transfer.put_layer(layer, entries=random_layer(seed + layer, len(lengths), max(lengths), 2, 256))


def check(layer_of: Any, seed: int = 0, lengths: list[int] = LENGTHS) -> None:
    """``layer_of(layer)`` has a transfer's entries, token-major."""
    for layer in range(SPEC.layers):
        found, wanted = layer_of(layer), random_layer(seed + layer, len(lengths), max(lengths), 2, 256)
        for row, length in enumerate(lengths):
            assert np.array_equal(found[row, :length], wanted[row, :length]), (layer, row)


# --- the device's bytes -----------------------------------------------------------------------------------------------


CASES = [case for case in json.loads((VECTORS / "index.json").read_text()) if case.get("banks")]
WIDTH = to_toml(ttnn.tensor({"h": 1, "t": 64, "d": 512}, memory="width", shard=(64, 64), tensors=("l", "kv")))


def placed_as(case: dict[str, Any]) -> tuple[KVSpec, Placement, np.ndarray[Any, Any]]:
    """The spec and the placement of a vector, and its entries: (1, tokens, heads, bytes)."""
    blocks, heads, tokens, dim = case["shape"]
    bits = np.load(VECTORS / "inputs.npz")[case["input"]]
    entries = bits.transpose(0, 2, 1, 3).reshape(1, blocks * tokens, heads, dim).copy().view(np.uint8)
    spec = KVSpec(layers=1, kv_heads=heads, entry_bytes=2 * dim, dtype="bf16", model=case["name"])
    layout = "tenstorrent" if tokens % 32 == 0 else "tenstorrent-rows"
    for part, name in (("_rm", "tenstorrent-rows"), ("height_sharded", "tenstorrent-height"), ("width_sharded", WIDTH)):
        layout = name if part in case["name"] else layout
    placement = Placement(
        layout=layout,
        device="bh" if case["banks"] == 8 else "wh",
        block_tokens=tokens,
        tensors=1,
        codec="bfp8_b" if case["dtype"] == "bfp8b" else "",
    )
    return spec, placement, entries


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_what_arrives_is_what_the_vendors_library_writes(
    clients: tuple[Client, Client], case: dict[str, Any], pull: bool
) -> None:
    """Bytes of a tensor that pass through two daemons equal, bank by bank, those of the vendor's simulator."""
    source, sink = clients
    spec, placement, entries = placed_as(case)
    lengths = [entries.shape[1]]
    with sink.decode(case["name"], spec, lengths, source="prefill", placement=placement, pull=pull) as decode:
        with source.prefill(case["name"], spec, lengths) as prefill:
            prefill.put_layer(0, entries=entries)
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        tensors = decode.tensors
        page = {"bf16": 2048, "bfp8b": 1088, "bf16_rm": 2 * case["shape"][3]}[case["dtype"]]
        step = tensors.map.page_stride
        assert step == case.get("aligned_page", 2048)
        for bank in range(case["banks"]):
            pages = tensors.share(0, 0, bank).reshape(-1, step)[:, :page]
            # a bank's pages as the vectors have them: those that the tensor has there
            found = pages[: _pages_in(tensors.map, bank)].tobytes()
            assert hashlib.sha256(found).hexdigest() == case["outputs"][f"bank{bank:02}"], bank
        assert tensors.address(0) % (64 if case["banks"] == 8 else 32) == 0


def _pages_in(found: TensorMap, bank: int) -> int:
    if found.kind != "round-robin":
        return found.shard_pages
    return len(range(bank, found.pages, found.channels))


# --- ways -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_both_ways(clients: tuple[Client, Client], unit: str, pull: bool) -> None:
    source, sink = clients
    name = f"{unit}-{pull}"
    before = source.status().counters
    with sink.decode(name, SPEC, LENGTHS, source="prefill", placement=TILES, unit=unit, pull=pull) as decode:
        with source.prefill(name, SPEC, LENGTHS) as prefill:
            put(prefill)
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode.layer)
        for layer in range(SPEC.layers):
            for row, length in enumerate(LENGTHS):
                assert (decode.mask(layer)[row, :length] == 1).all()
                assert (decode.mask(layer)[row, length:] == 0).all()
        (part,) = [t for t in sink.status().transfers if t.request == name]
    after = (sink if pull else source).status().counters
    assert after["tensor_requests"] > 0
    if unit == "whole" and not pull:
        # all layers' K and V of each row lie end to end in each channel, as far as this row's blocks do
        assert after["tensor_requests"] - before.get("tensor_requests", 0) <= 8 * SPEC.layers * 2 * len(LENGTHS)
    assert part.bytes_done == sum(LENGTHS) * 2 * 256 * SPEC.layers


def test_padding_is_zero_and_nothing_beside_it_is_touched(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with sink.open_cache(SPEC, TILES, 16) as cache:
        for buffer in cache.tensors.buffers:
            buffer[:] = 0xEE
        with sink.decode("pad", SPEC, [37], source="prefill", cache=cache, blocks=[[9, 4]]) as decode:
            with source.prefill("pad", SPEC, [37]) as prefill:
                put(prefill, lengths=[37])
                prefill.finish(timeout_s=WAIT_S)
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode.layer, lengths=[37])
        for layer in range(SPEC.layers):
            whole = cache.tensors.read(layer)[0].reshape(16, 32, 2, 256)
            assert (whole[4, 5:] == 0).all()
            assert (np.delete(whole, [9, 4], axis=0) == 0xEE).all()


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        ("tenstorrent", "wh"),
        ("tenstorrent", ""),
        ("nhd", ""),
        ("hnd", ""),
        ("vllm-lbhnc", ""),
        ("vllm-blnhc", ""),
        ("tpu", ""),
    ],
)
def test_straight_into_a_paged_cache_by_its_block_table(
    clients: tuple[Client, Client], layout: str, device: str
) -> None:
    """Two requests at once, each into blocks of its own, scattered, of one cache."""
    source, sink = clients
    placement = Placement(layout=layout, device=device)
    tables = [[[30, 3, 7, 12], [1, 0, 31, 2]], [[5, 22, 21, 20], [9, 8, 11, 25]]]
    with sink.open_cache(SPEC, placement, 32) as cache:
        for number, blocks in enumerate(tables):
            name = f"{layout}-{device}-{number}"
            with sink.decode(name, SPEC, LENGTHS, source="prefill", cache=cache, blocks=blocks) as decode:
                with source.prefill(name, SPEC, LENGTHS) as prefill:
                    put(prefill, seed=10 * number)
                    prefill.finish(timeout_s=WAIT_S)
                decode.wait_ready(timeout_s=WAIT_S)
                check(decode.layer, seed=10 * number)
        for number, blocks in enumerate(tables):  # the second one left the first one's alone
            for layer in range(SPEC.layers):
                whole = cache.tensors.read(layer)[0].reshape(32, 32, 2, 256)
                wanted = random_layer(10 * number + layer, 2, 100, 2, 256)
                for row, length in enumerate(LENGTHS):
                    found = whole[blocks[row]].reshape(128, 2, 256)[:length]
                    assert np.array_equal(found, wanted[row, :length])


def test_a_sink_takes_a_prefix_that_it_holds_in_whole_blocks(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    held = [TokenRange(0, 0, 64), TokenRange(1, 32, 37)]
    with sink.decode("held", SPEC, LENGTHS, source="prefill", placement=TILES, held=held) as decode:
        for layer in range(SPEC.layers):
            for r in held:
                mine = random_layer(100 + layer, 1, r.stop - r.start, 2, 256)[0]
                decode.put_held(layer, r.row, r.start, mine)
        with source.prefill("held", SPEC, LENGTHS) as prefill:
            put(prefill)
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        for layer in range(SPEC.layers):
            wanted = random_layer(layer, 2, 100, 2, 256)
            for r in held:
                wanted[r.row, r.start : r.stop] = random_layer(100 + layer, 1, r.stop - r.start, 2, 256)[0]
            for row, length in enumerate(LENGTHS):
                assert np.array_equal(decode.layer(layer)[row, :length], wanted[row, :length])


# --- back, and elsewhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink_placement", [None, TILES, msgspec.structs.replace(TILES, device="wh", block_tokens=64)])
@pytest.mark.parametrize("unit", ["layer", "whole"])
def test_from_a_device(clients: tuple[Client, Client], sink_placement: Placement | None, unit: str) -> None:
    """NPU to GPU, and NPU to another NPU: the source's tensors are tiled."""
    source, sink = clients
    options: dict[str, Any] = {} if sink_placement is None else {"placement": sink_placement, "unit": unit}
    with (
        sink.decode("back", SPEC, LENGTHS, source="prefill", **options) as decode,
        source.prefill("back", SPEC, LENGTHS, placement=TILES) as prefill,
    ):
        put(prefill)
        prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode.layer)


def test_there_and_back_again_from_a_cache(clients: tuple[Client, Client]) -> None:
    """What arrived in a paged cache goes on from there, by its block table."""
    source, sink = clients
    with sink.open_cache(SPEC, TILES, 12) as cache:
        blocks = [[7, 1, 10, 4], [0, 11, 2, 3]]
        with sink.decode("there", SPEC, LENGTHS, source="prefill", cache=cache, blocks=blocks) as decode:
            with source.prefill("there", SPEC, LENGTHS) as prefill:
                put(prefill)
                prefill.finish(timeout_s=WAIT_S)
            decode.wait_ready(timeout_s=WAIT_S)
        with (
            source.decode("back", SPEC, LENGTHS, source="decode") as decode,
            sink.prefill("back", SPEC, LENGTHS, cache=cache, blocks=blocks) as prefill,
        ):
            for layer in range(SPEC.layers):
                prefill.layer_ready(layer)
            prefill.finish(timeout_s=WAIT_S)
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode.layer)


@pytest.mark.parametrize("shape", [(96, 110), (3, 40, 64), (1, 4096), (257,)])
def test_an_activation_by_name(clients: tuple[Client, Client], shape: tuple[int, ...]) -> None:
    source, sink = clients
    value = np.random.default_rng(1).integers(0, 1 << 16, shape, dtype=np.uint16)
    for number, placement in enumerate((TILES, None)):
        name = f"activation {number}"
        with receive_tensor(
            sink, name, shape, dtype="bf16", item_bytes=2, source="prefill", placement=placement
        ) as received:
            with send_tensor(source, name, value, dtype="bf16", placement=None if placement else TILES) as sent:
                sent.finish(timeout_s=WAIT_S)
            received.wait_ready(timeout_s=WAIT_S)
            assert np.array_equal(received.layer(0).reshape(-1).view(np.uint16).reshape(shape), value)


# --- selective --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("mode", ["partial", "parallel", "speculative"])
def test_selective_transfer_into_tiles(clients: tuple[Client, Client], mode: str, pull: bool) -> None:
    """Blocks arrive in tiles in order of importance; what is missing is fetched, entry by entry, into them, too."""
    source, sink = clients
    lengths, k = [1500, 700], 64
    with sink.decode(
        f"{mode}-{pull}", SPEC, lengths, source="prefill", placement=TILES, mode=mode, landing_entries=k, pull=pull
    ) as decode:
        prefill = source.prefill(f"{mode}-{pull}", SPEC, lengths, prefill_s=1e-6)
        put(prefill, lengths=lengths)
        prefill.finish(wait=False)
        for layer in (0, 1):
            decode.wait_ready(layer, timeout_s=WAIT_S)
        generator = np.random.default_rng(3)
        for step in range(6):
            for layer in (2, 3):
                rows = [generator.permutation(length)[:k] for length in lengths for _ in range(2)]
                index, order = np.array(rows, np.int32), np.zeros((4, k), np.int32)
                decode.idle(layer)
                entries = decode.select(layer, index, slot=step % 2, order=order, timeout_s=WAIT_S)
                row = np.arange(4)[:, None]
                wanted = random_layer(layer, 2, 1500, 2, 256)
                assert np.array_equal(entries, wanted[row // 2, order, row % 2])
                local = decode.mask(layer).copy() == 1
                assert np.array_equal(decode.layer(layer)[local], wanted[local])
                # what a fetch brought lies in its tile from then on, whatever the mask says
                assert np.array_equal(decode.layer(layer)[row // 2, order, row % 2], entries)
        if mode == "speculative":
            while not (decode.poll_ready(2) and decode.poll_ready(3)):
                decode.idle(2)
                decode.select(2, np.zeros((4, 1), np.int32), timeout_s=WAIT_S)
            check(decode.layer, lengths=lengths)
    prefill.release()


# --- what can not be, and what went wrong -----------------------------------------------------------------------------


def test_what_can_not_be_is_said_at_open(clients: tuple[Client, Client]) -> None:
    source, sink = clients

    def opening(error: type[KvdError], says: str, **other: Any) -> KvdError:
        options = {"placement": TILES} | other
        with pytest.raises(error, match=says) as caught:
            sink.decode("r", SPEC, LENGTHS, source="prefill", **options)
        return caught.value

    opening(NotFound, "no device 'tpu'", placement=msgspec.structs.replace(TILES, device="tpu"))
    opening(KvdError, "no layout 'tiles'", placement=msgspec.structs.replace(TILES, layout="tiles"))
    opening(KvdError, "multiple of 32", placement=msgspec.structs.replace(TILES, block_tokens=16))
    opening(UnsupportedLayout, "vectors of raw:96", placement=msgspec.structs.replace(TILES, dtype="raw:96"))
    opening(UnsupportedLayout, "one channel", placement=msgspec.structs.replace(TILES, layout="nhd"))
    blocks = msgspec.structs.replace(TILES, codec="bfp8_b")
    opening(UnsupportedLayout, "share exponents", placement=blocks, mode="parallel", landing_entries=4)
    opening(InvalidArgument, "no unit 'tensor'", unit="tensor")
    opening(InvalidArgument, "go with a placement", placement=None, pull=True)
    opening(InvalidArgument, "cache_head need a cache", cache_head=0)
    opening(InvalidArgument, "cache_head, unit and pull go with", placement=None, cache_head=0)
    with pytest.raises(UnsupportedLayout, match="'tokens' has no block table"):
        sink.open_cache(SPEC, Placement(layout="tokens"), 4)
    with sink.open_cache(SPEC, TILES, 4) as cache:
        opening(UnsupportedLayout, "heads 2 and 1", placement=None, cache=cache, cache_head=1, blocks=[[0, 1], [2, 3]])
        opening(InvalidArgument, "needs a block table", placement=None, cache=cache)
        opening(InvalidArgument, "blocks 0 to 4", placement=None, cache=cache, blocks=[[0, 1, 2, 3], [4, 4, 4, 4]])
        opening(InvalidArgument, "2 entries", placement=None, cache=cache, blocks=[[0], [1]])
    opening(NotFound, "not open on this connection", placement=None, cache=cache, blocks=[[0]])
    with source.open_cache(SPEC, TILES, 8) as theirs:
        # The other daemon may have a cache of that number: blocks would arrive in one and be looked for in the other.
        opening(InvalidArgument, "another client's", placement=None, cache=theirs, blocks=[[0]])
    with sink.open_cache(msgspec.structs.replace(SPEC, layers=3), TILES, 8) as cache:
        error = opening(UnsupportedLayout, "layers 4 and 3", placement=None, cache=cache, blocks=[[0]])
        assert error.fields["differ"] == {"layers": [4, 3]}
    with source.prefill("held", SPEC, LENGTHS) as prefill:
        with (
            sink.decode("held", SPEC, LENGTHS, source="prefill", placement=TILES, held=[(0, 0, 33)]) as decode,
            pytest.raises(UnsupportedLayout, match="blocks of 32"),
        ):
            decode.wait_ready(timeout_s=WAIT_S)
        prefill.abort()


def test_a_full_channel_says_which_and_how_much(clients: tuple[Client, Client]) -> None:
    _, sink = clients
    with pytest.raises(OutOfMemory, match="channel") as caught:
        sink.open_cache(SPEC, TILES, 1 << 12)
    fields = caught.value.fields
    assert fields["device"] == "bh"
    assert fields["need"] > fields["free"] > 0


def test_a_cache_stays_while_transfers_into_it_are_open(clients: tuple[Client, Client]) -> None:
    _, sink = clients
    cache = sink.open_cache(SPEC, TILES, 8)
    with (
        sink.decode("r", SPEC, [40], source="prefill", cache=cache, blocks=[[2, 5]]),
        pytest.raises(Busy, match="release them first"),
    ):
        cache.close()
    cache.close()
    cache.close()


def test_a_model_of_another_kind_is_refused_as_ever(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("other", msgspec.structs.replace(SPEC, model="another"), LENGTHS) as prefill:
        with (
            sink.decode("other", SPEC, LENGTHS, source="prefill", placement=TILES) as decode,
            pytest.raises(FingerprintMismatch),
        ):
            decode.wait_ready(timeout_s=WAIT_S)
        prefill.abort()
