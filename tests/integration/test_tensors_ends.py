"""kill -9 while tensors are on their way into a device, or out of it: both sides hear of it, and all memory comes back.

Links are slow here, and the cache is a few batches large, so that some are on their way for a while. What must be given
back: leases of the pool (staging among them), channels of the devices, and the caches of a process that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvd_client import Client, KVSpec, Placement
from kvd_client.errors import KvdError, PeerLost, PeerRestarted, PeerUnreachable, ProcessLost
from tests.integration.daemons import DaemonProcess, nothing_is_left, random_layer, two_daemons
from tests.integration.workers import Worker

SPEC = KVSpec(layers=8, kv_heads=2, entry_bytes=256, dtype="bfloat16", model="test")
TOKENS = 4096
TILES = Placement(layout="tenstorrent", device="bh")
CONFIG: dict[str, dict[str, Any]] = {
    "npu.bh": {"channels": 8, "channel_bytes": "4MiB", "alignment": 64},
    "fabric": {"rate": "100mbit"},
    "memory": {"pool": "64MiB", "arena": "16MiB"},
}
ENDS = [("push", "sink"), ("pull", "source"), ("cache", "sink"), ("back", "source")]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), **CONFIG) as pair:
        yield pair


def _process(socket: str, role: str, way: str, request: str, pipe: Connection) -> None:
    """An inference process: opens its side, puts everything (a source), and tells when the first layer is there."""
    with Client(socket, name=role) as client:
        try:
            if role == "source":
                transfer: Any = client.prefill(request, SPEC, [TOKENS], placement=TILES if way == "back" else None)
                pipe.send("opened")
                for layer in range(SPEC.layers):
                    transfer.put_layer(layer, entries=random_layer(layer, 1, TOKENS, 2, 256))
                transfer.finish(timeout_s=60)
            else:
                options: dict[str, Any] = {}
                if way == "cache":
                    cache = client.open_cache(SPEC, TILES, 140)
                    options = {"cache": cache, "blocks": [list(range(139, 11, -1))]}
                elif way != "back":
                    options = {"placement": TILES, "pull": way == "pull"}
                transfer = client.decode(request, SPEC, [TOKENS], source="prefill", **options)
                pipe.send("opened")
                transfer.wait_ready(0, timeout_s=60)
                pipe.send("first layer")
                transfer.wait_ready(timeout_s=60)
            pipe.send("ok")
        except KvdError as error:
            pipe.send(error.code)
        pipe.recv()  # nobody sends: it ends with the test


def workers(daemons: tuple[DaemonProcess, DaemonProcess], way: str, request: str) -> tuple[Worker, Worker]:
    source, sink = (
        Worker(_process, daemon.socket, role, way, request)
        for daemon, role in zip(daemons, ("source", "sink"), strict=True)
    )
    return source, sink


@pytest.mark.parametrize(("way", "victim"), ENDS)
def test_a_process_dies_while_tensors_are_on_their_way(
    daemons: tuple[DaemonProcess, DaemonProcess], way: str, victim: str
) -> None:
    request = f"{way}-{victim}"
    source, sink = workers(daemons, way, request)
    try:
        assert source.answer() == sink.answer() == "opened"
        assert sink.answer() == "first layer"
        (source if victim == "source" else sink).kill()
        assert (sink if victim == "source" else source).answer() == ProcessLost.code
    finally:
        source.kill()
        sink.kill()
    nothing_is_left(*daemons)


@pytest.mark.parametrize(("way", "victim"), [("push", 1), ("pull", 0)], ids=["push-sink", "pull-source"])
def test_a_daemon_dies_while_tensors_are_on_their_way(tmp_path: Path, way: str, victim: int) -> None:
    with two_daemons(tmp_path, **CONFIG) as daemons:
        both = source, sink = workers(daemons, way, "r")
        try:
            assert source.answer() == sink.answer() == "opened"
            assert sink.answer() == "first layer"
            daemons[victim].kill()
            assert both[1 - victim].answer() in (PeerLost.code, PeerRestarted.code, PeerUnreachable.code)
        finally:
            source.kill()
            sink.kill()
        nothing_is_left(daemons[1 - victim])
