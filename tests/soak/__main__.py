"""Mixed load on two real daemons, with aborts and restarts: ``python -m tests.soak --minutes 20``.

Small transfers, most of them to the end and compared byte by byte, some selective with fetches; some given up by
either side, some whose sink never comes; processes that vanish, and every now and then a daemon that is killed and
started again. Prints what the daemons hold as it goes, and at the end whether it was flat: exit code 1 if a byte was
wrong, an error had an unforeseen code, descriptors grew, or memory grew by more than ``--slack``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvd_client import Client
from kvd_client.errors import (
    Aborted,
    Busy,
    DaemonLost,
    DaemonUnreachable,
    DeadlineExceeded,
    KvdError,
    LeaseExpired,
    NotFound,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
    ProcessLost,
    RendezvousTimeout,
)
from tests.integration.daemons import DaemonProcess, random_layer, two_daemons
from tests.soak.vanish import SPEC, TOKENS, vanish

WAIT_S = 15.0
EXPECTED = (
    Aborted, Busy, DaemonLost, DaemonUnreachable, DeadlineExceeded, LeaseExpired, NotFound, PeerLost, PeerRestarted,
    PeerUnreachable, ProcessLost, RendezvousTimeout,
)  # fmt: skip
"""What those that a restart, an abort or a vanished process concerns may be told."""


class Tally:
    """What has happened; shared by the workers' threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def add(self, what: str) -> None:
        with self.lock:
            self.ended[what] += 1

    def fail(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


class Pair:
    """A worker's clients, made anew after a daemon was lost."""

    def __init__(self, daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
        self._daemons = daemons
        self._clients: list[Client] = []

    def get(self) -> tuple[Client, Client]:
        if not self._clients:
            self._clients = [daemon.client("soak") for daemon in self._daemons]
        return self._clients[0], self._clients[1]

    def drop(self) -> None:
        for client in self._clients:
            with contextlib.suppress(KvdError):
                client.close()
        self._clients = []


def transfer(source: Client, sink: Client, kind: str, number: int, request: str) -> None:
    """One transfer of a kind. Raises AssertionError for a wrong byte, KvdError for an end that is no delivery."""
    seed = number % 1000
    mode = "speculative" if kind == "selective" else "full"
    landing = TOKENS if kind == "selective" else 0
    with source.prefill(request, SPEC, [TOKENS], mode=mode) as prefill:
        if kind == "no sink":
            prefill.put_layer(0, entries=random_layer(seed, 1, TOKENS, 2, 64))
            prefill.release()
            return
        with sink.decode(request, SPEC, [TOKENS], source="prefill", mode=mode, landing_entries=landing) as decode:
            for layer in range(SPEC.layers):
                prefill.put_layer(layer, entries=random_layer(seed + layer, 1, TOKENS, 2, 64))
                if layer == SPEC.layers // 2 and kind == "source aborts":
                    prefill.abort("soak")
                if layer == SPEC.layers // 2 and kind == "sink aborts":
                    decode.abort("soak")
            prefill.finish(wait=False)
            if kind == "selective":
                index = np.sort(np.random.default_rng(seed).permutation(TOKENS)[:20]).astype(np.int32)
                for layer in range(2, SPEC.layers):
                    found = decode.select(layer, np.stack([index, index]), timeout_s=WAIT_S)
                    _compare_selected(found, index, random_layer(seed + layer, 1, TOKENS, 2, 64), request)
                return
            decode.wait_ready(timeout_s=WAIT_S)
            for layer in range(SPEC.layers):
                expected = random_layer(seed + layer, 1, TOKENS, 2, 64)
                assert np.array_equal(decode.layer(layer)[:, :TOKENS], expected), f"layer {layer} of {request} differs"


def _compare_selected(found: Any, index: Any, entries: Any, request: str) -> None:
    """In any order: attention does not care."""
    for head in range(2):
        got = sorted(bytes(entry) for entry in found[head])
        wanted = sorted(bytes(entries[0, token, head]) for token in index)
        assert got == wanted, f"a selection of {request} differs"


RETRY_S = 0.2
"""After how long a worker comes back to a daemon that was killed under it."""

KINDS = ["whole"] * 70 + ["selective"] * 15 + ["source aborts"] * 5 + ["sink aborts"] * 5 + ["no sink"] * 5


def work(daemons: tuple[DaemonProcess, DaemonProcess], worker: int, rate: float, until: float, tally: Tally) -> None:
    """Transfers at ``rate`` a second, until the clock says so."""
    rng, pair, number = random.Random(worker), Pair(daemons), 0
    due = time.monotonic()
    while (now := time.monotonic()) < until:
        if now < due:
            time.sleep(min(due - now, until - now))
        due = max(due + 1 / rate, now - 1.0)
        kind, number = rng.choice(KINDS), number + 1
        try:
            transfer(*pair.get(), kind, number, f"soak-{worker}-{number}")
            tally.add(kind)
        except EXPECTED as error:
            tally.add(f"{kind}: {error.code}")
            if isinstance(error, DaemonLost | DaemonUnreachable):
                pair.drop()
                due = max(due, time.monotonic() + RETRY_S)
        except KvdError as error:
            tally.fail(f"{kind}: {error.code}: {error.message}")
        except AssertionError as error:
            tally.fail(str(error))
    pair.drop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=100.0, help="transfers a second, all workers together")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--restart", type=float, default=60.0, help="seconds between two kills of a daemon; 0: none")
    parser.add_argument("--slack", type=float, default=8.0, help="MiB by which a daemon may grow")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = {"transfer": {"rendezvous_s": 2.0}, "log": {"level": "error"}}
        with two_daemons(Path(name), **config) as daemons:
            return soak(daemons, options)


def soak(daemons: tuple[DaemonProcess, DaemonProcess], options: argparse.Namespace) -> int:
    tally, began = Tally(), time.monotonic()
    until = began + 60 * options.minutes
    arguments = [(daemons, worker, options.rate / options.workers, until, tally) for worker in range(options.workers)]
    threads = [threading.Thread(target=work, args=each, daemon=True) for each in arguments]
    for thread in threads:
        thread.start()
    spawn = multiprocessing.get_context("spawn")
    held: list[list[tuple[int, int]]] = [[], []]
    """(descriptors, resident bytes) of each daemon, since its last start."""
    verdicts: list[str] = []
    restart_at, which, count = began + (options.restart or float("inf")), 0, 0
    every = min(10.0, 6 * options.minutes)
    print(f"{'seconds':>8} {'ended':>8} {'prefill fds':>12} {'MiB':>6} {'decode fds':>12} {'MiB':>6}")
    while (now := time.monotonic()) < until:
        time.sleep(max(0.0, min(every, until - now)))
        count += 1
        process = spawn.Process(target=vanish, args=(daemons[count % 2].socket, f"vanished-{count}"), daemon=True)
        process.start()
        process.join(10)
        for samples, daemon in zip(held, daemons, strict=True):
            samples.append(daemon.resources())
        (fds, size), (other_fds, other_size) = held[0][-1], held[1][-1]
        print(
            f"{time.monotonic() - began:8.0f} {sum(tally.ended.values()):8} {fds:12} {size / 2**20:6.1f} "
            f"{other_fds:12} {other_size / 2**20:6.1f}",
            flush=True,
        )
        if time.monotonic() >= restart_at and time.monotonic() + options.restart / 2 < until:
            verdicts += judge(daemons[which].node, held[which], options.slack)
            held[which].clear()
            daemons[which].kill()
            assert daemons[which].process is not None
            daemons[which].process.wait(10)
            daemons[which].start()
            which, restart_at = 1 - which, time.monotonic() + options.restart
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            verdicts.append("a worker hangs beyond its deadlines")
    for daemon, samples in zip(daemons, held, strict=True):
        verdicts += judge(daemon.node, samples, options.slack)
        with daemon.client("look") as look:
            memory = look.status().memory
            if memory.leases:
                verdicts.append(f"{daemon.node}: {memory.leases} leases are still held")
    for what, times in sorted(tally.ended.items()):
        print(f"{times:8} {what}")
    for problem in tally.wrong[:20] + verdicts:
        print(f"WRONG: {problem}")
    print("flat, and every byte right" if not tally.wrong and not verdicts else "NOT WELL")
    return 1 if tally.wrong or verdicts else 0


def judge(node: str, samples: list[tuple[int, int]], slack: float) -> list[str]:
    """What has grown between the first third of a daemon's life and the last, by the least of each: load comes and
    goes, and a leak stays."""
    third = len(samples) // 3
    if third < 1:
        return []
    early, late = samples[:third], samples[-third:]
    found = []
    fds = min(s[0] for s in late) - min(s[0] for s in early)
    if fds > 2:
        found.append(f"{node}: {fds} descriptors more")
    grown = (min(s[1] for s in late) - min(s[1] for s in early)) / 2**20
    if grown > slack:
        found.append(f"{node}: {grown:.1f} MiB more")
    return found


if __name__ == "__main__":
    sys.exit(main())
