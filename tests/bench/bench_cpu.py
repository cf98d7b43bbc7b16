"""What selective transfer costs the daemons in CPU time, beside full transfer of the same bytes on the same link:
``python -m tests.bench.bench_cpu``.

Two daemons on loopback whose link is held to a rate, a cache of SmolLM2's shape in fp32, a prefix that is there from
the beginning. The small writes that keep a slow link's queue short each cost the same, whatever they carry: this is
what they cost. CPU time from /proc, so that other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path

from kvd.importance.matrix import ImportanceMatrix
from kvd.units import parse_rate
from kvd_client import KVSpec
from tests.bench.bench_budget import importance, write_profile
from tests.integration.daemons import DaemonProcess, two_daemons

LAYERS, HEADS, ENTRY, TOKENS, BLOCKS = 30, 3, 512, 2000, 1000
SPEC = KVSpec(layers=LAYERS, kv_heads=HEADS, entry_bytes=ENTRY, dtype="float32", model="bench")
WAIT_S = 120.0


def cpu_s(daemon: DaemonProcess) -> float:
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one(daemons: tuple[DaemonProcess, DaemonProcess], mode: str) -> tuple[float, float, float]:
    """CPU seconds of the source's and the sink's daemon for one transfer, and how long it took."""
    request = f"cpu-{secrets.token_hex(4)}"
    before = [cpu_s(daemon) for daemon in daemons]
    start = time.perf_counter()
    with (
        daemons[0].client() as source,
        daemons[1].client() as sink,
        source.prefill(request, SPEC, [TOKENS], selector="synthetic", mode=mode) as prefill,
        sink.decode(request, SPEC, [TOKENS], source="prefill", mode=mode, selector="synthetic") as decode,
    ):
        for layer in range(LAYERS):
            prefill.layer_ready(layer)
        prefill.finish(wait=False)
        if mode == "speculative":
            decode.wait_ready(1, timeout_s=WAIT_S)
            decode.idle(2)
        for layer in range(LAYERS):
            decode.wait_ready(layer, timeout_s=WAIT_S)
        elapsed = time.perf_counter() - start
        decode.release()
        after = [cpu_s(daemon) for daemon in daemons]
    return after[0] - before[0], after[1] - before[1], elapsed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="150mbit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cache = LAYERS * HEADS * ENTRY * TOKENS
    transfer_s = cache / parse_rate(options.rate)
    with tempfile.TemporaryDirectory() as name:
        profiles = Path(name, "profiles")
        profiles.mkdir()
        known = ImportanceMatrix(importance(LAYERS, BLOCKS))
        write_profile(profiles, SPEC, known, TOKENS, transfer_s / 6, transfer_s)
        selective = {"profiles": str(profiles), "blocks": BLOCKS}
        config = {"fabric": {"rate": options.rate}, "selective": selective, "log": {"level": "warning"}}
        with two_daemons(Path(name), **config) as daemons:
            print(f"{cache / 1e6:.0f} MB at {options.rate}; the daemons' CPU seconds, median of {options.rounds}")
            print(f"{'mode':12} {'source':>8} {'sink':>8} {'took':>8}")
            for mode in ("full", "speculative"):
                rounds = [one(daemons, mode) for _ in range(options.rounds)]
                source, sink, took = (statistics.median(values) for values in zip(*rounds, strict=True))
                print(f"{mode:12} {source:8.2f} {sink:8.2f} {took:8.2f}", flush=True)


if __name__ == "__main__":
    main()
