"""Does fragmentation block later allocations? A long random run per row: ``python -m tests.bench.bench_channels``.

KV caches of 128 to 8,192 tokens of Llama-3.1-70B (320 KiB a token) come and go in random order on a device of 8
channels of 4,278,190,080 bytes, with up to a given share of all bytes taken. Compared are: one buffer for a whole
request, in one channel (the conventional buffer, which knows no channels); one extent of all channels for a whole
request; and kvd's, the request's 160 tensors under one lease. A request comes only when the free bytes are enough in
sum, so that what is refused is refused for fragmentation, or for channels out of balance.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator

from kvd.errors import OutOfMemory
from kvd.memory.channels import ChannelSpace

CHANNELS, CHANNEL_BYTES, ALIGNMENT = 8, 4_278_190_080, 64
TENSORS, TOKEN_BYTES = 160, 2048
"""80 layers of K and V; bytes of a token in each of them."""

Taken = list[tuple[int, int, list[int] | None]]
"""Base, bytes and channels of each extent of a request."""


def conventional(space: ChannelSpace, tokens: int) -> Taken:
    """First come, first served: the first channel with room."""
    nbytes = tokens * TENSORS * TOKEN_BYTES
    for channel in range(space.channels):
        if space.largest([channel]) >= nbytes:
            return [(space.take(nbytes, [channel]), nbytes, [channel])]
    raise OutOfMemory("no channel has room")


def one_extent(space: ChannelSpace, tokens: int) -> Taken:
    nbytes = tokens * TENSORS * TOKEN_BYTES // space.channels
    return [(space.take(nbytes), nbytes, None)]


def tensors(space: ChannelSpace, tokens: int) -> Taken:
    nbytes = tokens * TOKEN_BYTES // space.channels
    return [(base, nbytes, None) for base in space.take_all([nbytes] * TENSORS)]


def run(place: Callable[[ChannelSpace, int], Taken], load: float, steps: int, seed: int) -> Iterator[str]:
    rng, space = random.Random(seed), ChannelSpace(CHANNELS, CHANNEL_BYTES, ALIGNMENT)
    room = int(load * CHANNELS * space.channel_bytes)
    running: list[tuple[Taken, int]] = []
    used = refused = extents = worst = 0
    fullest, seconds = 0.0, 0.0
    for _ in range(steps):
        tokens = -(-int(math.exp(rng.uniform(math.log(128), math.log(8192)))) // 32) * 32
        need = tokens * TENSORS * TOKEN_BYTES
        while used + need > room:
            taken, nbytes = running.pop(rng.randrange(len(running)))
            for extent in taken:
                space.give(*extent)
            used -= nbytes
        start = time.thread_time()
        try:
            taken = place(space, tokens)
        except OutOfMemory:
            refused += 1
            continue
        finally:
            seconds += time.thread_time() - start
        running.append((taken, need))
        used += need
        pieces = 1 + sum(b[0] != a[0] + a[1] for a, b in itertools.pairwise(taken))
        extents, worst = extents + pieces, max(worst, pieces)
        level = [space.used(channel) for channel in range(CHANNELS)]
        fullest = max(fullest, (max(level) - min(level)) / space.channel_bytes)
    for taken, _ in running:
        for extent in taken:
            space.give(*extent)
    assert space.empty, "something was not given back"
    placed = steps - refused
    yield f"{refused / steps:8.2%} refused"
    yield f"{extents / max(1, placed):5.2f} extents a request, {worst} at most"
    yield f"channels up to {fullest:4.0%} apart"
    yield f"{seconds / steps * 1e6:6.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.steps} requests, seed {options.seed}, {CHANNELS} channels of {CHANNEL_BYTES} bytes")
    ways = {"one channel": conventional, "one extent of all": one_extent, "kvd: tensors": tensors}
    for load in (0.7, 0.8, 0.9, 0.95, 0.98):
        for name, place in ways.items():
            print(f"{load:4.0%} {name:18}", *run(place, load, options.steps, options.seed), sep="  ", flush=True)


if __name__ == "__main__":
    main()
