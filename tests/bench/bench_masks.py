"""What masks by head cost the daemons: ``python -m tests.bench.bench_masks``.

One transfer between two daemons in mode ``speculative``, by token and by head in turns: the source puts its layers and
ranks each as prefill does, by pages of 16 tokens that heads prefer differently; the sink selects a tenth of each layer,
step after step, until all is local. Printed are medians: the CPU seconds of each daemon for a GB of KV cache, the
bytes sent and those fetched over those of the cache (what is fetched and travels again counts twice), and the time.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvd_client import Client, KVSpec
from kvd_client.spec import MASKS
from tests.integration.daemons import DaemonProcess, two_daemons

PAGE, SHARE, WAIT_S = 16, 0.1, 120.0
NUMBERS = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--entry", type=int, default=512, help="bytes of K and V of one head")
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    spec = KVSpec(
        layers=options.layers, kv_heads=options.heads, entry_bytes=options.entry, dtype="float16", model="bench"
    )
    total = spec.layers * options.tokens * spec.kv_heads * spec.entry_bytes
    pool = f"{2 * total + (64 << 20) >> 20}MiB"
    print(f"{spec.layers} layers, {spec.kv_heads} heads, {options.tokens} tokens, {total / 1e6:.0f} MB, {options.rate}")
    with (
        tempfile.TemporaryDirectory() as folder,
        two_daemons(Path(folder), memory={"pool": pool}, fabric={"rate": options.rate}) as daemons,
        daemons[0].client() as source,
        daemons[1].client() as sink,
    ):
        found: dict[str, list[tuple[float, ...]]] = {mask: [] for mask in MASKS}
        for _ in range(options.rounds):
            for mask in MASKS:
                found[mask].append(transfer(daemons, source, sink, spec, options.tokens, mask, total))
        for mask, rounds in found.items():
            names = ("source CPU s/GB", "sink CPU s/GB", "sent over cache", "fetched", "seconds")
            print(
                mask,
                *(f"{name} {median(each):.2f}" for name, each in zip(names, zip(*rounds, strict=True), strict=True)),
            )


def wanted(layer: int, heads: int, tokens: int, step: int, count: int) -> Any:
    """int32 (heads, count): whole pages, which a head keeps from step to step but for some."""
    pages = -(-tokens // PAGE)
    rows = []
    for head in range(heads):
        rng = np.random.default_rng([layer, head])
        worth = rng.random(pages) + 0.2 * np.random.default_rng([layer, head, step]).random(pages)
        best = np.argsort(-worth)[: -(-count // PAGE) + 1]
        positions = (best[:, None] * PAGE + np.arange(PAGE)).ravel()
        rows.append(positions[positions < tokens][:count])
    return np.array(rows, np.int32)


def transfer(
    daemons: tuple[DaemonProcess, DaemonProcess],
    source: Client,
    sink: Client,
    spec: KVSpec,
    tokens: int,
    mask: str,
    total: int,
) -> tuple[float, ...]:
    request, count = f"masks {next(NUMBERS)}", int(SHARE * tokens)
    before, sent, since = cpu(daemons), source.status().counters["bytes_sent"], time.monotonic()
    with (
        sink.decode(
            request, spec, [tokens], source="prefill", mode="speculative", landing_entries=count, mask=mask
        ) as decode,
        source.prefill(request, spec, [tokens], mask=mask) as prefill,
    ):
        for layer in range(spec.layers):
            prefill.layer_ready(layer)
            if layer >= 2:
                shares = np.zeros((spec.kv_heads, -(-tokens // PAGE)), np.float32)
                for head, chosen in enumerate(wanted(layer, spec.kv_heads, tokens, 0, count)):
                    shares[head, np.unique(chosen // PAGE)] = 1
                prefill.rank(layer, shares, wait=False)
        prefill.finish(wait=False)
        decode.wait_ready(0, timeout_s=WAIT_S)
        decode.wait_ready(1, timeout_s=WAIT_S)
        step = 0
        while not all(decode.poll_ready(layer) for layer in range(spec.layers)):
            step += 1
            for layer in range(2, spec.layers):
                decode.idle(layer)
                decode.select(
                    layer, wanted(layer, spec.kv_heads, tokens, step, count), slot=layer % 2, timeout_s=WAIT_S
                )
        took = time.monotonic() - since
        fetched = float(decode.selection_counters().fetched.sum()) * spec.entry_bytes
        prefill.wait_delivered(WAIT_S)
    spent = [(now - then) / (total / 1e9) for now, then in zip(cpu(daemons), before, strict=True)]
    return (*spent, (source.status().counters["bytes_sent"] - sent) / total, fetched / total, took)


def cpu(daemons: tuple[DaemonProcess, DaemonProcess]) -> list[float]:
    """CPU seconds of each daemon so far."""
    found = []
    for daemon in daemons:
        fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / 100)
    return found


if __name__ == "__main__":
    main()
