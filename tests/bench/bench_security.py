"""What checksums, authentication and encryption cost the tcp fabric, beside none of them and beside TLS 1.3.

``python -m tests.bench.bench_security``. Two processes over 127.0.0.1; rounds of the contestants alternate, and ratios
are medians over rounds of the same-round ratio to ``nothing``: above 1 is slower. CPU seconds are those of both
processes together.

- W1: 128 MiB in one piece.
- W2: 1,000 blocks of 36 KiB to scattered addresses with 9 mask bytes each, 50 blocks a write.
- W3: 1,000 runs of 512 bytes, the worst case for per-run work.
- paced: W1 on a link held to ``--rate`` (default 3 Gbit/s), where a transfer has CPU time to spare, as on a real one.
- tls: 128 MiB through Python's ssl with TLS 1.3 and AES-128-GCM, received into place; what ``secret`` would be with it.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvd.fabric.base import Endpoint
from kvd.fabric.tcp import TcpFabric
from kvd.types import Lane
from kvd.units import parse_rate
from tests.bench.bench_fabric import MIB, cpu_s, plan, tcp_pair

ONE_PIECE = 128 * MIB
SECRET = bytes(range(32))
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {"checksums": False},
    "checksum": {},
    "authentic": {"level": "authentic"},
    "secret": {"level": "secret"},
}
Contestants = dict[str, dict[str, Any]]
"""Options of the fabric, by name."""
Streams = dict[str, dict[Lane, tuple[socket.socket, socket.socket]]]


class Bringup:
    secret = SECRET

    def __init__(self, streams: dict[Lane, socket.socket], pipe: Connection, dialled: bool) -> None:
        self.streams, self.dialled = streams, dialled
        self._pipe = pipe

    async def exchange(self, blob: bytes) -> bytes:
        self._pipe.send_bytes(blob)
        return self._pipe.recv_bytes()


def contestants(rate: float, names: Sequence[str]) -> Contestants:
    chosen = {name: VARIANTS[name] for name in names}
    return {**chosen, **{f"{name} paced": {**options, "rate": rate} for name, options in chosen.items()}}


async def sink(
    pipe: Connection, streams: Streams, all_of: Contestants, tls: socket.socket, context: ssl.SSLContext
) -> None:
    memory = np.ones(ONE_PIECE, np.uint8)
    fabrics = []
    for name, options in all_of.items():
        fabric = TcpFabric(**options)
        region = fabric.register(memoryview(memory))
        grant = fabric.grant(region, 0, ONE_PIECE)
        endpoint = await fabric.connect(Bringup({k: v[1] for k, v in streams[name].items()}, pipe, False))
        endpoint.on_message = lambda lane, message: None
        pipe.send_bytes(grant.token)
        fabrics.append(fabric)
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    secured = context.wrap_socket(tls, server_side=True)

    def command() -> None:
        word = pipe.recv()
        if word == "stop":
            ended.set_result(None)
        elif word == "tls":
            view, done = memoryview(memory), 0
            while done < ONE_PIECE:
                done += secured.recv_into(view[done:], ONE_PIECE - done)
            secured.sendall(b"\1")
        else:
            pipe.send(cpu_s())

    loop.add_reader(pipe.fileno(), command)
    await ended
    loop.remove_reader(pipe.fileno())
    for fabric in fabrics:
        await fabric.close()


def sink_process(*arguments: Any) -> None:
    import uvloop

    uvloop.run(sink(*arguments))


class Source:
    def __init__(self, pipe: Connection, memory: np.ndarray[Any, Any]) -> None:
        self.pipe, self.memory = pipe, memory
        blocks, masks = plan()
        order = np.arange(1000)
        runs = np.stack([order * 1024, order[::-1] * 1024, np.full(1000, 512)], axis=1)
        whole = np.array([[0, 0, ONE_PIECE]], np.int64)
        self.work: dict[str, tuple[int, list[tuple[Any, Any]]]] = {
            "W1": (ONE_PIECE, [(whole, None)]),
            "W2": (int(blocks[:, 2].sum()), [(blocks[n : n + 50], masks[n : n + 50]) for n in range(0, 1000, 50)]),
            "W3": (512_000 * 8, [(runs, None)] * 8),
        }

    def cpu(self) -> float:
        self.pipe.send("cpu")
        return cpu_s() + float(self.pipe.recv())

    async def fabric(self, endpoint: Endpoint, region: Any, token: bytes, work: str) -> None:
        operations = [endpoint.write(Lane.BULK, region, token, rows, then=masks) for rows, masks in self.work[work][1]]
        for operation in operations:
            await operation.done


async def measure(
    rounds: int,
    pipe: Connection,
    streams: Streams,
    all_of: Contestants,
    tls: socket.socket,
    context: ssl.SSLContext,
) -> dict[str, Any]:
    memory = np.random.default_rng(3).integers(0, 256, ONE_PIECE, np.uint8)
    source = Source(pipe, memory)
    ends: dict[str, tuple[Endpoint, Any, bytes]] = {}
    fabrics = []
    for name, options in all_of.items():
        fabric = TcpFabric(**options)
        endpoint = await fabric.connect(Bringup({k: v[0] for k, v in streams[name].items()}, pipe, True))
        endpoint.on_message = lambda lane, message: None  # begins to receive: acknowledgements, here
        ends[name] = (endpoint, fabric.register(memoryview(memory)), pipe.recv_bytes())
        fabrics.append(fabric)
    secured = context.wrap_socket(tls)
    times: dict[tuple[str, str], list[float]] = {}
    cpus: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for work in source.work:
            for name in ends:
                paced = name.endswith("paced")
                if paced and work != "W1":
                    continue
                before, begin = source.cpu(), time.perf_counter()
                await source.fabric(*ends[name], work)
                times.setdefault((work, name), []).append(time.perf_counter() - begin)
                cpus.setdefault((work, name), []).append(source.cpu() - before)
        before, begin = source.cpu(), time.perf_counter()
        pipe.send("tls")
        secured.sendall(memoryview(memory))
        secured.recv(1)
        times.setdefault(("W1", "tls"), []).append(time.perf_counter() - begin)
        cpus.setdefault(("W1", "tls"), []).append(source.cpu() - before)
    pipe.send("stop")
    for fabric in fabrics:
        await fabric.close()
    results: dict[str, Any] = {}
    for (work, name), seconds in times.items():
        base = times[work, "nothing paced" if name.endswith("paced") else "nothing"]
        nbytes = source.work[work][0]
        results.setdefault(work, {})[name] = {
            "gb_s": round(nbytes / statistics.median(seconds) / 1e9, 3),
            "of_nothing": round(statistics.median(own / none for own, none in zip(seconds, base, strict=True)), 3),
            "cpu_s_per_gb": round(statistics.median(cpus[work, name]) / nbytes * 1e9, 3),
        }
    return results


def certificate(folder: Path) -> Path:
    """A certificate and its key, made here, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvd")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "both.pem"
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS 1.3 for the two ends. Authentication is left out: it costs the transfer nothing."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with tempfile.TemporaryDirectory() as folder:
        server.load_cert_chain(certificate(Path(folder)))
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return server, client


def main() -> None:
    parser = argparse.ArgumentParser(description="what each level of protection costs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", default="3gbit")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="those to compare, with commas between")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import uvloop

    names = list(dict.fromkeys(("nothing", *arguments.variants.split(","))))
    all_of = contestants(float(parse_rate(arguments.rate)), names)
    streams: Streams = {name: {lane: tcp_pair() for lane in Lane} for name in all_of}
    tls = tcp_pair()
    for lanes in streams.values():
        for pair in lanes.values():
            for sock in pair:
                sock.setblocking(False)
    server, client = contexts()
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=sink_process, args=(far, streams, all_of, tls[1], server)
    )
    process.start()
    for lanes in streams.values():
        for pair in lanes.values():
            pair[1].close()
    results = uvloop.run(measure(arguments.rounds, near, streams, all_of, tls[0], client))
    process.join()
    results["load"] = os.getloadavg()[0]
    if arguments.json:
        print(json.dumps(results))
        return
    for work in ("W1", "W2", "W3"):
        print(f"{work}:{'':<18} {'GB/s':>8} {'time':>8} {'CPU s/GB':>9}")
        for name, row in results[work].items():
            print(f"  {name:<18} {row['gb_s']:>8} {row['of_nothing']:>8} {row['cpu_s_per_gb']:>9}")
    print("time: of that with nothing, in the same round; load average:", results["load"])


if __name__ == "__main__":
    main()
