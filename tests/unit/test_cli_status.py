from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from kvd.cli import status as status_module
from kvd.cli.main import app
from kvd.cli.output import printable
from kvd.cli.status import bar, columns, duration, filled, render, to_json
from kvd.errors import DaemonLost, DaemonUnreachable
from kvd_client.protocol import Status
from kvd_client.statuses import MemoryStatus, PeerStatus, ProfileStatus, RecordingStatus, TransferStatus

PEER = PeerStatus(node="b", address="10.0.0.2:7440", state="connected", fabric="verbs", bytes_sent=3 << 29)
PART = TransferStatus(
    transfer=1,
    request="cmpl-7f3a",
    role="source",
    state="sending",
    peer="b",
    rank=0,
    ranks=1,
    bytes_total=200,
    bytes_done=50,
    age_s=1.26,
)
STATUS = Status(
    node="a",
    boot="0123456789abcdef",
    version="0.1.0",
    pid=77,
    uptime_s=3725.0,
    health="ok",
    reasons=[],
    fabric="verbs, tcp",
    device="mlx5_0 port 1, GID 3 (::ffff:10.0.0.1), MTU 4096",
    kernels="avx2",
    listen="10.0.0.1:7440",
    socket="/run/kvd/kvd.sock",
    clients=1,
    draining=False,
    memory=MemoryStatus(limit=4 << 30, registered=256 << 20, in_use=3 << 19, leases=2, huge_pages=False),
    peers=[PEER],
    transfers=[PART],
    counters={"delivered": 3},
)


def test_what_people_see() -> None:
    assert "\n".join(render(STATUS)) == (
        "a  ok  up 1h02m  kvd 0.1.0  pid 77\n"
        "  boot     0123456789abcdef\n"
        "  listen   10.0.0.1:7440\n"
        "  socket   /run/kvd/kvd.sock  (1 client)\n"
        "  fabric   verbs, tcp, kernels avx2\n"
        "  device   mlx5_0 port 1, GID 3 (::ffff:10.0.0.1), MTU 4096\n"
        "  memory   1.5 MiB in use by 2 leases, 256 MiB registered of 4.0 GiB,\n"
        "           small pages\n"
        "\n"
        "PEER  STATE      FABRIC  ADDRESS           SENT  RECEIVED\n"
        "b     connected  verbs   10.0.0.2:7440  1.5 GiB       0 B\n"
        "\n"
        "REQUEST    ROLE    PEER  STATE    PROGRESS            SIZE   AGE\n"
        "cmpl-7f3a  source  b     sending  [##........]  25%  200 B  1.3s"
    )


def test_what_moving_tensors_took() -> None:
    counters = {"tensor_requests": 640, "tensor_bytes": 80 << 20, "regroup_us": 1_300_000}
    assert "  tensors  640 requests, 80.0 MiB, regrouped in 1.3s" in render(replace(STATUS, counters=counters))
    del counters["regroup_us"]  # a sink that pulls
    assert "  tensors  640 requests, 80.0 MiB" in render(replace(STATUS, counters=counters))


def test_without_peers_and_transfers() -> None:
    lines = list(render(replace(STATUS, peers=[], transfers=[], draining=True)))
    assert lines[0].startswith("a  draining  up")
    assert "no peers" in lines
    assert lines[-1] == "no transfers"


def test_why_it_is_degraded() -> None:
    down = replace(PEER, state="down", error="connection refused")
    lines = list(render(replace(STATUS, health="degraded", reasons=["peer 'b': connection refused"], peers=[down])))
    assert lines[0].startswith("a  degraded")
    assert lines[1] == "  ! peer 'b': connection refused"
    assert "  ! connection refused" in lines


def test_ranks_and_thousands_of_transfers() -> None:
    parts = [replace(PART, rank=i % 4, ranks=4) for i in range(2000)]
    lines = list(render(replace(STATUS, transfers=parts)))
    assert any(line.startswith("cmpl-7f3a[3/4]") for line in lines)
    assert lines[-1] == "and 1950 more; --json lists all"


@given(
    st.text(max_size=300),
    st.text(max_size=64),
    st.integers(0, 1 << 50),
    st.floats(0, 1e7),
    st.sampled_from([74, 80, 120]),
)
def test_request_ids_of_any_length_leave_the_columns_in_place(
    request_id: str, node: str, total: int, age: float, width: int
) -> None:
    part = replace(PART, request=request_id, peer=node, state="RENDEZVOUS_TIMEOUT", bytes_total=total, age_s=age)
    peer = replace(PEER, node=node, error=request_id)
    status = replace(STATUS, peers=[peer], transfers=[PART, part])
    lines = [printable(line) for line in render(status, width=width)]
    assert all(len(line) <= width for line in lines[7:])
    assert all(line.isprintable() for line in lines)


SELECTIVE = replace(
    PART,
    mode="speculative",
    budget_bytes=3 << 20,
    paths={
        "proactive": 3 << 20,
        "on_demand": 12 << 10,
        "speculative": 300 << 10,
        "metadata": 1 << 20,
        "fetches": 1,
        "windows": 14,
        "budget_tokens": 77,
    },
)
PROFILE = ProfileStatus(
    model="org/model", revision="abc", selector="quest", groups=[(512, 1024), (1024, 2048)], fingerprint="0f" * 32
)
RECORDING = RecordingStatus(model="org/model", revision="", selector="", low=1024, high=2048, prompts=12, steps=190)


def test_a_selective_transfer_shows_its_budget_and_what_went() -> None:
    lines = list(render(replace(STATUS, transfers=[SELECTIVE, PART])))
    at = next(i for i, line in enumerate(lines) if line.startswith("REQUEST"))
    assert lines[at + 2 : at + 4] == [
        "  speculative: budget 3.0 MiB, proactive 3.0 MiB, on-demand 12.0 KiB,",
        "  speculative 300 KiB, metadata 1.0 MiB, 1 fetch, 14 idle windows",
    ]
    assert lines[at + 4].startswith("cmpl-7f3a")
    assert lines[at + 5 :] == []


def test_a_mask_by_head_is_named() -> None:
    part = replace(PART, role="sink", mode="speculative", mask="head", paths={"on_demand": 2048})
    assert "  speculative by head: on-demand 2.0 KiB" in render(replace(STATUS, transfers=[part]))


def test_without_a_fixed_budget_the_source_says_so_and_the_sink_nothing() -> None:
    bare = replace(SELECTIVE, budget_bytes=0, paths={"fetches": 2})
    assert "  speculative: no fixed budget, 2 fetches" in render(replace(STATUS, transfers=[bare]))
    assert "  speculative" in render(replace(STATUS, transfers=[replace(bare, role="sink", paths={})]))
    assert "  speculative: 2 fetches" in render(replace(STATUS, transfers=[replace(bare, role="sink")]))


def test_bytes_by_path_profiles_and_recordings() -> None:
    counters = {"bytes_sent_proactive": 3 << 30, "bytes_sent_on_demand": 1023 << 20, "bytes_sent_metadata": 0}
    lines = list(render(replace(STATUS, counters=counters, profiles=[PROFILE], recordings=[RECORDING])))
    assert "  sent     proactive 3.0 GiB, on-demand 1023 MiB" in lines
    assert lines[-6:] == [
        "",
        "PROFILE           SELECTOR  PROMPT TOKENS  GROUPS  SHA256",
        "org/model at abc  quest     512-2047            2  0f0f0f0f0f0f",
        "",
        "RECORDED   SELECTOR  PROMPT TOKENS  PROMPTS  STEPS",
        "org/model  -         1024-2047           12    190",
    ]


def test_the_widest_of_everything_fits_80_columns() -> None:
    large = dict.fromkeys(("proactive", "on_demand", "speculative", "metadata"), 1023 << 30)
    wide = replace(SELECTIVE, paths=large | {"fetches": 10**9, "windows": 10**9}, budget_bytes=1023 << 30)
    profile = replace(PROFILE, model="m" * 200, selector="s" * 99, groups=[(1 << 23, 1 << 24)])
    recording = replace(RECORDING, model="m" * 200, selector="s" * 99, low=1 << 23, high=1 << 24, steps=10**9)
    status = replace(
        STATUS,
        transfers=[wide, replace(wide, role="sink")],
        counters={f"bytes_sent_{name}": count for name, count in large.items()},
        profiles=[profile],
        recordings=[recording],
    )
    lines = list(render(status))
    assert max(map(len, lines)) <= 80
    assert sum("metadata 1023 GiB" in line for line in lines) == 3


def test_json_has_it_all() -> None:
    status = replace(STATUS, transfers=[SELECTIVE], profiles=[PROFILE], recordings=[RECORDING])
    found = json.loads(to_json(status))
    assert found["transfers"][0]["paths"] == SELECTIVE.paths
    assert found["transfers"][0]["budget_bytes"] == 3 << 20
    assert found["profiles"][0]["groups"] == [[512, 1024], [1024, 2048]]
    assert found["profiles"][0]["fingerprint"] == "0f" * 32
    assert found["recordings"][0]["steps"] == 190


@given(st.lists(st.text("ab", min_size=1, max_size=30), max_size=9), st.integers(32, 60))
def test_filled_lines_keep_every_item(items: list[str], width: int) -> None:
    lines = list(filled(items, width))
    assert [item for line in lines for item in line.rstrip(",").split(", ")] == items
    assert all(len(line) <= width for line in lines)


def test_what_failed_is_shown_by_code() -> None:
    counters = {
        "transfers_ended_source_OK": 9,
        "transfers_ended_source_PEER_LOST": 2,
        "transfers_ended_sink_PEER_LOST": 1,
        "requests_failed_OUT_OF_MEMORY": 12,
        "dials_failed": 3,
        "connections_refused": 0,
    }
    lines = list(render(replace(STATUS, counters=counters)))
    assert "  failed   PEER_LOST 3, requests OUT_OF_MEMORY 12, dials 3" in lines
    assert not [line for line in render(STATUS) if line.startswith("  failed")]


def test_a_peer_that_is_down_says_since_when_and_one_of_two_names_says_so() -> None:
    down = replace(PEER, state="down", error="PEER_LOST: gone", down_s=185.0, trouble="two daemons go by the id b")
    lines = list(render(replace(STATUS, peers=[down])))
    at = next(number for number, line in enumerate(lines) if line.startswith("PEER"))
    assert "down 3m05s" in lines[at + 1]
    assert lines[at + 2 : at + 4] == ["  ! PEER_LOST: gone", "  ! two daemons go by the id b"]


def test_columns_shorten_only_what_may_be_shortened() -> None:
    rows = [("REQUEST", "AGE"), ("a" * 50, "1.0s"), ("b", "10s")]
    assert columns(rows, right=(1,), give=(0,), width=20) == [
        "REQUEST          AGE",
        "aaaaaaaaaaaaa…  1.0s",
        "b                10s",
    ]


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 10, "[....]   0%"),
        (5, 10, "[##..]  50%"),
        (999, 1000, "[###.]  99%"),
        (10, 10, "[####] 100%"),
        (11, 10, "[####] 100%"),
        (0, 0, "[####] 100%"),
    ],
)
def test_bars(done: int, total: int, text: str) -> None:
    assert bar(done, total, 4) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (7620, "2h07m"),
        (442800, "5d03h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class FakeClient:
    asked: ClassVar[list[str]] = []
    answer = STATUS

    def __init__(self, path: str, name: str) -> None:
        self.asked.append(path)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *ending: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def status(self) -> Status:
        return self.answer


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr(status_module, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "asked", [])
    for name in ("KVD_CONFIG", "KVD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    return FakeClient


def test_exit_codes(client: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["status", "--socket", "/s"]).exit_code == 0
    monkeypatch.setattr(client, "answer", replace(STATUS, health="degraded"))
    assert CliRunner().invoke(app, ["status", "--socket", "/s"]).exit_code == 1


def test_json(client: type[FakeClient]) -> None:
    tree = json.loads(CliRunner().invoke(app, ["status", "--socket", "/s", "--json"]).output)
    assert (tree["node"], tree["memory"]["limit"], tree["transfers"][0]["bytes_done"]) == ("a", 4 << 30, 50)
    assert "type" not in tree


def test_which_socket_is_asked(client: type[FakeClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text('[api]\nsocket = "/file.sock"\n')
    CliRunner().invoke(app, ["status", "--config", str(path)])
    monkeypatch.setenv("KVD_CONFIG", str(path))
    CliRunner().invoke(app, ["status"])
    monkeypatch.setenv("KVD_SOCKET", "/environment.sock")
    CliRunner().invoke(app, ["status"])
    CliRunner().invoke(app, ["status", "--socket", "/option.sock"])
    assert client.asked == ["/file.sock", "/file.sock", "/environment.sock", "/option.sock"]


def test_watching_goes_on_while_a_daemon_restarts(client: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 4:
            raise KeyboardInterrupt

    def answer(self: FakeClient) -> Status:
        if len(waited) in (1, 2):
            raise (DaemonLost, DaemonUnreachable)[len(waited) - 1]("no daemon answers at /s")
        return STATUS

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    monkeypatch.setattr(client, "status", answer)
    result = CliRunner().invoke(app, ["status", "--socket", "/s", "--watch", "0.5", "--json"])
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line.get("node", line.get("error")) for line in found] == ["a", "DAEMON_LOST", "DAEMON_UNREACHABLE", "a"]
    assert client.asked == ["/s"], "one connection, so that the daemon's log has two lines and not two a second"
    assert waited == [0.5] * 4


def test_watching_ends_where_no_daemon_ever_answered(client: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: FakeClient) -> Status:
        raise DaemonUnreachable("no daemon answers at /s")

    monkeypatch.setattr(client, "status", unreachable)
    assert CliRunner().invoke(app, ["status", "--socket", "/s", "--watch", "0.5"]).exit_code == 3


def test_a_users_status_finds_the_system_daemon(
    client: type[FakeClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvd.config.SYSTEM_FILE", tmp_path / "kvd.toml")
    monkeypatch.setattr("kvd.cli.status.SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "user"))
    CliRunner().invoke(app, ["status"])
    (tmp_path / "system.sock").touch()
    CliRunner().invoke(app, ["status"])
    (tmp_path / "kvd.toml").write_text("[nonsense]\n")
    CliRunner().invoke(app, ["status"])
    (tmp_path / "user").mkdir()
    (tmp_path / "user/kvd.sock").touch()
    CliRunner().invoke(app, ["status"])
    own, system = str(tmp_path / "user/kvd.sock"), str(tmp_path / "system.sock")
    assert client.asked == [own, system, system, own]


def test_nobody_answers(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status", "--socket", str(tmp_path / "none.sock")])
    assert result.exit_code == 3
    assert result.stderr.startswith(f"kvd: no daemon answers at {tmp_path}/none.sock")
    assert "kvd serve" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("seconds", ["inf", "1e300", "nan", "0"])
def test_watching_so_seldom_or_so_often_is_wrong_usage(seconds: str) -> None:
    result = CliRunner().invoke(app, ["status", "--socket", "/s", "--watch", seconds])
    assert result.exit_code == 2
