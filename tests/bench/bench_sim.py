"""The planning simulator beside real daemons: ``python -m tests.bench.bench_sim``.

The same requests through ``kvd.sim`` and through two daemons on loopback whose link is held to a rate. Prefill and
decode sleep for as long as they would compute, and decode selects at random as the scenario says, so that only the
transfer is compared. Prints TTST and the time until everything was local, measured and simulated, and for each mode the
median of measured / simulated: 1 is a simulator that is right.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from kvd.blocks import block_bounds
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.sim.cluster import Cluster
from kvd.sim.workload import Request, Scenario, Shape, requests, synthetic_importance, wanted
from kvd.units import parse_rate
from kvd_client import KVSpec
from tests.bench.bench_budget import write_profile
from tests.integration.daemons import DaemonProcess, two_daemons

SHAPE = Shape(24, 4, 256)
WAIT_S = 120.0


@dataclasses.dataclass(slots=True)
class Times:
    ttst_s: float = 0.0
    local_s: float = 0.0


def drive(daemons: tuple[DaemonProcess, DaemonProcess], scenario: Scenario, known: ImportanceMatrix) -> list[Times]:
    """All requests through the daemons, each when it arrives; one prefill after the other."""
    found = [Times() for _ in requests(scenario)]
    prefilling = threading.Lock()
    began = time.perf_counter()
    threads = [
        threading.Thread(target=_one, args=(daemons, scenario, known, request, began, prefilling, found))
        for request in requests(scenario)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _sleep_until(then: float) -> None:
    time.sleep(max(0.0, then - time.perf_counter()))


def _one(
    daemons: tuple[DaemonProcess, DaemonProcess],
    scenario: Scenario,
    known: ImportanceMatrix,
    request: Request,
    began: float,
    prefilling: threading.Lock,
    found: list[Times],
) -> None:
    spec, tokens, layers = scenario.spec, request.tokens, scenario.shape.layers
    name = f"{request.name}-{secrets.token_hex(4)}"
    share = wanted(scenario, known, request)
    rng = np.random.default_rng(request.number)
    arrived = began + request.arrives_s
    _sleep_until(arrived)
    with prefilling, daemons[0].client() as source, daemons[1].client() as sink:
        prefill_s = max(1, round(tokens * (1 - scenario.prefix_hit))) / scenario.prefill_rate
        held = tokens - max(1, round(tokens * (1 - scenario.prefix_hit)))
        start = time.perf_counter()
        with (
            source.prefill(name, spec, [tokens], selector="synthetic", prefill_s=prefill_s) as prefill,
            sink.decode(
                name, spec, [tokens], source="prefill", mode=scenario.mode, selector="synthetic", landing_entries=tokens
            ) as decode,
        ):
            for layer in range(layers):
                prefill.layer_ready(layer, stop=held)
            for layer in range(layers):
                _sleep_until(start + prefill_s * (layer + 1) / layers)
                prefill.layer_ready(layer)
            prefill.finish(wait=False)
            prefilling.release()
            try:
                _decode(decode, scenario, share, tokens, rng, arrived, found[request.number])
                decode.release()
            finally:
                prefilling.acquire()


def _decode(decode, scenario, share, tokens, rng, arrived, times) -> None:  # type: ignore[no-untyped-def]
    layers, heads = scenario.shape.layers, scenario.shape.kv_heads
    bounds = block_bounds(tokens, share.shape[1])
    first = [_draw(share[layer], bounds, heads, rng) for layer in range(layers)]
    step = 0
    while not times.local_s:
        begun = time.perf_counter()
        for layer in range(layers):
            if scenario.mode == "full" or layer < ALWAYS_LAYERS:
                decode.wait_ready(layer, timeout_s=WAIT_S)
            else:
                if step:
                    decode.idle(layer)
                index = first[layer]
                if step:
                    fresh = _draw(share[layer], bounds, heads, rng)
                    swap = rng.random(index.shape[1]) < scenario.novelty
                    index = np.where(swap & _absent(fresh, index), fresh, index)
                decode.select(layer, np.ascontiguousarray(index), timeout_s=WAIT_S)
            _sleep_until(begun + scenario.step_s * (layer + 1) / layers)
        step += 1
        now = time.perf_counter() - arrived
        times.ttst_s = times.ttst_s or now
        if all(decode.poll_ready(layer) for layer in range(layers)):
            times.local_s = now


def _draw(share: np.ndarray, bounds: np.ndarray, heads: int, rng: np.random.Generator) -> np.ndarray:  # type: ignore[type-arg]
    """Of each block the share of tokens that the scenario says, as a KV index (heads, k)."""
    weights = np.repeat(share, np.diff(bounds))
    count = max(1, round(float(weights.sum())))
    keys = np.log(weights + 1e-12) + rng.gumbel(size=(heads, len(weights)))
    return np.sort(np.argsort(-keys, axis=1)[:, :count], axis=1).astype(np.int32)


def _absent(fresh: np.ndarray, index: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Which of ``fresh`` are not in the same row of ``index``: positions must be distinct."""
    return np.stack([~np.isin(a, b) for a, b in zip(fresh, index, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="100mbit")
    options = parser.parse_args()
    base = Scenario(
        model="bench", shape=SHAPE, prefill_nodes=1, decode_nodes=1, link_rate=float(parse_rate(options.rate)),
        arrivals=0.25, duration_s=20.0, prompt_tokens=1500, prompt_sigma=0.3, prefill_rate=1000.0, step_s=0.1,
        metadata=0.0, surprise=0.5, seed=3, output_tokens=100_000,  # decode goes on until all is local, as in `drive`
    )  # fmt: skip
    known = synthetic_importance(SHAPE.layers, base.seed)
    spec: KVSpec = base.spec
    print(f"{len(list(requests(base)))} requests, {options.rate}; seconds, measured / simulated")
    with tempfile.TemporaryDirectory() as name:
        profiles = Path(name, "profiles")
        profiles.mkdir()
        write_profile(profiles, spec, known, 1500, 0.4, 1500 * base.token_bytes / base.link_rate)
        config = {
            "fabric": {"rate": options.rate},
            "selective": {"profiles": str(profiles), "blocks": known.blocks},
            "log": {"level": "warning"},
        }
        with two_daemons(Path(name), **config) as daemons:
            for mode in ("full", "speculative"):
                scenario = dataclasses.replace(base, mode=mode)
                measured = drive(daemons, scenario, known)
                cluster = Cluster(scenario, known)
                simulated = sorted(cluster.run(), key=lambda one: one.request.number)
                pairs = list(zip(measured, simulated, strict=True))
                for real, model in pairs:
                    print(
                        f"{mode:12} {model.request.name:10} {model.request.tokens:5} tokens  "
                        f"TTST {real.ttst_s:6.3f} / {model.ttst_s:6.3f}   "
                        f"all local {real.local_s:6.3f} / {model.local_s:6.3f}",
                        flush=True,
                    )
                ttst = statistics.median(real.ttst_s / model.ttst_s for real, model in pairs)
                local = statistics.median(real.local_s / model.local_s for real, model in pairs)
                print(f"{mode:12} measured / simulated, median: TTST {ttst:.2f}, all local {local:.2f}", flush=True)


if __name__ == "__main__":
    main()
