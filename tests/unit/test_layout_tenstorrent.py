"""Byte for byte what the vendor's library and simulator made: tests/data/tenstorrent.

``host_*``: tensors tiled by the library. ``dev_bh_*``, ``dev_wh_*``: read back from the simulator, bank by bank, of a
Blackhole (8 banks, 64 bytes aligned) and a Wormhole (12 banks, 32 bytes). Large results are kept as SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kvd.layout import named
from kvd.layout.codec import CODECS, decode, encode
from kvd.layout.descriptor import Layout, Placed, Placement
from kvd.layout.execute import regroup
from kvd.layout.notation import layout
from kvd.layout.plan import plan_regroup

DATA = Path(__file__).parent.parent / "data" / "tenstorrent"
CASES = json.loads((DATA / "index.json").read_text())
INPUTS, OUTPUTS = np.load(DATA / "inputs.npz"), np.load(DATA / "outputs.npz")
CODEC = {"bf16": "bf16", "bf16_rm": "bf16", "f32": "f32", "bfp8b": "bfp8_b", "bfp4b": "bfp4_b"}
ALIGNMENT = {"dev_bh": 64, "dev_wh": 32, "host_": 1}
TILES = {"t": "T:* F:2 r:16", "d": "D:* G:2 c:16"}


def device_layout(case) -> Layout:
    codec, alignment = CODEC[case["dtype"]], ALIGNMENT[case["name"][:6] if case["name"][0] == "d" else "host_"]
    if "banks" not in case:
        return layout("host", "b h T D | F G r c", TILES, codec=codec, padding=True)
    if "height_sharded" in case["name"]:
        return layout(
            "height", "b h T D | F G r c", TILES, codec=codec, placement=Placement("sharded", 8, 64), padding=True
        )
    if "width_sharded" in case["name"]:
        axes = TILES | {"d": "S:* D:2 G:2 c:16"}
        return layout(
            "width", "S b h T D | F G r c", axes, codec=codec, placement=Placement("digit", 8, 64), padding=True
        )
    placement = Placement("round-robin", case["banks"], alignment)
    if case["dtype"] == "bf16_rm":
        return layout("rows", "b h t | d", codec=codec, placement=placement, padding=True)
    return layout("tiles", "b h T D | F G r c", TILES, codec=codec, placement=placement, padding=True)


def plain(case) -> tuple[Placed, np.ndarray]:
    """The input as it lies in an engine's memory."""
    values = INPUTS[case["input"]]
    shape = (1,) * (4 - values.ndim) + values.shape
    held = dict(zip("bhtd", ((0, size) for size in shape), strict=True))
    codec = "f32" if values.dtype.itemsize == 4 else "bf16"
    return Placed(layout("plain", "b h t d", codec=codec), held), values.reshape(-1).view(np.uint8)


def transferred(source: Placed, target: Placed, memory: list[np.ndarray]) -> list[np.ndarray]:
    plan = plan_regroup(source, target)
    staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
    regroup(plan, memory, staging)
    out = [np.full(target.channel_bytes, 0xEE, np.uint8) for _ in range(target.geometry.channels)]
    for start, channel, to, length in plan.requests.tolist():
        out[channel][to : to + length] = staging[start : start + length]
    return out


def check(case, name: str, got: np.ndarray) -> None:
    if f"{case['name']}.{name}" in OUTPUTS:
        np.testing.assert_array_equal(got, OUTPUTS[f"{case['name']}.{name}"])
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["outputs"][name]


def check_banks(case, target: Placed, banks: list[np.ndarray]) -> None:
    if "banks" not in case:
        check(case, "raw", banks[0])
        return
    stride, pages = target.geometry.page_stride, target.geometry.pages
    for bank, got in enumerate(banks):
        used = len(got)
        if target.layout.placement.kind == "round-robin":
            used = len(range(bank, pages, case["banks"])) * stride
            assert (got[used:] == 0xEE).all()
        # what lies between pages is nobody's: the simulator has old bytes there, and we zeros
        got = got[:used].reshape(-1, stride)
        assert not got[:, target.geometry.page_bytes :].any()
        check(case, f"bank{bank:02}", got[:, : target.geometry.page_bytes].reshape(-1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_arrives_as_the_vendor_has_it(case):
    source, memory = plain(case)
    target = Placed(device_layout(case), source.held)
    banks = transferred(source, target, [memory])
    check_banks(case, target, banks)
    assert target.geometry.page_stride == case.get("aligned_page", target.geometry.page_stride)
    if "banks" in case:
        assert len(plan_regroup(source, target).requests) == min(case["banks"], target.geometry.pages)


@pytest.mark.parametrize("case", [case for case in CASES if "bfp" not in case["dtype"]], ids=lambda case: case["name"])
def test_and_back_again(case):
    source, memory = plain(case)
    target = Placed(device_layout(case), source.held)
    banks = transferred(source, target, [memory])
    np.testing.assert_array_equal(transferred(target, source, banks)[0], memory)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "raw" in case["outputs"] and "bfp" in case["dtype"]],
    ids=lambda case: case["name"],
)
def test_block_formats_decode_as_the_vendor_does(case):
    source, memory = plain(case)
    target = Placed(device_layout(case), source.held)
    encoded = transferred(source, target, [memory])
    f32 = Placed(layout("plain", "b h t d", codec="f32"), source.held)
    values = transferred(target, f32, encoded)[0]
    check(case, "roundtrip", values.view(np.float32).reshape(INPUTS[case["input"]].shape))
    # seven bits of magnitude are exact in bf16
    bf16 = Placed(layout("plain", "b h t d", codec="bf16"), source.held)
    np.testing.assert_array_equal(transferred(target, bf16, encoded)[0].view(np.uint16), values.view(np.uint32) >> 16)


@pytest.mark.parametrize("name", ["dev_bh_kv_1x8x64x128_bfp8b", "dev_bh_odd_1x1x96x110_bfp8b"])
@pytest.mark.parametrize("banks", [1, 7, 12])
def test_block_formats_move_as_they_are(name, banks):
    case = next(case for case in CASES if case["name"] == name)
    source, memory = plain(case)
    there = Placed(device_layout(case), source.held)
    other = layout(
        "other", "h b T D | F G r c", TILES, codec="bfp8_b", placement=Placement("round-robin", banks, 32), padding=True
    )
    other_side = Placed(other, source.held)
    first = transferred(source, there, [memory])
    plan = plan_regroup(there, other_side)
    assert plan.decode is None
    assert plan.encode is None
    back = transferred(other_side, there, transferred(there, other_side, first))
    check_banks(case, there, back)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["name"].split("_")[2] in ("kv", "hd64", "paged64")],
    ids=lambda case: case["name"],
)
def test_the_paged_cache_by_name(case):
    blocks, heads, block, dim = case["shape"]
    held = {"l": (0, 1), "kv": (0, 1), "h": (0, heads), "t": (0, blocks * block), "d": (0, dim)}
    table = np.arange(blocks, dtype=np.int64)
    source = Placed(named.get("rebellions", block=block), held, {"B": blocks}, table)
    target = Placed(
        named.get(
            "tenstorrent",
            codec=CODEC[case["dtype"]],
            block=block,
            channels=case["banks"],
            alignment=ALIGNMENT[case["name"][:6]],
        ),
        held,
        {"B": blocks},
        table,
    )
    values = INPUTS[case["input"]].reshape(-1).view(np.uint8)
    check_banks(case, target, transferred(source, target, [values]))


def test_blocks_of_one_head_begin_on_alternating_banks():
    # one head per card: a block of 32 tokens is 4 tiles, so that it starts on bank 0 or 4 of 8
    held = {"l": (0, 1), "kv": (0, 1), "h": (5, 6), "t": (0, 128), "d": (0, 128)}
    layout = named.get("tenstorrent", block=32)
    table = np.array([6, 3, 0, 1], np.int64)
    target = Placed(layout, held, {"B": 8}, table)
    channel, offset = target.locate(l=0, kv=0, h=5, t=np.arange(0, 128, 32), d=0)
    assert channel.tolist() == [0, 4, 0, 4]
    assert offset.tolist() == [3 * 2048, 1 * 2048, 0, 0]


SPECIAL = {
    # f32 bits of a face row -> shared exponent, then sign and magnitude of its first elements
    "half to even": ([140 << 23, 134 << 23 | 0x400000, 134 << 23 | 0x400001, 133 << 23], 140, [64, 2, 2, 0]),
    "saturates": ([140 << 23 | 0x7FFFFF, 0], 140, [127, 0]),
    "a zero has no sign": ([140 << 23, 1 << 31, 1 << 31 | 100 << 23], 140, [64, 0, 0]),
    "denormals are zero": ([0x7FFFFF, 1 << 31 | 0x400000], 0, [0, 0]),
    "infinity": ([255 << 23, 1 << 31 | 255 << 23, 127 << 23], 255, [64, 192, 0]),
    "NaN keeps its upper bits": ([0x7FC00000, 0xFFC00001], 255, [96, 224]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_are_encoded_as_the_vendor_does(name):
    bits, exponent, wanted = SPECIAL[name]
    tile = np.zeros(1024, np.uint32)
    tile[: len(bits)] = bits
    page = np.empty(1088, np.uint8)
    encode(tile.view(np.uint8), CODECS["f32"], CODECS["bfp8_b"], 1024, page, 1088)
    assert page[0] == exponent
    assert page[64 : 64 + len(wanted)].tolist() == wanted
    assert not page[1:64].any()


@pytest.mark.parametrize(("name", "size"), [("bfp8_b", 1088), ("bfp4_b", 576)])
def test_what_was_decoded_is_encoded_to_the_same(name, size):
    random = np.random.default_rng(7)
    values = (random.standard_normal(64 * 1024) * np.exp(random.standard_normal(64 * 1024) * 4)).astype(np.float32)
    pages, again = np.empty((64, size), np.uint8), np.empty((64, size), np.uint8)
    encode(values.view(np.uint8), CODECS["f32"], CODECS[name], 1024, pages.reshape(-1), size)
    decoded = np.empty(values.nbytes, np.uint8)
    decode(pages, np.arange(64) * size, CODECS[name], CODECS["f32"], 1024, decoded)
    encode(decoded, CODECS["f32"], CODECS[name], 1024, again.reshape(-1), size)
    np.testing.assert_array_equal(pages, again)


def test_tiny_exponents_decode_to_zero_or_a_denormal():
    page = np.zeros(1088, np.uint8)
    page[64:68] = 1, 64, 127, 128 + 2  # exponent 0: below what f32 can normalise, or not
    out = np.empty(4096, np.uint8)
    decode(page, np.zeros(1, np.int64), CODECS["bfp8_b"], CODECS["f32"], 1024, out)
    assert out.view(np.uint32)[:4].tolist() == [0, 0, 63 << 17, 0]
