"""Named layouts against NumPy transposes of the shapes that engines and vendors document, tensor parallel included."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.errors import InvalidArgument, UnsupportedLayout
from kvd.layout import named
from kvd.layout.descriptor import Placed
from kvd.layout.execute import regroup
from kvd.layout.notation import layout
from kvd.layout.plan import check_convertible, plan_direct, plan_regroup

L, H, T, D = 2, 4, 150, 64
SHAPES = {
    # dims of the cache in memory order: l, kv, B (block), N (token in it), h, d
    "nhd": "l kv B N h d",
    "hnd": "l kv B h N d",
    "nhd-blocks": "l B kv N h d",
    "hnd-blocks": "l B kv h N d",
    "vllm-lbhnc": "l B h N kv d",
    "vllm-lbnhc": "l B N h kv d",
    "vllm-lhbnc": "l h B N kv d",
    "vllm-blhnc": "B l h N kv d",
    "vllm-blnhc": "B l N h kv d",
    "vllm-bhlnc": "B h l N kv d",
    "ascend": "l kv B N h d",
    "gaudi": "l kv B N h d",
    "neuron": "l kv B N h d",
    "rebellions": "l kv B h N d",
    "sglang": "l kv B N h d",
    "sglang-page-first": "kv B N l h d",
    "sglang-page-first-direct": "kv B l N h d",
    "sglang-page-head": "kv B h N l d",
    "lmcache": "B kv l N h d",
    "vllm-rocm-v": "l kv B h d N",
}
VALUES = np.random.default_rng(1).integers(0, 2**16, (L, 2, H, T, D), np.uint16)


def cache(
    name: str, heads: tuple[int, int], block: int, seed: int, values=VALUES
) -> tuple[Placed, np.ndarray, np.ndarray]:
    """A paged cache that these heads lie in: its numbers, its memory, and a mark on every element that is in use."""
    random = np.random.default_rng(seed)
    needed = -(-T // block)
    blocks = needed + 5
    table = random.permutation(blocks)[:needed].astype(np.int64)
    sizes = {"l": L, "kv": 2, "h": heads[1] - heads[0], "B": blocks, "N": block, "d": D}
    names = SHAPES[name].split()
    memory = np.full([sizes[one] for one in names], 0xEEEE, np.uint16)
    marks = np.zeros(memory.shape, np.bool_)
    order = [names.index(one) for one in ("l", "kv", "h", "B", "N", "d")]
    for number, place in enumerate(table):
        part = VALUES[:, :, heads[0] : heads[1], number * block : (number + 1) * block]
        at = (slice(None),) * 3 + (place, slice(part.shape[3]))
        memory.transpose(order)[at] = part
        marks.transpose(order)[at] = True
    held = {"l": (0, L), "kv": (0, 2), "h": heads, "t": (0, T), "d": (0, D)}
    return Placed(named.get(name, block=block), held, {"B": blocks}, table), memory, marks


def send(source: Placed, target: Placed, memory: np.ndarray, out: np.ndarray, within=None) -> int:
    plan = plan_regroup(source, target, within)
    staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
    regroup(plan, [memory.reshape(-1).view(np.uint8)], staging)
    flat = out.reshape(-1).view(np.uint8)
    for start, channel, to, length in plan.requests.tolist():
        assert channel == 0
        flat[to : to + length] = staging[start : start + length]
    return len(plan.requests)


def runs(marks: np.ndarray) -> int:
    return int((np.diff(np.concatenate(([0], marks.reshape(-1).astype(np.int8)))) == 1).sum())


@pytest.mark.parametrize("target", SHAPES)
@pytest.mark.parametrize("source", ["nhd", "vllm-bhlnc"])
def test_caches_of_engines(source, target):
    mine, memory, _ = cache(source, (0, H), 16, 3)
    theirs, wanted, marks = cache(target, (0, H), 32, 4)
    out = np.full_like(wanted, 0xEEEE)
    assert send(mine, theirs, memory, out) == runs(marks)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (16, 128), (128, 16), (64, 32), (24, 64)])
@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("names", [("nhd", "vllm-lbhnc"), ("vllm-blnhc", "hnd-blocks")])
def test_ranks_and_blocks_that_differ(names, ranks, blocks):
    sources = [cache(names[0], (r * H // ranks[0], (r + 1) * H // ranks[0]), blocks[0], r) for r in range(ranks[0])]
    for rank in range(ranks[1]):
        theirs, wanted, _ = cache(names[1], (rank * H // ranks[1], (rank + 1) * H // ranks[1]), blocks[1], 10 + rank)
        out = np.full_like(wanted, 0xEEEE)
        for mine, memory, _ in sources:
            check_convertible(mine, theirs)
            send(mine, theirs, memory, out)
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2)])
def test_ranks_of_a_tiled_cache(ranks):
    sources = [cache("nhd", (r * H // ranks[0], (r + 1) * H // ranks[0]), 16, r) for r in range(ranks[0])]
    back = [np.full_like(memory, 0xEEEE) for _, memory, _ in sources]
    for rank in range(ranks[1]):
        heads = (rank * H // ranks[1], (rank + 1) * H // ranks[1])
        held = {"l": (0, L), "kv": (0, 2), "h": heads, "t": (0, T), "d": (0, D)}
        table = np.random.default_rng(rank).permutation(9)[:5].astype(np.int64)
        target = Placed(named.get("tenstorrent", block=32, channels=7), held, {"B": 9}, table)
        channels = [np.full(target.channel_bytes, 0xEE, np.uint8) for _ in range(7)]
        for mine, memory, _ in sources:
            plan = plan_regroup(mine, target)
            staging = np.full(plan.staging_bytes, 0xDD, np.uint8)
            regroup(plan, [memory.reshape(-1).view(np.uint8)], staging)
            for start, channel, to, length in plan.requests.tolist():
                channels[channel][to : to + length] = staging[start : start + length]
        where = dict(
            zip(("l", "kv", "h", "t", "d"), np.ix_(range(L), range(2), range(*heads), range(T), range(D)), strict=True)
        )
        channel, offset = target.locate(**where)
        got = np.stack(channels).view(np.uint16)[channel, offset // 2]
        np.testing.assert_array_equal(got, VALUES[:, :, heads[0] : heads[1]])
        for (mine, _, _), out in zip(sources, back, strict=True):
            plan = plan_regroup(target, mine)
            staging = np.empty(plan.staging_bytes, np.uint8)
            regroup(plan, channels, staging)
            flat = out.reshape(-1).view(np.uint8)
            for start, _, to, length in plan.requests.tolist():
                flat[to : to + length] = staging[start : start + length]
    for (_, memory, _), out in zip(sources, back, strict=True):
        np.testing.assert_array_equal(out, memory)


def test_a_prefix_that_is_there_already():
    # the sink has tokens 0 to 64 and gets the rest: its first blocks stay as they are
    mine, memory, _ = cache("nhd", (0, H), 16, 3)
    theirs, wanted, _ = cache("nhd", (0, H), 16, 4)
    out = np.full_like(wanted, 0xEEEE)
    send(mine, theirs, memory, out, {"t": (64, T)})
    order = (0, 1, 4, 2, 3, 5)
    for number, place in enumerate(theirs.table):
        here = out.transpose(order)[:, :, :, place]
        if number < 4:
            assert (here == 0xEEEE).all()
        else:
            np.testing.assert_array_equal(here, wanted.transpose(order)[:, :, :, place])


def test_same_layout_needs_no_regroup():
    mine, memory, _ = cache("vllm-lbnhc", (0, H), 16, 3)
    theirs, wanted, _ = cache("vllm-lbnhc", (0, H), 16, 4)
    out = np.full_like(wanted, 0xEEEE)
    requests = plan_direct(mine, theirs)[0]
    assert len(requests) <= L * len(mine.table)
    for start, _, to, length in requests.tolist():
        out.reshape(-1).view(np.uint8)[to : to + length] = memory.reshape(-1).view(np.uint8)[start : start + length]
    np.testing.assert_array_equal(out, wanted)


def test_ascend_fractals():
    values = np.random.default_rng(2).integers(0, 2**16, (8, 100, 30), np.uint16)
    padded = np.zeros((8, 112, 32), np.uint16)
    padded[:, :100, :30] = values
    wanted = np.ascontiguousarray(padded.reshape(8, 112, 2, 16).transpose(0, 2, 1, 3))
    assert wanted.shape == (8, 2, 112, 16)
    held = {"l": (0, 1), "kv": (0, 1), "h": (0, 8), "t": (0, 100), "d": (0, 30)}
    source, target = Placed(named.get("heads"), held), Placed(named.get("ascend-nz"), held)
    out = np.full_like(wanted, 0xEEEE)
    assert send(source, target, values, out) == 1
    np.testing.assert_array_equal(out, wanted)
    # torch_npu: 32 bytes a row, but f32 has as many columns as f16
    assert [named.get("ascend-nz", codec=codec).digits("d")[1].radix for codec in ("i8", "f16", "f32")] == [32, 16, 16]


def test_ascend_310p():
    mine, memory, _ = cache("nhd", (0, H), 16, 3)
    table = np.arange(-(-T // 32), dtype=np.int64)
    target = Placed(named.get("ascend-310p", block=32), mine.held, {"B": 8}, table)
    out = np.full((L, 2, 8, H * D // 16, 32, 16), 0xEEEE, np.uint16)
    send(mine, target, memory, out)
    wanted = np.full_like(out, 0xEEEE)
    for number in range(len(table)):
        part = VALUES[:, :, :, number * 32 : (number + 1) * 32]
        tokens = part.shape[3]
        joined = part.transpose(0, 1, 3, 2, 4).reshape(L, 2, tokens, H * D // 16, 16).transpose(0, 1, 3, 2, 4)
        wanted[:, :, number, :, :tokens] = joined
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(("codec", "dtype"), [("f32", np.uint32), ("bf16", np.uint16), ("i8", np.uint8)])
def test_tpu_tiles_pack_rows_into_words(codec, dtype):
    values = np.random.default_rng(2).integers(0, 200, (1, 2, 3, 32, 128)).astype(dtype)
    held = {"l": (0, 1), "kv": (0, 2), "h": (0, 3), "t": (0, 32), "d": (0, 128)}
    source = Placed(named.get("heads", codec=codec), held)
    target = Placed(named.get("tpu", codec=codec, block=16), held, {"B": 2}, np.array([1, 0], np.int64))
    packed = 4 // values.itemsize
    tiles = values.reshape(1, 2, 3, 2, 2, 8 // packed, packed, 128).transpose(0, 1, 2, 3, 4, 5, 7, 6)[:, :, :, ::-1]
    out = np.zeros(tiles.shape, dtype)
    send(source, target, values, out)
    np.testing.assert_array_equal(out, tiles)


def paged(target: str, codec: str, values, out, block: int) -> None:
    """``values`` [l, kv, h, t, d] into a cache of two blocks, the second one first."""
    sizes = dict(zip(("l", "kv", "h", "t", "d"), values.shape, strict=True))
    held = {axis: (0, size) for axis, size in sizes.items()}
    form = named.get(target, codec=codec, block=block)
    theirs = Placed(form, held, {"B": 2}, np.array([1, 0], np.int64))
    send(Placed(named.get("heads", codec=codec), held), theirs, values, out)


@pytest.mark.parametrize(("codec", "dtype"), [("f32", np.uint32), ("bf16", np.uint16), ("f8_e4m3", np.uint8)])
def test_ragged_paged_attention_packs_heads_into_words(codec, dtype):
    values = np.random.default_rng(2).integers(1, 200, (2, 2, 4, 32, 64)).astype(dtype)
    p = 4 // values.itemsize
    # tokens, K and V of a head side by side, rows of 128: padding stays as it was
    merged = np.zeros((2, 32, 8, 128), dtype)
    merged[..., :64] = values.transpose(0, 3, 2, 1, 4).reshape(2, 32, 8, 64)
    wanted = merged.reshape(2, 2, 16, 8 // p, p, 128).swapaxes(-1, -2)[:, ::-1]
    out = np.zeros(wanted.shape, dtype)
    paged("vllm-tpu", codec, values, out, 16)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", np.uint16), ("f8_e4m3", np.uint8)])
def test_rocm_has_words_of_16_bytes(codec, dtype):
    values = np.random.default_rng(2).integers(1, 200, (2, 1, 3, 64, 96)).astype(dtype)
    x = 16 // values.itemsize
    blocks = values.reshape(2, 1, 3, 2, 32, 96)[:, :, :, ::-1].transpose(0, 1, 3, 2, 4, 5)  # l kv B h N d
    keys = np.ascontiguousarray(blocks.reshape(2, 1, 2, 3, 32, 96 // x, x).swapaxes(4, 5))
    out = np.zeros_like(keys)
    paged("vllm-rocm-k", codec, values, out, 32)
    np.testing.assert_array_equal(out, keys)
    shuffled = np.ascontiguousarray(blocks.reshape(2, 1, 2, 3, 32 // x, x, 96).swapaxes(5, 6))
    out = np.zeros_like(shuffled)
    paged("vllm-aiter-v", codec, values, out, 32)
    np.testing.assert_array_equal(out, shuffled)


def test_blocks_of_a_cache_take_turns():
    held = {"l": (0, 1), "kv": (0, 2), "h": (0, 2), "t": (0, 160), "d": (0, 64)}
    table = np.array([4, 0, 3, 2, 1], np.int64)
    target = Placed(named.get("tenstorrent-shards", block=32, shard=4, channels=3), held, {"B": 5}, table)
    channel, offset = target.locate(l=0, kv=1, h=np.array([[0], [1]]), t=np.arange(0, 160, 32), d=32)
    # block 4 is the second one of bank 1; each tensor takes two blocks of 4 tiles of 2 KiB in each bank
    assert channel.tolist() == [[1, 0, 0, 2, 1]] * 2
    assert (offset // 2048).tolist() == [[8 + 4 + 1, 9, 13, 9, 9], [8 + 4 + 3, 11, 15, 11, 11]]


def test_latents():
    values = np.random.default_rng(2).integers(0, 2**16, (3, 50, 576), np.uint16)
    held = {"l": (0, 3), "t": (0, 50), "d": (0, 576), "kv": (0, 1), "h": (0, 1)}
    source = Placed(named.get("tokens"), held)
    target = Placed(named.get("mla", block=64), held, {"B": 2}, np.array([1], np.int64))
    out = np.full((3, 2, 64, 576), 0xEEEE, np.uint16)
    assert send(source, target, values, out) == 3
    np.testing.assert_array_equal(out[:, 1, :50], values)
    assert (out[:, 0] == 0xEEEE).all()
    assert (out[:, 1, 50:] == 0xEEEE).all()


def test_activations_of_an_operator():
    values = np.random.default_rng(2).integers(0, 2**16, (40, 100), np.uint16)
    held = {"t": (0, 40), "d": (0, 100)}
    source = Placed(layout("activation", "t d", codec="bf16"), held)
    target = Placed(named.get("tenstorrent-tiled"), held | {"l": (0, 1), "kv": (0, 1), "h": (0, 1)})
    channels = [np.zeros(target.channel_bytes, np.uint8) for _ in range(8)]
    plan = plan_regroup(source, target)
    staging = np.empty(plan.staging_bytes, np.uint8)
    regroup(plan, [values.view(np.uint8).reshape(-1)], staging)
    assert len(plan.requests) == 8
    for start, channel, to, length in plan.requests.tolist():
        channels[channel][to : to + length] = staging[start : start + length]
    t, d = np.ix_(range(40), range(100))
    channel, offset = target.locate(t=t, d=d)
    np.testing.assert_array_equal(np.stack(channels).view(np.uint16)[channel, offset // 2], values)


class TestRefusals:
    def refused(self, reader: str, writer: str, **more):
        held = {"l": (0, L), "kv": (0, 2), "h": (0, H), "t": (0, T), "d": (0, D)}
        a = Placed(named.get(reader, **more.get("source", {})), held | more.get("held", {}))
        b = Placed(named.get(writer, **more.get("target", {})), held | more.get("theirs", {}))
        with pytest.raises(UnsupportedLayout) as error:
            check_convertible(a, b)
        with pytest.raises((UnsupportedLayout, InvalidArgument)):
            plan_regroup(a, b)
        assert error.value.code == "UNSUPPORTED_LAYOUT"
        return error.value.fields

    def test_number_formats(self):
        assert self.refused("heads", "tokens", target={"codec": "f32"})["codec"] == ["bf16", "f32"]
        assert self.refused("heads", "tokens", target={"codec": "f16"})["codec"] == ["bf16", "f16"]
        assert self.refused("heads", "tenstorrent-tiled", source={"codec": "i8"}, target={"codec": "bfp8_b"})["codec"]

    def test_an_axis_that_only_one_side_has(self):
        held = {"l": (0, L), "t": (0, T), "d": (0, D)}
        with pytest.raises(UnsupportedLayout, match="no axis"):
            plan_regroup(
                Placed(layout("no-heads", "l t d", codec="bf16"), held),
                Placed(named.get("heads"), held | {"kv": (0, 1), "h": (0, H)}),
            )

    def test_a_target_page_that_the_source_has_in_part(self):
        fields = self.refused("heads", "tenstorrent-tiled", held={"t": (0, 40)})
        assert fields["axis"] == "t"
        assert fields["page"] == 32
        assert fields["layout"] == ["heads", "tenstorrent-tiled"]

    def test_elements_into_block_formats(self):
        held = {"l": (0, L), "kv": (0, 2), "h": (0, H), "t": (0, T), "d": (0, D)}
        target = Placed(named.get("tenstorrent-tiled", codec="bfp8_b"), held)
        with pytest.raises(UnsupportedLayout, match="whole pages"):
            plan_regroup(Placed(named.get("heads"), held), target, partial=True)
        with pytest.raises(UnsupportedLayout, match="by a regroup only"):
            plan_direct(Placed(named.get("heads"), held), target)

    def test_unknown_names_and_sizes(self):
        with pytest.raises(InvalidArgument, match="no layout 'tiles'; there are kvd, "):
            named.get("tiles")
        with pytest.raises(InvalidArgument, match="multiple of 32"):
            named.get("tenstorrent", block=16)
        with pytest.raises(InvalidArgument, match="multiple of 8"):
            named.get("tpu", block=12)
        with pytest.raises(InvalidArgument, match="needs shard"):
            named.get("tenstorrent-shards", block=32)
        with pytest.raises(InvalidArgument, match="multiple of 8 tokens"):
            named.get("vllm-aiter-v", block=12)
        for name in ("vllm-tpu", "vllm-rocm-k", "vllm-aiter-v"):
            with pytest.raises(InvalidArgument, match="1, 2 or 4 bytes, not raw:3"):
                named.get(name, codec="raw:3")
        with pytest.raises(InvalidArgument, match="channels"):
            named.get("tenstorrent", block=32, channels=0)


def test_ranges_that_cut_a_tile_are_refused_unless_elements_go_alone():
    held = {"l": (0, L), "kv": (0, 2), "h": (0, H), "t": (0, T), "d": (0, D)}
    source, target = Placed(named.get("heads"), held), Placed(named.get("tenstorrent-tiled"), held)
    with pytest.raises(InvalidArgument, match="would be cut"):
        plan_regroup(source, target, {"t": (0, 40)})
    assert len(plan_regroup(source, target, {"t": (32, 64)}).zero) == 0
    # the last tile has padding, and ends the tensor
    assert len(plan_regroup(source, target, {"t": (128, T)}).zero) == L * 2 * H * (D // 32)
    entry = plan_regroup(source, target, {"l": (0, 1), "h": (1, 2), "t": (77, 78)}, partial=True)
    assert entry.payload_bytes == entry.staging_bytes == 2 * D * 2
    assert entry.requests[:, 3].tolist() == [32] * (2 * D // 16)
