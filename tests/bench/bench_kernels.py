"""The kernels' time as a ratio to a memcpy of the same bytes in the same run: ``python -m tests.bench.bench_kernels``.

Absolute times on a shared machine say little, so each round times the memcpy and every implementation right after each
other; the figure is the median of the rounds' ratios, with the quartiles beside it. Sources are larger than the caches
and are read at other places in each round, by the memcpy too; destinations are in the caches as far as they fit, for
both. `--rounds` and `--only WORD` shorten a run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kvd_kernels as kernels
import numpy as np

POOL = 256 << 20  # bytes; the L3 here has 32 MiB


def arena(nbytes: int) -> Any:
    """Page-aligned memory, touched, as the daemon's staging is."""
    raw = np.ones(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + nbytes]


@dataclass
class Case:
    """One line of the table. `prepare` is called before each round and gives (memcpy, kernel)."""

    title: str
    nbytes: int
    prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]]
    items: int


def cases(rng: Any) -> Iterator[Case]:
    pool, staging = arena(POOL), arena(64 << 20)

    def memcpy(nbytes: int) -> Callable[[], object]:
        at = int(rng.integers(0, (POOL - nbytes) // 4096)) * 4096
        part, to = pool[at : at + nbytes], staging[:nbytes]
        to.fill(1)  # or the memcpy would pay for what the kernel before it left in the caches, or did not
        return lambda: np.copyto(to, part)

    def gather(title: str, size: int, n: int, offset: int = 0) -> Case:
        def prepare() -> Any:
            index = rng.integers(0, POOL // size, n)
            out, source = staging[offset : offset + n * size], pool[: POOL // size * size]
            return memcpy(n * size), lambda: kernels.gather(source, size, index, out)

        return Case(f"gather {title}", n * size, prepare, n)

    def selected(title: str, size: int, batch: int, heads: int, tokens: int, k: int, ordered: bool) -> Case:
        """What one decode step reads of one layer: k positions of each head, any of the layers in the pool."""
        entries = batch * heads * tokens
        n = batch * heads * k

        def prepare() -> Any:
            index = np.stack([rng.permutation(tokens)[:k] for _ in range(batch * heads)]).astype(np.int32)
            if ordered:
                index.sort(axis=1)
            flat = kernels.token_entries(index, tokens, heads).reshape(-1)
            at = int(rng.integers(0, POOL // (entries * size))) * entries * size
            out, layer = staging[: n * size], pool[at : at + entries * size]
            return memcpy(n * size), lambda: kernels.gather(layer, size, flat, out)

        return Case(f"gather {title}", n * size, prepare, n)

    def scatter(title: str, size: int, n: int) -> Case:
        def prepare() -> Any:
            index = rng.permutation(POOL // size)[:n]
            values, target = staging[: n * size], pool[: POOL // size * size]
            return memcpy(n * size), lambda: kernels.scatter(values, size, index, target)

        return Case(f"scatter {title}", n * size, prepare, n)

    def runs(size: int, total: int) -> Case:
        def prepare() -> Any:
            n = total // size
            descriptors = np.empty((n, 3), np.int64)
            descriptors[:, 0] = rng.permutation(POOL // size)[:n] * size
            descriptors[:, 1], descriptors[:, 2] = np.arange(n) * size, size
            return memcpy(total), lambda: kernels.copy_runs(pool, staging, descriptors)

        return Case(f"copy_runs {size} B", total, prepare, total // size)

    def selection(batch: int, heads: int, tokens: int, k: int) -> Iterator[Case]:
        shape = f"B={batch} H={heads} N={tokens} k={k}"
        n = batch * heads * k
        mask = rng.integers(1, 3, (batch, tokens), np.int8)
        out, counts = np.empty((batch * heads, k), np.int32), np.empty(batch * heads, np.int32)
        entries, blocks = np.empty((batch * heads, k), np.int64), np.zeros((batch, 1000))

        def index() -> Any:
            return np.stack([rng.permutation(tokens)[:k] for _ in range(batch * heads)]).astype(np.int32)

        def case(name: str, kernel: Callable[[Any], object]) -> Case:
            def prepare() -> Any:
                i = index()
                return memcpy(i.nbytes), lambda: kernel(i)

            return Case(f"{name} {shape}", 4 * n, prepare, n)

        yield case("partition", lambda i: kernels.partition(i, mask, heads, out, counts))
        yield case("token_entries", lambda i: kernels.token_entries(i, tokens, heads, entries))
        yield case("accumulate_blocks", lambda i: kernels.accumulate_blocks(i, blocks, tokens))

    def compared(heads: int, group: int, tokens: int, bits: int) -> Case:
        """One layer's scores of a decode step: each KV head's queries against the codes of all tokens."""
        size = heads * tokens * bits // 8
        q = rng.integers(0, 256, (heads, group, bits // 8), np.uint8)
        out = np.empty((heads, tokens), np.int32)

        def prepare() -> Any:
            at = int(rng.integers(0, (POOL - size) // 4096)) * 4096
            k = pool[at : at + size].reshape(heads, tokens, -1)
            return memcpy(size), lambda: kernels.hamming(q, k, out)

        return Case(f"hamming H={heads} G={group} N={tokens} {bits} bits", size, prepare, heads * tokens)

    def chosen(rows: int, tokens: int, page: int = 1) -> Case:
        """A fifth of each row; with `page` scores as Quest has them, that many alike in succession."""
        k, out = tokens // 5, np.empty((rows, tokens // 5), np.int32)
        lengths, wanted = np.full(rows, tokens), np.full(rows, k)

        def prepare() -> Any:
            scores = np.repeat(rng.standard_normal((rows, -(-tokens // page))).astype(np.float32), page, axis=1)
            scores = np.ascontiguousarray(scores[:, :tokens])
            return memcpy(scores.nbytes), lambda: kernels.top_k(scores, lengths, wanted, out)

        return Case(
            f"top_k {rows} x {tokens}{f' in pages of {page}' if page > 1 else ''}",
            4 * rows * tokens,
            prepare,
            rows * tokens,
        )

    def hashed(tokens: int, dim: int, bits: int) -> Case:
        w = rng.standard_normal((dim, bits)).astype(np.float32)
        out = np.empty((tokens, bits // 8), np.uint8)
        keys = pool.view(np.float32)
        keys[: tokens * dim] = rng.standard_normal(tokens * dim)
        x = keys[: tokens * dim].reshape(tokens, dim)

        def prepare() -> Any:
            return memcpy(x.nbytes), lambda: kernels.sign_codes(x, w, out)

        return Case(f"sign_codes N={tokens} d={dim} {bits} bits", x.nbytes, prepare, tokens)

    yield selected("512 B, B=4 H=8 N=4096 k=400", 512, 4, 8, 4_096, 400, ordered=False)
    yield selected("512 B, the same by position", 512, 4, 8, 4_096, 400, ordered=True)
    yield selected("1152 B, MLA, B=8 H=1 N=8192 k=1600", 1152, 8, 1, 8_192, 1_600, ordered=False)
    yield gather("256 B x 65536", 256, 65_536)
    yield gather("512 B x 25600", 512, 25_600)
    yield gather("512 B x 2560", 512, 2_560)
    yield gather("512 B x 25600, unaligned", 512, 25_600, offset=8)
    yield gather("1152 B x 16384", 1152, 16_384)
    yield gather("4096 B x 4096", 4096, 4_096)
    yield scatter("512 B x 25600", 512, 25_600)
    yield scatter("1152 B x 16384", 1152, 16_384)
    for size in (512, 4_096, 65_536, 1 << 20):
        yield runs(size, 32 << 20)
    yield from selection(4, 8, 4_096, 400)
    yield from selection(6, 8, 10_240, 1_024)
    yield compared(8, 4, 8_192, 256)
    yield compared(3, 3, 2_000, 256)
    yield compared(8, 4, 8_192, 128)
    yield chosen(3, 2_000)
    yield chosen(48, 2_000, page=16)
    yield chosen(32, 8_192)
    yield hashed(2_000, 64, 256)
    yield hashed(2_000, 128, 256)


def measure(case: Case, rounds: int) -> str:
    names = kernels.available()
    ratios: dict[Any, list[float]] = {name: [] for name in names}
    copies, fastest = [], {name: float("inf") for name in names}
    for _ in range(rounds):
        for name in names:  # a fresh place for each, or the later ones would find it in the caches
            memcpy, kernel = case.prepare()
            before = kernels.select(name)
            start = time.perf_counter()
            memcpy()
            between = time.perf_counter()
            kernel()
            end = time.perf_counter()
            kernels.select(before)
            ratios[name].append((end - between) / (between - start))
            copies.append(between - start)
            fastest[name] = min(fastest[name], end - between)
    line = f"{case.title:44} {case.nbytes / 2**20:7.2f} {statistics.median(copies) * 1e6:9.1f}"
    for name in names:
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        line += f" | {middle:6.2f} ({low:6.2f}-{high:6.2f}) {fastest[name] / case.items * 1e9:7.1f}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="run the cases whose title contains this word")
    options = parser.parse_args()
    print(f"in use: {kernels.implementation()}; {kernels.why_not_native() or 'native code is available'}")
    print("ratio to memcpy: median (quartiles), then best ns an item (entry, run, index value)")
    print(f"{'':44} {'MiB':>7} {'memcpy us':>9}" + "".join(f" | {name:^30}" for name in kernels.available()))
    for case in cases(np.random.default_rng(0)):
        if options.only in case.title:
            print(measure(case, options.rounds), flush=True)


if __name__ == "__main__":
    main()
