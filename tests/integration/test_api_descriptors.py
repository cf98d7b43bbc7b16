"""A process that may have no more descriptors: it is told so at once, and its other transfers go on."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd_client import Client, KVSpec
from kvd_client.errors import Busy, DaemonUnreachable
from tests.integration.api_harness import WAIT_S

SPEC = KVSpec(layers=2, kv_heads=1, entry_bytes=64, dtype="float32", model="test")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Of a daemon in a process of its own, which has its own limit."""
    argv = [sys.executable, "-m", "tests.integration.api_harness", os.fspath(tmp_path / "api.sock")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            with Client(tmp_path / "api.sock", timeout_s=WAIT_S) as client:
                assert client.status().node
                yield client
        finally:
            child.kill()


@contextlib.contextmanager
def room_for(spare: int) -> Iterator[None]:
    """This process may have so many more descriptors, and no more."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd"))) + 1
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, most))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_what_can_not_be_opened_ends_no_other_transfer(client: Client) -> None:
    with client.decode("good", SPEC, [4]) as sink, client.prefill("good", SPEC, [4]) as source:
        with room_for(0), pytest.raises(Busy, match="ulimit -n"):
            client.decode("bad", SPEC, [4])
        for layer in range(SPEC.layers):
            source.put_layer(layer, np.full((1, 4, SPEC.kv_heads, SPEC.entry_bytes), 7, np.uint8))
        sink.wait_ready(timeout_s=WAIT_S)
        assert client.status().memory.leases == 2  # what had been opened has been given back
    assert client.status().memory.leases == 0


def test_a_client_that_can_not_connect_says_why_and_can_later(client: Client) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    for spare in range(5):
        with room_for(spare), pytest.raises((Busy, DaemonUnreachable), match="ulimit -n"):
            Client(client.socket_path).status()
    assert len(os.listdir("/proc/self/fd")) == open_before
    with Client(client.socket_path) as other:
        assert other.status().node
