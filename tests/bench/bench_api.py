"""Both ends of the local API: round trips, ring events, and what importing the client costs.

``python -m tests.bench.bench_api``. The server runs in a process of its own, as it does in life.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvd_client import Client, KVSpec
from kvd_client.errors import NotFound
from kvd_client.protocol import Release
from kvd_client.ring import EVENT_IDLE, EVENT_LAYER_READY, RING_EVENTS

IMPORTS = ("kvd_client", "kvd_client.transfer", "numpy")


def microseconds(do: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        do()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return sorted(times)


def show(name: str, times: list[float]) -> None:
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{name:<52} {p50:9.1f} {p99:9.1f} {times[0]:9.1f}")


def bare(count: int) -> None:
    """The same bytes to and fro between two processes without any protocol: what the machine itself takes."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        while data := there.recv(1 << 16):
            there.send(data)
        os._exit(0)
    there.close()
    poll = select.poll()
    poll.register(here, select.POLLIN)

    def to_and_fro() -> None:
        here.send(b"x" * 30)
        poll.poll()
        here.recv(1 << 16)

    microseconds(to_and_fro, 200)
    show("round trip, bare sockets between two processes", microseconds(to_and_fro, count))
    here.close()
    os.waitpid(child, 0)


def round_trips(client: Client, count: int) -> None:
    connection = client._connected()

    def unknown() -> None:
        try:
            connection.request(Release(transfer=0))
        except NotFound:
            return

    microseconds(unknown, 200)
    show("round trip, Release answered with an error", microseconds(unknown, count))
    show("round trip, status", microseconds(client.status, count))
    show("round trip, Reject answered with Ok", microseconds(lambda: client.reject(handle="x"), count))


def events(client: Client, count: int) -> None:
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=64, dtype="f32", model="bench")
    with client.decode("bench", spec, [1]) as transfer:
        connection, number = client._connected(), transfer.id
        doorbell = connection.doorbell

        def quiet() -> None:
            doorbell.ring(EVENT_IDLE, 0, number, 0, 0, 0)  # the test's service never asks to be woken for these

        def loud() -> None:
            doorbell.ring(EVENT_LAYER_READY, 0, number, 0, 0, 0)

        def drained() -> None:
            client.reject(handle="x")  # the server empties the ring before it answers

        show("idle() while the daemon has nothing queued", microseconds(lambda: transfer.idle(0), count))
        times: list[float] = []
        while len(times) < count:
            drained()
            times += microseconds(quiet, min(count, RING_EVENTS // 4))
        show("ring event, no wake-up", sorted(times))
        times = []
        for _ in range(count):
            drained()  # so that the server sleeps again, and each event finds the wake-up flag set
            times += microseconds(loud, 1)
        show("ring event with wake-up", sorted(times))


def imports() -> None:
    code = (
        "import resource, sys, time; begin = time.perf_counter(); import {0}; took = time.perf_counter() - begin; "
        "rss = [int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmRSS')][0]; "
        "print(took * 1e3, rss / 1024, len(sys.modules), any(m in sys.modules for m in ('torch', 'uvloop', 'kvd')))"
    )
    print(f"\n{'import':<30} {'ms':>9} {'RSS MiB':>9} {'modules':>9}   torch, uvloop or kvd loaded")
    for name in ("sys", *IMPORTS):
        runs = []
        for _ in range(5):
            out = subprocess.run(
                [sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True
            ).stdout.split()
            runs.append((float(out[0]), float(out[1]), int(out[2]), out[3]))
        took, rss, modules, heavy = min(runs)
        label = "nothing" if name == "sys" else name
        print(f"{label:<30} {took:9.1f} {rss:9.1f} {modules:9d}   {heavy}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="repetitions of each measurement")
    parser.add_argument("--cpu", type=int, help="pin both processes to this CPU")
    options = parser.parse_args()
    count = options.count
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "api.sock")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.api_harness", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdout.readline()
            print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
            print(f"{'µs':<52} {'median':>9} {'p99':>9} {'best':>9}")
            bare(count)
            with Client(path, name="bench") as client:
                round_trips(client, count)
                events(client, count)
        finally:
            server.stdin.close()
            server.wait()
    imports()


if __name__ == "__main__":
    main()
