"""A layout-aware transfer beside a plain one of the same bytes, host staging with conversion, and a request per tile.

``python -m tests.bench.bench_hetero [--tokens 256 1024] [--rate loopback 10gbit] [--rounds 5]``. Two daemons on this
host, the sink with a device of 8 channels in shared memory; the model is Llama-3.1-70B's (80 layers, 8 KV heads of 128,
bfloat16: 320 KiB a token), all layers computed beforehand. Timed from the sink's open to the last token's mask byte.

In each round every way runs next to a plain transfer of its own, in every second round before it; the ratio is the
median of these pairs, which a machine that is slower for some seconds leaves as it is. CPU is both daemons', and its
ratio that of the medians. Loopback is this host's; a rate is that of a veth pair that the kernel's tbf holds, or with
``--paced``, and without root, that of kvd's own pacing. ``--seconds`` ends a table early.

``python -m tests.bench.bench_hetero --marks`` is what the marks are about, in less than four minutes: layer by layer,
pushed and pulled, 80 and 320 MiB, on loopback and at 1, 2.5, 5 and 10 Gbit/s.

``convert``: a plain transfer, then the tiling in the sink's host memory, layer by layer with PyTorch where it is
installed (what an engine without kvd does), else with NumPy. ``convert (kernel)``: the same with kvd's own kernel.
``paged``: straight into a paged cache whose blocks are scattered, four tiles a request. ``staged``: layer by layer into
tensors of its own, and a kernel scatters them into the cache when all is there. ``per tile``: the same on a
device of 32 channels, where each tile of a block lies in a channel of its own, so that each is a request of 2 KiB.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

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
LEAST_ROUNDS = 3
FAST_S = 3.0
MARKED_RATES = ["loopback", "1gbit", "2.5gbit", "5gbit", "10gbit"]

Way: TypeAlias = Callable[[], "tuple[float, dict[str, int]]"]


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
        return seconds, {key: now[key] - before.get(key, 0) for key in now} | {"cpu_us": int(1e6 * cpu)}

    def _cpu(self) -> float:
        """Processor seconds of both daemons so far: what a busy machine changes least."""
        tasks = [task for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

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
def clients(rate: str, nbytes: int, shaped: bool) -> Iterator[tuple[Client, Client]]:
    # Arenas of other sizes are kept up to half of it: none shall be made while a transfer is timed.
    room = f"{(12 * nbytes >> 20) + 512}MiB"
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


@dataclasses.dataclass
class Row:
    """A way's runs, and the plain ones beside them."""

    times: list[float] = dataclasses.field(default_factory=list)
    plain: list[float] = dataclasses.field(default_factory=list)
    cpu_us: list[int] = dataclasses.field(default_factory=list)
    plain_cpu_us: list[int] = dataclasses.field(default_factory=list)
    last: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, ways: dict[str, Way], name: str, plain_first: bool) -> None:
        for one in ("plain", name) if plain_first else (name, "plain"):
            seconds, counters = ways[one]()
            (self.plain if one == "plain" else self.times).append(seconds)
            (self.plain_cpu_us if one == "plain" else self.cpu_us).append(counters["cpu_us"])
            if one == name:
                self.last = counters

    def shown(self, name: str) -> str:
        ratio = statistics.median(one / plain for one, plain in zip(self.times, self.plain, strict=True))
        cpu = statistics.median(self.cpu_us) / 1e3
        regroup_us = self.last.get("regroup_us", 0)
        return (
            f"{name:18} {1e3 * statistics.median(self.times):6.0f} ms {1e3 * min(self.times):6.0f} ms {ratio:7.3f} "
            f"{min(self.times) / min(self.plain):10.3f} {self.last.get('tensor_requests', 0) or '':>9} "
            f"{f'{regroup_us / 1e3:.0f} ms' if regroup_us else '':>9} {cpu:5.0f} ms "
            f"{1e3 * cpu / statistics.median(self.plain_cpu_us):9.2f}"
        )


def measure(options: argparse.Namespace, tokens: int, rate: str) -> None:
    spec = msgspec.structs.replace(LLAMA, layers=options.layers)
    nbytes = tokens * options.layers * spec.kv_heads * spec.entry_bytes
    shaped = bool(rate) and not options.paced
    with clients(rate, nbytes, shaped) as (source, sink):
        bench = Bench(source, sink, spec, tokens)
        ways: dict[str, Way] = {
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
        if has_torch():
            ways["convert"] = lambda: bench.run(bench.convert_with_torch)
        ways = {name: way for name, way in ways.items() if name == "plain" or not options.ways or name in options.ways}
        began = time.monotonic()
        for way in ways.values():  # makes the memory
            way()
        if time.monotonic() - began < FAST_S:  # and more, in the sizes that batches have once the link's rate is known
            for way in ways.values():
                way()
        rows = {name: Row() for name in ways if name != "plain"}
        began, rounds = time.monotonic(), 0
        while rounds < options.rounds and (rounds < LEAST_ROUNDS or time.monotonic() - began < options.seconds):
            for name, row in rows.items():
                row.add(ways, name, plain_first=rounds % 2 == 0)
            rounds += 1
        link = f"{rate}, {'held by the kernel' if shaped else 'paced by kvd'}" if rate else "loopback"
        print(f"\n{nbytes / (1 << 20):.0f} MiB, {tokens} tokens, {options.layers} layers, {link}, {rounds} pairs a way")
        names = ("way", "median", "best", "ratio", "best ratio", "requests", "regroup", "CPU", "CPU ratio")
        print("{:18} {:>9} {:>9} {:>7} {:>10} {:>9} {:>9} {:>8} {:>9}".format(*names))
        every = [one for row in rows.values() for one in row.plain]
        cpu_us = [one for row in rows.values() for one in row.plain_cpu_us]
        print(Row(every, every, cpu_us, cpu_us).shown("plain"))
        for name, row in rows.items():
            print(row.shown(name), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--layers", type=int, default=LLAMA.layers)
    parser.add_argument(
        "--rate", nargs="+", default=["loopback"], help="limits of the link, as in the configuration, such as 10gbit"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help=f"of a table of {LEAST_ROUNDS} rounds or more"
    )
    parser.add_argument("--ways", nargs="+", default=[], help="beside the plain one, by the names of the table")
    parser.add_argument("--paced", action="store_true", help="kvd holds the rate itself, not the kernel's tbf, as root")
    parser.add_argument("--marks", action="store_true", help="the sizes, rates and ways of the marks")
    options = parser.parse_args()
    if options.marks:
        options.ways, options.tokens, options.rate = ["layers, push", "layers, pull"], [256, 1024], MARKED_RATES
        options.rounds, options.seconds = 25, min(options.seconds, 11.0)
    if why_not() and not options.paced and options.rate != ["loopback"]:
        print(f"bench_hetero: {why_not()}; kvd holds the rates itself")
        options.paced = True
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for rate in options.rate:
        for tokens in options.tokens:
            measure(options, tokens, "" if rate == "loopback" else rate)


if __name__ == "__main__":
    main()
