"""``kvd profile record`` over texts, with a tiny random model in place of SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd.cli.main import app
from kvd.profiling import files
from kvd_client.selectors import weights
from tests.engine_models import model_folder
from tests.unit.test_profile_link import LINK

TEXT = "What a decode selects depends on the text, and on where in the text it stands. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(model_folder(tmp_path_factory.mktemp("model") / "tiny-llama"))


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    paths[0].write_text(TEXT * 4)
    paths[1].write_text(TEXT.upper()[:70])
    return paths


def record(*args: Any) -> Any:
    return CliRunner().invoke(app, ["profile", "record", *map(str, args)], prog_name="kvd")


@pytest.mark.parametrize("selector", ["quest", "exact", "hata"])
def test_texts_become_a_profile(model: Path, texts: list[Path], tmp_path: Path, selector: str) -> None:
    out = tmp_path / "out.kvdprofile"
    done = record(
        *("--model", model, "--texts", *texts, "--tokens", 128, "--tokens", 64, "--steps", 3, "--prompts", 4),
        *("--share", 0.25, "--blocks", 16, "--link-rate", "8mbit", "--selector", selector, "-o", out),
    )
    assert done.exit_code == 0, done.output
    assert f"{out}: written, 6 prompts and 18 decode steps" in done.stdout
    assert "prompts of 64 tokens: 4 of 4" in done.stderr
    assert "\x1b" not in done.stderr
    found = files.read(out)
    assert (found.model, found.revision, found.layers, found.kv_heads) == ("tiny-llama", "", 4, 2)
    assert (found.selector, found.parameters["share"], found.blocks) == (selector, 0.25, 16)
    # The first text has two pieces of 128 tokens and four of 64, the second one of 64.
    assert [(g.low, g.samples, g.steps) for g in found.groups] == [(64, 4, 12), (128, 2, 6)]
    for group in found.groups:
        assert group.matrix.values[2:].mean() == pytest.approx(0.25)
    assert found.prefill.tokens == (64,) * 4 + (128,) * 2
    assert all(seconds > 0 for seconds in found.prefill.seconds)
    assert found.entry_bytes == 2 * 16 * 4
    token_bytes = 4 * 2 * found.entry_bytes
    assert (found.transfer.tokens, found.link_rate) == ((64, 128), 1_000_000)
    assert found.transfer.seconds == pytest.approx((64 * token_bytes / 1e6, 128 * token_bytes / 1e6))
    assert found.timing() is not None


def test_a_measured_link_gives_t_t_and_names_are_the_transfers(model: Path, texts: list[Path], tmp_path: Path) -> None:
    out, measured = tmp_path / "out.kvdprofile", tmp_path / "link.json"
    measured.write_text(json.dumps(LINK.fields()))
    done = record(
        *("--model", model, "--texts", texts[0], "--tokens", 40, "--steps", 1, "--prompts", 1, "-o", out),
        *("--link", measured, "--model-id", "org/tiny", "--revision", "r1", "--notes", "one text"),
    )
    assert done.exit_code == 0, done.output
    assert "has 1 prompts" in done.stderr  # what a profile of one prompt is worth
    found = files.read(out)
    assert (found.model, found.revision, found.notes, found.selector) == ("org/tiny", "r1", "one text", "quest")
    assert found.link_rate == LINK.rate
    assert found.transfer.seconds[0] == pytest.approx(LINK.latency_s + 40 * 4 * 2 * 128 / LINK.rate)


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (("--tokens", 400), 2, "the longest has"),
        (("--tokens", 511, "--steps", 9), 2, "model's context of 512"),
        (("--selector", "best"), 2, "there is no selector 'best'"),
        (("--link-rate", "0mbit"), 2, "rate 0"),
        (("--link-rate", "8mbit", "--link", "x"), 2, "--link-rate and --link"),
        (("--texts", "/none"), 2, "/none: can't be read"),
        (("--model", "/none"), 2, "/none: has no config.json"),
        (("--share", 0), 2, "--share"),
    ],
)
def test_what_can_be_wrong_is_one_sentence_and_writes_nothing(
    model: Path, texts: list[Path], tmp_path: Path, change: tuple[Any, ...], code: int, sentence: str
) -> None:
    out = tmp_path / "out.kvdprofile"
    done = record(
        *("--model", model, "--texts", texts[0], "--tokens", 40, "--steps", 1, "--prompts", 1, "-o", out), *change
    )
    assert done.exit_code == code, done.output
    assert sentence in done.stderr
    assert not out.exists()


def test_weights_are_trained_and_recorded_with(model: Path, texts: list[Path], tmp_path: Path) -> None:
    made, out = tmp_path / "hata.safetensors", tmp_path / "out.kvdprofile"
    command = ("profile", "train", "hata", *texts, "--model", model, "--tokens", 64, "--prompts", 2)
    done = CliRunner().invoke(app, [*map(str, command), "--bits", "64", "--steps", "2", "-o", str(made)])
    assert done.exit_code == 0, done.output
    found = weights.read(made)
    assert f"hata of {model.name} from 2 prompts of 64 tokens; sha256 {found.fingerprint}" in done.stdout
    assert (found.selector, found.model, found.layers) == ("hata", model.name, 4)
    assert dict(found.parameters) == {"bits": 64, "steps": 2, "prompts": 2, "tokens": 128}
    how = ("--model", model, "--texts", texts[0], "--tokens", 40, "--steps", 1, "--prompts", 1, "-o", out)
    done = record(*how, "--selector", "hata:ahead=true", "--weights", made)
    assert done.exit_code == 0, done.output
    profile = files.read(out)
    assert profile.selector == "hata"
    assert profile.parameters["weights"] == found.fingerprint
    assert profile.parameters["ahead"] is True
    for wrong, code, sentence in (
        (("--selector", "infinigen", "--weights", made), 1, "for selector 'hata', not for 'infinigen'"),
        (("--selector", "quest", "--weights", made), 2, "takes no weights"),
        (("--selector", "hata", "--weights", made, "--model-id", "other"), 1, "are another model's"),
        (("--selector", "hata", "--weights", texts[0]), 1, "no safetensors file"),
    ):
        done = record(*how, *wrong)
        assert (done.exit_code, sentence in done.stderr) == (code, True), done.output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("quest", "--bits", "64"), "'quest' is not trained"),
        (("infinigen", "--bits", "64"), "has no bits"),
        (("hata", "--bits", "100"), "100 bits"),
        (("hata", "--tokens", "20000"), "model's context of 512"),
    ],
)
def test_what_can_be_wrong_with_training(
    model: Path, texts: list[Path], tmp_path: Path, change: tuple[str, ...], sentence: str
) -> None:
    out = tmp_path / "w"
    command = ["profile", "train", change[0], str(texts[0]), "--model", str(model), "-o", str(out), *change[1:]]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr
    assert not out.exists()
