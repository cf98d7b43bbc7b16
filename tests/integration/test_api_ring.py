"""The server against a ring that is spoiled: what no library writes closes the connection, and only that."""

from __future__ import annotations

import contextlib
import queue
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.api.server import ApiLimits
from kvd_client import Client
from kvd_client.doorbell import Doorbell
from kvd_client.errors import DaemonLost
from kvd_client.framing import encode
from kvd_client.protocol import (
    GetStatus,
    Status,
)
from kvd_client.ring import (
    EVENT_IDLE,
    EVENT_LAYER_READY,
    EVENT_METADATA_READY,
    RING_EVENT,
    RING_EVENTS_OFFSET,
    RING_HEAD_OFFSET,
)
from tests.integration.api_entries import SPEC
from tests.integration.api_harness import WAIT_S, Raw, ServerThread


def close_by_ring(server, spoil) -> str:
    with Client(server.path) as bystander, Raw(server.path) as raw:
        bystander.status()
        doorbell = Doorbell(raw.fds[0], raw.fds[1])
        spoil(doorbell)
        doorbell.wake()
        said = raw.ended()
        assert said.code == "PROTOCOL"
        assert doorbell.closed
        assert bystander.status().node == "test"
        return said.message


def test_a_head_that_jumps_closes_the_connection(server):
    def spoil(doorbell):
        doorbell._u64[RING_HEAD_OFFSET // 8] = 2**63 + 5

    assert "head" in close_by_ring(server, spoil)


def test_an_unknown_kind_closes_the_connection(server):
    def spoil(doorbell):
        doorbell.ring(EVENT_LAYER_READY, 0, 1, 0, 0, 1)
        doorbell.ring(77, 0, 1, 0, 0, 1)

    assert "unknown kind 77" in close_by_ring(server, spoil)


def test_every_known_kind_reaches_the_service(server):
    kinds = [EVENT_LAYER_READY, EVENT_IDLE, EVENT_METADATA_READY]
    with Client(server.path) as client:
        for kind in kinds:
            client._connected().doorbell.ring(kind, 1, 2, 3, 4, 5)
        client.status()  # by its answer the events have been taken
    assert server.service.events == [(kind, 1, 2, 3, 4, 5) for kind in kinds]


def test_an_event_that_the_service_refuses_closes_the_connection(server):
    with Client(server.path) as client:
        source = client.prefill("r", SPEC, [1])
        client._connected().ring(source._part, EVENT_LAYER_READY, 999, 0, 0, 1)
        with pytest.raises(DaemonLost, match="layer 999"):
            source.wait_delivered(WAIT_S)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 2**64 - 1), st.binary(min_size=RING_EVENT.size, max_size=20 * RING_EVENT.size))
def test_any_bytes_in_the_ring_leave_the_server_serving(server, head, records):
    with Raw(server.path) as raw:
        doorbell = Doorbell(raw.fds[0], raw.fds[1])
        doorbell._bytes[RING_EVENTS_OFFSET : RING_EVENTS_OFFSET + len(records)] = records
        doorbell._u64[RING_HEAD_OFFSET // 8] = head
        doorbell.wake()
        with contextlib.suppress(OSError):  # closed already
            raw.sock.sendall(encode(GetStatus(id=2)))
            raw.sock.shutdown(socket.SHUT_WR)
        raw.ended()
    with Raw(server.path) as other:
        other.sock.sendall(encode(GetStatus(id=3)))
        assert isinstance(other.reply(), Status)
    assert server.log.exceptions == []


def test_events_without_a_wake_up_are_found_by_the_sweep(tmp_path):
    with ServerThread(tmp_path / "s", limits=ApiLimits(sweep_s=0.01)) as server, Client(server.path) as client:
        seen: queue.Queue[int] = queue.Queue()
        server.service.on_event = lambda client, kind, layer, *rest: seen.put(layer)
        doorbell = client._connected().doorbell
        doorbell.wake = lambda: None
        doorbell.ring(EVENT_LAYER_READY, 5, 1, 0, 0, 1)
        assert seen.get(timeout=WAIT_S) == 5
