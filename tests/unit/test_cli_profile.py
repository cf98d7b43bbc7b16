"""``kvd profile``: what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.cli.output import number, seconds
from kvd.profiling.files import fingerprint, write
from kvd.profiling.profile import ProfileGroup
from kvd.profiling.timing import Times
from tests.profiles import matrix, profile

Invoke = Callable[..., Any]


@pytest.fixture
def invoke() -> Invoke:
    return lambda *args: CliRunner().invoke(app, ["profile", *map(str, args)], prog_name="kvd")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.kvprofile"
    write(profile(), path)
    return path


def test_show_says_what_the_profile_holds(invoke: Invoke, file: Path) -> None:
    done = invoke("show", file)
    assert done.exit_code == 0, done.output
    for text in (
        "org/model at abc",
        "quest (page 16, share 0.1)",
        "200mbit",
        "512-1023",
        "MISS 1/2",
        fingerprint(profile()),
    ):
        assert text in done.stdout
    assert "1024-2047 tokens" not in done.stdout
    assert "\x1b" not in done.stdout
    assert "2025-03-04 05:06:07" in done.stdout
    assert "| texts of five domains" in done.stdout


def test_show_fits_80_columns_with_the_largest_numbers(invoke: Invoke, tmp_path: Path) -> None:
    groups = tuple(ProfileGroup(1 << at, 2 << at, matrix(at), 99_999, 9_999_999) for at in range(25))
    lengths = tuple(range(100_000, 16_000_000, 100_000))
    path = tmp_path / "large"
    write(
        profile(
            groups=groups,
            prefill=Times(lengths, tuple(float(at) for at in range(len(lengths)))),
            transfer=Times(lengths, tuple(float(9 * at) for at in range(len(lengths)))),
        ),
        path,
    )
    lines = invoke("show", path).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60
    assert "16777216-33554431" in "\n".join(lines)
    assert "…" not in "\n".join(lines)


def test_show_gives_json(invoke: Invoke, file: Path) -> None:
    found = json.loads(invoke("show", file, "--json").stdout)
    assert (found["model"], found["blocks"], found["selector"]) == ("org/model", 10, "quest")
    assert [group["low"] for group in found["groups"]] == [512, 1024]
    assert found["sha256"] == fingerprint(profile())
    assert len(found["times"]) == 3


def test_names_from_the_file_do_not_steer_the_terminal(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "evil"
    write(profile(model="\x1b[2J[red]m[/red]", notes="one\x07\n[/bold]two", parameters={"a\r": "\x1b"}), path)
    done = invoke("show", path)
    assert done.exit_code == 0, done.output
    assert not {"\x1b", "\x07", "\r"} & set(done.stdout)
    assert "?[2J[red]m[/red]" in done.stdout
    assert "[/bold]two" in done.stdout


def test_check_passes_a_whole_file_and_warns(invoke: Invoke, file: Path) -> None:
    done = invoke("check", file)
    assert done.exit_code == 0
    assert done.stdout.strip() == f"{file}: usable, with 1 warning"
    assert "1024 to 2047 tokens has 4 prompts" in done.stderr


@pytest.mark.parametrize("command", ["show", "check", "plot"])
def test_a_damaged_file_fails_in_one_sentence(invoke: Invoke, file: Path, command: str) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    done = invoke(command, file, *(("-o", file.parent / "x.png") if command == "plot" else ()))
    assert done.exit_code == 1
    assert done.stderr.startswith(f"kvd: {file} can't be used as a profile")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("args", [("show", "/none"), ("compare", "/none", "/none"), ("show",), ("plot", "/none")])
def test_wrong_usage_ends_with_2(invoke: Invoke, args: tuple[str, ...]) -> None:
    assert invoke(*args).exit_code == 2


def test_compare_shows_groups_and_layers(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.kvprofile"
    write(profile(selector="hata", parameters={}), other)
    done = invoke("compare", file, other)
    assert done.exit_code == 0, done.output
    assert "Pearson 1.000, Spearman 1.000, top half shared 1.000" in done.stdout
    assert "! selector: quest and hata" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["2", "3"]
    found = json.loads(invoke("compare", file, other, "--json").stdout)
    assert found["pearson"] == pytest.approx(1)
    assert found["differences"]["parameters"] == [{"page": 16, "share": 0.1}, {}]
    assert [layer["layer"] for layer in found["groups"][1]["layers"]] == [2, 3]


def test_compare_refuses_another_number_of_layers(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.kvprofile"
    write(profile(layers=5, groups=(ProfileGroup(1, 2, matrix(layers=5)),)), other)
    done = invoke("compare", file, other)
    assert done.exit_code == 1
    assert "4 and 5 layers" in done.stderr


def test_plot_writes_a_picture(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    done = invoke("plot", file, "-o", out)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == f"{out}: written"
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_pipe_of_any_encoding_takes_the_tables(file: Path, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "profile", "show", str(file)],
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr
    assert ("█" in done.stdout.decode(encoding)) == (encoding == "utf-8")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0008, "0.8ms"), (0.125, "125ms"), (0.9999, "1.0s"), (3.21, "3.2s"), (250.0, "250s")]
)
def test_seconds_are_short(value: float, text: str) -> None:
    assert seconds(value) == text


def test_what_is_not_defined_is_a_dash() -> None:
    assert (number(None), number(0.12345)) == ("-", "0.123")


@pytest.mark.parametrize("wrong", ["missing/out", "a.kvprofile/out", ".", "x" * 300], ids=repr)
@pytest.mark.parametrize(
    "command",
    [
        ("profile", "record", "--texts", "/nonexistent/text"),
        ("profile", "train", "hata", "/nonexistent/text"),
        ("profile", "link", "--from", "b", "--socket", "/nonexistent/s"),
        ("profile", "plot", "/nonexistent/profile"),
    ],
    ids=" ".join,
)
def test_where_the_result_goes_is_checked_before_the_work(file: Path, command: tuple[str, ...], wrong: str) -> None:
    done = CliRunner().invoke(app, [*command, "-o", f"{file.parent}/{wrong}"], prog_name="kvd")
    assert done.exit_code == 2
    assert not isinstance(done.exception, OSError | ValueError)
    assert any(words in done.stderr for words in ("is no folder", "is not a file", "can't be written"))


def test_where_a_simulations_picture_goes_is_checked_before_it_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "--hours", "1000", "--plot", str(tmp_path)], prog_name="kvd")
    assert (done.exit_code, "is not a file" in done.stderr) == (2, True)
