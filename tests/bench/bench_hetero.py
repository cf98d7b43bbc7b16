"""A layout-aware transfer beside a plain one of the same bytes, host staging with conversion, and a request per tile.

``python -m tests.bench.bench_hetero [--tokens 256 1024] [--rate 10gbit] [--rounds 5]``. Two daemons on this host, the
sink with a device of 8 channels in shared memory; the model is Llama-3.1-70B's (80 layers, 8 KV heads of 128, bfloat16:
320 KiB a token), all layers computed beforehand. Each round times every way once, one after the other, from the sink's
open to the last token's mask byte; the ratio is the median over rounds of a way's time over the plain one's of the
same round. Without ``--rate`` the link is loopback itself; with ``--shaped`` it is a veth pair, whose rate the kernel
holds.

``convert``: a plain transfer, then the tiling in the sink's host memory, layer by layer with PyTorch where it is
installed (what an engine without kvd does), else with NumPy. ``convert (kernel)``: the same with kvd's own kernel.
``paged``: straight into a paged cache whose blocks are scattered, four tiles a request. ``staged``: layer by layer into
tensors of its own, and a kernel scatters them into the cache when all is there. ``per tile``: the same on a
device of 32 channels, where each tile of a block lies in a channel of its own, so that each is a request of 2 KiB.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvd_kernels
import msgspec
import numpy as np

from kvd.layout.execute import regroup
from kvd.layout.plan import plan_direct
from kvd.tensors import Route, in_lease, on_device
from kvd.units import parse_rate
from kvd_client import Client, KVSpec, Placement
from kvd_client.spec import TokenRange
from tests.integration.daemons import DaemonProcess, two_daemons
from tests.integration.netns import two_hosts, why_not

LLAMA = KVSpec(layers=80, kv_heads=8, entry_bytes=512, dtype="bfloat16", model="llama-3.1-70b")
TILES = Placement(layout="tenstorrent", device="npu")
WIDE = Placement(layout="tenstorrent", device="wide")
WAIT_S = 300.0


class Bench:
    """One pair of daemons and one prompt length."""

    def __init__(self, source: Client, sink: Client, spec: KVSpec, tokens: int) -> None:
        self.source, self.sink, self.spec, self.tokens = source, sink, spec, tokens
        self.number = 0
        self._scatter: tuple[Any, Any] | None = None
        self._pids = [client.status().pid for client in (source, sink)]

    def run(self, after: Callable[[Any], None] | None = None, **options: Any) -> tuple[float, dict[str, int]]:
        """Seconds from the sink's open to the last byte (and ``after``), and what the source's counters grew by."""
        self.number += 1
        name = f"{self.tokens}-{self.number}"
        with self.source.prefill(name, self.spec, [self.tokens]) as prefill:
            for layer in range(self.spec.layers):  # memory that was never written would be read as one zero page
                prefill.layer(layer)[:] = layer
                prefill.layer_ready(layer)
            before, cpu = self.source.status().counters, self._cpu()
            began = time.perf_counter()
            with self.sink.decode(name, self.spec, [self.tokens], source="prefill", **options) as decode:
                decode.wait_ready(timeout_s=WAIT_S)
                if after is not None:
                    after(decode)
                seconds = time.perf_counter() - began
            prefill.finish(timeout_s=WAIT_S)
            now, cpu = self.source.status().counters, self._cpu() - cpu
        return seconds, {key: now[key] - before.get(key, 0) for key in now} | {"cpu_ms": int(1e3 * cpu)}

    def _cpu(self) -> float:
        """Processor seconds of both daemons so far: what a busy machine changes least."""
        total = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def paged(self, placement: Placement) -> tuple[float, dict[str, int]]:
        """Into every second block of a cache, so that none touches another."""
        blocks = 2 * -(-self.tokens // 32)
        with self.sink.open_cache(self.spec, placement, blocks) as cache:
            return self.run(cache=cache, blocks=[list(range(0, blocks, 2))], unit="layer")

    def staged(self, placement: Placement) -> tuple[float, dict[str, int]]:
        """Into tensors of the transfer's own, in the fewest requests of a layer; from there a kernel scatters them into
        every second block of a cache, within each channel (HAWK, section 4.2: "limited intra-channel movement")."""
        count = -(-self.tokens // 32)
        with self.sink.open_cache(self.spec, placement, 2 * count) as cache:

            def scatter(decode: Any) -> None:
                mine, theirs = decode.tensors, cache.tensors
                key = (mine.map.bases, theirs.map.bases)
                if self._scatter is None or self._scatter[0] != key:
                    ends = [
                        on_device(
                            decode.layout, [self.tokens], 0, placement, channels=mine.channels, alignment=64,
                            blocks=blocks, table=np.arange(0, blocks, blocks // count, dtype=np.int64)[None],
                            bases=np.frombuffer(one.map.bases, np.int64),
                        ).rows[0]
                        for one, blocks in ((mine, count), (theirs, 2 * count))
                    ]  # fmt: skip
                    self._scatter = key, plan_direct(*ends)
                for channel, requests in self._scatter[1].items():
                    assert (requests[:, 1] == channel).all()
                    for nbytes in np.unique(requests[:, 3]).tolist():
                        places = np.ascontiguousarray(requests[requests[:, 3] == nbytes][:, [0, 2]])
                        kvd_kernels.regroup(mine.buffers[channel], theirs.buffers[channel], places, (), (), (), nbytes)

            return self.run(scatter, placement=placement, unit="layer")

    def convert_with_kernel(self, decode: Any) -> None:
        """Tile a token-major lease as the regroup does, into memory of this process."""
        layout = decode.layout
        form = in_lease(layout, [self.tokens], 0, TILES)
        blocks = -(-self.tokens // 32)
        table = np.arange(blocks, dtype=np.int64)[None]
        tiles = on_device(layout, [self.tokens], 0, TILES, channels=8, alignment=64, blocks=blocks, table=table)
        memory = np.asarray(decode._part.mapping)
        route = Route(form, tiles)
        for layer in range(layout.layers):
            for plan in route.plan([(layer, [TokenRange(0, 0, self.tokens)])]):
                regroup(plan, [memory], np.empty(plan.staging_bytes, np.uint8))

    def convert_with_torch(self, decode: Any) -> None:
        """The same as an engine would write it: permutations of views, one contiguous copy for K and for V."""
        import torch

        padded = -(-self.tokens // 32) * 32
        for layer in range(self.spec.layers):
            entries = torch.from_numpy(decode.layer(layer)[0]).view(torch.bfloat16)
            for half in entries.unflatten(2, (2, 128)).unbind(2):
                x = torch.nn.functional.pad(half.permute(1, 0, 2), (0, 0, 0, padded - self.tokens))
                x = x.reshape(8, padded // 32, 2, 16, 4, 2, 16).permute(1, 0, 4, 2, 5, 3, 6).contiguous()
                pages = x.view(-1, 8, 1024)
                for channel in range(8):
                    pages[:, channel].contiguous()  # a channel's share, as it is copied to the card


def has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    torch.set_num_threads(1)
    return True


@contextlib.contextmanager
def clients(rate: str, nbytes: int, shaped: bool = False) -> Iterator[tuple[Client, Client]]:
    room = f"{(5 * nbytes >> 20) + 64}MiB"
    config: dict[str, Any] = {
        "memory": {"pool": room, "arena": "64MiB"},
        "npu.npu": {"channels": 8, "channel_bytes": f"{(3 * nbytes // 8 >> 20) + 4}MiB", "alignment": 64},
        "npu.wide": {"channels": 32, "channel_bytes": f"{(2 * nbytes // 32 >> 20) + 4}MiB", "alignment": 64},
        # nothing here fetches: the plain transfer shall not be held back for it either
        "selective": {"fetch_delay_s": 10.0},
        "transfer": {"window": "64MiB"},
        "log": {"level": "warning"},
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if shaped:
            hosts = stack.enter_context(two_hosts())
            for host in hosts:
                # 4 ms of the link: what segmentation offload hands over at once would not fit into less
                host.shape(rate, burst=f"{max(64, int(parse_rate(rate) * 0.004) >> 10)}kb")
            key = Path(folder) / "key"
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex(32))
            config["peers"] = {"key_file": str(key)}
            daemons = []
            for node, host, other in zip(("prefill", "decode"), hosts, reversed(hosts), strict=True):
                peers = {"decode" if node == "prefill" else "prefill": f"{other.address}:7440"}
                listen = f"{host.address}:7440"
                daemon = DaemonProcess(
                    Path(folder), node, listen=listen, peers=peers, config=config, prefix=host.prefix
                )
                stack.callback(daemon.destroy)
                daemons.append(daemon.start())
        else:
            if rate:
                config["fabric"] = {"rate": rate}
            daemons = list(stack.enter_context(two_daemons(Path(folder), **config)))
        with daemons[0].client("source") as source, daemons[1].client("sink") as sink:
            yield source, sink


def measure(tokens: int, rate: str, rounds: int, layers: int, chosen: list[str], shaped: bool) -> None:
    spec = msgspec.structs.replace(LLAMA, layers=layers)
    nbytes = tokens * layers * spec.kv_heads * spec.entry_bytes
    with clients(rate, nbytes, shaped) as (source, sink):
        bench = Bench(source, sink, spec, tokens)
        torch = has_torch()
        ways: dict[str, Callable[[], tuple[float, dict[str, int]]]] = {
            "plain": bench.run,
            "layers, push": lambda: bench.run(placement=TILES, unit="layer"),
            "layers, pull": lambda: bench.run(placement=TILES, unit="layer", pull=True),
            "whole, push": lambda: bench.run(placement=TILES, unit="whole"),
            "chunks, push": lambda: bench.run(placement=TILES, unit="chunk"),
            "convert (kernel)": lambda: bench.run(bench.convert_with_kernel),
            "paged": lambda: bench.paged(TILES),
            "staged": lambda: bench.staged(TILES),
            "per tile": lambda: bench.paged(WIDE),
        }
        if torch:
            ways["convert"] = lambda: bench.run(bench.convert_with_torch)
        ways = {name: way for name, way in ways.items() if name == "plain" or not chosen or name in chosen}
        for way in ways.values():
            way()  # makes the memory
        times: dict[str, list[float]] = {name: [] for name in ways}
        last: dict[str, dict[str, int]] = {}
        cpu: dict[str, list[int]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                seconds, last[name] = way()
                times[name].append(seconds)
                cpu[name].append(last[name]["cpu_ms"])
        print(f"\n{nbytes / (1 << 20):.0f} MiB, {tokens} tokens, {layers} layers, link {rate or 'loopback'}")
        names = ("way", "median", "best", "ratio", "best ratio", "requests", "regroup", "CPU")
        print("{:18} {:>9} {:>9} {:>7} {:>10} {:>9} {:>9} {:>8}".format(*names))
        for name, found in times.items():
            ratio = statistics.median(one / plain for one, plain in zip(found, times["plain"], strict=True))
            requests, regroup_us = last[name].get("tensor_requests", 0), last[name].get("regroup_us", 0)
            print(
                f"{name:18} {1e3 * statistics.median(found):6.0f} ms {1e3 * min(found):6.0f} ms {ratio:7.3f} "
                f"{min(found) / min(times['plain']):10.3f} {requests or '':>9} "
                f"{f'{regroup_us / 1e3:.0f} ms' if regroup_us else '':>9} {statistics.median(cpu[name]):5.0f} ms",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--layers", type=int, default=LLAMA.layers)
    parser.add_argument("--rate", default="", help="limit of the link, as in the configuration, such as 10gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=[], help="beside the plain one, by the names of the table")
    parser.add_argument("--shaped", action="store_true", help="the kernel's tbf holds the rate, as root, not kvd")
    options = parser.parse_args()
    if options.shaped and why_not():
        raise SystemExit(f"bench_hetero: {why_not()}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for tokens in options.tokens:
        measure(tokens, options.rate, options.rounds, options.layers, options.ways, options.shaped)


if __name__ == "__main__":
    main()
