from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvd.addresses import is_loopback, is_wildcard, split_address
from kvd.config import (
    SYSTEM_FILE,
    Config,
    Memory,
    find,
    load,
    parse,
    resolve,
    to_builtins,
    to_toml,
)
from kvd.errors import ConfigError
from kvd.host import Host
from kvd.keys import read_keys

HOST = Host(
    name="node-a",
    memory=64 << 30,
    huge_page_bytes=0,
    uid=0,
    groups=frozenset({0}),
    service_dir="",
    runtime_dir="",
    group_id=lambda name: None,
)


def resolved(text: str = "", host: Host = HOST, **environ: str) -> Config:
    return resolve(parse(text), environ=environ, host=host)


def test_an_empty_file_is_a_configuration() -> None:
    config = resolved()
    assert parse("") == Config()
    assert config.node.id == "node-a"
    assert config.api.socket == "/run/kvd/kvd.sock"
    assert config.memory.pool == 4 << 30
    assert config.peers.listen == "127.0.0.1:7440"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[peers]\nheartbeat_s = "1"', "kvd.toml: $.peers.heartbeat_s: expected float, got str"),
        ("[peers]\nheartbeet_s = 1", "kvd.toml: $.peers.heartbeet_s: no such key; did you mean heartbeat_s?"),
        ("[peer]", "kvd.toml: $.peer: no such key; did you mean peers?"),
        ("[log]\nxyzzy = 1", "kvd.toml: $.log.xyzzy: no such key; known here: format, level"),
        ("[node]\nid = 3", "kvd.toml: $.node.id: expected str, got int"),
        ("node = 3", "kvd.toml: $.node: expected table, got int"),
        ("[peers.static]\nb = 7440", "kvd.toml: $.peers.static.b: expected str, got 7440"),
        (
            "[peers.static]\nb.c = 'x:1'",
            'kvd.toml: $.peers.static.b: expected str, got a table; a name with a dot needs quotes, such as "b.c"',
        ),
        (
            "[peers.static]\nkv.n1 = 'x:1'\nkv.n2 = 'x:2'",
            'kvd.toml: $.peers.static.kv: expected str, got a table; a name with a dot needs quotes, such as "kv.n1"',
        ),
        (
            "[npu.card-0.a]\nchannels = 3",
            "kvd.toml: $.npu.card-0.a: no such key; known here: backing, channels, channel_bytes, alignment, path, "
            'origin, noc; a name with a dot needs quotes, such as "card-0.a"',
        ),
        ("[peers]\ntimeout_s = nan", "kvd.toml: $.peers.timeout_s: expected float > 0.0"),
        ("[peers]\ntimeout_s = inf", "kvd.toml: $.peers.timeout_s: expected float <= 86400.0"),
        ("[peers]\ntimeout_s = true", "kvd.toml: $.peers.timeout_s: expected float, got bool"),
        ("[api]\nmax_clients = 0", "kvd.toml: $.api.max_clients: expected int >= 1"),
        (
            '[log]\nlevel = "trace"',
            'kvd.toml: $.log.level: "trace" is none of "debug", "info", "warning", "error"',
        ),
        ("[memory]\npool = true", 'kvd.toml: $.memory.pool: expected a size, such as "4GiB", got bool'),
        ("[memory]\npool = -1", "kvd.toml: $.memory.pool: -1 is not a size in bytes"),
        ("[fabric]\nrate = 10", 'kvd.toml: $.fabric.rate: expected a rate, such as "200mbit", got int'),
    ],
)
def test_a_wrong_key_is_named_with_its_path(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.message == sentence
    assert caught.value.fields["key"] in sentence


def test_what_is_no_size_or_rate_says_so() -> None:
    with pytest.raises(ConfigError, match=r'\$\.memory\.pool: "4G" is not a size'):
        parse('[memory]\npool = "4G"')
    with pytest.raises(ConfigError, match=r'\$\.fabric\.rate: "10bps" is not a rate'):
        parse('[fabric]\nrate = "10bps"')


def test_what_is_no_toml_says_where() -> None:
    with pytest.raises(ConfigError, match=r"^CONFIG: a\.toml: not TOML: .*line 2"):
        parse("[peers]\nlisten = \n", name="a.toml")
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse("a = " + "[" * 3000)
    with pytest.raises(ConfigError, match="thousands of digits"):
        parse("a = " + "9" * 5000)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: can't be read: no such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe4\n")
    with pytest.raises(ConfigError, match=r"latin\.toml: byte 2 is not UTF-8"):
        load(tmp_path / "latin.toml")


def test_sizes_may_be_numbers_and_nothing_means_no_limit() -> None:
    config = parse('[memory]\npool = 1048576\nclient_limit = ""\n[fabric]\nrate = "200mbit"')
    assert (config.memory.pool, config.memory.client_limit, config.fabric.rate) == (1 << 20, 0, 25_000_000)


def test_which_file_is_read(tmp_path: Path) -> None:
    assert find({"KVD_CONFIG": "/x/y.toml"}) == Path("/x/y.toml")
    assert find({}) == (SYSTEM_FILE if SYSTEM_FILE.exists() else None)


def test_the_socket_of_root_of_a_user_and_from_the_environment() -> None:
    user = dataclasses.replace(HOST, uid=1000)
    session = dataclasses.replace(user, runtime_dir="/run/user/1000")
    assert resolved().api.socket == "/run/kvd/kvd.sock"
    assert resolved(host=session).api.socket == "/run/user/1000/kvd/kvd.sock"
    assert resolved(host=user).api.socket == "/tmp/kvd-1000/kvd.sock"
    service = dataclasses.replace(user, service_dir="/run/kvd")
    assert resolved(host=service).api.socket == "/run/kvd/kvd.sock"
    assert resolved('[api]\nsocket = "/a"', host=user).api.socket == "/a"
    assert resolved('[api]\nsocket = "/a"', KVD_SOCKET="/b").api.socket == "/b"


def test_the_default_pool_leaves_a_small_host_half_of_its_memory() -> None:
    assert resolved(host=dataclasses.replace(HOST, memory=3 << 30)).memory.pool == 3 << 29
    explicit = resolved('[memory]\npool = "4GiB"', host=dataclasses.replace(HOST, memory=3 << 30))
    assert explicit.memory.pool == 4 << 30


def test_a_relative_key_file_is_a_credential_or_lies_beside_the_configuration(tmp_path: Path) -> None:
    config = parse('[peers]\nkey_file = "peer.key"')
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    environ = {"CREDENTIALS_DIRECTORY": str(credentials)}
    beside = resolve(config, path=tmp_path / "kvd.toml", environ=environ, host=HOST)
    assert beside.peers.key_file == str(tmp_path / "peer.key")
    (credentials / "peer.key").touch()
    passed = resolve(config, path=tmp_path / "kvd.toml", environ=environ, host=HOST)
    assert passed.peers.key_file == str(credentials / "peer.key")


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(text, st.dictionaries(text, text, max_size=3), st.integers(0, (1 << 62) - 1), st.floats(0.001, 86400))
def test_what_is_shown_is_read_back_to_the_same(name: str, static: dict[str, str], pool: int, seconds: float) -> None:
    config = resolved()
    config = replace(
        config,
        node=replace(config.node, id=name),
        peers=replace(config.peers, static=static, timeout_s=seconds),
        memory=replace(config.memory, pool=Memory(pool=type(config.memory.pool)(pool)).pool),
    )
    assert parse(to_toml(config)) == config


def test_plain_tables_hold_sizes_as_text() -> None:
    tree = to_builtins(resolved('[fabric]\nrate = "200mbit"'))
    assert tree["memory"]["pool"] == "4GiB"
    assert tree["memory"]["client_limit"] == ""
    assert tree["fabric"]["rate"] == "200mbit"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:7440", ("127.0.0.1", 7440)),
        ("[::1]:0", ("::1", 0)),
        ("kvd-b.example:65535", ("kvd-b.example", 65535)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", "host", ":7440", "::1:7440", "[]:1", "a:", "a:-1", "a:65536", "a b:1", "a:²", "http://a:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|has no port"):
        split_address(text)


def test_loopback_and_wildcard() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "::", "example.org"]))
    assert all(map(is_wildcard, ["0.0.0.0", "::"]))
    assert not any(map(is_wildcard, ["127.0.0.1", "localhost"]))


class TestKeys:
    def write(self, directory: Path, content: bytes, mode: int = 0o600) -> Path:
        path = directory / "peer.key"
        path.write_bytes(content)
        os.chmod(path, mode)
        return path

    def test_each_line_is_a_key_and_the_first_one_proves(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, b"# rotated\nnew-key-new-key-new\n\n  old-key-old-key-old \r\n")
        assert read_keys(path) == [b"new-key-new-key-new", b"old-key-old-key-old"]

    @pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
    def test_a_file_open_to_all_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = self.write(tmp_path, b"0123456789abcdef\n", mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}, open to every user; chmod o-rw"):
            read_keys(path)

    def test_a_group_may_read_it(self, tmp_path: Path) -> None:
        assert read_keys(self.write(tmp_path, b"0123456789abcdef\n", 0o640)) == [b"0123456789abcdef"]

    def test_a_short_key_is_refused_without_being_shown(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, b"0123456789abcdef\nhunter2\n")
        with pytest.raises(ConfigError, match=r"line 2 of the key file .* has 7 bytes; 16 are the least") as caught:
            read_keys(path)
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"\n# nothing\n"])
    def test_an_empty_file_says_how_to_make_a_key(self, tmp_path: Path, content: bytes) -> None:
        with pytest.raises(ConfigError, match="holds no key; make one with"):
            read_keys(self.write(tmp_path, content))

    def test_a_missing_or_endless_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="can't be read: no such file"):
            read_keys(tmp_path / "none")
        with pytest.raises(ConfigError, match="longer than 65536 bytes"):
            read_keys(self.write(tmp_path, b"x" * 70000))


def test_the_example_file_shows_every_option_with_its_default() -> None:
    example = (Path(__file__).parents[2] / "systemd/kvd.toml").read_text()
    shown = tomllib.loads(re.sub(r"^#(\[|[a-z0-9_-]+ = )", r"\1", example, flags=re.MULTILINE))
    parse(example)
    defaults = to_builtins(resolved("[npu.bh]"))
    for section, option in (("node", "id"), ("api", "group"), ("peers", "key_file"), ("peers", "static")):
        del shown[section][option], defaults[section][option]  # examples: their defaults are the host's name, or none
    assert shown == defaults


def test_the_facts_of_this_host() -> None:
    host = Host.read({"XDG_RUNTIME_DIR": "/run/user/7"})
    assert host.uid == os.geteuid()
    assert host.memory > 1 << 20
    assert host.runtime_dir == "/run/user/7"
    assert host.group_id("no-such-group-here") is None


def test_what_is_learnt_goes_into_the_state_directory() -> None:
    assert resolved("").profile.state == ""
    environ = {"STATE_DIRECTORY": "/var/lib/kvd:/var/lib/other"}
    assert resolved("", **environ).profile.state == "/var/lib/kvd"
    assert resolved('[profile]\nstate = "/srv/kvd"', **environ).profile.state == "/srv/kvd"
