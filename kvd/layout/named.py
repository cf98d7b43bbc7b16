"""The layouts of known engines and devices, by name.

Sizes that a layout leaves open are arguments of :func:`get`; a layout that has no use for one ignores it. Axes are a KV
cache's: ``l`` layers, ``kv`` K and V, ``h`` KV heads, ``t`` tokens, ``d`` head dimension. Activations use ``t`` and
``d``, with one of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvd.errors import InvalidArgument
from kvd.layout.codec import codec as codec_named
from kvd.layout.descriptor import MAX_ALIGNMENT, MAX_CHANNELS, MAX_RADIX, Kind, Layout, Placement
from kvd.layout.notation import from_toml, layout

TILE, FACE = 32, 16
"""Rows and columns of a Tenstorrent tile, and of each of its four faces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What :func:`get` was given."""

    codec: str
    block: int
    channels: int
    alignment: int
    shard: int


Builder: TypeAlias = Callable[[str, Sizes], Layout]


def get(
    name: str, *, codec: str = "bf16", block: int = 16, channels: int = 8, alignment: int = 64, shard: int = 0
) -> Layout:
    """The layout of that name, or the one that ``name`` describes if it is TOML (which has all sizes itself).

    ``block``: tokens of a cache's block. ``channels``, ``alignment`` (bytes): of the device. ``shard``: tiles that a
    shard is wide (width-sharded), tiles that take turns together (``tenstorrent-shards``), or pages that a shard has
    (height-sharded; 0: as few as hold the tensor).

    Raises :class:`InvalidArgument` for an unknown name, with those there are, and for sizes that don't fit.
    """
    if "=" in name or "\n" in name:
        return from_toml(name)
    if name not in NAMED:
        raise InvalidArgument(f"there is no layout {name[:64]!r}; there are {', '.join(NAMED)}", layout=name[:64])
    for what, value, most in (
        ("block", block, MAX_RADIX),
        ("channels", channels, MAX_CHANNELS),
        ("alignment", alignment, MAX_ALIGNMENT),
    ):
        if not 1 <= value <= most:
            raise InvalidArgument(f"{what} of layout {name!r} is {value}; it must be from 1 to {most}", field=what)
    if not 0 <= shard <= MAX_RADIX:
        raise InvalidArgument(f"shard of layout {name!r} is {shard}; it must be from 0 to {MAX_RADIX}", field="shard")
    return NAMED[name].build(name, Sizes(codec, block, channels, alignment, shard))


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A layout by name; ``about`` is its shape, and where it is used."""

    about: str
    build: Builder


def _paged(order: str) -> Builder:
    """Caches of blocks in one memory, as engines on GPUs have them; ``B`` goes through the block table."""

    def build(name: str, sizes: Sizes) -> Layout:
        return layout(name, order, {"t": f"B:* N:{sizes.block}"}, codec=sizes.codec, table="B")

    return build


def _plain(order: str) -> Builder:
    def build(name: str, sizes: Sizes) -> Layout:
        return layout(name, order, codec=sizes.codec)

    return build


def _vllm(letters: str) -> Builder:
    """One of vLLM's stride orders of [L, B, H, N, C]; the block digit has to be outside the page."""
    words = [{"L": "l", "B": "B", "H": "h", "N": "N", "C": "kv d"}[letter] for letter in letters]
    cut = words.index("B") + 1
    outer, inner = words[:cut], words[cut:]
    front = f"l || {' '.join(outer[1:])}" if outer[0] == "l" else " ".join(outer)
    return _paged(f"{front} | {' '.join(inner)}")


def _tiles(order: str, kind: Kind = "round-robin", paged: bool = False, shards: bool = False) -> Builder:
    def build(name: str, sizes: Sizes) -> Layout:
        tokens = f"T:* F:2 r:{FACE}"
        if paged:
            if sizes.block % TILE:
                raise InvalidArgument(
                    f"blocks of {sizes.block} tokens don't fit layout {name!r}, whose tiles have {TILE} rows; use a "
                    f"multiple of {TILE}",
                    block=sizes.block,
                )
            tokens = f"B:* T:{sizes.block // TILE} F:2 r:{FACE}"
        dims = f"D:* G:2 c:{FACE}"
        if kind == "digit":
            dims = f"S:* D:{sizes.shard or 1} G:2 c:{FACE}"
        if kind == "flat":
            place = Placement()
        else:
            if shards and not sizes.shard:
                raise InvalidArgument(
                    f"layout {name!r} needs shard, the tiles that take turns together; a block of 32 tokens of "
                    "8 heads of 128 elements has 32",
                    field="shard",
                )
            pages = sizes.shard if kind == "sharded" or shards else 0
            place = Placement(kind, sizes.channels, sizes.alignment, pages)
        return layout(
            name,
            order,
            {"t": tokens, "d": dims},
            codec=sizes.codec,
            placement=place,
            table="B" if paged else "",
            padding=True,
        )

    return build


def _rows(name: str, sizes: Sizes) -> Layout:
    place = Placement("round-robin", sizes.channels, sizes.alignment)
    return layout(name, "l kv || h t | d", codec=sizes.codec, placement=place, padding=True)


def _fractal(name: str, sizes: Sizes) -> Layout:
    columns = 32 if codec_named(sizes.codec).item_bytes == 1 else 16  # torch_npu has 16 of f32, too
    axes = {"t": "M:* m:16", "d": f"n1:* n0:{columns}"}
    return layout(name, "l kv || h n1 M | m n0", axes, codec=sizes.codec, padding=True)


def _fractal_cache(name: str, sizes: Sizes) -> Layout:
    axes = {"t": f"B:* N:{sizes.block}", "d": "n1:* n0:16"}
    return layout(name, "l || kv B h n1 | N n0", axes, codec=sizes.codec, table="B")


def _tpu(name: str, sizes: Sizes) -> Layout:
    item = codec_named(sizes.codec).item_bytes
    if item not in (1, 2, 4) or sizes.block % 8:
        raise InvalidArgument(
            f"layout {name!r} has pages of a multiple of 8 tokens and elements of 1, 2 or 4 bytes, not {sizes.block} "
            f"tokens of {sizes.codec}",
            block=sizes.block,
            codec=sizes.codec,
        )
    packed = 4 // item
    axes = {"t": f"B:* T:{sizes.block // 8} R:{8 // packed} p:{packed}", "d": "D:* c:128"}
    return layout(name, "l kv || h B T D | R c p", axes, codec=sizes.codec, table="B", padding=True)


def _rocm_key(name: str, sizes: Sizes) -> Layout:
    axes = {"t": f"B:* N:{sizes.block}", "d": f"e:* x:{_words(name, sizes, 16)}"}
    return layout(name, "l kv || B | h e N x", axes, codec=sizes.codec, table="B")


def _aiter_value(name: str, sizes: Sizes) -> Layout:
    together = _words(name, sizes, 16)
    if sizes.block % together:
        raise InvalidArgument(
            f"layout {name!r} has blocks of a multiple of {together} tokens of {sizes.codec}, not {sizes.block}",
            block=sizes.block,
        )
    axes = {"t": f"B:* n:{sizes.block // together} x:{together}"}
    return layout(name, "l kv || B | h n d x", axes, codec=sizes.codec, table="B")


def _vllm_tpu(name: str, sizes: Sizes) -> Layout:
    """K and V of a head are neighbouring rows; so many rows as fill 32 bits are packed, element by element."""
    packed = _words(name, sizes, 4)
    order = {1: "h kv D c", 2: "h D c kv", 4: "h D c g kv"}[packed]
    axes = {"t": f"B:* N:{sizes.block}", "d": "D:* c:128", "kv": "kv:2"} | ({"h": "h:* g:2"} if packed == 4 else {})
    return layout(name, f"l || B | N {order}", axes, codec=sizes.codec, table="B")


def _words(name: str, sizes: Sizes, nbytes: int) -> int:
    """Elements in a word of so many bytes."""
    item = codec_named(sizes.codec).item_bytes
    if item not in (1, 2, 4):
        raise InvalidArgument(f"layout {name!r} has elements of 1, 2 or 4 bytes, not {sizes.codec}", codec=sizes.codec)
    return nbytes // item


_VLLM = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

NAMED: Mapping[str, Named] = MappingProxyType(
    {
        "kvd": Named("[l][t, h, kv, d]: a lease of the local API, one row", _plain("l || t h kv d")),
        "tokens": Named("[l][kv][t, h, d]: K and V apart, contiguous tokens", _plain("l kv || t h d")),
        "heads": Named("[l][kv][h, t, d]: K and V apart, contiguous heads", _plain("l kv || h t d")),
        "nhd": Named("[l](2, blocks, N, H, D): vLLM before its stride orders", _paged("l || kv B | N h d")),
        "hnd": Named("[l](2, blocks, H, N, D): the same, forced HND", _paged("l || kv B | h N d")),
        "nhd-blocks": Named("[l](blocks, 2, N, H, D): FlashInfer", _paged("l || B kv | N h d")),
        "hnd-blocks": Named("[l](blocks, 2, H, N, D): FlashInfer, HND", _paged("l || B kv | h N d")),
        **{
            f"vllm-{letters.lower()}": Named(f"[L, B, H, N, C] in the order {letters}: vLLM", _vllm(letters))
            for letters in _VLLM
        },
        "vllm-rocm-k": Named("[l][kv](blocks, H, D/x, N, x), x of 16 bytes: K alone, vLLM on ROCm, AITER", _rocm_key),
        "vllm-rocm-v": Named("[l][kv](blocks, H, D, N): V alone, vLLM on ROCm", _paged("l kv || B | h d N")),
        "vllm-aiter-v": Named("[l][kv](blocks, H, N/x, D, x): V alone, shuffled for AITER", _aiter_value),
        "vllm-tpu": Named("[l](blocks, N, 2H/p, p, D), p of 32 bits: vLLM on TPU, ragged paged attention", _vllm_tpu),
        "sglang": Named("[l][kv](pages, N, H, D): SGLang", _paged("l kv || B | N h d")),
        "sglang-page-first": Named("[kv](pages, N, l, H, D): SGLang's host cache", _paged("kv || B | N l h d")),
        "sglang-page-first-direct": Named("[kv](pages, l, N, H, D): the same, direct", _paged("kv || B | l N h d")),
        "sglang-page-head": Named("[kv](pages, H, N, l, D): the same, by head", _paged("kv || B | h N l d")),
        "lmcache": Named("(chunks, 2, l, N, H, D): LMCache, KV_2LTD", _paged("B | kv l N h d")),
        "mla": Named("[l](blocks, N, D): one latent a token, vLLM", _paged("l || B | N d")),
        "tenstorrent": Named(
            "[l][kv](blocks, H, N, D): paged cache, tiles round robin over channels",
            _tiles("l kv || B h T D | F G r c", paged=True),
        ),
        "tenstorrent-shards": Named(
            "[l][kv](blocks, H, N, D): paged cache, shards of tiles (a block's, say) round robin",
            _tiles("l kv || B h T D | F G r c", paged=True, shards=True),
        ),
        "tenstorrent-tiled": Named(
            "[l][kv](H, T, D): a tensor, tiles round robin over channels", _tiles("l kv || h T D | F G r c")
        ),
        "tenstorrent-rows": Named("[l][kv](H, T, D): a tensor in row-major pages, round robin", _rows),
        "tenstorrent-height": Named(
            "[l][kv](H, T, D): height-sharded tiles", _tiles("l kv || h T D | F G r c", "sharded")
        ),
        "tenstorrent-width": Named(
            "[l][kv](H, T, D): width-sharded tiles", _tiles("l kv || S h T D | F G r c", "digit")
        ),
        "tenstorrent-host": Named("[l][kv](H, T, D): tiles on the host", _tiles("l kv || h T D | F G r c", "flat")),
        "ascend": Named("[l](2, blocks, N, H, D): Ascend", _paged("l || kv B | N h d")),
        "ascend-nz": Named("[l][kv](H, n1, m1, m0, n0): a tensor in fractals of Ascend", _fractal),
        "ascend-310p": Named("[l](2, blocks, H*D/16, N, 16): Ascend 310P", _fractal_cache),
        "gaudi": Named("[l][kv](blocks, N, H, D): Gaudi", _paged("l kv || B | N h d")),
        "neuron": Named("[l][kv](blocks, N, H, D): Neuron", _paged("l kv || B | N h d")),
        "rebellions": Named("[l][2, blocks, H, 1, N, D]: Rebellions", _paged("l || kv B h | N d")),
        "tpu": Named("[l][kv](H, pages, N, D) in tiles of (8, 128), packed to 32 bits: TPU", _tpu),
    }
)
