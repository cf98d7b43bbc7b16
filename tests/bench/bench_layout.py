"""Planning beside a memcpy of the bytes that are planned, in the same run: ``python -m tests.bench.bench_layout``.

The KV cache of Llama-3.1-70B (320 KiB a token) on its way from vLLM's paged cache into tiles. Times are CPU time of
this thread, since other work shares the machine; of ``--rounds`` the median and the quickest are shown, and the median
as a share of a memcpy of as many bytes. The lines of block formats are a whole regroup of one layer's K, encoding or
decoding included and planning left out. ``--only WORD`` picks lines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from kvd.layout import named
from kvd.layout.descriptor import Placed
from kvd.layout.execute import regroup
from kvd.layout.models import MODELS
from kvd.layout.plan import plan_regroup
from kvd.layout.ranges import Ranges

Case: TypeAlias = "tuple[str, int, Callable[[], object]]"

MODEL = MODELS["llama-3.1-70b"]
TOKEN_BYTES = 320 << 10


def placed(
    name: str, tokens: int, *, block: int, codec: str = "bf16", channels: int = 8, scattered: bool = False
) -> Placed:
    blocks = -(-tokens // block)
    room = 2 * blocks if scattered else blocks
    table = np.random.default_rng(0).permutation(room)[:blocks] if scattered else np.arange(blocks)
    layout = named.get(name, block=block, codec=codec, channels=channels)
    return Placed(layout, MODEL.held(tokens), {"B": room}, table.astype(np.int64))


def planning(title: str, source: Placed, target: Placed, within: Ranges | None = None) -> Case:
    plan = plan_regroup(source, target, within)
    boxes = sum(len(copy.places) for copy in plan.copies)
    title = f"{title}: {boxes:,} boxes, {len(plan.requests):,} requests"
    return title, plan.payload_bytes, lambda: plan_regroup(source, target, within)


def cases() -> Iterator[Case]:
    for mib in (10, 80, 320, 1280):
        tokens = mib * 1024 // 320
        source = placed("vllm-lbhnc", tokens, block=16, scattered=True)
        yield planning(f"plan {mib} MiB, staged per channel", source, placed("tenstorrent", tokens, block=32))
    tokens = 4096
    source = placed("vllm-lbhnc", tokens, block=16, scattered=True)
    yield planning("plan one layer", source, placed("tenstorrent", tokens, block=32), {"l": (3, 4)})
    yield planning("plan 12 channels", source, placed("tenstorrent", tokens, block=32, channels=12))
    paged = placed("tenstorrent", tokens, block=32, scattered=True)
    yield planning("plan scattered blocks", source, paged)
    yield planning("plan scattered blocks, one layer", source, paged, {"l": (3, 4)})
    yield planning("plan back, one layer", paged, source, {"l": (3, 4)})
    yield planning("plan blocks of 16 to 128", source, placed("vllm-lbnhc", tokens, block=128, scattered=True))
    within: Ranges = {"l": (0, 1), "kv": (0, 1)}
    memory = np.random.default_rng(0).standard_normal(source.channel_bytes // 80 // 4).astype(np.float32)
    for codec in ("bfp8_b", "bfp4_b"):
        target = placed("tenstorrent", tokens, block=32, codec=codec)
        there, back = plan_regroup(source, target, within), plan_regroup(target, source, within)
        staging, out = np.empty(there.staging_bytes, np.uint8), np.empty(back.staging_bytes, np.uint8)
        channels = [np.zeros(target.geometry.tensor_stride, np.uint8) for _ in range(8)]
        yield f"regroup into {codec}", there.copies[0].nbytes, lambda p=there, s=staging: regroup(p, [memory], s)
        yield f"regroup from {codec}", there.copies[0].nbytes, lambda p=back, c=channels, o=out: regroup(p, c, o)


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    print(f"{'median':>10} {'quickest':>10} {'of memcpy':>10}")
    pool = np.ones(256 << 20, np.uint8)
    copy = np.empty_like(pool)
    np.copyto(copy, pool)
    for title, nbytes, work in cases():
        if given.only not in title:
            continue
        work()
        per_byte = statistics.median(timed(lambda: np.copyto(copy, pool), 3)) / pool.nbytes
        times = timed(work, given.rounds)
        middle = statistics.median(times)
        print(f"{1e3 * middle:>7.1f} ms {1e3 * min(times):>7.1f} ms {middle / (per_byte * nbytes):>10.3f}  {title}")


if __name__ == "__main__":
    main()
