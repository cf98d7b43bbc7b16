"""kill -9 and SIGSTOP of every process at every stage of a transfer, on real daemons.

What must hold each time: the other side gets a named error (or the bytes, if they had all arrived), memory comes
back, a restarted daemon serves at once, and nobody who holds a mapping is hurt.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd_client import Client
from kvd_client.errors import DaemonLost, KvdError, PeerLost, PeerRestarted, PeerUnreachable, ProcessLost
from tests.integration.daemons import DaemonProcess, nothing_is_left, random_layer, small_spec, two_daemons
from tests.integration.fault_helpers import Told, saw
from tests.integration.workers import Worker
from tests.waiting import eventually

WAIT_S = 20.0
SPEC = small_spec(layers=8, heads=4, entry_bytes=256)
LENGTHS = [256]
LOST = (PeerLost.code, PeerRestarted.code)
STAGES = ["opened", "paired", "delivered"]
"""Opened on this side only; both sides paired and the first layer across; everything across, not yet released."""


def _process(socket: str, role: str, request: str, pipe: Connection) -> None:
    """An inference process under test: does what the pipe says, answers with ``ok`` or the error's code."""
    with Client(socket, name=role) as client:
        transfer: Any = None
        view: Any = None  # held all along, as an engine does
        while True:
            command, *arguments = pipe.recv()
            said = "ok"
            try:
                match command:
                    case "open" if role == "source":
                        transfer = client.prefill(request, SPEC, LENGTHS)
                        view = transfer.layer(0)
                    case "open":
                        transfer = client.decode(request, SPEC, LENGTHS, source="prefill")
                        view = transfer.layer(0)
                    case "put":
                        for layer in arguments[0]:
                            transfer.put_layer(layer, entries=random_layer(layer, 1, LENGTHS[0], 4, 256))
                    case "finish":
                        transfer.finish(timeout_s=WAIT_S)
                    case "wait":
                        transfer.wait_ready(arguments[0], timeout_s=WAIT_S)
                    case "read":
                        same = np.array_equal(view, random_layer(0, 1, LENGTHS[0], 4, 256))
                        said = "same" if same else "different"
                    case "release":
                        transfer.release()
            except KvdError as error:
                said = error.code
            pipe.send(said)


@contextlib.contextmanager
def workers(prefill: DaemonProcess, decode: DaemonProcess, request: str) -> Iterator[tuple[Worker, Worker]]:
    pair = (
        Worker(_process, prefill.socket, "source", request),
        Worker(_process, decode.socket, "sink", request),
    )
    try:
        yield pair
    finally:
        for worker in pair:
            worker.kill()


def bring_to(stage: str, source: Worker, sink: Worker, first: str) -> None:
    """``first`` opens; the other side only from stage "paired" on."""
    one, other = (source, sink) if first == "source" else (sink, source)
    assert one.ask("open") == "ok"
    if stage == "opened":
        return
    assert other.ask("open") == "ok"
    layers = [0] if stage == "paired" else range(SPEC.layers)
    assert source.ask("put", list(layers)) == "ok"
    assert sink.ask("wait", 0 if stage == "paired" else None) == "ok"
    if stage == "delivered":
        assert source.ask("finish") == "ok"


def serves_new_transfers(prefill: DaemonProcess, decode: DaemonProcess) -> None:
    with (
        prefill.client() as a,
        decode.client() as b,
        a.prefill("afterwards", SPEC, LENGTHS) as source,
        b.decode("afterwards", SPEC, LENGTHS, source="prefill") as sink,
    ):
        for layer in range(SPEC.layers):
            source.put_layer(layer, entries=random_layer(layer, 1, LENGTHS[0], 4, 256))
        source.finish(timeout_s=WAIT_S)
        sink.wait_ready(timeout_s=WAIT_S)
        assert np.array_equal(sink.layer(7), random_layer(7, 1, LENGTHS[0], 4, 256))


@pytest.fixture(scope="module")
def pair_of_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    config: dict[str, dict[str, Any]] = {
        "peers": {"heartbeat_s": 0.2, "timeout_s": 1.0},
        "transfer": {"rendezvous_s": 3.0},
    }
    with two_daemons(tmp_path_factory.mktemp("faults"), **config) as pair:
        yield pair


@pytest.fixture
def daemons(
    pair_of_daemons: tuple[DaemonProcess, DaemonProcess],
) -> tuple[DaemonProcess, DaemonProcess]:
    """Both alive, whatever the test before did to them."""
    for daemon in pair_of_daemons:
        assert daemon.process is not None
        if daemon.process.poll() is not None:
            daemon.start()
    return pair_of_daemons


@pytest.mark.parametrize("stage", STAGES)
def test_kill_the_sinks_process(daemons: tuple[DaemonProcess, DaemonProcess], stage: str) -> None:
    prefill, decode = daemons
    with workers(prefill, decode, f"kill-sink-{stage}") as (source, sink):
        bring_to(stage, source, sink, first="sink")
        sink.kill()
        nothing_is_left(decode)
        if stage == "paired":
            assert source.ask("put", list(range(1, SPEC.layers))) in ("ok", ProcessLost.code)
        if stage != "opened":
            told = source.told("finish")
            saw("sink's process killed", stage, source=told)
            assert told.code == (ProcessLost.code if stage == "paired" else "OK")
    nothing_is_left(prefill)
    serves_new_transfers(prefill, decode)


@pytest.mark.parametrize("stage", STAGES)
def test_kill_the_sources_process(daemons: tuple[DaemonProcess, DaemonProcess], stage: str) -> None:
    prefill, decode = daemons
    with workers(prefill, decode, f"kill-source-{stage}") as (source, sink):
        bring_to(stage, source, sink, first="source")
        source.kill()
        nothing_is_left(prefill)
        if stage != "opened":
            told = sink.told("wait", None)
            saw("source's process killed", stage, sink=told)
            assert told.code == (ProcessLost.code if stage == "paired" else "OK")
        if stage == "delivered":
            assert sink.ask("read") == "same"
    nothing_is_left(decode)
    serves_new_transfers(prefill, decode)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_kill_a_daemon(daemons: tuple[DaemonProcess, DaemonProcess], victim: str, stage: str) -> None:
    prefill, decode = daemons
    dead, alive = (prefill, decode) if victim == "prefill" else (decode, prefill)
    with workers(prefill, decode, f"kill-{victim}-{stage}") as (source, sink):
        near, far = (source, sink) if victim == "prefill" else (sink, source)
        bring_to(stage, source, sink, first="source" if victim == "prefill" else "sink")
        dead.kill()
        assert dead.process is not None
        dead.process.wait()
        told: dict[str, Told] = {}
        names = {source: "source", sink: "sink"}
        if stage != "delivered":
            told[names[near]] = near.told("wait", None) if near is sink else near.told("finish")
            assert told[names[near]].code == DaemonLost.code
        if stage == "paired":
            if far is source:
                assert far.ask("put", list(range(1, SPEC.layers))) in ("ok", *LOST)
            told[names[far]] = far.told("wait", None) if far is sink else far.told("finish")
            assert told[names[far]].code in LOST
        if told:
            saw(f"{victim} killed", stage, **told)
        # whoever holds a mapping may still look at it, and is not hurt
        if stage != "opened":
            assert sink.ask("read") == "same"
        assert near.ask("release") == "ok"
        dead.start()
        assert near.process.is_alive()
        assert far.process.is_alive()
    nothing_is_left(alive, dead)
    serves_new_transfers(prefill, decode)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_daemon_that_stands_still_is_given_up(daemons: tuple[DaemonProcess, DaemonProcess], victim: str) -> None:
    """SIGSTOP for longer than peers.timeout_s: the other side hears of it, and all is well after SIGCONT."""
    prefill, decode = daemons
    with workers(prefill, decode, f"stop-{victim}") as (source, sink):
        bring_to("paired", source, sink, first="source")
        stopped, far = (prefill, sink) if victim == "prefill" else (decode, source)
        stopped.kill(signal.SIGSTOP)
        try:
            if far is source:
                assert far.ask("put", list(range(1, SPEC.layers))) in ("ok", *LOST)
            assert (far.ask("wait", None) if far is sink else far.ask("finish")) == PeerLost.code
        finally:
            stopped.kill(signal.SIGCONT)
        near = source if victim == "prefill" else sink
        if near is source:
            assert near.ask("put", list(range(1, SPEC.layers))) in ("ok", *LOST)
        assert (near.ask("wait", None) if near is sink else near.ask("finish")) == PeerLost.code
    nothing_is_left(*daemons)
    serves_new_transfers(prefill, decode)


def test_vllm_49238_a_handle_of_an_earlier_boot(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    prefill, decode = daemons
    with prefill.client() as client:
        handle = client.prefill("old", SPEC, LENGTHS).handle
        prefill.kill()
        assert prefill.process is not None
        prefill.process.wait()
        prefill.start()
    with decode.client() as client, client.decode("old", SPEC, LENGTHS, handle=handle) as transfer:
        with pytest.raises((PeerRestarted, PeerUnreachable, PeerLost)) as caught:
            transfer.wait_ready(timeout_s=WAIT_S)
        assert caught.type is PeerRestarted
    serves_new_transfers(prefill, decode)


def test_mooncake_1084_the_death_of_one_client_leaves_the_others_mapping(
    daemons: tuple[DaemonProcess, DaemonProcess],
) -> None:
    prefill, decode = daemons
    with workers(prefill, decode, "one") as (source, sink), workers(prefill, decode, "two") as (source2, sink2):
        bring_to("delivered", source, sink, first="sink")
        bring_to("paired", source2, sink2, first="sink")
        sink2.kill()
        source2.kill()
        assert sink.ask("read") == "same"
        serves_new_transfers(prefill, decode)
        assert sink.ask("read") == "same"


def test_sigterm_lets_running_transfers_end_and_refuses_new_ones(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (prefill, decode), workers(prefill, decode, "drain") as (source, sink):
        bring_to("paired", source, sink, first="sink")
        with prefill.client() as late:
            late.status()
            prefill.kill(signal.SIGTERM)
            eventually("it drains", lambda: late.status().draining)
            with pytest.raises(KvdError) as caught:
                late.prefill("new", SPEC, LENGTHS)
            assert caught.value.code == "SHUTTING_DOWN"
            assert source.ask("put", list(range(1, SPEC.layers))) == "ok"
            assert source.ask("finish") == "ok"
            assert sink.ask("wait", None) == "ok"
            assert sink.ask("read") == "same"
        assert prefill.process is not None
        assert prefill.process.wait(10) == 0


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (prefill, decode), workers(prefill, decode, "hurry") as (source, sink):
        bring_to("paired", source, sink, first="sink")
        with prefill.client() as late:
            late.status()
            prefill.kill(signal.SIGTERM)
            eventually("it drains", lambda: late.status().draining)
        prefill.kill(signal.SIGTERM)
        assert prefill.process is not None
        assert prefill.process.wait(10) == 0
        assert sink.ask("wait", None) == "SHUTTING_DOWN"
        assert source.ask("finish") in ("SHUTTING_DOWN", "DAEMON_LOST")
        assert not os.path.exists(prefill.socket)
