"""``kvd profile evaluate`` from end to end, with a tiny random model in place of SmolLM2 and texts of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from kvd.cli.main import app
from kvd.profiling import recorded
from kvd_client.engines.prompt import AHEAD, QUERIES
from tests.engine_models import model_folder

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
SELECTIONS = ("exact@0.2", "exact@1", "random@0.2")
LABELS = ["full", *SELECTIONS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(model_folder(tmp_path_factory.mktemp("model") / "tiny-llama"))
    config = folder / "config.json"
    # A byte a token makes long questions.
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 4096'))
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, dice = tmp_path_factory.mktemp("texts"), random.Random(3)
    paths = [folder / name for name in ("one.txt", "two.txt")]
    for path in paths:
        path.write_text("\n".join(" ".join(dice.choices(WORDS, k=9)) for _ in range(1100)))
    return paths


def options(model: Path, texts: list[Path], out: Path, *more: Any) -> list[str]:
    found = ["profile", "evaluate", "-o", out, "--model", model, "--calibration", "one", "--tokens", 400]
    for path in texts:
        found += ["--texts", f"{path.stem}={path}"]
    for label in SELECTIONS:
        found += ["--select", label]
    found += ["--prompts", 2, "--compared", 1, "--hidden", 1, "--steps", 4, "--blocks", 40, "--record", "exact@0.2"]
    return [str(one) for one in (*found, *more)]


def evaluate(*args: Any) -> Any:
    return CliRunner().invoke(app, options(*args), prog_name="kvd")


@pytest.fixture(scope="module")
def killed(model: Path, texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder whose program was killed between cells."""
    out = tmp_path_factory.mktemp("out") / "report"
    argv = [sys.executable, "-m", "kvd", *options(model, texts, out)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("two-400-0, hidden: 5 of"):
                break
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    return out


@pytest.fixture(scope="module")
def finished(model: Path, texts: list[Path], killed: Path) -> tuple[Path, dict[Path, int], Any]:
    """The folder after the second run, when each file of the first one was written, and what the run said."""
    before = {path: path.stat().st_mtime_ns for path in (killed / "work").rglob("*") if path.is_file()}
    return killed, before, evaluate(model, texts, killed)


def test_a_killed_run_goes_on_where_it_was(finished: tuple[Path, dict[Path, int], Any]) -> None:
    out, before, done = finished
    assert done.exit_code == 0, done.output
    cells = {path for path in before if path.suffix == ".json"}
    assert len(cells) >= 1 + 1 + 4  # the manifest, one text with the recorded selection, one with all
    kept = {path for path in before if not path.name.startswith(".")}
    assert {path: path.stat().st_mtime_ns for path in kept} == {path: before[path] for path in kept}
    assert len(list((out / "work" / "cells").rglob("*.json"))) == 1 + 4 + 3 + 1 + 1
    assert "\x1b" not in done.stderr


def test_the_report_has_what_was_measured(finished: tuple[Path, dict[Path, int], Any]) -> None:
    out, _, done = finished
    report = json.loads((out / "report.json").read_text())
    assert report["complete"]
    assert report["prompts"] == {"text": {"400": 1}, "hidden": {"400": 1}, "recorded": {"exact@0.2": 4}}
    divergence, recall = report["divergence"]["400"], report["recall"]["400"]
    assert list(divergence) == LABELS
    assert list(recall) == ["full", "exact@0.2", "random@0.2"]  # those that --recall has by default
    # Everything selected is the full cache; at random most is lost, and a random model finds nothing.
    for label in ("full", "exact@1"):
        assert divergence[label]["kl"]["mean"] == pytest.approx(0.0, abs=1e-6)
        assert divergence[label]["same_token"]["mean"] == 1.0
        assert divergence[label]["perplexity"] == pytest.approx(divergence["full"]["perplexity"], rel=1e-4)
    assert 0 < divergence["exact@0.2"]["kl"]["mean"] < divergence["random@0.2"]["kl"]["mean"]
    assert divergence["exact@0.2"]["selected"] == pytest.approx(0.2)
    assert all(found["one"]["of"] == found["all"]["of"] == 5 for found in recall.values())
    # Half of 4 layers are layers 0 and 1: nothing that was selected has been sent, by any order.
    figures = report["on_demand"]["exact@0.2"]["400"]
    assert figures["prompts"] == 2
    assert {each["mean"] for each in figures["block"]["global"]["0.5"]["ratio"].values()} == {1.0}
    assert list(report["correlation"]["exact@0.2"]["domains"]["400"]) == ["one two"]
    reached = {mark["claim"].split(" ")[2]: mark["reached"] for mark in report["marks"] if "recall" in mark["claim"]}
    assert set(reached) >= {"infinigen@0.2", "infinigen@0.1", "hata@0.2", "streaming@0.2"}
    assert set(reached.values()) == {None}  # none of them was measured
    assert "exact@0.2" in done.stdout
    text = (out / "report.md").read_text()
    for name in ("recall.png", "divergence.png", "on_demand.png", "correlation.png"):
        assert (out / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert f"({name})" in text


def test_selections_are_kept_as_recordings(finished: tuple[Path, dict[Path, int], Any]) -> None:
    out, _, _ = finished
    paths = sorted((out / "work" / "cells").rglob("*.kvdrecorded"))
    assert len(paths) == 4
    one = recorded.read(paths[0])
    assert (one.name, one.selector, one.length, one.step_count, one.query_count) == (
        "one",
        "exact",
        400,
        4,
        QUERIES + 1,
    )
    assert one.step_mask().sum(axis=(0, 2, 3)).tolist() == [2 * 2 * 80] * 4  # layers, heads, a fifth of the prompt
    assert one.asked_ahead == AHEAD
    # All but the narrow selection, which is the last one, are a fifth of the prompt, and have the newest token.
    assert one.query_mask().sum(axis=(0, 2, 3)).tolist() == [2 * 2 * 80] * QUERIES + [2 * 2 * 20]
    assert one.query_mask()[2:, :, :, -1].all()


def test_a_recording_whose_queries_stood_elsewhere_is_asked_anew(
    model: Path, texts: list[Path], finished: tuple[Path, dict[Path, int], Any]
) -> None:
    out, _, _ = finished
    path = min((out / "work" / "cells").rglob("*.kvdrecorded"))
    whole = recorded.read(path)
    recorded.write(dataclasses.replace(whole, queries=whole.queries[:, -16:].copy(), asked_ahead=0), path)
    assert evaluate(model, texts, out).exit_code == 0
    assert recorded.read(path).asked_ahead == AHEAD
    assert np.array_equal(recorded.read(path).queries, whole.queries)
    assert np.array_equal(recorded.read(path).steps, whole.steps)


def test_more_selections_add_to_what_is_there(
    model: Path, texts: list[Path], finished: tuple[Path, dict[Path, int], Any]
) -> None:
    out, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (out / "work").rglob("*.json")}
    done = evaluate(model, texts, out, "--select", "streaming@0.2", "--minutes", 0)
    assert done.exit_code == 0, done.output
    assert "time is up" in done.stderr  # before anything was run
    assert not json.loads((out / "report.json").read_text())["complete"]
    assert {path: path.stat().st_mtime_ns for path in (out / "work").rglob("*.json")} == before


def test_recall_alone(model: Path, texts: list[Path], tmp_path: Path) -> None:
    done = evaluate(model, texts, tmp_path / "out", "--prompts", 0, "--recall", "random@0.2")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["prompts"]["text"] == {}
    assert report["divergence"] == {}
    assert {label: found["one"]["of"] for label, found in report["recall"]["400"].items()} == {
        "full": 5,
        "random@0.2": 5,
    }


def test_another_evaluations_folder_is_refused(
    model: Path, texts: list[Path], finished: tuple[Path, dict[Path, int], Any]
) -> None:
    out, _, _ = finished
    done = evaluate(model, texts, out, "--steps", 5)
    assert done.exit_code == 1
    assert "settings.steps 4 instead of 5" in done.stderr
    done = evaluate(model, [texts[0], texts[0].with_name("two.txt"), Path(__file__)], out)
    assert done.exit_code == 2  # a name with an underscore
    assert "is no domain" in done.stderr


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("--calibration", "three"), "calibration on 'three'"),
        (("--select", "best@0.1"), "there is no selector 'best'"),
        (("--select", "exact"), "'exact' is no selection"),
        (("--prompts", 9), "for 2 prompts of a length, not for 3"),
        (("--tokens", 4000), "exceed the model's context of 4096"),
        (("--texts", "one=/none"), "/none: can't be read"),
        (("--model", "/none"), "/none: has no config.json"),
    ],
)
def test_what_can_be_wrong_is_one_sentence(
    model: Path, texts: list[Path], tmp_path: Path, change: tuple[Any, ...], sentence: str
) -> None:
    done = evaluate(model, texts, tmp_path / "out", *change)
    assert done.exit_code in (1, 2), done.output
    assert sentence in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "report.json").exists()
