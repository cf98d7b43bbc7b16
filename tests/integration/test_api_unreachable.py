"""What the client library says where there is no daemon, or none that answers, or no client any more."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest

from kvd_client import Client
from kvd_client.errors import DaemonUnreachable, InvalidArgument
from tests.integration.api_entries import SPEC
from tests.integration.api_harness import WAIT_S


def test_nobody_there_is_said_with_the_way_to_start_it(tmp_path):
    with Client(tmp_path / "none") as client, pytest.raises(DaemonUnreachable) as found:
        client.status()
    for word in (os.fspath(tmp_path / "none"), "kvd serve", "systemctl start kvd"):
        assert word in found.value.message


def test_something_else_at_the_socket_is_said(tmp_path):
    path = os.fspath(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer():
            sock, _ = listener.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"220 smtp ready\r\n")
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with Client(path) as client, pytest.raises(DaemonUnreachable, match="frame of"):
            client.status()
        thread.join()


def test_a_daemon_that_does_not_answer_is_unreachable_after_the_timeout(server):
    with Client(server.path, timeout_s=1.0) as client:
        client.status()

        def hold():
            server.service.hold = asyncio.Event()

        server.call(hold)
        with pytest.raises(DaemonUnreachable, match=r"GetStatus within 1 s"):
            client.status()
        server.call(lambda: server.service.hold.set())
        client.reject(handle="still connected")


def test_the_socket_is_taken_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("KVD_SOCKET", server.path)
    with Client() as client:
        assert client.status().node == "test"
    monkeypatch.delenv("KVD_SOCKET")
    assert Client().socket_path == "/run/kvd/kvd.sock"


def test_a_closed_client_says_so(server):
    client = Client(server.path)
    source = client.prefill("r", SPEC, [1])
    view = source.layer(0)
    view[:] = 3
    client.close()
    client.close()
    assert not view.any()
    source.release()
    with pytest.raises(InvalidArgument, match="closed"):
        client.status()
    server.service.lost.get(timeout=WAIT_S)
    assert server.service.parts == {}
