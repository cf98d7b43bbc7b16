"""A 64 KiB fetch on an idle link and beside a bulk backlog of 200 MB, on two hosts joined by a shaped veth pair.

``python -m tests.bench.bench_fetch [--rate 1gbit] [--fetches 200]``, as root. The link is shaped by the kernel (tbf),
not by kvd: what kvd keeps on its way is its own doing. Prints the distribution of both, and the mark: beside the
backlog, the 99th percentile is at most twice the idle one plus one window (`selective.fetch_delay_s`).
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvd_client import Client, DecodeTransfer, KVSpec
from tests.integration.daemons import DaemonProcess
from tests.integration.netns import two_hosts, why_not

SPEC = KVSpec(layers=4, kv_heads=8, entry_bytes=512, dtype="float16", model="bench")
TOKENS, ENTRIES = 2048, 16  # 8 heads x 16 entries x 512 B = 64 KiB
BACKLOG = KVSpec(layers=32, kv_heads=8, entry_bytes=512, dtype="float16", model="backlog")
BACKLOG_TOKENS = 1536  # 201 MB
WINDOW_S = 0.01
WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--fetches", type=int, default=200)
    options = parser.parse_args()
    if why_not():
        raise SystemExit(f"bench_fetch: {why_not()}")
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for host in hosts:
            host.shape(options.rate)
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
                    "selective": {"fetch_delay_s": WINDOW_S},
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
                measure(source, sink, options.fetches, options.rate)
        finally:
            for daemon in daemons:
                daemon.destroy()


def measure(source: Client, sink: Client, fetches: int, rate: str) -> None:
    """Both distributions, one after the other, on one pair of transfers."""
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
            with (
                source.prefill("backlog", BACKLOG, [BACKLOG_TOKENS]) as bulk,
                sink.decode("backlog", BACKLOG, [BACKLOG_TOKENS], source="prefill") as waiting,
            ):
                for layer in range(BACKLOG.layers):
                    bulk.layer_ready(layer)
                waiting.wait_ready(0, timeout_s=WAIT_S)
                busy = []
                while len(busy) < fetches and not waiting.poll_ready(BACKLOG.layers - 2):
                    busy.append(one(decode, rng))
                bulk.finish(wait=False)
                waiting.wait_ready(timeout_s=WAIT_S)
            show("idle", idle)
            show("backlog", busy)
            bound = 2 * quantile(idle, 0.99) + WINDOW_S
            print(
                f"link {rate}: p99 beside the backlog {1e3 * quantile(busy, 0.99):.2f} ms; the mark is twice the idle "
                f"p99 plus one window: {1e3 * bound:.2f} ms"
            )
        prefill.abort("the benchmark is over")


def one(decode: DecodeTransfer, rng: np.random.Generator) -> float:
    """Seconds of one fetch of 64 KiB, its bytes not looked at: the tests do that."""
    index = np.sort(rng.choice(TOKENS, (SPEC.kv_heads, ENTRIES), replace=False), axis=1).astype(np.int32).ravel()
    counts = np.full(SPEC.kv_heads, ENTRIES, np.int32)
    start = time.perf_counter()
    decode.begin_fetch(3, 0, counts, index).wait(WAIT_S)
    return time.perf_counter() - start


def quantile(times: list[float], q: float) -> float:
    return sorted(times)[min(len(times) - 1, int(q * len(times)))]


def show(name: str, times: list[float]) -> None:
    ms = [1e3 * t for t in times]
    print(
        f"{name:8} {len(ms):4} fetches of 64 KiB: median {statistics.median(ms):.2f} ms, "
        f"p99 {1e3 * quantile(times, 0.99):.2f} ms, max {max(ms):.2f} ms"
    )


if __name__ == "__main__":
    main()
