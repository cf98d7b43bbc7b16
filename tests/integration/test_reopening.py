"""A request id is free again as soon as nobody can use what was opened by it: a retry, or a successor, gets through."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvd_client import Client, DecodeTransfer
from tests.integration.daemons import DaemonProcess, small_spec

SPEC = small_spec()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("daemon"), "decode", peers={"nobody": "127.0.0.1:1"})
    try:
        yield daemon.start()
    finally:
        daemon.destroy()


class Interrupted(Exception):
    pass


def interrupt(*_: Any) -> None:
    raise Interrupted


@contextlib.contextmanager
def an_alarm(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_open_that_was_interrupted_can_be_tried_again(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        client.status()
        daemon.kill(signal.SIGSTOP)
        try:
            with an_alarm(0.02), pytest.raises(Interrupted):
                client.decode("again", SPEC, [8])
        finally:
            daemon.kill(signal.SIGCONT)
        # The daemon carries out the first attempt now, and its answer comes before that to the second.
        with client.decode("again", SPEC, [8]):
            assert [t.request for t in client.status().transfers] == ["again"]


def test_what_was_opened_for_an_interrupted_caller_goes_back_though_its_traceback_is_kept(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.client() as client:
        monkeypatch.setattr(DecodeTransfer, "_place", interrupt)
        with pytest.raises(Interrupted) as kept:
            client.decode("kept", SPEC, [8])
        assert client.status().transfers == []
        assert kept.tb is not None


def test_a_process_that_has_gone_leaves_its_request_ids_to_its_successor(daemon: DaemonProcess) -> None:
    counts, index = np.full(SPEC.kv_heads, 4, np.int32), np.tile(np.arange(4, dtype=np.int32), SPEC.kv_heads)
    with daemon.client("successor") as successor:
        successor.status()  # connected before the other one ends, so that its open comes right behind that
        for number in range(20):
            gone = Client(daemon.socket)
            transfer = gone.decode(f"request {number}", SPEC, [8], landing_entries=4)
            transfer.begin_fetch(2, 0, counts, index)  # the daemon has something to cancel before it can end the rest
            gone.close()
            successor.decode(f"request {number}", SPEC, [8]).release()
