"""Regrouping beside a memcpy of the same bytes in the same run: ``python -m tests.bench.bench_regroup``.

Token-major K or V of one layer into 32x32 tiles, pages round robin over the channels of a device, each channel's share
contiguous (HAWK, section 4.3, step 1), and back. Absolute times on a shared machine say little, so each round times a
memcpy right before every way, in CPU time; the figure is the median of the rounds' ratios with the quartiles beside it.
Sources are larger than the caches and are read at other places in each round. NumPy's view is the transposition that
one would write without a kernel, `torch` the same in torch where it is installed. `--rounds` and `--only WORD` shorten
a run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import kvd_kernels as kernels
import numpy as np

from kvd.layout import execute
from kvd.tensors import Route, in_lease, on_device
from kvd_client import KVSpec, Placement
from kvd_client.spec import TokenRange, part_layout

Ways: TypeAlias = dict[str, Callable[[], object]]

POOL = 256 << 20
TOKENS, HEADS, WIDTH = 4096, 8, 128


def arena(nbytes: int) -> Any:
    """Page-aligned memory, touched, as the daemon's staging is."""
    raw = np.ones(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + nbytes]


def tile_places(size: int, channels: int, heads: int, layers: int) -> tuple[Any, int]:
    """Places of the tiles of ``layers`` tensors, in the target's order: those of a channel one after another. And the
    bytes of a token."""
    row = heads * WIDTH * size
    layer, head, tile, column = np.meshgrid(
        np.arange(layers), np.arange(heads), np.arange(TOKENS // 32), np.arange(WIDTH // 32), indexing="ij"
    )
    source = (layer * TOKENS + tile * 32) * row + head * WIDTH * size + column * 32 * size
    source = source.reshape(-1)
    page = np.arange(source.size)
    order = np.argsort(page % channels, kind="stable")
    return np.stack((source[order], page * 1024 * size), axis=1), row


def by(side: int, places: Any) -> Any:
    """The same places, ordered by one side: 0, the source; 1, the target."""
    return places[np.argsort(places[:, side], kind="stable")]


def cases() -> Iterator[tuple[str, int, Callable[[], Ways]]]:
    """(title, bytes, prepare); `prepare` gives the ways of one round, memcpy first."""
    rng = np.random.default_rng(0)
    pool, staging, other = arena(POOL), arena(64 << 20), arena(64 << 20)

    def part(nbytes: int) -> Any:
        at = int(rng.integers(0, (POOL - nbytes) // 4096)) * 4096
        return pool[at : at + nbytes]

    def native(ways: Ways, call: Callable[[], object]) -> None:
        for name in kernels.available():

            def run(name: Any = name) -> None:
                before = kernels.select(name)
                call()
                kernels.select(before)

            ways[name] = run

    def tile(dtype: str, size: int, channels: int, heads: int = HEADS, layers: int = 2, side: int = 0) -> Any:
        places, row = tile_places(size, channels, heads, layers)
        places = by(side, places)
        nbytes = len(places) * 1024 * size
        face, line = 256 * size, 16 * size
        box = ((2, 2, 16), (16 * row, line, row), (2 * face, face, line), line)

        def prepare() -> Ways:
            source, out = part(nbytes), staging[:nbytes]
            ways = {"memcpy": lambda: np.copyto(other[:nbytes], source)}
            native(ways, lambda: kernels.regroup(source, out, places, *box))
            view = source.view(f"V{line}").reshape(layers, TOKENS // 32, 2, 16, heads, WIDTH // 32, 2)
            tiles = out.view(f"V{line}").reshape(layers, heads, TOKENS // 32, WIDTH // 32, 2, 2, 16)
            if channels == 1:
                ways["NumPy view"] = lambda: np.copyto(tiles, view.transpose(0, 4, 1, 5, 2, 6, 3))
                ways |= by_torch(source, out)
            return ways

        def by_torch(source: Any, out: Any) -> Ways:
            try:
                import torch
            except ImportError:
                return {}
            torch.set_num_threads(1)
            kind = torch.int16 if size == 2 else torch.int32
            shape = (layers, TOKENS // 32, 2, 16, heads, WIDTH // 32, 2, 16)
            given = torch.from_numpy(source).view(kind).reshape(shape).permute(0, 4, 1, 5, 2, 6, 3, 7)
            tiles = torch.from_numpy(out).view(kind).reshape(given.shape)
            return {"torch permute": lambda: tiles.copy_(given)}

        order = ", in the target's order" if side else ""
        return f"tile {dtype}, {channels} channels, {heads} heads{order}", nbytes, prepare

    def untile(channels: int) -> Any:
        places, row = tile_places(2, channels, HEADS, 2)
        back = by(1, np.ascontiguousarray(places[:, ::-1]))
        nbytes = len(places) * 2048
        box = ((2, 16, 2), (1024, 32, 512), (16 * row, row, 32), 32)

        def prepare() -> Ways:
            source, out = part(nbytes), staging[:nbytes]
            ways: Ways = {"memcpy": lambda: np.copyto(other[:nbytes], source)}
            native(ways, lambda: kernels.regroup(source, out, back, *box))
            return ways

        return f"untile bf16, {channels} channels", nbytes, prepare

    def blocks(nbytes: int, total: int) -> Any:
        def prepare() -> Ways:
            source, out = part(total), staging[:total]
            places = np.stack((rng.permutation(total // nbytes), np.arange(total // nbytes)), axis=1) * nbytes
            ways: Ways = {"memcpy": lambda: np.copyto(other[:total], source)}
            native(ways, lambda: kernels.regroup(source, out, places, (), (), (), nbytes))
            return ways

        return f"block table, {nbytes >> 10} KiB blocks", total, prepare

    def planned() -> Any:
        """One layer of a transfer: entries of K and V together, from a lease to a device's tiles, by the plan."""
        spec = KVSpec(layers=1, kv_heads=HEADS, entry_bytes=4 * WIDTH, dtype="bfloat16", model="llama")
        layout = part_layout(spec, heads=HEADS, rows=1, capacity=TOKENS)
        placement, blocks = Placement(layout="tenstorrent", device="npu"), TOKENS // 32
        table = np.arange(blocks, dtype=np.int64)[None]
        tiles = on_device(layout, [TOKENS], 0, placement, channels=8, alignment=64, blocks=blocks, table=table)
        route = Route(in_lease(layout, [TOKENS], 0, placement), tiles)
        (plan,) = route.plan([(0, [TokenRange(0, 0, TOKENS)])])
        nbytes = plan.staging_bytes

        def prepare() -> Ways:
            source, out = part(layout.nbytes), staging[:nbytes]
            ways: Ways = {"memcpy": lambda: np.copyto(other[:nbytes], source[:nbytes])}
            native(ways, lambda: execute.regroup(plan, [source], out))
            return ways

        return f"a layer's plan, 8 channels, {len(plan.requests)} requests", nbytes, prepare

    def coded(title: str, magnitude: int, way: str) -> Any:
        nbytes, page = 16 << 20, kernels.block_page_bytes(1024, magnitude)
        pages, stride = nbytes // 2048, -(-page // 64) * 64
        offsets, encoded = np.arange(pages) * stride, staging[: pages * stride]

        def prepare() -> Ways:
            source = part(nbytes)
            ways: Ways = {"memcpy": lambda: np.copyto(other[:nbytes], source)}
            if way == "encode":
                native(ways, lambda: kernels.encode_bfp(source, "bf16", magnitude, 1024, encoded, stride))
            else:
                blocks = part(pages * stride)
                native(ways, lambda: kernels.decode_bfp(blocks, offsets, magnitude, 1024, staging[:nbytes], "bf16"))
            return ways

        return f"{way} {title} ({'from' if way == 'encode' else 'to'} bf16)", nbytes, prepare

    yield planned()
    yield tile("bf16", 2, 1)
    yield tile("bf16", 2, 8)
    yield tile("bf16", 2, 8, side=1)
    yield tile("bf16", 2, 12)
    yield tile("bf16", 2, 8, heads=1, layers=16)
    yield tile("f32", 4, 8, layers=1)
    yield untile(1)
    yield untile(8)
    yield blocks(8 << 10, 16 << 20)
    yield blocks(64 << 10, 16 << 20)
    for title, magnitude in (("bfp8_b", 7), ("bfp4_b", 3)):
        yield coded(title, magnitude, "encode")
        yield coded(title, magnitude, "decode")


def measure(prepare: Callable[[], Ways], rounds: int) -> tuple[float, dict[str, list[float]]]:
    """Median seconds of the memcpy; ratios to it, by way. Each reads a fresh place, or the later ways would find in the
    caches what the earlier ones have read."""
    names = [name for name in prepare() if name != "memcpy"]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    copies = []
    for _ in range(rounds):
        for name in names:
            copy = seconds(prepare()["memcpy"])
            ratios[name].append(seconds(prepare()[name]) / copy)
            copies.append(copy)
    return statistics.median(copies), ratios


def seconds(work: Callable[[], object]) -> float:
    """Of this thread's CPU, so that what else runs on the machine does not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="run the cases whose title contains this word")
    options = parser.parse_args()
    print(f"in use: {kernels.implementation()}; ratio to memcpy of the same bytes: median (quartiles)")
    for title, nbytes, prepare in cases():
        if options.only not in title:
            continue
        copy, ratios = measure(prepare, options.rounds)
        print(f"{title}: {nbytes >> 20} MiB, memcpy {copy * 1e3:.2f} ms ({nbytes / copy / 1e9:.1f} GB/s)")
        for name, values in ratios.items():
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"  {name:14} {middle:6.2f} ({low:.2f}-{high:.2f})", flush=True)


if __name__ == "__main__":
    main()
