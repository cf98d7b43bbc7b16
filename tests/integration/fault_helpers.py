"""The fault matrix's parts: a transfer at a stage, what both of its processes are told, and what must hold afterwards.

Each test brings a transfer to a stage, lets something go wrong, asks both processes how the transfer ended
(:func:`ends`), and ends with :func:`all_is_well`: no lease, no byte in use, no descriptor more than before, and the
next transfer right to its last byte.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from kvd_client import Client
from kvd_client.errors import KvdError
from tests.integration.daemons import DaemonProcess, random_layer, small_spec
from tests.waiting import PATIENCE_S, eventually

WAIT_S = PATIENCE_S
"""The deadline of every answer: far beyond all time-outs of the daemons under test, reached only by a hang."""
SPEC = small_spec(layers=6, heads=4, entry_bytes=256)
RATE = "64mbit"
"""Of each link: slow enough that a transfer of :data:`LONG` tokens is still under way when the fault comes."""
SHORT, LONG = 256, 4096
"""Tokens: 1.5 MiB and 24 MiB in all."""
STAGES = ("opened", "paired", "mid-way", "delivered")
"""One side has opened; both are paired and the first layer is across; all layers are computed and most of the bytes
are queued or in sockets; everything is across and nothing released."""
K = 32
"""Entries of a (row, head) that a fetch asks for."""


# --- what was seen ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Told:
    """An error's code, or ``OK``; how long after the fault it came, in seconds; the error's fields."""

    code: str
    seconds: float
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code} {self.seconds:.1f} s"


SEEN: list[tuple[str, str, dict[str, Told]]] = []
"""Fault, stage, and what each side was told, in the order of the run."""


def saw(fault: str, stage: str, **told: Told) -> None:
    """Put a line into the table, and hold every answer against the deadline."""
    SEEN.append((fault, stage, told))
    for side, answer in told.items():
        assert answer.seconds < WAIT_S, f"{side} was left waiting: {answer}"


def table(seen: Sequence[tuple[str, str, dict[str, Told]]]) -> list[str]:
    """The lines of a table of ``seen``."""
    sides = list(dict.fromkeys(side for _, _, told in seen for side in told))
    rows = [["fault", "stage", *sides]]
    rows += [[fault, stage, *(str(told.get(side, "")) for side in sides)] for fault, stage, told in seen]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def tell(do: Callable[[], object], since: float | None = None) -> Told:
    """Do it, and say what came of it and when, counted from ``since`` (monotonic clock; default: now)."""
    begin = time.monotonic() if since is None else since
    try:
        do()
    except KvdError as error:
        return Told(error.code, time.monotonic() - begin, error.fields)
    return Told("OK", time.monotonic() - begin)


# --- a transfer ------------------------------------------------------------------------------------------------------


class Daemons(Protocol):
    """What the helpers need: the two daemons of a transfer."""

    @property
    def prefill(self) -> DaemonProcess: ...

    @property
    def decode(self) -> DaemonProcess: ...


@dataclasses.dataclass
class Pair:
    """``prefill`` and ``decode``, and how many descriptors each has when nothing is under way."""

    prefill: DaemonProcess
    decode: DaemonProcess
    descriptors: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def both(self) -> tuple[DaemonProcess, DaemonProcess]:
        return self.prefill, self.decode

    def settle(self, tokens: int = LONG) -> Pair:
        """Run what grows what grows once (arenas for transfers of ``tokens`` tokens, the session), and count
        descriptors as :func:`all_is_well` will."""
        one_transfer(self, "settle", tokens)
        for daemon in self.both:
            eventually(f"{daemon.node} is idle", idle(daemon))

            def counted(daemon: DaemonProcess = daemon) -> bool:
                self.descriptors[daemon.node] = descriptors(daemon)
                return self.descriptors[daemon.node] > 0

            eventually(f"nobody is connected to {daemon.node}", counted)
        return self


def entries(layer: int, tokens: int) -> Any:
    return random_layer(layer, 1, tokens, SPEC.kv_heads, SPEC.entry_bytes)


class Both:
    """Both processes of a transfer of ``tokens`` tokens, as clients in this one. A context: releases at its end."""

    def __init__(self, pair: Daemons, request: str, mode: str = "full", tokens: int = SHORT, **options: Any) -> None:
        self.pair, self.request, self.mode, self.tokens = pair, request, mode, tokens
        self.options = options
        self.source_client: Client = pair.prefill.client(f"{request} source")
        self.sink_client: Client = pair.decode.client(f"{request} sink")
        self.source: Any = None
        self.sink: Any = None
        self.views: list[Any] = []
        """Mask and memory of each layer at the sink."""
        self.fetch: Any = None
        """A fetch that waits for a layer which is not computed yet."""
        self.pool = concurrent.futures.ThreadPoolExecutor(4)

    def __enter__(self) -> Both:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.views.clear()
        for transfer in (self.sink, self.source):
            if transfer is not None:
                with contextlib.suppress(KvdError):
                    transfer.release()
        self.sink_client.close()
        self.source_client.close()

    def open_sink(self) -> None:
        self.sink = self.sink_client.decode(
            self.request, SPEC, [self.tokens], source=self.pair.prefill.node, mode=self.mode, landing_entries=K,
            **self.options,
        )  # fmt: skip
        # Taken now: a transfer that has failed gives none, but its memory stays until the release.
        self.views = [(self.sink.mask(layer)[0], self.sink.layer(layer)[0]) for layer in range(SPEC.layers)]

    def open_source(self) -> None:
        self.source = self.source_client.prefill(self.request, SPEC, [self.tokens], **self.options)

    def put(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self.source.put_layer(layer, entries=entries(layer, self.tokens))

    def begin_fetch(self) -> None:
        """Ask for entries of the last layer, which the source answers when it has been computed."""
        counts = np.full(SPEC.kv_heads, K, np.int32)
        index = np.tile(np.arange(K, dtype=np.int32), SPEC.kv_heads)
        self.fetch = self.sink.begin_fetch(SPEC.layers - 1, 0, counts, index)

    def bring_to(self, stage: str) -> Both:
        """One of :data:`STAGES`; mode ``speculative`` has a fetch under way where both are paired."""
        self.open_sink()
        if stage == "opened":
            return self
        self.open_source()
        self.put([0])
        self.sink.wait_ready(0, timeout_s=WAIT_S)
        if stage == "paired":
            if self.mode != "full":
                self.begin_fetch()
            return self
        self.put(range(1, SPEC.layers))
        self.source.finish(wait=False)
        if stage == "delivered":
            self.sink.wait_ready(timeout_s=WAIT_S)
            self.source.wait_delivered(timeout_s=WAIT_S)
        return self

    def ends(self, since: float) -> dict[str, Told]:
        """What both processes (and a fetch) are told, asked at the same time; checks every byte that counts as
        arrived, and whether all have where the sink was told so."""
        asked = {}
        if self.source is not None:
            asked["source"] = self.pool.submit(tell, lambda: self.source.wait_delivered(timeout_s=WAIT_S), since)
        asked["sink"] = self.pool.submit(tell, lambda: self.sink.wait_ready(timeout_s=WAIT_S), since)
        if self.fetch is not None:
            asked["fetch"] = self.pool.submit(tell, lambda: self.fetch.wait(WAIT_S), since)
        told = {side: answer.result(WAIT_S + 20) for side, answer in asked.items()}
        self.check_bytes(complete=told["sink"].code == "OK")
        return told

    def check_bytes(self, *, complete: bool) -> None:
        """Every token whose mask says local is the source's."""
        for layer, (mask, memory) in enumerate(self.views):
            local = mask[: self.tokens] == 1
            assert local.all() or not complete
            assert np.array_equal(memory[: self.tokens][local], entries(layer, self.tokens)[0][local])


def one_transfer(pair: Daemons, request: str, tokens: int = SHORT, mode: str = "full") -> None:
    """A transfer from end to end, every byte compared."""
    with Both(pair, request, mode, tokens) as both:
        both.bring_to("delivered" if mode == "full" else "mid-way")
        both.check_bytes(complete=mode == "full")


# --- faults ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[float]:
    """The daemon stands still; the monotonic time from which on."""
    daemon.kill(signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        daemon.kill(signal.SIGCONT)


def kill_and_start(pair: Pair, victim: str, mode: str, stage: str, tokens: int) -> None:
    """kill -9 of a daemon with work under way: both processes are told at once, since the connections end with it."""
    dead: DaemonProcess = getattr(pair, victim)
    with Both(pair, f"killed {victim} {mode}", mode, tokens) as both:
        both.bring_to(stage)
        since = time.monotonic()
        dead.destroy()
        told = both.ends(since)
        saw(f"{victim} killed", f"{mode} {stage}", **told)
        near, far = ("source", "sink") if victim == "prefill" else ("sink", "source")
        assert told.pop(near).code == "DAEMON_LOST"
        assert far in told
        assert {answer.code for answer in told.values()} == {"PEER_LOST"}
    dead.start()
    all_is_well(pair)


# --- what must hold afterwards ---------------------------------------------------------------------------------------


def idle(daemon: DaemonProcess) -> Callable[[], bool]:
    """Whether no transfer, no lease and no byte of the pool is left."""

    def look() -> bool:
        with daemon.client("look") as client:
            status = client.status()
            return (status.memory.leases, status.memory.in_use, len(status.transfers)) == (0, 0, 0)

    return look


def connected(daemon: DaemonProcess, peer: str) -> bool:
    """Whether the daemon has a live session with the node ``peer``."""
    with daemon.client("look") as client:
        return any(status.state == "connected" for status in client.status().peers if status.node == peer)


def descriptors(daemon: DaemonProcess) -> int:
    """How many the daemon has while nobody but the one who asks is connected; 0 while somebody is."""
    with daemon.client("look") as client:
        return daemon.resources()[0] if client.status().clients == 1 else 0


def all_is_well(pair: Pair) -> None:
    """Both daemons live, hold nothing, serve the next transfer, and have no descriptor more than before."""
    for daemon in pair.both:
        assert daemon.process is not None
        assert daemon.process.poll() is None, f"{daemon.node} has died:\n{daemon.log.read_text()[-2000:]}"
        eventually(f"{daemon.node} has everything back", idle(daemon))
    served(pair)
    for daemon in pair.both:
        eventually(f"{daemon.node} has everything back", idle(daemon))
        most = pair.descriptors[daemon.node]
        eventually(f"{daemon.node} has {most} descriptors", lambda d=daemon, n=most: 0 < descriptors(d) <= n)  # type: ignore[misc]
        assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()[-4000:]


def served(pair: Pair) -> None:
    """The next transfer works; a peer that could not be reached is tried again, as an orchestrator would."""

    def attempt() -> bool:
        told = tell(lambda: one_transfer(pair, "afterwards"))
        assert told.code in ("OK", "PEER_UNREACHABLE", "PEER_LOST"), told
        return told.code == "OK"

    eventually("the next transfer is served", attempt)


def start(*daemons: DaemonProcess) -> None:
    """Start daemons at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(daemons)) as pool:
        for started in [pool.submit(daemon.start) for daemon in daemons]:
            started.result()


@contextlib.contextmanager
def destroyed(*daemons: DaemonProcess) -> Iterator[None]:
    """Whatever happens, the daemons are gone at the end."""
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.destroy()


def key_file(folder: Path, text: str) -> str:
    """A file with a key that only its owner can read."""
    file = folder / "key"
    file.touch(mode=0o600)
    file.write_text(text + "\n")
    return str(file)
