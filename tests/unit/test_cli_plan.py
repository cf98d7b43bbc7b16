"""``kvd plan``: counts as the paper's case has them, tables, JSON, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.errors import InvalidArgument
from kvd.layout.models import model
from tests.unit.layout_oracle import TOML

LLAMA = ["--model", "llama-3.1-70b", "--from", "vllm-lbhnc", "--to", "tenstorrent"]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def shown(*words: str):
    code, out, err = run("show", *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("mib", [10, 40, 160, 1280])
def test_requests_of_llama_70b(mib):
    """320 KiB a token; every way's count follows from the size of its pieces."""
    tokens = mib * 1024 // 320
    found = shown(*LLAMA, "--tokens", str(tokens))
    size = mib << 20
    assert found["payload_bytes"] == found["staging_bytes"] == size
    counts = {name: way["requests"] for name, way in found["ways"].items()}
    assert counts == {
        "pieces": size // 32,  # face rows
        "token rows": size // 256,
        "tiles": size // 2048,
        "scattered": size // 8192,
        "layers": 80 * 2 * 8,
        "channels": 8,
    }
    if mib == 1280:
        assert (counts["pieces"], counts["token rows"], counts["tiles"], counts["scattered"]) == (
            41_943_040,
            5_242_880,
            655_360,
            163_840,
        )
    assert found["ways"]["channels"] == {"requests": 8, "smallest": size // 8, "largest": size // 8}


def test_table():
    code, out, _ = run("show", *LLAMA, "--tokens", "100")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "llama-3.1-70b: 80 layers, 8 KV heads, 2 x 128, 100 tokens"
    assert "1,280 pages padded" not in out
    assert "5,120 pages padded" in out
    assert any(line.split()[:1] == ["8"] and "channels: staged" in line for line in lines)


def test_ranks_are_planned_in_pairs():
    found = shown(*LLAMA, "--tokens", "64", "--from-tp", "2", "--to-tp", "4")
    pairs = [(one["from"], one["to"], one["heads"]) for one in found["ranks"]]
    assert pairs == [(0, 0, [0, 2]), (0, 1, [2, 4]), (1, 2, [4, 6]), (1, 3, [6, 8])]
    assert found["payload_bytes"] == 64 * 320 * 1024
    assert found["ways"]["channels"]["requests"] == 32


def test_block_formats_and_other_channels():
    found = shown(*LLAMA, "--tokens", "64", "--to-dtype", "bfp8_b", "--channels", "12", "--alignment", "32")
    assert found["staging_bytes"] == 64 * 320 * 1024 // 2048 * 1088
    assert found["to"]["placement"] == {"kind": "round-robin", "channels": 12, "alignment": 32, "shard_pages": 0}
    assert "pieces" not in found["ways"]


def test_a_layout_of_ones_own(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\norder = "l kv || h t | d"\ncodec = "bf16"\npadding = true\n[placement]\n'
        'kind = "round-robin"\nchannels = 3\nalignment = 512\n'
    )
    found = shown("--model", "layers=2,kv_heads=3,head_dim=100", "--tokens", "7", "--from", "heads", "--to", str(file))
    assert found["payload_bytes"] == 2 * 2 * 3 * 7 * 200
    assert found["staging_bytes"] == 2 * 2 * 3 * 7 * 512
    assert found["ways"]["pages"]["requests"] == 84
    assert found["ways"]["channels"]["requests"] == 3
    assert found["to"]["name"] == "mine"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model", "gpt-9"], 2, "there is no model 'gpt-9'"),
        (["--model", "layers=2"], 2, "the model lacks"),
        (["--model", "layers=2,kv_heads=0,head_dim=4"], 2, "kv_heads"),
        (["--model", "nowhere/config.json"], 2, "can't be read"),
        (["--from", "tiles"], 2, "there is no layout 'tiles'"),
        (["--from", "none.toml"], 2, "none.toml can't be read"),
        (["--tokens", "0"], 2, "0 tokens"),
        (["--tokens", "99999999999"], 2, "give 1 to 16777216"),
        (["--tokens", "1000000"], 2, "too many for one plan"),
        (["--to-block", "48"], 2, "multiple of 32"),
        (["--channels", "0"], 2, "channels"),
        (["--to-dtype", "bf17"], 2, "no codec"),
        (["--to-dtype", "f32"], 1, "same number format"),
        (["--from-tp", "3"], 2, "split evenly"),
        (["--to", "mla"], 1, "no axis h"),
        (["--to", "tenstorrent-width", "--shard", "16777216"], 2, "places of padding on axis d, where 128 are held"),
    ],
)
def test_refusals_are_one_sentence(words, code, message):
    given = dict(zip(LLAMA[::2], LLAMA[1::2], strict=True)) | {"--tokens": "64"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    got, out, err = run("show", *[word for pair in given.items() for word in pair])
    assert (got, out) == (code, "")
    assert message in err
    assert err.startswith("kvd: ")
    assert len(err.splitlines()) == 1


def test_layouts_are_listed():
    code, out, _ = run("layouts")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()].count("tenstorrent") == 1
    assert set(json.loads(run("layouts", "--json")[1])) == {line.split()[0] for line in out.splitlines()}


class TestModels:
    def config(self, tmp_path: Path, **fields) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    def test_grouped_heads(self, tmp_path):
        fields = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
        shape = model(str(self.config(tmp_path, **fields)))
        assert (shape.layers, shape.kv_heads, shape.head_dim, shape.parts) == (30, 3, 64, 2)

    def test_heads_wider_than_the_hidden_size(self, tmp_path):
        fields = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "head_dim": 256}
        shape = model(str(self.config(tmp_path, text_config=fields) / "config.json"))
        assert (shape.kv_heads, shape.head_dim) == (8, 256)

    def test_latents(self, tmp_path):
        fields = {"num_hidden_layers": 2, "num_attention_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        shape = model(str(self.config(tmp_path, **fields)))
        assert (shape.kv_heads, shape.head_dim, shape.parts) == (1, 576, 1)

    @pytest.mark.parametrize("text", ["{", "[]", '{"num_hidden_layers": "two"}', '{"num_hidden_layers": 2}'])
    def test_files_that_are_no_configuration(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"config\.json"):
            model(str(tmp_path))


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("padding", "paddding", "a layout has no field 'paddding'; there are name, order"),
        ('"l kv || B h T D | F G r c"', '""', "its axes have digit B once and its order not at all"),
        ("G r c", "G r", "its axes have digit c once and its order not at all"),
        ("G r c", "G r c c", "its axes have digit c once and its order twice"),
        ("T D | F", "T | D | F", "one || and one |"),
        ("D:* G:2", "D:* F:2", "its axes have digit F twice and its order once"),
        ("G:2", "G:0", "a digit is a name, a colon and a size or *"),
        ("round-robin", "roundrobin", "use flat, round-robin, sharded, digit"),
        ("channels = 8", "channels = 0", "channels is 0; it must be between 1 and 256"),
        ("channels = 8", "channels = 8.0", "channels of a placement can't be a float"),
        ("bf16", "bf17", "known are bf16, f16"),
        ('table = "B"', 'table = "r"', "which must be a digit before the page cut"),
        ('"my-npu"', '"my-npu', "is not TOML: "),
        ("channels = 8", "channels = " + "9" * 5000, "is not TOML: a number has thousands of digits"),
        ("channels = 8", "channels = 0x" + "f" * 5000, "channels of a placement is a number of more than 64 bits"),
        ("codec", "x = " + "[" * 3000 + "]" * 3000 + "\ncodec", "is not TOML: its brackets are nested too deeply"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, good: str, bad: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    shape = ("--model", "layers=2,kv_heads=2,head_dim=64", "--tokens", "50", "--from", "nhd", "--to", str(file))
    assert run("show", *shape)[0] == 0
    assert good in TOML
    file.write_text(TOML.replace(good, bad))
    code, out, err = run("show", *shape)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"kvd: {file}: ")
    assert words in err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--to-block", str(1 << 40), "block of layout 'tenstorrent' is 1099511627776; it must be from 1 to 16777216"),
        ("--channels", "300", "it must be from 1 to 256"),
        ("--alignment", "0", "it must be from 1 to 2097152"),
        ("--model", "layers=1,layers=2,kv_heads=1,head_dim=2", "the model has layers twice"),
    ],
)
def test_sizes_that_make_no_sense_are_named(option: str, value: str, words: str) -> None:
    given = {"--model": "llama-3.1-8b", "--tokens": "100", "--from": "nhd", "--to": "tenstorrent", option: value}
    code, _, err = run("show", *(word for pair in given.items() for word in pair))
    assert code == 2
    assert words in err


def test_shards_that_take_turns_are_shown() -> None:
    words = [
        "--model",
        "llama-3.1-8b",
        "--tokens",
        "64",
        "--from",
        "nhd",
        "--to",
        "tenstorrent-shards",
        "--shard",
        "32",
    ]
    assert "round-robin over 8 channels in shards of 32 pages\n" in run("show", *words)[1]


def test_shards_are_as_wide_as_they_are_said_to_be() -> None:
    """100 elements are 4 tiles, and 3 channels hold shards of 2."""
    shape = ["--model", "layers=1,kv_heads=5,head_dim=100", "--tokens", "1000", "--from", "nhd"]
    shape += ["--to", "tenstorrent-width", "--channels", "3"]
    code, _, err = run("show", *shape)
    assert code == 2
    assert "3 channels can't hold the 4 values of digit S, one each" in err
    found = shown(*shape, "--shard", "2")
    assert found["ways"]["channels"]["requests"] == 2
    assert found["to"]["axes"]["d"] == "S:* D:2 G:2 c:16"
    code, _, err = run("show", *shape, "--shard", "-1")
    assert (code, "it must be from 0 to" in err) == (2, True)


def test_a_configuration_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        model(str(tmp_path))


def test_a_layout_that_is_none_is_named_with_its_file(tmp_path):
    for text, said in (("[", "not TOML"), ("", "a layout needs")):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        given = dict(zip(LLAMA[::2], LLAMA[1::2], strict=True)) | {"--tokens": "64", "--to": str(path)}
        code, _, err = run("show", *[word for pair in given.items() for word in pair])
        assert code == 2
        assert err.startswith(f"kvd: {path}: ")
        assert said in err
