"""``kvd profile selections``: a folder of recordings, with a tiny random model in place of SmolLM2."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd.cli.main import app
from kvd.profiling import record_run, recorded
from kvd_client.engines.prompt import AHEAD
from tests.engine_models import model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(model_folder(tmp_path_factory.mktemp("model") / "tiny-llama"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A domain of two documents and one of a single one."""
    folder, dice = tmp_path_factory.mktemp("texts"), random.Random(3)
    made = []
    for name, lines in (("two", 6_000), ("one", 60)):
        path = folder / f"{name}.txt"
        path.write_text("\n".join(" ".join(dice.choices(["alpha", "beta", "gamma"], k=2)) for _ in range(lines)))
        made += ["--texts", f"{name}={path}"]
    return made


def selections(model: Path, texts: list[str], out: Path, *more: Any) -> Any:
    how = ("--model", model, "--tokens", 96, "--steps", 3, "--prompts", 1, "--question", "And now?", *more)
    command = ["profile", "selections", "-o", str(out), *texts, *map(str, how)]
    return CliRunner().invoke(app, command, prog_name="kvd")


def times_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*")}


def test_each_prompt_is_a_file_and_what_is_there_stays(model: Path, texts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = selections(model, texts, out)
    assert done.exit_code == 0, done.output
    assert f"{out}: 2 prompts recorded, 0 were there" in done.stdout
    first = times_of(out)
    assert sorted(name.rsplit("-", 1)[0] for name in first) == ["one-00", "two-00"]
    found = [recorded.read(path) for path in sorted(out.iterdir())]
    assert [(one.name, one.length, one.step_count, one.selector, one.model) for one in found] == [
        (name, 96, 3, "quest", "tiny-llama") for name in ("one", "two")
    ]
    for one in found:
        assert (one.step_mask(slice(2, None)).sum(-1) == 20).all(), "a fifth of each head's tokens, rounded up"
        assert one.query_count == 10, "one for each ten tokens; the last one twice"
        assert one.asked_ahead == AHEAD
    again = selections(model, texts, out)
    assert "0 prompts recorded, 2 were there" in again.stdout
    assert times_of(out) == first
    (gone,) = out.glob("one-*")
    gone.unlink()
    again = selections(model, texts, out)
    assert "1 prompts recorded, 1 were there" in again.stdout
    assert "1 of 2 done" in again.stderr
    assert set(times_of(out)) == set(first)


def test_more_prompts_of_a_domain_are_added(model: Path, texts: list[str], tmp_path: Path) -> None:
    for prompts, said in ((1, "1 prompts recorded, 0 were there"), (2, "1 prompts recorded, 1 were there")):
        done = selections(model, texts[:2], tmp_path, "--prompts", prompts)
        assert said in done.stdout, done.output
    assert sorted(name[:6] for name in times_of(tmp_path)) == ["two-00", "two-01"]


def test_a_stopped_command_goes_on(
    model: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = record_run.record, []

    def stopped(*args: Any, **how: Any) -> Any:
        calls.append(how["name"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **how)

    monkeypatch.setattr(record_run, "record", stopped)
    done = selections(model, texts, tmp_path / "out")
    assert done.exit_code == 130
    assert "the same command goes on from here" in done.stderr
    assert len(times_of(tmp_path / "out")) == 1
    assert selections(model, texts, tmp_path / "out").exit_code == 0
    assert calls == ["two", "one", "one"]


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (("--share", 0.3), 1, "was recorded with share 0.2 instead of 0.3; give another folder"),
        (("--selector", "quest:page=8"), 1, "was recorded with parameters"),
        (("--question", "What?"), 1, "is of a prompt that these options don't make"),
        (("--prompts", 2), 2, "domain 'one' has texts for 1 prompts, not for 2; give --prompts 1"),
        (("--tokens", 500, "--steps", 13), 2, "model's context of 512"),
        (("--texts", "three"), 2, "is no domain"),
        (("--selector", "best"), 2, "there is no selector 'best'"),
        (("--model", "/none"), 2, "/none: has no config.json"),
    ],
)
def test_what_can_be_wrong_is_one_sentence_and_changes_nothing(
    made: Path, model: Path, texts: list[str], change: tuple[Any, ...], code: int, sentence: str
) -> None:
    before = times_of(made)
    done = selections(model, texts, made, *change)
    assert sentence in done.stderr, done.output
    assert done.exit_code == code
    assert times_of(made) == before


@pytest.fixture(scope="module")
def made(model: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert selections(model, texts, folder).exit_code == 0
    return folder


def test_a_text_that_is_too_short(model: Path, texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("alpha beta")
    done = selections(model, [*texts, "--texts", f"short={path}"], tmp_path / "out")
    assert done.exit_code == 2
    assert "domain 'short' has a text that makes a prompt of" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_damaged_recording_is_named(model: Path, texts: list[str], tmp_path: Path) -> None:
    assert selections(model, texts, tmp_path).exit_code == 0
    (path,) = tmp_path.glob("two-*")
    path.write_bytes(path.read_bytes()[:100])
    done = selections(model, texts, tmp_path)
    assert done.exit_code == 1
    assert f"{path} can't be used as a recording of selections" in done.stderr
