"""The worker's half of the vLLM connector with real daemons and caches as vLLM has them, without vLLM."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvd_client import Client, KVSpec
from kvd_client.engines._vllm_loads import Loads
from kvd_client.engines._vllm_node import Node
from kvd_client.engines._vllm_paged import PagedCache
from kvd_client.engines._vllm_plan import Board, Load, Options, Rejection, Save
from kvd_client.engines._vllm_sources import Sources
from kvd_client.errors import DaemonLost
from tests.integration.daemons import DaemonProcess, two_daemons
from tests.waiting import eventually

WAIT_S = 60.0
LAYERS, BLOCKS, HEADS, BLOCK, ELEMENTS = 4, 32, 4, 16, 8


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("vllm"), transfer={"rendezvous_s": 2.0}) as pair:
        yield pair


class Rank:
    """One worker of an engine: its cache, and what the connector keeps there."""

    def __init__(self, socket: str, *, seed: int, rank: int = 0, ranks: int = 1, block: int = BLOCK, **options: Any):
        self.options = Options(socket=socket, **{"deadline_s": WAIT_S, **options})
        rng = np.random.default_rng(seed)
        made = rng.standard_normal((LAYERS, BLOCKS, HEADS, block, ELEMENTS)).astype(np.float32)
        each = HEADS // ranks
        mine = [torch.from_numpy(layer[:, rank * each : (rank + 1) * each].copy()) for layer in made]
        self.cache = PagedCache({f"layers.{n}": layer for n, layer in enumerate(mine)}, block, self.options.unit)
        spec = KVSpec(
            layers=LAYERS, kv_heads=HEADS, entry_bytes=self.cache.entry_bytes, dtype="float32 as tests have it",
            model="tiny",
        )  # fmt: skip
        self.client = Client(socket, "worker", 10.0)
        self.board = Board()
        node = Node(self.client, spec, self.options, rank, ranks)
        self.sources = Sources(node, self.cache, self.board)
        self.loads = Loads(node, self.cache, self.options.deadline_s)
        self.lost: set[int] = set()

    def save(
        self, name: str, blocks: list[int], computed: int, tokens: int, *, anew: bool = True, **given: Any
    ) -> None:
        """One pass: each layer is handed over as it is computed."""
        self.sources.begin([Save(name, name, blocks, anew, computed, tokens, **{"prompt": "p", **given})])
        for layer in range(LAYERS - 1):  # the last is not told of: some passes skip the hooks
            self.sources.put(f"layers.{layer}")
        self.sources.end()

    def load(self, name: str, blocks: list[int], tokens: int, held: int = 0, **given: Any) -> None:
        given = {"prompt": "p", "source": "prefill", "transfer": name, **given}
        self.loads.add([Load(request=name, blocks=blocks, held=held, tokens=tokens, **given)])

    def wait(self, *names: str) -> set[int]:
        """Until these have ended; the blocks that were not loaded."""
        left, end = set(names), time.monotonic() + WAIT_S
        while left:
            ended = self.loads.take(idle=True)
            self.lost |= self.loads.take_failed_blocks()
            assert ended <= left, "each is reported once"
            left -= ended
            assert time.monotonic() < end, f"{left} did not end"
        lost, self.lost = self.lost, set()
        return lost

    def close(self) -> None:
        self.loads.close()
        self.sources.close()
        self.client.close()


@pytest.fixture
def ranks(daemons: tuple[DaemonProcess, DaemonProcess]) -> Iterator[tuple[Rank, Rank]]:
    with contextlib.ExitStack() as stack:
        source, sink = (
            stack.enter_context(contextlib.closing(Rank(daemon.socket, seed=seed)))
            for daemon, seed in zip(daemons, (1, 2), strict=True)
        )
        yield source, sink
        until_free(source.client)  # before the connections take back what is left
        until_free(sink.client)


def until_free(client: Client) -> None:
    eventually("the pool is free", lambda: client.status().memory.leases == 0)


def check(source: Rank, there: list[int], sink: Rank, here: list[int]) -> None:
    for a, b in zip(source.cache.layers, sink.cache.layers, strict=True):
        assert torch.equal(a[there], b[here])


def test_a_prompt_in_chunks(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    old = [layer.clone() for layer in sink.cache.layers]
    sink.load("chunks", [9, 3, 20, 21, 4], 70, held=32)  # it asks first
    source.save("chunks", [0, 1, 2], 40, 70)
    source.save("chunks", [30, 31], 70, 70, anew=False)
    assert sink.wait("chunks") == set()
    check(source, [2, 30, 31], sink, [20, 21, 4])
    rest = [block for block in range(BLOCKS) if block not in (20, 21, 4)]
    for before, now in zip(old, sink.cache.layers, strict=True):
        assert torch.equal(before[rest], now[rest])  # what it held, too


def test_many_at_once_by_handle_and_by_name(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    names = [f"many-{n}" for n in range(8)]
    for n, name in enumerate(names):
        source.save(name, [n, n + 8, n + 16], 48, 48)
    for n, name in enumerate(names):
        blocks = [31 - n, 23 - n, 15 - n]
        handle = source.board.handle(name)
        assert handle
        if n % 2:
            sink.load(name, blocks, 48)
        else:
            sink.load(name, blocks, 48, transfer=f"other-{n}", source="", handle=handle)
    assert sink.wait(*names) == set()
    for n in range(8):
        check(source, [n, n + 8, n + 16], sink, [31 - n, 23 - n, 15 - n])
    until_free(source.client)
    eventually("no handle stays", lambda: not any(source.board.handle(name) for name in names))


def test_a_preempted_prompt_goes_on_from_new_blocks(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    source.save("again", [0, 1], 32, 60)
    for layer in source.cache.layers:  # recomputed elsewhere; the old blocks are somebody else's now
        layer[[10, 11]] = layer[[0, 1]]
        layer[[0, 1]] = -1.0
    source.save("again", [10, 11], 32, 60)
    source.save("again", [12, 13], 60, 60, anew=False)
    sink.load("again", [5, 6, 7, 8], 60)
    assert sink.wait("again") == set()
    check(source, [10, 11, 12, 13], sink, [5, 6, 7, 8])


def test_an_abort_of_prefill_fails_decode_at_once(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    sink.load("cut", [9, 3, 20], 48, held=16)
    source.save("cut", [0, 1], 20, 48)
    source.sources.drop(["cut", "cut"])
    assert sink.wait("cut") == {3, 20}  # not what it held
    until_free(source.client)
    source.sources.drop(["cut"])


def test_an_abort_behind_the_end_of_prefill_frees_at_once(ranks: tuple[Rank, Rank]) -> None:
    source, _ = ranks
    source.save("late", [0, 1], 32, 32)
    assert source.client.status().memory.leases == 1
    source.sources.drop(["late"])
    assert source.client.status().memory.leases == 0


def test_an_abort_of_decode_frees_both_and_reports_no_block(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    source.save("given up", [0, 1], 20, 48)
    sink.load("given up", [9, 3, 20], 48)
    sink.loads.drop(["given up"])
    assert sink.wait("given up") == set()
    source.save("given up", [2], 48, 48, anew=False)  # and the source hears of it
    until_free(source.client)


def test_a_rejection_frees_the_source(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    for n, name in enumerate(["by handle", "by name"]):
        source.save(name, [0, 1], 32, 32)
        handle = source.board.handle(name) if n == 0 else ""
        sink.loads.add([], [Rejection(name, "prefill", handle, "not needed")])
        until_free(source.client)


def test_another_prompt_is_refused(ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    source.save("prompt", [0, 1], 32, 32, prompt="of Alice")
    sink.load("prompt", [4, 5], 32, prompt="of Bob")
    assert sink.wait("prompt") == {4, 5}
    source.sources.drop(["prompt"])


def test_nobody_brings_it(ranks: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture) -> None:
    sink = ranks[1]
    sink.load("gone", [4, 5], 32, handle="prefill/0123456789abcdef/1/0123456789abcdef")
    sink.load("never", [6, 7], 32)
    assert sink.wait("gone", "never") == {4, 5, 6, 7}
    assert "gone was not loaded: PEER_RESTARTED" in caplog.text
    assert "never was not loaded: RENDEZVOUS_TIMEOUT" in caplog.text


def test_vllm_50765_other_block_sizes_are_refused_or_converted(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    with contextlib.ExitStack() as stack:
        pairs = {
            unit: (
                stack.enter_context(contextlib.closing(Rank(daemons[0].socket, seed=1, block=16, unit=unit))),
                stack.enter_context(contextlib.closing(Rank(daemons[1].socket, seed=2, block=32, unit=unit))),
            )
            for unit in ("block", "token")
        }
        source, sink = pairs["block"]
        source.save("sizes", [0, 1, 2], 48, 48)
        sink.load("sizes", [4, 5], 48)
        assert sink.wait("sizes") == {4, 5}
        source.sources.drop(["sizes"])
        source, sink = pairs["token"]
        source.save("tokens", [8, 1, 2], 40, 40)
        sink.load("tokens", [5, 4], 40)
        assert sink.wait("tokens") == set()
        for a, b in zip(source.cache.layers, sink.cache.layers, strict=True):
            sent, got = (torch.cat([layer[n].transpose(0, 1) for n in blocks]) for layer, blocks in
                         ((a, [8, 1, 2]), (b, [5, 4])))  # fmt: skip
            assert torch.equal(sent[:40], got[:40])


@pytest.mark.parametrize(("there", "here"), [(2, 2), (2, 1), (1, 4)])
def test_tensor_parallel_ranks(daemons: tuple[DaemonProcess, DaemonProcess], there: int, here: int) -> None:
    with contextlib.ExitStack() as stack:
        sources, sinks = (
            [
                stack.enter_context(
                    contextlib.closing(Rank(d.socket, seed=seed, rank=rank, ranks=own, peer_ranks=peer))
                )
                for rank in range(own)
            ]
            for d, seed, own, peer in ((daemons[0], 1, there, here), (daemons[1], 2, here, there))
        )
        name = f"parallel-{there}-{here}"
        for source in sources:
            source.save(name, [0, 7], 20, 40)
            source.save(name, [5], 40, 40, anew=False)
        for sink in sinks:
            sink.load(name, [9, 8, 1], 40, held=16)
        for sink in sinks:
            assert sink.wait(name) == set()
        for layer in range(LAYERS):
            sent = torch.cat([source.cache.layers[layer] for source in sources], 1)[[7, 5]]
            got = torch.cat([sink.cache.layers[layer] for sink in sinks], 1)[[8, 1]]
            assert torch.equal(sent, got)
        for source in sources:
            until_free(source.client)


def test_a_full_pool_is_waited_for(daemons: tuple[DaemonProcess, DaemonProcess], ranks: tuple[Rank, Rank]) -> None:
    source, sink = ranks
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=1 << 20, dtype="x", model="big")
    with contextlib.ExitStack() as stack:
        hogs = [stack.enter_context(daemon.client("hog")) for daemon in daemons]
        big = [client.prefill(f"big-{n}", spec, [60]) for client in hogs for n in range(4)]
        source.save("full", [0, 1], 32, 48)  # there is no room yet
        sink.load("full", [9, 3, 20], 48)
        for transfer in big:
            transfer.release()
        source.save("full", [2], 48, 48, anew=False)  # now there is
        assert sink.wait("full") == set()
    check(source, [0, 1, 2], sink, [9, 3, 20])


def test_a_daemon_that_dies_costs_the_load_and_nothing_else(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (a, b), contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(Rank(a.socket, seed=1)))
        sink = stack.enter_context(contextlib.closing(Rank(b.socket, seed=2)))
        sink.load("half", [9, 3, 20], 48)
        source.save("half", [0, 1], 32, 48)
        eventually("something comes", lambda: sink.client.status().counters["bytes_received"] > 0)
        b.kill(signal.SIGKILL)
        assert sink.wait("half") == {9, 3, 20}
        sink.load("while it is away", [4], 16)
        assert sink.wait("while it is away") == {4}
        source.save("half", [2], 48, 48, anew=False)
        until_free(source.client)
        a.kill(signal.SIGKILL)
        source.save("nobody", [5], 16, 16)  # does not raise
        assert source.board.has_failed("nobody")
        b.start()
        a.start()
        source.save("anew", [6], 16, 16)
        sink.load("anew", [7], 16)
        assert sink.wait("anew") == set()
        check(source, [6], sink, [7])


def test_a_daemon_that_hangs_is_not_waited_for_by_everybody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with two_daemons(tmp_path) as (a, b), contextlib.ExitStack() as stack:
        sink = stack.enter_context(contextlib.closing(Rank(b.socket, seed=2, timeout_s=1.0, deadline_s=5.0)))
        sink.client = sink.loads._node._client = stack.enter_context(contextlib.closing(Client(b.socket, "w", 0.5)))
        assert sink.client.status().node == "decode"
        b.kill(signal.SIGSTOP)
        try:
            names = [f"hung-{n}" for n in range(20)]
            for n, name in enumerate(names):
                sink.load(name, [n], 16)
            assert sink.wait(*names) == set(range(20))
            assert 1 <= caplog.text.count("did not answer") < 10  # one of them finds out for all
        finally:
            b.kill(signal.SIGCONT)
        del a


class Dying:
    """A transfer whose memory turns to zeros while a layer is copied."""

    def __init__(self) -> None:
        self.copied = False

    def check(self) -> None:
        if self.copied:
            raise DaemonLost("it is gone")

    def poll_ready(self, layer: int) -> bool:
        return True

    def layer(self, layer: int) -> Any:
        self.copied = True
        return np.zeros((1, 1, HEADS, BLOCK * ELEMENTS * 4), np.uint8)

    def abort(self, reason: str) -> None:
        pass

    def release(self) -> None:
        pass


def test_zeros_are_never_delivered_as_a_cache(ranks: tuple[Rank, Rank]) -> None:
    class Nobody(Node):
        def sink(self, load: Load, units: int, held: int) -> Any:
            return Dying()

    spec = KVSpec(layers=LAYERS, kv_heads=HEADS, entry_bytes=1, dtype="x", model="x")
    sink = ranks[1]
    sink.loads._node = Nobody(sink.client, spec, sink.options)
    sink.load("zeros", [4], 16)
    assert sink.wait("zeros") == {4}


def test_a_load_that_can_not_begin_ends_all_the_same(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(self: object) -> None:
        raise RuntimeError("can't start new thread")

    sink = ranks[1]
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", no_more)
        sink.load("thread", [4, 5], 32)
        assert sink.wait("thread") == {4, 5}
    sink.load("next", [6], 16, handle="prefill/0123456789abcdef/1/0123456789abcdef")
    assert sink.wait("next") == {6}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_costs_its_loads_only(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ranks[1]

    def end(self: object, loading: object) -> None:
        raise SystemExit

    monkeypatch.setattr(Loads, "_step", end)
    sink.load("thread", [4, 5], 32)
    assert sink.wait("thread") == {4, 5}
