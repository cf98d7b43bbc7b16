"""``kvd metrics``: the exposition format, what its numbers mean, and the HTTP server."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from kvd.cli import metrics
from kvd.cli.main import app
from kvd.errors import AddressInUse, ConfigError, DaemonUnreachable
from kvd_client.protocol import Status
from kvd_client.statuses import DeviceStatus, MemoryStatus, PeerStatus, TransferStatus

PEERS = [
    PeerStatus(node="b", address="10.0.0.2:7440", state="connected", fabric="tcp", bytes_sent=7, bytes_received=9),
    PeerStatus(node="c", address="10.0.0.3:7440", state="down", error="PEER_LOST: gone", down_s=61.5),
]


def part(**fields: Any) -> TransferStatus:
    told = {"transfer": 1, "request": "r", "role": "source", "state": "running", "peer": "b", "rank": 0, "ranks": 1}
    return TransferStatus(**{**told, "bytes_total": 8, "bytes_done": 4, "age_s": 1.5, **fields})


STATUS = Status(
    node="a",
    boot="0123",
    version="0.1.0",
    pid=7,
    uptime_s=12.25,
    health="degraded",
    reasons=["peer 'c': gone"],
    fabric="tcp",
    kernels="avx2",
    listen="10.0.0.1:7440",
    socket="/s",
    clients=2,
    draining=False,
    memory=MemoryStatus(limit=1 << 32, registered=1 << 28, in_use=4096, leases=1, huge_pages=False),
    peers=PEERS,
    transfers=[part(), part(role="sink", state="PEER_LOST", age_s=70.0), part(state="ended")],
    counters={
        "transfers_opened_source": 3,
        "transfers_ended_source_OK": 1,
        "transfers_ended_sink_PEER_LOST": 1,
        "bytes_sent": 100,
        "bytes_sent_on_demand": 40,
        "regroup_us": 1500,
        "checksum_errors": 0,
        "tensor_bytes": 64,
        "requests_failed_BUSY": 5,
        "dials_failed": 2,
    },
    devices=[
        DeviceStatus(
            name="bh",
            backing="host",
            channel_bytes=1024,
            alignment=64,
            leases=1,
            used=[512, 0],
            largest_free=[512, 1024],
            largest_common=512,
        )
    ],
)

LINE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.]+(?:e[+-]?\d+)?)')


def samples(text: str) -> dict[str, float]:
    """Every line must be one of the format, every sample have help and type before it, and no name come twice."""
    found: dict[str, float] = {}
    families: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in families
            families[name] = kind
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            assert match[1] in families
            assert (families[match[1]] == "counter") == match[1].endswith("_total")
            found[f"{match[1]}{match[2] or ''}"] = float(match[3])
    assert text.endswith("\n")
    return found


def test_what_an_alert_is_made_of() -> None:
    found = samples(metrics.text_of(STATUS))
    assert found["kvd_up"] == 1
    assert found["kvd_healthy"] == 0
    assert found['kvd_peer_connected{peer="b"}'] == 1
    assert found['kvd_peer_down_seconds{peer="c"}'] == 61.5
    assert found['kvd_transfers_running{role="source"}'] == 1
    assert found['kvd_transfers_oldest_seconds{role="sink"}'] == 70
    assert found['kvd_transfers_ended_total{role="sink",code="PEER_LOST"}'] == 1
    assert found["kvd_sent_bytes_total"] == 100
    assert found['kvd_sent_by_path_bytes_total{path="on_demand"}'] == 40
    assert found["kvd_regroup_seconds_total"] == 0.0015
    assert found["kvd_checksum_errors_total"] == 0
    assert found['kvd_requests_failed_total{code="BUSY"}'] == 5
    assert found["kvd_dials_failed_total"] == 2
    assert found["kvd_memory_lent_bytes"] == 4096
    assert found['kvd_device_used_bytes{device="bh",channel="0"}'] == 512
    assert found['kvd_device_largest_common_bytes{device="bh"}'] == 512


def test_nobody_answers() -> None:
    assert samples(metrics.text_of(None)) == {"kvd_up": 0.0}


@given(st.text(), st.floats(0, 1e15))
def test_any_name_and_number_is_one_line(name: str, number: float) -> None:
    peer = replace(PEERS[1], node=name, down_s=number)
    text = metrics.text_of(replace(STATUS, peers=[peer]))
    lines = [line for line in text.split("\n") if line.startswith("kvd_peer_down_seconds")]
    assert len(lines) == 1
    assert float(lines[0].rpartition(" ")[2]) == pytest.approx(number, abs=1e-6, rel=1e-12)


class FakeClient:
    answer: Status | None = STATUS

    def status(self) -> Status:
        if self.answer is None:
            raise DaemonUnreachable("no daemon answers")
        return self.answer


@pytest.fixture
def served() -> Iterator[tuple[FakeClient, int]]:
    client = FakeClient()
    with metrics.server("127.0.0.1:0", client) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield client, server.server_address[1]
        server.shutdown()
        thread.join()


def get(port: int, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_over_http_while_the_daemon_comes_and_goes(served: tuple[FakeClient, int]) -> None:
    client, port = served
    code, text = get(port, "/metrics?x=1")
    assert (code, samples(text)["kvd_up"]) == (200, 1)
    client.answer = None
    code, text = get(port, "/metrics")
    assert (code, samples(text)) == (200, {"kvd_up": 0.0})
    assert get(port, "/etc/passwd")[0] == 404


def test_an_address_that_can_not_be_had() -> None:
    with metrics.server("127.0.0.1:0", FakeClient()) as server:  # type: ignore[arg-type]
        taken = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(AddressInUse, match=taken):
            metrics.server(taken, FakeClient())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="host:port"):
        metrics.server("9745", FakeClient())  # type: ignore[arg-type]


def test_without_a_daemon_the_command_ends_as_status_does(tmp_path: Any) -> None:
    result = CliRunner().invoke(app, ["metrics", "--socket", str(tmp_path / "none")])
    assert (result.exit_code, result.stdout) == (3, "")
