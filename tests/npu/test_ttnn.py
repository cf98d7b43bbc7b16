"""Tenstorrent's own library reads what was regrouped, and rounds block formats as the codec does."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.layout import named
from kvd.layout.descriptor import Placed, Placement
from kvd.layout.execute import regroup
from kvd.layout.notation import layout
from kvd.layout.plan import plan_regroup
from tests.npu.judge import ask, in_page_order, python

pytestmark = pytest.mark.usefixtures("ttnn")


@pytest.fixture(scope="session")
def ttnn() -> str:
    return python()


def as_codec(values: np.ndarray, codec: str) -> np.ndarray:
    bits = values.view(np.uint32)
    return bits if codec == "f32" else (bits >> 16).astype(np.uint16)


def random(shape: tuple[int, ...], spread: float = 1.0) -> np.ndarray:
    """Numbers that bf16 holds exactly."""
    rng = np.random.default_rng(11)
    values = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * spread)).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def test_reads_the_original_tensor_from_regrouped_bytes(tmp_path):
    heads, tokens, dim, tensors = 3, 150, 96, []
    values = random((heads, tokens, dim))
    for number, (codec, banks, alignment) in enumerate(
        (("bf16", 8, 64), ("f32", 12, 32), ("bf16", 7, 64), ("bfp8_b", 8, 64), ("bfp4_b", 5, 64))
    ):
        plain = codec if codec in ("bf16", "f32") else "bf16"
        held = {"l": (0, 1), "kv": (0, 1), "h": (0, heads), "t": (0, tokens), "d": (0, dim)}
        blocks = -(-tokens // 16)
        table = np.random.default_rng(number).permutation(blocks + 3)[:blocks].astype(np.int64)
        source = Placed(named.get("nhd", codec=plain, block=16), held, {"B": blocks + 3}, table)
        memory = np.zeros((blocks + 3, 16, heads, dim), as_codec(values, plain).dtype)
        for at, place in enumerate(table):
            part = as_codec(values, plain)[:, at * 16 : (at + 1) * 16].transpose(1, 0, 2)
            memory[place, : len(part)] = part
        target = Placed(named.get("tenstorrent-tiled", codec=codec, channels=banks, alignment=alignment), held)
        plan = plan_regroup(source, target)
        staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
        regroup(plan, [memory.reshape(-1).view(np.uint8)], staging)
        channels = [np.full(target.channel_bytes, 0xEE, np.uint8) for _ in range(banks)]
        for start, channel, to, length in plan.requests.tolist():
            channels[channel][to : to + length] = staging[start : start + length]
        geometry = target.geometry
        raw = in_page_order(channels, geometry.page_stride, geometry.pages, geometry.page_bytes)
        tensors.append({"shape": np.array(values.shape), "dtype": codec, "layout": "tile", "raw": raw, "given": values})
    for tensor, answer in zip(tensors, ask(tmp_path, tensors), strict=True):
        np.testing.assert_array_equal(tensor["raw"], answer["encoded"])
        if tensor["dtype"] in ("bf16", "f32"):
            np.testing.assert_array_equal(answer["values"], values)


@pytest.mark.parametrize("name", ["bfp8_b", "bfp4_b"])
def test_rounds_as_the_codec_does(tmp_path, name):
    """Any f32 bits: denormals, infinities and NaN among them; and rows whose elements differ by a few powers of two."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, (6, 64, 64), np.uint32)
    bits[1] = (bits[1] & 0x807FFFFF) | rng.integers(0, 12, (64, 64), np.uint32) << 23
    bits[2] = (bits[2] & 0x807FFFFF) | (rng.integers(0, 12, (64, 64), np.uint32) + 120) << 23
    bits[3] = (bits[3] & 0x80780000) | (rng.integers(0, 6, (64, 64), np.uint32) + 120) << 23  # many halves
    bits[4] = (bits[4] & 0x807FFFFF) | (rng.integers(0, 8, (64, 64), np.uint32) + 248) << 23
    held = {"n": (0, 6), "t": (0, 64), "d": (0, 64)}
    tiles = {"t": "T:* F:2 r:16", "d": "D:* G:2 c:16"}
    source = Placed(layout("plain", "n t d", codec="f32"), held)
    form = layout("tiles", "n T D | F G r c", tiles, codec=name, placement=Placement(), padding=True)
    target = Placed(form, held)
    plan = plan_regroup(source, target)
    mine = np.empty(plan.staging_bytes, np.uint8)
    regroup(plan, [bits.reshape(-1).view(np.uint8)], mine)
    every = np.random.default_rng(6).integers(0, 256, len(mine), np.uint8)  # any bytes at all, decoded
    asked = {"shape": np.array(bits.shape), "dtype": name, "layout": "tile"}
    (answer,) = ask(tmp_path, [asked | {"given": bits.view(np.float32), "raw": every}])
    np.testing.assert_array_equal(mine, answer["encoded"])
    decoded = plan_regroup(target, source)
    out = np.empty(decoded.staging_bytes, np.uint8)
    regroup(decoded, [every], out)
    np.testing.assert_array_equal(out.view(np.uint32), answer["values"].view(np.uint32).reshape(-1))
