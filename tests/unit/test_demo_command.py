"""``kvd demo`` as a command: its usage and its exit codes, without running the demo."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.demo import compare as demo_compare
from kvd.demo import run as demo_run
from kvd.demo.errors import DemoFailed
from kvd.demo.report import Report
from kvd.units import parse_rate

FIGURES: dict[str, Any] = {
    "model": "tiny",
    "prompt_tokens": 100,
    "tokens": [5, 6],
    "reference_tokens": [5, 6],
    "text": "one two",
    "kv_bytes": 1000,
    "bytes_moved": 1100,
    "link_configured": None,
    "link_achieved": 1e6,
    "ttft_s": 2.0,
    "ttst_s": 2.5,
    "waited_s": 0.2,
    "tbt_s": None,
    "layers_before_first": 3,
    "layers": 4,
    "peak_memory": {"prefill": 1},
}


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the demo does instead of running: ``result`` is its report, or what it raises; ``options`` is seen."""
    told: dict[str, Any] = {"result": Report(**FIGURES)}

    def run(options: demo_run.Options, display: object) -> Report:
        told["options"] = options
        if isinstance(told["result"], BaseException):
            raise told["result"]
        return told["result"]  # type: ignore[no-any-return]

    monkeypatch.setattr(demo_run, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return told


def test_equal_tokens_are_success(outcome: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["demo", "--link", "1gbit", "--tokens", "7", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["tokens_equal"] is True
    assert outcome["options"] == demo_run.Options(
        link=parse_rate("1gbit"), new_tokens=7, prompt_file=None, prompt_tokens=None, model=None
    )


def test_a_layout_is_checked_before_anything_starts(outcome: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["demo", "--layout", "tenstorrent"])
    assert result.exit_code == 0
    assert outcome["options"].layout == "tenstorrent"
    for name, says in (("tiles", "no layout 'tiles'"), ("nhd", "one channel")):
        result = CliRunner().invoke(app, ["demo", "--layout", name])
        assert result.exit_code != 0
        assert says in result.stderr
    result = CliRunner().invoke(app, ["demo", "--compare", "--layout", "tenstorrent"])
    assert result.exit_code != 0
    assert "plain demo" in result.stderr


def test_different_tokens_are_failure(outcome: dict[str, Any]) -> None:
    outcome["result"] = Report(**FIGURES | {"tokens": [5, 7]})
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "NO, from token 1" in result.stdout
    assert outcome["options"].link == parse_rate("200mbit")


def test_a_failure_is_one_sentence(outcome: dict[str, Any]) -> None:
    outcome["result"] = DemoFailed("the model is gone; fetch it again")
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr == "kvd: the model is gone; fetch it again\n"
    assert result.stdout == ""


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_a_signal_is_an_exit_code(outcome: dict[str, Any], number: int, code: int) -> None:
    outcome["result"] = demo_run.Interrupted(number)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == code
    assert result.stderr.count("\n") == 1


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As ``outcome``, of the demo with selective transfer."""
    told: dict[str, Any] = {}

    def run(options: demo_compare.Options, display: object) -> None:
        told["options"] = options
        raise DemoFailed("that is all")

    monkeypatch.setattr(demo_compare, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return told


def test_compare_runs_every_mode_on_the_automatic_link(compared: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["demo", "--compare"])
    assert result.stderr == "kvd: that is all\n"
    assert compared["options"] == demo_compare.Options(
        modes=("full", "partial", "profile", "parallel", "speculative"),
        budgets=("fixed", "deadline"),
        speculative=("adaptive",),
        shares=(0.1,),
        selector="quest",
        prefix_share=0.95,
        link=None,
        new_tokens=96,
    )


def test_options_of_selective_transfer(compared: dict[str, Any]) -> None:
    arguments = ["--mode", "full, parallel,full", "--budget", "fixed", "--speculative", "adaptive,windows"]
    arguments += ["--select", "0.05,1", "--selector", "hata", "--no-prefix", "--link", "1gbit", "--repeat", "3"]
    CliRunner().invoke(app, ["demo", *arguments])
    options = compared["options"]
    assert options.modes == ("full", "parallel")
    assert options.budgets == ("fixed",)
    assert options.speculative == ("adaptive", "windows")
    assert options.shares == (0.05, 1.0)
    assert (options.selector, options.prefix_share, options.link) == ("hata", 0.0, parse_rate("1gbit"))
    assert options.repeat == 3
    CliRunner().invoke(app, ["demo", "--mode", "partial", "--prefix-share", "0.5", "--link", "auto"])
    options = compared["options"]
    assert (options.budgets, options.prefix_share, options.link) == (("deadline",), 0.5, None)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--mode", "fast"], "--mode"),
        (["--mode", ""], "--mode"),
        (["--compare", "--select", "0"], "--select"),
        (["--compare", "--select", "10%"], "--select"),
        (["--compare", "--budget", "fixed,none"], "--budget"),
        (["--compare", "--speculative", "yes"], "--speculative"),
        (["--compare", "--selector", "nonsense"], "there is no selector"),
        (["--compare", "--selector", "exact"], "needs every key"),
        (["--compare", "--plot", "/nowhere/picture.png"], "/nowhere is no folder"),
        (["--select", "0.1"], "--select is for selective transfer"),
        (["--no-prefix"], "--prefix is for selective transfer"),
        (["--compare", "--no-prefix", "--prefix-share", "0.5"], "contradict each other"),
        (["--link", "auto"], "--link auto is for selective transfer"),
    ],
)
def test_wrong_usage_of_selective_transfer(compared: dict[str, Any], arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert word in result.stderr
    assert "options" not in compared


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--link", "fast"], "is not a rate"),
        (["--link", "0mbit"], "unlimited"),
        (["--tokens", "0"], "--tokens"),
        (["--prompt-tokens", "10"], "--prompt-tokens"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage(outcome: dict[str, Any], arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert word in result.stderr
    assert "options" not in outcome


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert result.stderr == ("kvd: the demo needs torch, which this Python lacks: pip install 'kvd-transport[demo]'\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvd.cli.main import app\n"
        "try: app(['demo', '--help'])\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy', 'asyncio'} & sys.modules.keys()), file=sys.stderr)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.returncode == 0
    assert "--prompt-file" in made.stdout
    assert made.stderr == "[]\n"
