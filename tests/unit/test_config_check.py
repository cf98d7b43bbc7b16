from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvd.config import Config, parse, resolve, to_toml
from kvd.config_check import Problem, check
from kvd.host import Host

HOST = Host(
    name="a",
    memory=64 << 30,
    huge_page_bytes=0,
    uid=0,
    groups=frozenset({0, 7}),
    service_dir="",
    runtime_dir="",
    group_id={"kvd": 7, "other": 8}.get,
)


def problems(text: str, host: Host = HOST) -> list[Problem]:
    return check(resolve(parse(text), environ={}, host=host), host, fabrics=("tcp", "loopback"))


def errors(text: str, host: Host = HOST) -> dict[str, str]:
    return {p.key.removeprefix("$."): p.message for p in problems(text, host) if p.level == "error"}


def warnings(text: str, host: Host = HOST) -> dict[str, str]:
    found = problems(text, host)
    assert all(p.level == "warning" for p in found)
    return {p.key.removeprefix("$."): p.message for p in found}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "peer.key"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    path.chmod(0o600)
    return f'key_file = "{path}"\n'


def test_the_defaults_have_no_problem() -> None:
    assert problems("") == []
    assert problems("", dataclasses.replace(HOST, uid=1000)) == []


@pytest.mark.parametrize("name", ["a b", "x" * 65, "ä"])
def test_node_ids(name: str) -> None:
    assert "1 to 64 of the characters" in errors(f'[node]\nid = "{name}"')["node.id"]
    assert "1 to 64 of the characters" in errors(f'[peers.static]\n"{name}" = "localhost:1"')[f"peers.static.{name}"]


class TestSocket:
    def test_relative(self) -> None:
        assert errors('[api]\nsocket = "kvd.sock"')["api.socket"] == "kvd.sock must be an absolute path"

    def test_longer_than_linux_allows(self, tmp_path: Path) -> None:
        assert "Linux allows 107" in errors(f'[api]\nsocket = "{tmp_path}/{"x" * 107}"')["api.socket"]

    def test_without_a_directory(self, tmp_path: Path) -> None:
        found = errors(f'[api]\nsocket = "{tmp_path}/none/kvd.sock"')
        assert found["api.socket"].startswith(f"the directory {tmp_path}/none doesn't exist")

    def test_the_default_directory_need_not_exist(self) -> None:
        host = dataclasses.replace(HOST, uid=1000, runtime_dir="/nonexistent")
        assert errors("", host) == {}


class TestGroup:
    def test_there_is_none(self) -> None:
        assert errors('[api]\ngroup = "nobody-here"')["api.group"].startswith("there is no group nobody-here")

    def test_a_user_can_give_the_socket_only_to_its_own_groups(self) -> None:
        user = dataclasses.replace(HOST, uid=1000)
        assert errors('[api]\ngroup = "kvd"', user) == {}
        assert "isn't a member of other" in errors('[api]\ngroup = "other"', user)["api.group"]
        assert errors('[api]\ngroup = "other"') == {}


class TestPeers:
    def test_beyond_loopback_only_with_a_key(self, key: str) -> None:
        text = '[peers]\nlisten = "10.0.0.1:7440"\n'
        assert "must prove a shared key" in errors(text)["peers.key_file"]
        assert problems(text + key) == []

    def test_a_remote_peer_needs_the_key_too(self) -> None:
        found = errors('[peers]\nadvertise = "10.0.0.1:7440"\n[peers.static]\nb = "10.0.0.2:7440"')
        assert found["peers.key_file"].startswith("peer b is on another host")

    def test_all_networks_are_warned_of(self, key: str) -> None:
        assert "every network" in warnings('[peers]\nlisten = "0.0.0.0:7440"\n' + key)["peers.listen"]

    def test_remote_peers_are_not_told_localhost(self, key: str) -> None:
        static = '[peers.static]\nb = "10.0.0.2:7440"\n'
        found = errors(f'[peers]\nlisten = "10.0.0.1:7440"\nadvertise = "localhost:7440"\n{key}{static}')
        assert "each of them finds itself, and b is on another host" in found["peers.advertise"]
        assert "set peers.advertise" in errors(f"[peers]\n{key}{static}")["peers.listen"]

    def test_local_peers_may_be_told_localhost(self) -> None:
        assert problems('[peers.static]\nb = "127.0.0.1:7441"') == []

    @pytest.mark.parametrize("address", ["0.0.0.0:7440", "10.0.0.1:0"])
    def test_what_cannot_be_dialled_is_neither_advertised_nor_a_peer(self, address: str, key: str) -> None:
        assert "can't be dialled" in errors(f'[peers]\nadvertise = "{address}"')["peers.advertise"]
        found = errors(f'[peers]\nlisten = "10.0.0.1:1"\n{key}[peers.static]\nb = "{address}"')
        assert "can't be dialled" in found["peers.static.b"]

    def test_the_own_node_is_no_peer(self) -> None:
        assert "the node's own id" in errors('[peers.static]\na = "localhost:7440"')["peers.static.a"]

    @pytest.mark.parametrize("where", ["listen", "advertise"])
    def test_addresses_have_a_port(self, where: str) -> None:
        assert "is not host:port" in errors(f'[peers]\n{where} = "10.0.0.1"')[f"peers.{where}"]
        assert "has no port" in errors('[peers.static]\nb = "10.0.0.1:x"')["peers.static.b"]

    def test_the_timeout_is_above_the_heartbeat(self) -> None:
        assert "would count as lost" in errors("[peers]\nheartbeat_s = 5.0")["peers.timeout_s"]
        assert "less than two heartbeats" in warnings("[peers]\nheartbeat_s = 3.0")["peers.timeout_s"]

    def test_the_key_file_is_read(self, tmp_path: Path) -> None:
        assert "can't be read" in errors(f'[peers]\nkey_file = "{tmp_path}/none"')["peers.key_file"]


class TestMemory:
    def test_a_pool_larger_than_memory_names_both_numbers(self) -> None:
        found = errors('[memory]\npool = "80GiB"')
        assert found["memory.pool"].startswith("80GiB is more than the 64.0 GiB that this host")
        assert "set at most 48GiB" in found["memory.pool"]

    def test_a_pool_that_leaves_nothing_is_warned_of(self) -> None:
        assert "under a tenth" in warnings('[memory]\npool = "60GiB"')["memory.pool"]

    def test_a_small_pool_alone_is_one_arena(self) -> None:
        assert errors('[memory]\npool = "64MiB"') == {}
        assert resolve(parse('[memory]\npool = "64MiB"'), environ={}, host=HOST).memory.arena == 64 << 20

    def test_arenas(self) -> None:
        assert "more than memory.pool" in errors('[memory]\npool = "8MiB"\narena = "16MiB"')["memory.arena"]
        assert "less than 1MiB" in errors('[memory]\narena = "1B"')["memory.arena"]

    def test_a_limit_above_the_pool_is_warned_of(self) -> None:
        assert "limits nobody" in warnings('[memory]\nclient_limit = "5GiB"')["memory.client_limit"]

    def test_huge_pages_that_must_be_there(self) -> None:
        text = '[memory]\nhuge_pages = "always"'
        assert '"always" needs 4GiB of huge pages' in errors(text)["memory.huge_pages"]
        assert problems(text, dataclasses.replace(HOST, huge_page_bytes=4 << 30)) == []


def test_pieces_fit_the_window() -> None:
    assert "more than transfer.window" in errors('[transfer]\nchunk = "16MiB"')["transfer.chunk"]
    assert "less than 4KiB" in errors('[transfer]\nchunk = "1B"')["transfer.chunk"]


def test_waiting_longer_than_the_deadline_is_warned_of() -> None:
    assert "ends the wait first" in warnings("[transfer]\nrendezvous_s = 400")["transfer.rendezvous_s"]


def test_fabrics() -> None:
    assert problems('[fabric]\nname = "auto"') == []
    assert errors('[fabric]\nname = "tcq"')["fabric.name"] == 'there is no fabric "tcq"; known are auto, loopback, tcp'


@pytest.mark.parametrize("level", ["authentic", "secret"])
def test_protection_needs_a_key_and_the_tcp_fabric(key: str, level: str) -> None:
    asked = f'[security]\nlevel = "{level}"\n'
    assert "needs a shared key" in errors(asked)["security.level"]
    keyed = f"[peers]\n{key}"
    assert problems(asked + keyed) == []
    for name in ("auto", "verbs"):
        assert "what the tcp fabric can do" in errors(f'{asked}{keyed}[fabric]\nname = "{name}"')["security.level"]


def test_no_checksums_is_warned_of() -> None:
    assert "not noticed" in warnings("[security]\nchecksums = false")["security.checksums"]


def test_errors_come_first() -> None:
    levels = [p.level for p in problems('[memory]\nclient_limit = "5GiB"\narena = "1B"')]
    assert levels == ["error", "warning"]


def test_the_example_has_no_problem() -> None:
    example = Path(__file__).parents[2] / "systemd/kvd.toml"
    service = dataclasses.replace(HOST, uid=990, groups=frozenset({7}), service_dir="/run/kvd")
    assert problems(example.read_text(), service) == []


def test_the_example_names_every_key_with_its_default() -> None:
    example = (Path(__file__).parents[2] / "systemd/kvd.toml").read_text()
    shown = dict(re.findall(r"^#?(\w+) = (.*)$", example, re.MULTILINE))
    effective = dict(re.findall(r"^(\w+) = (.*)$", to_toml(resolve(Config(), environ={}, host=HOST)), re.MULTILINE))
    explained = {"id", "socket", "group", "key_file"}
    assert shown.keys() - {"decode"} >= effective.keys()
    assert {k: v for k, v in shown.items() if k in effective.keys() - explained} == {
        k: v for k, v in effective.items() if k not in explained
    }


class TestProfile:
    @pytest.mark.parametrize("text", ["64", "many requests", "-1 tokens"])
    def test_a_half_life_has_a_unit(self, text: str) -> None:
        assert '"64 requests" or "100000 tokens"' in errors(f'[profile]\nhalf_life = "{text}"')["profile.half_life"]

    def test_the_state_folder_is_one(self, tmp_path: Path) -> None:
        assert "absolute" in errors('[profile]\nstate = "here"')["profile.state"]
        (tmp_path / "file").touch()
        assert "is no folder" in errors(f'[profile]\nstate = "{tmp_path}/file"')["profile.state"]
        assert errors(f'[profile]\nstate = "{tmp_path}/to-be-made"') == {}
        assert errors(f'[profile]\nlearn = false\nstate = "{tmp_path}/file"') == {}

    def test_folders_that_nothing_can_be_kept_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for key, text in (("profile", "state"), ("selective", "profiles")):
            assert warnings(f'[{key}]\n{text} = "{tmp_path}/to-be-made/inner"') == {}
            (tmp_path / "file").touch()
            found = warnings(f'[{key}]\n{text} = "{tmp_path}/file/inner"')
            assert "file is no folder, so nothing is kept" in found[f"{key}.{text}"]
        monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
        found = warnings(f'[profile]\nstate = "{tmp_path}/inner"')
        assert f"may not write to {tmp_path}, so nothing is kept" in found["profile.state"]
