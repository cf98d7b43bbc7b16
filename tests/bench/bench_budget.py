"""The two budget policies side by side, on a steady link and on one whose rate falls to a half (or rises to double)
halfway through prefill: ``python -m tests.bench.bench_budget``, as root.

Two hosts, a link shaped by the kernel, a synthetic model: layers become ready one after the other in the course of
prefill, block importance falls off as in real models, and the first decode step selects entries in proportion to it.
Prints, for each policy and link, the on-demand ratio of the first decode step (entries fetched / entries selected,
layers 0 and 1 left out), and the time from the first token until everything that the step needs is there.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling import files
from kvd.profiling.profile import Profile, ProfileGroup
from kvd.profiling.timing import Times
from kvd_client import Client, KVSpec
from tests.integration.daemons import DaemonProcess
from tests.integration.netns import Host, two_hosts, why_not

LAYERS, HEADS, ENTRY, TOKENS, BLOCKS = 24, 4, 256, 2000, 500
SPEC = KVSpec(layers=LAYERS, kv_heads=HEADS, entry_bytes=ENTRY, dtype="float16", model="bench")
CACHE = LAYERS * HEADS * ENTRY * TOKENS
RATE = 200e6 / 8
TRANSFER_S = CACHE / RATE
"""T_t on the steady link: 2 s."""
PREFILL_S = TRANSFER_S / 3
SELECTED = TOKENS // 10
WAIT_S = 60.0
LINKS = {"steady": 1.0, "falls to 1/2": 0.5, "rises to 2x": 2.0}


def importance(layers: int = LAYERS, blocks: int = BLOCKS) -> npt.NDArray[np.float32]:
    """Few blocks matter much: the first and the last ones and some others, differently in each layer."""
    rng = np.random.default_rng(0)
    values = rng.lognormal(0.0, 1.5, (layers, blocks))
    values[:, :2] += values.max()
    values[:, -blocks // 10 :] *= 4
    return (values / values.max()).astype(np.float32)


def write_profile(
    folder: Path, spec: KVSpec, known: ImportanceMatrix, tokens: int, prefill_s: float, transfer_s: float
) -> None:
    """What the daemons know: the importance, T_p and T_t of so many tokens on the steady link."""
    matrix = known.values.copy()
    matrix[:2] = 0
    group = ProfileGroup(1, 1 << 20, ImportanceMatrix(matrix), 1, 1)
    files.write(
        Profile(
            model=spec.model,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            entry_bytes=spec.entry_bytes,
            selector="synthetic",
            groups=(group,),
            prefill=Times((tokens,), (prefill_s,)),
            transfer=Times((tokens,), (transfer_s,)),
            created=datetime.now(UTC),
        ),
        folder / "bench.kvdprofile",
    )


def index_of(layer: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """A KV index (heads, SELECTED), drawn in proportion to importance (Gumbel top-k)."""
    weights = np.repeat(importance()[layer], TOKENS // BLOCKS).astype(np.float64)
    keys = np.log(weights + 1e-9) + rng.gumbel(size=(HEADS, TOKENS))
    return np.sort(np.argsort(-keys, axis=1)[:, :SELECTED], axis=1).astype(np.int32)


def one(source: Client, sink: Client, hosts: tuple[Host, Host], factor: float, number: int) -> tuple[float, float]:
    """On-demand ratio of the first step, and seconds from the first token until its entries are there."""
    rng = np.random.default_rng(number)
    request = f"budget-{secrets.token_hex(4)}"
    hosts[0].shape(f"{int(RATE * 8)}bit")
    with (
        source.prefill(request, SPEC, [TOKENS], selector="synthetic", prefill_s=PREFILL_S) as prefill,
        sink.decode(
            request, SPEC, [TOKENS], source="prefill", mode="parallel", selector="synthetic", landing_entries=SELECTED
        ) as decode,
    ):
        start = time.perf_counter()
        for layer in range(LAYERS):
            # Prefill computes: this process has nothing else to do until the layer is done.
            time.sleep(max(0.0, start + PREFILL_S * (layer + 1) / LAYERS - time.perf_counter()))
            prefill.layer_ready(layer)
            if layer == LAYERS // 2:
                hosts[0].shape(f"{int(RATE * 8 * factor)}bit")
        prefill.finish(wait=False)
        first_token = time.perf_counter()
        for layer in (0, 1):
            decode.wait_ready(layer, timeout_s=WAIT_S)
        before = decode.selection_counters()
        for layer in range(2, LAYERS):
            decode.select(layer, index_of(layer, rng), timeout_s=WAIT_S)
        done = time.perf_counter()
        counted = decode.selection_counters().since(before)
        decode.release()
        return counted.on_demand_ratio, done - first_token


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if why_not():
        raise SystemExit(f"bench_budget: {why_not()}")
    print(
        f"{LAYERS} layers, {TOKENS} tokens, {CACHE / 1e6:.0f} MB; T_p {PREFILL_S:.2f} s, T_t {TRANSFER_S:.2f} s at "
        f"{RATE * 8 / 1e6:.0f} Mbit/s; {SELECTED} of {TOKENS} entries selected"
    )
    print(f"{'link':14} {'policy':9} {'on-demand ratio':>16} {'first token to second step, s':>31}")
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for policy in ("fixed", "deadline"):
            run(Path(folder, policy), hosts, policy, options.rounds)


def run(folder: Path, hosts: tuple[Host, Host], policy: str, rounds: int) -> None:
    """All links with one policy."""
    profiles = folder / "profiles"
    profiles.mkdir(parents=True)
    write_profile(profiles, SPEC, ImportanceMatrix(importance()), TOKENS, PREFILL_S, TRANSFER_S)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    daemons = []
    try:
        for node, host, other in zip(("prefill", "decode"), hosts, reversed(hosts), strict=True):
            peer = {"prefill": "decode", "decode": "prefill"}[node]
            daemon = DaemonProcess(
                folder,
                node,
                listen=f"{host.address}:7440",
                peers={peer: f"{other.address}:7440"},
                config={
                    "peers": {"key_file": str(key)},
                    "selective": {"budget": policy, "profiles": str(profiles), "blocks": BLOCKS},
                    "log": {"level": "warning"},
                },
                prefix=host.prefix,
            )
            daemons.append(daemon.start())
        with daemons[0].client() as source, daemons[1].client() as sink:
            for link, factor in LINKS.items():
                found = [one(source, sink, hosts, factor, number) for number in range(rounds)]
                ratio, seconds = (statistics.median(values) for values in zip(*found, strict=True))
                print(f"{link:14} {policy:9} {ratio:16.3f} {seconds:31.3f}", flush=True)
    finally:
        for daemon in daemons:
            daemon.destroy()


if __name__ == "__main__":
    main()
