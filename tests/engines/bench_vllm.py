"""What the vLLM connector costs: ``python -m tests.engines.bench_vllm [--copies]``.

``--copies``: blocks between vLLM's cache and a lease, against a memcpy of the same bytes; needs torch only. Otherwise,
with vLLM (see :mod:`tests.engines.vllms`): prefill in one engine and decode in another on this machine, against decode
computing the prompt itself; ``--connector nixl`` has vLLM's own in kvd's place, where NIXL is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engines.vllms import Engine, connector, make_model
from tests.integration.daemons import free_port, two_daemons

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def best(do: Callable[[], object], times: int = 9) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        do()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def copies() -> None:
    import numpy as np
    import torch

    from kvd_client.engines._vllm_paged import PagedCache

    torch.set_num_threads(1)
    print("64 MiB of one layer, scattered blocks: throughput over a memcpy's")
    print(f"{'cache':>44}  into the lease  out of it")
    for heads, block, elements, dtype in ((8, 16, 256, torch.bfloat16), (8, 128, 256, torch.bfloat16),
                                          (4, 32, 64, torch.float32)):  # fmt: skip
        count = (64 << 20) // (heads * block * elements * dtype.itemsize)
        blocks = random.Random(1).sample(range(3 * count), count)
        made = {
            "heads first": torch.zeros(3 * count, heads, block, elements, dtype=dtype),
            "tokens first": torch.zeros(3 * count, block, heads, elements, dtype=dtype).transpose(1, 2),
        }
        for form, layer in made.items():
            cache = PagedCache({"layers.0": layer}, block, "block")
            lease = np.zeros((count, heads, cache.entry_bytes), np.uint8)
            plain, other = lease.reshape(-1), np.ones(lease.size, np.uint8)
            memcpy = best(lambda plain=plain, other=other: np.copyto(plain, other))
            into = best(lambda c=cache, b=blocks, n=count, x=lease: c.gather(0, b, 0, n, x))
            out = best(lambda c=cache, b=blocks, n=count, x=lease: c.scatter(0, b, 0, n, x, None))
            name = f"{heads} heads, {block} tokens, {str(dtype)[6:]}, {form}"
            print(f"{name:>44}  {memcpy / into:14.2f}  {memcpy / out:9.2f}")


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


class Pair:
    """Two engines, run by a thread each, as two servers would be."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode

    def reset(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.do("run")
            assert engine.do("reset")

    def alone(self, tokens: list[int], new: int) -> Any:
        self.reset()
        return self.decode.one(tokens, new)

    def one_after_the_other(self, tokens: list[int], new: int) -> tuple[Any, float]:
        """As routers do: decode is asked with prefill's answer. Also the seconds that prefill took."""
        self.reset()
        begun = time.monotonic()
        params = self.prefill.one(tokens, 1, PREFILL, free=False)["params"]
        between = time.monotonic() - begun
        return self.decode.one(tokens, new, params), between

    def both_at_once(self, tokens: list[int], new: int, name: str) -> Any:
        """Decode waits while prefill runs."""
        self.reset()
        params = {"do_remote_prefill": True, "kvd_request": name, "kvd_source": "prefill"}
        found: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: found.update(self.decode.one(tokens, new, params)))
        thread.start()
        self.prefill.one(tokens, 1, {**PREFILL, "kvd_request": name})
        thread.join()
        return found


def line(what: str, first: list[float], second: list[float]) -> None:
    print(f"{what:>58}  {statistics.median(first):6.3f} s  {statistics.median(second):6.3f} s")


def engines(folder: Path, connectors: Sequence[str], length: int, runs: int) -> None:
    model = make_model(folder / "llama")
    given: dict[str, Any] = {"block_size": 32, "enable_prefix_caching": True, "max_num_batched_tokens": 512}
    for name in connectors:
        with contextlib.ExitStack() as stack:
            if name == "kvd":
                a, b = stack.enter_context(two_daemons(folder))
                configs = connector("kv_producer", a.socket), connector("kv_consumer", b.socket)
                made = [
                    Engine(folder, f"kvd-{role}", model, **given, kv_transfer_config=config)
                    for role, config in zip(("prefill", "decode"), configs, strict=True)
                ]
            else:
                made = [nixl_engine(folder, f"nixl-{role}", model, given) for role in ("prefill", "decode")]
            for engine in made:
                stack.callback(engine.destroy)
            measure(Pair(*made), name, length, runs, at_once=name == "kvd")


def nixl_engine(folder: Path, name: str, model: Path, given: dict[str, Any]) -> Engine:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
              "kv_load_failure_policy": "fail"}  # fmt: skip
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return Engine(folder, name, model, environment, **given, kv_transfer_config=config)


def measure(pair: Pair, name: str, length: int, runs: int, *, at_once: bool) -> None:
    pair.prefill.ready()
    pair.decode.ready()
    first: dict[str, list[float]] = {}
    second: dict[str, list[float]] = {}

    def note(what: str, answer: Any, before: float = 0.0) -> None:
        first.setdefault(what, []).append(answer["times"][0] + before)
        second.setdefault(what, []).append(answer["times"][1] + before)

    for run in range(runs + 1):
        tokens = prompt(length, run)
        alone = pair.alone(tokens, 8)
        after, between = pair.one_after_the_other(tokens, 8)
        assert after["tokens"] == alone["tokens"], f"{name}: other tokens than one engine's"
        together = pair.both_at_once(tokens, 8, f"bench-{run}") if at_once else None
        assert together is None or together["tokens"] == alone["tokens"], f"{name}: other tokens than one engine's"
        if run:  # the first one dials, and warms caches
            note("decode computes the prompt itself", alone)
            note(f"{name}, one after the other: in decode alone", after)
            note(f"{name}, one after the other: from the question on", after, between)
            if together is not None:
                note(f"{name}, both at once: from the question on", together)
    print(f"{f'{length} tokens, median of {runs}: first and second token':>58}")
    for what in first:
        line(what, first[what], second[what])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--connector", choices=("kvd", "nixl"), action="append")
    parser.add_argument("--length", type=int, default=1900)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    if options.copies:
        copies()
        return
    with tempfile.TemporaryDirectory() as folder:
        engines(Path(folder), options.connector or ["kvd"], options.length, options.runs)


if __name__ == "__main__":
    main()
