"""``kvd demo`` with selective transfer, as its user runs it, with a tiny random model in place of SmolLM2."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from kvd_client.selectors.weights import read
from tests.engine_models import model_folder
from tests.integration.test_demo import Demo, only_text

LAYERS, ENTRY_BYTES, KV_HEADS = 4, 2 * 16 * 4, 2
PROMPT, NEW = 240, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = model_folder(tmp_path_factory.mktemp("model") / "tiny-llama")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of its own, so that the tests neither use nor leave the user's profiles."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def arguments(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model", str(model), "--prompt-tokens", str(PROMPT), "--tokens", str(NEW), "--link", "5mbit", *more)


def test_every_mode_and_policy_says_the_same(tmp_path: Path, model: Path, cache: Path) -> None:
    picture = tmp_path / "picture.png"
    more = ("--compare", "--speculative", "windows,adaptive", "--select", "0.1,0.2", "--plot", str(picture), "--json")
    demo = Demo(tmp_path, *arguments(model, *more))
    assert demo.end() == 0, demo.err
    assert only_text(demo.err)
    assert picture.read_bytes().startswith(b"\x89PNG")
    tree = json.loads(demo.out)
    kv_bytes = PROMPT * LAYERS * KV_HEADS * ENTRY_BYTES
    assert tree["kv_bytes"] == kv_bytes
    assert tree["prefix_tokens"] == 228
    assert tree["tokens_equal"] is True
    assert [selection["share"] for selection in tree["selections"]] == [0.1, 0.2]
    assert len(list((cache / "kvd" / "profiles").iterdir())) == 1
    for selection in tree["selections"]:
        assert selection["entries"] == PROMPT * selection["share"]
        assert set(selection["on_demand_ratio_by_order"]) == {
            "sequential",
            "random",
            "streaming",
            "profile",
            "optimal",
        }
        runs: dict[tuple[str, ...], Any] = {
            (run["mode"], run["budget"], run["speculative"]): run for run in selection["runs"]
        }
        assert len(runs) == 10
        for (mode, *_), run in runs.items():
            assert run["tokens"] == selection["local_tokens"]
            assert len(run["tokens"]) == NEW
            assert run["ttst_s"] > run["ttft_s"] > 0
            assert run["bound_s"] > 0
            selected = selection["entries"] * KV_HEADS * (LAYERS - 2)
            # Selections of all layers are counted; two of the four make one.
            assert run["selected"] == [selected] * (NEW - 1)
            paths = run["paths"]
            assert paths["metadata"] > 0
            # What the process asked for when the last blocks had just arrived is served from the sink's own memory.
            asked = paths.get("on_demand", 0) + paths.get("filled", 0)
            assert asked == sum(run["fetched"]) * ENTRY_BYTES
            assert paths["proactive"] + paths.get("speculative", 0) <= kv_bytes
            if mode == "full":
                assert sum(run["fetched"]) == 0
                assert paths["proactive"] == kv_bytes
            if mode != "speculative":
                assert "speculative" not in paths


def test_one_mode_without_a_prefix_as_a_table(tmp_path: Path, model: Path) -> None:
    more = ("--mode", "speculative", "--no-prefix", "--selector", "hata", "--repeat", "2", "--mask", "head")
    demo = Demo(tmp_path, *arguments(model, *more))
    assert demo.end() == 0, demo.err
    assert only_text(demo.out + demo.err)
    lines = demo.out.splitlines()
    assert any(line.startswith("prompt ") and line.endswith(f"{PROMPT} tokens") for line in lines)
    row = next(line for line in lines if line.startswith("speculative deadline adaptive by head"))
    assert row.endswith("yes")
    assert "on-demand ratio, had half of the blocks been sent" in lines


def test_a_selector_that_looks_ahead_with_weights_of_its_own(tmp_path: Path, model: Path, cache: Path) -> None:
    more = ("--mode", "partial", "--selector", "infinigen:alpha=1", "--select", "0.2", "--mask", "token,head", "--json")
    # On a busy machine prefill takes long, and equation 2 then lets everything go on a faster link.
    demo = Demo(tmp_path, *arguments(model, *more, "--link", "1mbit"))
    assert demo.end() == 0, demo.err
    assert "calibration, prompts" in demo.err
    made = {read(path).selector for path in (cache / "kvd" / "weights").iterdir()}
    assert "infinigen" in made
    tree = json.loads(demo.out)
    assert tree["tokens_equal"] is True
    (selection,) = tree["selections"]
    assert 0 < selection["select_share_of_step"] < 1
    assert [run["mask"] for run in selection["runs"]] == ["token", "head"]
    for run in selection["runs"]:
        assert sum(run["fetched"]) > 0
        assert all(took >= waited for took, waited in zip(run["fetch_s"], run["fetch_wait_s"], strict=True))
        assert 0 <= run["fetch_hidden"] <= 1


STAGES = {
    "while processes start": "starting two inference",
    "while the profile is recorded": "recorded once, prompts: 0 of",
    "in the local run": "the same in one process",
    "between runs": "full, 10 % selected: TTST",
    "after a restart of the daemons": "partial by head, 10 % selected: TTST",
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, model: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "profile" in stage:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    demo = Demo(tmp_path, *arguments(model, "--compare"))
    demo.until(lambda: STAGES[stage] in demo.err)
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.err
    assert "Traceback" not in demo.err
    assert demo.err.endswith("kvd: the demo was interrupted; nothing of it is left behind\n")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--mode", "full", "--model", "/nowhere"), "/nowhere: has no config.json; "),
        (("--mode", "full", "--prompt-tokens", "600"), "a prompt of 600 tokens and 12 new ones exceed "),
        (("--compare", "--plot", "/nowhere/picture.png"), "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, model: Path, more: tuple[str, ...], sentence: str) -> None:
    demo = Demo(tmp_path, *arguments(model, *more))
    assert demo.end() in (1, 2)
    assert demo.out == ""
    assert sentence in demo.err.splitlines()[-1]
    assert "Traceback" not in demo.err


@pytest.mark.model
def test_smollm2_over_the_automatic_link(tmp_path: Path) -> None:
    """The real model; its profile is recorded into the test's own cache folder if the user's has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME")
        demo = Demo(
            tmp_path, "--compare", "--mode", "full,speculative", "--budget", "deadline", "--prompt-tokens", "256",
            "--tokens", "24", "--json",
        )  # fmt: skip
    assert demo.end() == 0, demo.err
    tree = json.loads(demo.out)
    assert tree["tokens_equal"] is True
    assert tree["transfer_s"] == pytest.approx(6.5 * tree["prefill_s"], rel=1e-3)
    full, speculative = tree["selections"][0]["runs"]
    assert full["fetched"] == [0] * 23
    assert sum(speculative["fetched"]) > 0
