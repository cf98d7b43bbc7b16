from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvd
from kvd.cli.main import app, exit_code
from kvd.config import Config, parse
from kvd.errors import AddressInUse, ConfigError, DaemonUnreachable, InvalidArgument, KvdError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's configuration; the default socket lies in a directory of the test."""
    monkeypatch.setattr("kvd.config.SYSTEM_FILE", tmp_path / "none.toml")
    monkeypatch.setattr("kvd.host.SYSTEM_SOCKET", str(tmp_path / "run/kvd.sock"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("KVD_CONFIG", "KVD_SOCKET", "NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def invoke(environ: None) -> Callable[..., Any]:
    return lambda *args: CliRunner().invoke(app, list(args), prog_name="kvd")


def kvd_process(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvd", *args], capture_output=True, text=True, timeout=60, **kwargs)


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "kvd.toml"
        path.write_text(text)
        return str(path)

    return write


def test_help_lists_the_commands_and_loads_none_of_them() -> None:
    code = (
        "import sys\n"
        "from kvd.__main__ import main\n"
        "try:\n    sys.argv = ['kvd', '--help']; main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'uvloop', 'structlog', 'rich', 'kvd.daemon'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "loaded: []" in done.stdout
    for command in ("serve", "status", "config", "demo", "version"):
        assert f"\n  {command} " in done.stdout


def test_version(invoke) -> None:
    assert invoke("version").output == f"kvd {kvd.__version__}\n"


@pytest.mark.parametrize(
    "args",
    [("frobnicate",), ("serve", "--no-such"), ("status", "--watch", "0"), ("status", "extra"), ("config", "chek"), ()],
)
def test_wrong_usage_is_2(invoke, args: tuple[str, ...]) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Usage: kvd" in result.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ConfigError("an address that may come", passing=True), 1),
        (InvalidArgument("x"), 2),
        (DaemonUnreachable("x"), 3),
        (AddressInUse("x"), 1),
        (KvdError("x"), 1),
    ],
)
def test_exit_codes(error: KvdError, code: int) -> None:
    assert exit_code(error) == code


class TestConfigCheck:
    def test_the_defaults_are_usable(self, invoke) -> None:
        result = invoke("config", "check")
        assert (result.exit_code, result.output) == (0, "the defaults: usable\n")

    def test_a_wrong_type_is_one_sentence(self, invoke, toml) -> None:
        path = toml('[peers]\nheartbeat_s = "1"\n')
        result = invoke("config", "check", "--config", path)
        assert result.exit_code == 2
        assert result.stderr == f"kvd: {path}: $.peers.heartbeat_s: expected float, got str\n"

    def test_each_problem_has_a_line(self, invoke, toml) -> None:
        path = toml('[peers]\nlisten = "0.0.0.0:7440"\nheartbeat_s = 9\n')
        result = invoke("config", "check", "--config", path)
        first, second, third, last = result.stderr.splitlines()
        assert result.exit_code == 2
        assert first.startswith(f"kvd: warning: {path}: $.peers.listen: ")
        assert second.startswith(f"kvd: {path}: $.peers.key_file: ")
        assert third.startswith(f"kvd: {path}: $.peers.timeout_s: ")
        assert last == f"kvd: {path} has 2 errors; see above"

    def test_warnings_alone_are_usable(self, invoke, toml) -> None:
        path = toml("[transfer]\nrendezvous_s = 400\n")
        result = invoke("config", "check", "--config", path)
        assert (result.exit_code, result.stdout) == (0, f"{path}: usable, with 1 warning\n")
        assert result.stderr.startswith(f"kvd: warning: {path}: $.transfer.rendezvous_s: ")

    def test_the_environment_names_the_file(self, invoke, toml, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVD_CONFIG", toml("[nod]\n"))
        result = invoke("config", "check")
        assert result.exit_code == 2
        assert "$.nod: no such key; did you mean node?" in result.stderr

    def test_an_unknown_fabric_is_named(self, invoke, toml) -> None:
        result = invoke("config", "check", "--config", toml('[fabric]\nname = "tcq"\n'))
        assert 'there is no fabric "tcq"; known are auto, loopback, tcp' in result.stderr

    def test_a_problem_is_told_once(self, invoke, toml) -> None:
        path = toml('[peers]\nlisten = "127.0.0.1"\n')
        result = invoke("config", "check", "--config", path)
        assert result.stderr.count("is not host:port") == len(result.stderr.splitlines()) == 1

    def test_what_would_steer_a_terminal_is_not_repeated(self, invoke, toml) -> None:
        path = toml('[node]\nid = "\\u001b[31m\\u0000%s"\n' % ("x" * 5000))
        result = invoke("config", "check", "--config", path)
        assert "\x1b" not in result.stderr
        assert "\x00" not in result.stderr
        assert len(result.stderr) < 500

    def test_a_file_without_an_end_is_no_configuration(self, invoke) -> None:
        result = invoke("config", "check", "--config", "/dev/zero")
        assert result.exit_code == 2
        assert result.stderr == "kvd: /dev/zero: has more than 1048576 bytes; that is no configuration\n"

    def test_as_a_process(self, toml, tmp_path: Path) -> None:
        done = kvd_process("config", "check", "--config", str(tmp_path / "none.toml"))
        assert done.returncode == 2
        assert done.stderr == f"kvd: {tmp_path}/none.toml: can't be read: no such file or directory\n"
        assert done.stdout == ""


class TestConfigShow:
    def test_what_is_in_effect_can_be_read_back(self, invoke, toml) -> None:
        shown = invoke("config", "show", "--config", toml('[node]\nid = "a"\n[fabric]\nrate = "10gbit"\n'))
        assert shown.exit_code == 0
        config = parse(shown.output)
        assert (config.node.id, config.fabric.rate) == ("a", 1_250_000_000)
        assert config.api.socket.endswith("kvd.sock")

    def test_json(self, invoke) -> None:
        tree = json.loads(invoke("config", "show", "--json").output)
        assert tree["peers"]["listen"] == "127.0.0.1:7440"

    def test_keys_are_never_shown(self, invoke, toml, tmp_path: Path) -> None:
        (tmp_path / "peer.key").write_text("correct-horse-battery-staple\n")
        path = toml('[peers]\nkey_file = "peer.key"\n')
        for args in (("show",), ("show", "--json"), ("check",)):
            result = invoke("config", *args, "--config", path)
            assert "correct-horse" not in result.output + result.stderr
        assert str(tmp_path / "peer.key") in invoke("config", "show", "--config", path).output


class TestServe:
    @pytest.fixture
    def served(self, environ: None, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
        """What the daemon was asked to run with; it ends at once."""
        configs: list[Config] = []
        module = types.ModuleType("kvd.run")

        def run(config: Config, *, notifier: Any) -> int:
            configs.append(config)
            return 0

        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvd.run", module)
        monkeypatch.setattr("kvd.log.configure", lambda *args: None)
        monkeypatch.setattr("faulthandler.enable", lambda: None)
        return configs

    def test_without_a_file(self, invoke, served: list[Config], tmp_path: Path) -> None:
        assert invoke("serve").exit_code == 0
        assert os.path.isdir(os.path.dirname(served[0].api.socket))
        assert served[0].api.socket.startswith(str(tmp_path / "run"))

    def test_options_win_over_the_file_and_the_environment(
        self, invoke, served: list[Config], toml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVD_SOCKET", "/environment.sock")
        path = toml('[node]\nid = "file"\n[api]\nsocket = "/file.sock"\n')
        options = ("--node", "option", "--socket", str(tmp_path / "o.sock"), "--listen", "127.0.0.1:0")
        assert invoke("serve", "--config", path, *options).exit_code == 0
        (config,) = served
        assert (config.node.id, config.api.socket) == ("option", str(tmp_path / "o.sock"))
        assert config.peers.listen == "127.0.0.1:0"

    def test_a_bad_configuration_does_not_start_it(self, invoke, served: list[Config], toml) -> None:
        result = invoke("serve", "--config", toml('[peers]\nlisten = "10.0.0.1:1"\n'))
        assert result.exit_code == 2
        assert "must prove a shared key" in result.stderr
        assert served == []

    def test_what_it_raises_is_a_sentence(self, invoke, served, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(config: Config, *, notifier: Any) -> int:
            raise AddressInUse("127.0.0.1:7440 is taken; stop what listens there, or set peers.listen")

        monkeypatch.setattr(sys.modules["kvd.run"], "run", run)
        result = invoke("serve")
        assert result.exit_code == 1
        assert result.stderr == "kvd: 127.0.0.1:7440 is taken; stop what listens there, or set peers.listen\n"

    def test_a_limit_on_files_that_no_daemon_can_live_with(
        self, invoke, served: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda which: (10, 1024))
        done = invoke("serve", "--socket", str(tmp_path / "s"))
        assert (done.exit_code, served) == (2, [])
        assert "may open 10 files" in done.stderr
        assert "LimitNOFILE=" in done.stderr

    def test_somebody_elses_directory_is_not_used(
        self, invoke, served: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
        if os.geteuid() != 0:
            (tmp_path / "run").unlink()
            (tmp_path / "run").mkdir()
            (tmp_path / "run/kvd").symlink_to(tmp_path / "elsewhere")
        result = invoke("serve")
        assert result.exit_code == 2
        assert "belongs to somebody else; choose --socket" in result.stderr
        assert served == []


class TestDemo:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
        import typer

        found: list[tuple[int, str]] = []
        module = types.ModuleType("kvd.cli.demo")
        module.app = typer.Typer(add_completion=False, rich_markup_mode=None)  # type: ignore[attr-defined]

        @module.app.command()
        def demo(tokens: int = 10, link: str = "") -> None:
            """A stand-in."""
            found.append((tokens, link))
            if link == "broken":
                raise KvdError("the link is broken; mend it")
            raise typer.Exit(7 if link == "odd" else 0)

        monkeypatch.setitem(sys.modules, "kvd.cli.demo", module)
        return found

    def test_its_options_are_its_own(self, invoke, calls: list[tuple[int, str]]) -> None:
        assert invoke("demo", "--tokens", "3", "--link", "200mbit").exit_code == 0
        assert calls == [(3, "200mbit")]
        shown = invoke("demo", "--help")
        assert shown.exit_code == 0
        assert "Usage: kvd demo" in shown.output
        assert "--tokens" in shown.output

    def test_how_it_ends(self, invoke, calls: list[tuple[int, str]]) -> None:
        assert invoke("demo", "--link", "odd").exit_code == 7
        broken = invoke("demo", "--link", "broken")
        assert (broken.exit_code, broken.stderr) == (1, "kvd: the link is broken; mend it\n")
        assert invoke("demo", "--tokens", "x").exit_code == 2
        assert invoke("demo", "--none").exit_code == 2
