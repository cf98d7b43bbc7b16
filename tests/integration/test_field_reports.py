"""Reports of the field that no other test is about; ``tests/field_reports.py`` lists them all."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd_client.errors import KvdError, LeaseExpired
from tests.integration.daemons import DaemonProcess, random_layer, small_spec, two_daemons
from tests.waiting import eventually

WAIT_S = 20.0
SPEC = small_spec()
TOKENS = 40
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), transfer={"rendezvous_s": 1.0}) as pair:
        yield pair


def test_vllm_21570_memory_is_not_read_after_its_lease(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    """After its release a transfer's memory says LEASE_EXPIRED, and an array that was taken before shows zeros: never
    the entries of whoever has been lent the memory since."""
    prefill, decode = daemons
    with prefill.client() as source, decode.client() as sink, decode.client() as other:
        first = sink.decode("first", SPEC, [TOKENS], source="prefill")
        with source.prefill("first", SPEC, [TOKENS]) as sent:
            for layer in range(SPEC.layers):
                sent.put_layer(layer, entries=random_layer(layer, 1, TOKENS, 2, 64))
            first.wait_ready(timeout_s=WAIT_S)
            sent.finish(timeout_s=WAIT_S)
        kept = first.layer(0)
        assert kept.any()
        first.release()
        with (
            source.prefill("second", SPEC, [TOKENS]) as sent,
            other.decode("second", SPEC, [TOKENS], source="prefill") as second,
        ):
            for layer in range(SPEC.layers):
                sent.put_layer(layer, entries=np.full((1, TOKENS, 2, 64), 7, np.uint8))
            second.wait_ready(timeout_s=WAIT_S)
            for read in (first.layer, first.mask, first.wait_ready):
                with pytest.raises(LeaseExpired):
                    read(0)
            assert not kept.any()
            sent.finish(timeout_s=WAIT_S)


def test_vllm_20965_a_taken_port_ends_the_daemon_and_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = DaemonProcess(tmp_path, "late", listen=f"127.0.0.1:{port}")
        try:
            with pytest.raises(AssertionError, match=f"{port} is taken by another process"):
                daemon.start()
            assert daemon.process is not None
            assert daemon.process.wait(10) == 1
            assert not Path(daemon.socket).exists()
        finally:
            daemon.destroy()


def test_vllm_17192_nothing_that_runs_what_it_reads_is_imported() -> None:
    """No pickle, marshal or shelve, no eval or exec, nowhere in what is installed."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
    seen = 0
    for folder in ("kvd", "kvd_client", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            seen += 1
            for node in ast.walk(ast.parse(path.read_text())):
                names = set()
                if isinstance(node, ast.Import):
                    names = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").split(".")[0]}
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec", "compile"), f"{path}:{node.lineno}"
                assert not names & forbidden, f"{path}:{node.lineno}"
    assert seen > 100


def test_vllm_21784_counters_equal_what_was_sent_and_failures_are_counted(
    daemons: tuple[DaemonProcess, DaemonProcess],
) -> None:
    prefill, decode = daemons

    def counters() -> list[dict[str, int]]:
        found = []
        for daemon in daemons:
            with daemon.client() as client:
                found.append(client.status().counters)
        return found

    before = counters()
    with prefill.client() as source, decode.client() as sink:
        with (
            sink.decode("counted", SPEC, [TOKENS], source="prefill") as into,
            source.prefill("counted", SPEC, [TOKENS]) as sent,
        ):
            for layer in range(SPEC.layers):
                sent.put_layer(layer, entries=random_layer(layer, 1, TOKENS, 2, 64))
            into.wait_ready(timeout_s=WAIT_S)
            sent.finish(timeout_s=WAIT_S)
        with sink.decode("nobody", SPEC, [TOKENS], source="prefill") as into, pytest.raises(KvdError) as caught:
            into.wait_ready(timeout_s=WAIT_S)
        with source.prefill("given up", SPEC, [TOKENS]) as sent:
            sent.abort("no need")
    nbytes = SPEC.layers * TOKENS * 2 * 64
    grown: list[dict[str, int]] = []

    def confirmed() -> bool:
        """The delivery and the last confirmations come on different connections."""
        grown[:] = [
            {k: now.get(k, 0) - was.get(k, 0) for k in now} for was, now in zip(before, counters(), strict=True)
        ]
        return grown[0]["bytes_sent"] >= nbytes

    eventually("all bytes are confirmed", confirmed)
    assert (grown[0]["bytes_sent"], grown[1]["bytes_received"]) == (nbytes, nbytes)
    assert grown[0]["bytes_sent_proactive"] == nbytes
    assert (grown[0]["bytes_received"], grown[1]["bytes_sent"]) == (0, 0)
    assert grown[0]["transfers_ended_source_OK"] == grown[1]["transfers_ended_sink_OK"] == 1
    assert grown[0]["transfers_ended_source_ABORTED"] == 1
    assert grown[1][f"transfers_ended_sink_{caught.value.code}"] == 1
    assert grown[0]["checksum_errors"] == grown[1]["checksum_errors"] == 0
