"""The tcp fabric beside a raw socket and memcpy, between two processes over 127.0.0.1.

``python -m tests.bench.bench_fabric``. Rounds of the contestants alternate, and the ratios are medians over rounds,
since whatever else the machine does hits all of them. CPU seconds are those of both processes.

- W1: 256 MiB in one piece.
- W2: 1,000 blocks of 36 KiB to scattered addresses, and for each 9 mask bytes that may be seen only after it,
  sent per 50 blocks.
- W4: round trip of 64 bytes, as a message and as a write with notify.

The raw contestant is what one would write by hand: blocking sockets, a header of 16 bytes before each block, received
straight into place; a mask message per 50 blocks; one byte back at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import statistics
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvd.fabric.base import Endpoint
from kvd.fabric.tcp import TcpFabric
from kvd.types import Lane

MIB = 1 << 20
ONE_PIECE = 256 * MIB
BLOCKS, BLOCK, MASK, GROUP = 1000, 36 << 10, 9, 50
SCATTERED = BLOCKS * BLOCK
SMALL = 1000
"""Round trips of W4."""
MEMORY = ONE_PIECE
"""Memory of each side: W1 fills it, W2 uses the beginning for blocks and what follows for masks."""
HEADER = struct.Struct("<qq")


def plan() -> tuple[np.ndarray, np.ndarray]:
    """Descriptors of W2's blocks and masks."""
    index, place = np.arange(BLOCKS), np.random.default_rng(7).permutation(BLOCKS)
    # Room between the blocks, so that neighbours can't be merged.
    blocks = np.stack([index * BLOCK, place * (BLOCK + 4096), np.full(BLOCKS, BLOCK)], axis=1)
    begin = BLOCKS * (BLOCK + 4096)
    masks = np.stack([begin + index * MASK, begin + place * MASK, np.full(BLOCKS, MASK)], axis=1)
    return blocks, masks


# --- raw sockets ------------------------------------------------------------------------------------------------------


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += sock.recv_into(view[done:], len(view) - done, socket.MSG_WAITALL)


def send_all(sock: socket.socket, parts: list[Any]) -> None:
    total = sum(len(part) for part in parts)
    sent = sock.sendmsg(parts)
    while sent < total:
        for part in parts:
            if sent < len(part):
                sock.sendall(memoryview(part)[sent:])
                sent = len(part)
            sent -= len(part)
            total -= len(part)


def raw_send(sock: socket.socket, memory: memoryview, workload: str) -> None:
    if workload == "W4":
        sock.sendall(bytes(64))
        receive_exactly(sock, memoryview(bytearray(64)))
        return
    if workload == "W1":
        send_all(sock, [HEADER.pack(0, ONE_PIECE), memory[:ONE_PIECE]])
    else:
        blocks, masks = plan()
        for group in range(0, BLOCKS, GROUP):
            for local, remote, length in blocks[group : group + GROUP].tolist():
                send_all(sock, [HEADER.pack(remote, length), memory[local : local + length]])
            rows = masks[group : group + GROUP].tolist()
            sock.sendall(b"".join(HEADER.pack(remote, n) + memory[local : local + n] for local, remote, n in rows))
    receive_exactly(sock, memoryview(bytearray(1)))


def raw_receive(sock: socket.socket, memory: memoryview, workload: str) -> None:
    header = bytearray(HEADER.size)
    view = memoryview(header)
    if workload == "W4":
        body = memoryview(bytearray(64))
        for _ in range(SMALL):
            receive_exactly(sock, body)
            sock.sendall(body)
        return
    if workload == "W1":
        receive_exactly(sock, view)
        offset, length = HEADER.unpack(header)
        receive_exactly(sock, memory[offset : offset + length])
    else:
        step = HEADER.size + MASK
        bounce = bytearray(GROUP * step)
        for _ in range(0, BLOCKS, GROUP):
            for _ in range(GROUP):
                receive_exactly(sock, view)
                offset, length = HEADER.unpack(header)
                receive_exactly(sock, memory[offset : offset + length])
            receive_exactly(sock, memoryview(bounce))
            for at in range(0, len(bounce), step):
                offset, length = HEADER.unpack_from(bounce, at)
                memory[offset : offset + length] = bounce[at + HEADER.size : at + step]
    sock.sendall(b"\1")


# --- the two processes ------------------------------------------------------------------------------------------------


class Bringup:
    secret, dialled = b"", False

    def __init__(self, streams: dict[Lane, socket.socket], pipe: Connection) -> None:
        self.streams = streams
        self._pipe = pipe

    async def exchange(self, blob: bytes) -> bytes:
        self._pipe.send_bytes(blob)
        return self._pipe.recv_bytes()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def sink(pipe: Connection, streams: dict[Lane, socket.socket], raw: socket.socket) -> None:
    """The far process: serves the fabric, receives raw rounds when told, and tells its CPU time."""
    memory = np.ones(MEMORY, np.uint8)
    fabric = TcpFabric()
    region = fabric.register(memoryview(memory))
    grant = fabric.grant(region, 0, MEMORY, readable=True)
    endpoint = await fabric.connect(Bringup(streams, pipe))
    endpoint.on_message = lambda lane, message: endpoint.send(lane, message) and None
    pipe.send_bytes(grant.token)
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def command() -> None:
        words = pipe.recv()
        if words[0] == "stop":
            ended.set_result(None)
        elif words[0] == "raw":
            raw_receive(raw, memoryview(memory), words[1])
        elif words[0] == "cpu":
            pipe.send(cpu_s())
        elif words[0] == "sum":
            pipe.send(int(memory.view(np.uint64).sum(dtype=np.uint64)))
            memory[:] = 1

    loop.add_reader(pipe.fileno(), command)
    await ended
    loop.remove_reader(pipe.fileno())
    await fabric.close()


def sink_process(pipe: Connection, streams: dict[Lane, socket.socket], raw: socket.socket) -> None:
    import uvloop

    uvloop.run(sink(pipe, streams, raw))


class Source:
    """The near process's contestants; each method is one round and returns its seconds."""

    def __init__(
        self, endpoint: Endpoint, fabric: TcpFabric, token: bytes, pipe: Connection, raw: socket.socket
    ) -> None:
        self.memory = np.random.default_rng(3).integers(0, 256, MEMORY, np.uint8)
        self.copy = np.ones(MEMORY, np.uint8)
        self.region = fabric.register(memoryview(self.memory))
        self.endpoint = endpoint
        self.token = token
        self.pipe = pipe
        self.raw_socket = raw
        self.blocks, self.masks = plan()
        self.answered = asyncio.Event()
        endpoint.on_message = lambda lane, message: self.answered.set()

    async def memcpy(self, workload: str) -> float:
        begin = time.perf_counter()
        if workload == "W1":
            self.copy[:] = self.memory
        else:
            for local, remote, n in self.blocks.tolist():
                self.copy[remote : remote + n] = self.memory[local : local + n]
        return time.perf_counter() - begin

    async def raw(self, workload: str) -> float:
        self.pipe.send(("raw", workload))
        begin = time.perf_counter()
        raw_send(self.raw_socket, memoryview(self.memory), workload)
        return time.perf_counter() - begin

    async def kvd(self, workload: str) -> float:
        begin = time.perf_counter()
        write = self.endpoint.write
        if workload == "W1":
            operations = [write(Lane.BULK, self.region, self.token, np.array([[0, 0, ONE_PIECE]], np.int64))]
        else:
            operations = [
                write(
                    Lane.BULK,
                    self.region,
                    self.token,
                    self.blocks[group : group + GROUP],
                    then=self.masks[group : group + GROUP],
                )
                for group in range(0, BLOCKS, GROUP)
            ]
        for operation in operations:
            await operation.done
        return time.perf_counter() - begin

    async def read(self, workload: str) -> float:
        begin = time.perf_counter()
        rows = np.array([[0, 0, ONE_PIECE]], np.int64) if workload == "W1" else self.blocks
        await self.endpoint.read(Lane.BULK, self.region, self.token, rows).done
        return time.perf_counter() - begin

    async def message(self) -> float:
        self.answered.clear()
        begin = time.perf_counter()
        self.endpoint.send(Lane.URGENT, bytes(64))
        await self.answered.wait()
        return time.perf_counter() - begin

    async def write_notify(self) -> float:
        self.answered.clear()
        begin = time.perf_counter()
        row = np.array([[0, 0, 64]], np.int64)
        self.endpoint.write(Lane.URGENT, self.region, self.token, row, then=row, notify=bytes(8))
        await self.answered.wait()
        return time.perf_counter() - begin

    async def placed(self) -> float:
        row = np.array([[0, 0, 64]], np.int64)
        begin = time.perf_counter()
        await self.endpoint.write(Lane.URGENT, self.region, self.token, row).done
        return time.perf_counter() - begin

    async def launch(self, count: int = 1000) -> float:
        """Seconds on the caller's side to submit one write of ``count`` descriptors of 512 bytes and have it placed."""
        rows = np.empty((count, 3), np.int64)
        rows[:, 0] = rows[:, 1] = np.arange(count) * 1024
        rows[:, 2] = 512
        begin = time.perf_counter()
        await self.endpoint.write(Lane.BULK, self.region, self.token, rows).done
        return time.perf_counter() - begin

    def cpu(self) -> float:
        self.pipe.send(("cpu",))
        return cpu_s() + float(self.pipe.recv())

    def far_sum(self) -> int:
        self.pipe.send(("sum",))
        return int(self.pipe.recv())


async def measure(
    rounds: int, pipe: Connection, streams: dict[Lane, socket.socket], raw: socket.socket
) -> dict[str, Any]:
    fabric = TcpFabric()
    endpoint = await fabric.connect(Bringup(streams, pipe))
    source = Source(endpoint, fabric, pipe.recv_bytes(), pipe, raw)
    results: dict[str, Any] = {}
    for workload, nbytes in (("W1", ONE_PIECE), ("W2", SCATTERED)):
        times: dict[str, list[float]] = {"memcpy": [], "raw": [], "kvd": []}
        cpus: dict[str, list[float]] = {name: [] for name in times}
        for _ in range(rounds):
            for name in times:
                repeat = 1 if workload == "W1" else 3
                before = source.cpu()
                seconds = [await getattr(source, name)(workload) for _ in range(repeat)]
                cpus[name].append((source.cpu() - before) / repeat / nbytes * 1e9)
                times[name].append(statistics.median(seconds))
        source.far_sum()
        await source.kvd("W1")
        if source.far_sum() != int(source.memory.view(np.uint64).sum(dtype=np.uint64)):
            raise SystemExit("the far side's memory differs from the near side's")
        results[workload] = {
            name: {
                "gb_s": round(nbytes / statistics.median(times[name]) / 1e9, 2),
                "cpu_s_per_gb": round(statistics.median(cpus[name]), 3),
                "of_raw": round(
                    statistics.median(raw_s / own_s for raw_s, own_s in zip(times["raw"], times[name], strict=True)), 3
                ),
            }
            for name in times
        }
    small: dict[str, list[float]] = {"message": [], "write_notify": [], "placed": []}
    for _ in range(SMALL):
        for name in small:
            small[name].append(await getattr(source, name)())
    pipe.send(("raw", "W4"))
    small["raw"] = []
    for _ in range(SMALL):
        begin = time.perf_counter()
        raw_send(raw, memoryview(source.memory), "W4")
        small["raw"].append(time.perf_counter() - begin)
    results["W4_us"] = {name: round(statistics.median(values) * 1e6, 1) for name, values in small.items()}
    launches = [await source.launch() for _ in range(200)]
    results["write_1000x512B_us"] = round(statistics.median(launches) * 1e6, 1)
    reads = [await source.read("W1") for _ in range(max(3, rounds // 2))]
    results["read_W1_gb_s"] = round(ONE_PIECE / statistics.median(reads) / 1e9, 2)
    pipe.send(("stop",))
    await fabric.close()
    return results


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def main() -> None:
    parser = argparse.ArgumentParser(description="the tcp fabric beside a raw socket and memcpy")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import uvloop

    lanes = {lane: tcp_pair() for lane in Lane}
    raw = tcp_pair()
    for sock in raw:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for pair in lanes.values():
        for sock in pair:
            sock.setblocking(False)
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=sink_process, args=(far, {lane: pair[1] for lane, pair in lanes.items()}, raw[1])
    )
    process.start()
    for pair in lanes.values():
        pair[1].close()
    results = uvloop.run(measure(arguments.rounds, near, {lane: pair[0] for lane, pair in lanes.items()}, raw[0]))
    process.join()
    results["load"] = os.getloadavg()[0]
    if arguments.json:
        print(json.dumps(results))
        return
    for workload in ("W1", "W2"):
        print(f"{workload}:   {'GB/s':>8} {'of raw':>8} {'CPU s/GB':>9}")
        for name, row in results[workload].items():
            print(f"  {name:<8} {row['gb_s']:>6} {row['of_raw']:>8} {row['cpu_s_per_gb']:>9}")
    print("W4, median microseconds:", results["W4_us"])
    print("write of 1,000 x 512 B, placed, microseconds:", results["write_1000x512B_us"])
    print("read W1, GB/s:", results["read_W1_gb_s"], "  load average:", results["load"])


if __name__ == "__main__":
    main()
