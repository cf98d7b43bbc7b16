"""A 64 KiB fetch on an idle link and beside a bulk backlog of 200 MB, on two hosts joined by a shaped veth pair.

``python -m tests.bench.bench_fetch [--rate 200mbit 1gbit] [--bands] [--burst 64kb] [--fetches 200]``, as root. The
link is shaped by the kernel (tbf), not by kvd: what kvd keeps on its way is its own doing. It has one queue, as a
bottleneck in the network has; with ``--bands`` one that is sorted by priority, as a host's own is. Prints the
distribution of both, what the link carries of bulk alone and how much of it is in flight then (the median, which the
mark counts, and the 99th percentile), what it carries of bulk beside the fetches, and the mark: beside the backlog, the
99th percentile is at most twice the idle one plus the time that the link takes for one such window.

tbf cuts what is larger than its bucket into packets, each with a timer and a walk through the stack on this host: of 64
KiB at 1 Gbit/s that keeps one core busy, which is no doing of a link. A bucket of 80kb lets it pass whole, as a network
card does.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvd_client import Client, DecodeTransfer, KVSpec
from kvd_client.spec import MASK_LOCAL
from tests.integration.daemons import DaemonProcess
from tests.integration.netns import two_hosts, why_not

SPEC = KVSpec(layers=4, kv_heads=8, entry_bytes=512, dtype="float16", model="bench")
TOKENS, ENTRIES = 2048, 16  # 8 heads x 16 entries x 512 B = 64 KiB
BACKLOG = KVSpec(layers=32, kv_heads=8, entry_bytes=512, dtype="float16", model="backlog")
BACKLOG_TOKENS = 1536  # 201 MB
LAYER_BYTES = BACKLOG_TOKENS * BACKLOG.kv_heads * BACKLOG.entry_bytes
ALONE = msgspec.structs.replace(BACKLOG, layers=8)  # 50 MB
SAMPLE_S = 0.02
WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", nargs="+", default=["200mbit", "1gbit"], help="of the link, as tc writes it")
    parser.add_argument("--fetches", type=int, default=200)
    parser.add_argument("--bands", action="store_true", help="what waits for the link is sorted by priority")
    parser.add_argument("--burst", default="64kb", help="size of the bucket, as tc writes it")
    options = parser.parse_args()
    if why_not():
        raise SystemExit(f"bench_fetch: {why_not()}")
    for rate in options.rate:
        print(f"link {rate}, {'sorted by priority' if options.bands else 'one queue'}")
        on_link(rate, options.burst, options.bands, options.fetches)


def on_link(rate: str, burst: str, bands: bool, fetches: int) -> None:
    """Measure between two new daemons on a link of this rate."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for host in hosts:
            host.shape(rate, burst, bands=bands)
        key = Path(folder) / "key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
        daemons = []
        try:
            for node, host, other in zip(("prefill", "decode"), hosts, reversed(hosts), strict=True):
                name = {"prefill": "decode", "decode": "prefill"}[node]
                config = {
                    "peers": {"key_file": str(key)},
                    "memory": {"pool": "512MiB"},
                    "log": {"level": "warning"},
                }
                daemon = DaemonProcess(
                    Path(folder),
                    node,
                    listen=f"{host.address}:7440",
                    peers={name: f"{other.address}:7440"},
                    config=config,
                    prefix=host.prefix,
                )
                daemons.append(daemon.start())
            with daemons[0].client() as source, daemons[1].client() as sink:
                measure(source, sink, fetches, (daemons[0].pid, daemons[1].pid))
        finally:
            for daemon in daemons:
                daemon.destroy()


def measure(source: Client, sink: Client, fetches: int, pids: tuple[int, int]) -> None:
    """Both distributions, one after the other, on one pair of transfers. ``pids`` are the source's daemon's
    and the sink's."""
    with source.prefill("fetched", SPEC, [TOKENS], mode="parallel") as prefill:
        rng = np.random.default_rng(0)
        for layer in range(SPEC.layers):
            prefill.layer(layer)[:] = rng.integers(0, 256, prefill.layer(layer).shape, dtype=np.uint8)
        with sink.decode(
            "fetched", SPEC, [TOKENS], source="prefill", mode="parallel", landing_entries=ENTRIES, landing_slots=1
        ) as decode:
            for layer in range(SPEC.layers):
                prefill.layer_ready(layer)
            prefill.finish(wait=False)
            decode.wait_ready(1, timeout_s=WAIT_S)
            one(decode, rng)
            idle = [one(decode, rng) for _ in range(fetches)]
            show("idle", idle)
            window_s = alone(source, sink, pids)
            with (
                source.prefill("backlog", BACKLOG, [BACKLOG_TOKENS]) as bulk,
                sink.decode("backlog", BACKLOG, [BACKLOG_TOKENS], source="prefill") as waiting,
            ):
                for layer in range(BACKLOG.layers):
                    bulk.layer_ready(layer)
                waiting.wait_ready(0, timeout_s=WAIT_S)
                busy: list[float] = []
                before, start = arrived(waiting), time.perf_counter()
                while len(busy) < fetches and not waiting.poll_ready(BACKLOG.layers - 2):
                    busy.append(one(decode, rng))
                rate = (arrived(waiting) - before) / (time.perf_counter() - start)
                bulk.finish(wait=False)
                waiting.wait_ready(timeout_s=WAIT_S)
            show("backlog", busy)
            print(f"beside   {rate / 1e6:.1f} MB/s of bulk")
            bound = 2 * quantile(idle, 0.99) + window_s
            print(
                f"p99 beside the backlog {1e3 * quantile(busy, 0.99):.2f} ms; the mark is twice the idle p99 plus one "
                f"window: {1e3 * bound:.2f} ms"
            )
        prefill.abort("the benchmark is over")


def alone(source: Client, sink: Client, pids: tuple[int, int]) -> float:
    """Seconds that the link takes for what is in flight of bulk with nothing beside it."""
    with (
        source.prefill("alone", ALONE, [BACKLOG_TOKENS]) as bulk,
        sink.decode("alone", ALONE, [BACKLOG_TOKENS], source="prefill") as waiting,
    ):
        start = time.perf_counter()
        for layer in range(ALONE.layers):
            bulk.layer_ready(layer)
        bulk.finish(wait=False)
        waiting.wait_ready(0, timeout_s=WAIT_S)
        samples = []
        while not waiting.poll_ready(ALONE.layers - 2):
            samples.append(in_flight(pids))
            time.sleep(SAMPLE_S)
        waiting.wait_ready(timeout_s=WAIT_S)
        rate = ALONE.layers * LAYER_BYTES / (time.perf_counter() - start)
    nbytes, most = statistics.median(samples), quantile(samples, 0.99)
    print(
        f"alone    {rate / 1e6:.1f} MB/s of bulk, {nbytes / 1e3:.0f} kB of it in flight: a window of "
        f"{1e3 * nbytes / rate:.2f} ms (99 of 100 samples within {most / 1e3:.0f} kB)"
    )
    return nbytes / rate


def arrived(waiting: DecodeTransfer) -> float:
    """Bytes of the backlog that are in place."""
    local = sum(int(np.count_nonzero(waiting.mask(layer) == MASK_LOCAL)) for layer in range(BACKLOG.layers))
    return local / BACKLOG_TOKENS * LAYER_BYTES


def in_flight(pids: tuple[int, int]) -> int:
    """Bytes on their way on the connection that has most of them: what the first process's host has not been told to
    have arrived, and what the second's has and the process has not taken."""
    queues = []
    for pid, column in zip(pids, (0, 1), strict=True):
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        queues.append(max(int(line.split()[4].split(":")[column], 16) for line in lines))
    return sum(queues)


def one(decode: DecodeTransfer, rng: np.random.Generator) -> float:
    """Seconds of one fetch of 64 KiB, its bytes not looked at: the tests do that."""
    index = np.sort(rng.choice(TOKENS, (SPEC.kv_heads, ENTRIES), replace=False), axis=1).astype(np.int32).ravel()
    counts = np.full(SPEC.kv_heads, ENTRIES, np.int32)
    start = time.perf_counter()
    decode.begin_fetch(3, 0, counts, index).wait(WAIT_S)
    return time.perf_counter() - start


def quantile(times: Sequence[float], q: float) -> float:
    return sorted(times)[min(len(times) - 1, int(q * len(times)))]


def show(name: str, times: list[float]) -> None:
    ms = [1e3 * t for t in times]
    print(
        f"{name:8} {len(ms):4} fetches of 64 KiB: median {statistics.median(ms):.2f} ms, "
        f"p99 {1e3 * quantile(times, 0.99):.2f} ms, max {max(ms):.2f} ms"
    )


if __name__ == "__main__":
    main()
