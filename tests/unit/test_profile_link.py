"""What a measured link means: rates, T_t, and the file that carries them; no link is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.cli.profile_link import speed
from kvd.errors import InvalidArgument
from kvd.profiling.link import Link, Round, geometry, measure, read, transfer_times

LINK = Link(
    source="a",
    sink="b",
    mib=8,
    rounds=(Round(8 << 20, 0.5, 0.002), Round(8 << 20, 0.25, 0.001), Round(4 << 20, 1.0, 0.1)),
)


def test_medians_leave_outliers_alone() -> None:
    assert LINK.rate == 16 << 20
    assert LINK.latency_s == 0.002
    found = LINK.fields()
    assert found["bytes_per_s"] == {"median": 16 << 20, "min": 4 << 20, "max": 32 << 20}
    assert found["latency_s"] == {"median": 0.002, "min": 0.001, "max": 0.1}
    assert found["rounds"][2] == {"bytes": 4 << 20, "seconds": 1.0, "latency_s": 0.1}


def test_a_written_result_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(LINK.fields() | {"transfer": {"tokens": 1024}}))
    assert read(path) == (16 << 20, 0.002)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "else"},
        {"version": 2},
        {"bytes_per_s": {"median": 0}},
        {"bytes_per_s": {"median": -5.0}},
        {"bytes_per_s": {"median": "fast"}},
        {"latency_s": {}},
        {"latency_s": None},
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(LINK.fields() | change))
    with pytest.raises(InvalidArgument, match=r"link\.json"):
        read(path)


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", b"{}"])
def test_bytes_that_are_no_result_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "link.json"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match="no result of kvd profile link"):
        read(path)
    with pytest.raises(InvalidArgument, match="can't be read"):
        read(tmp_path / "none")


def test_a_full_transfer_takes_latency_and_bytes() -> None:
    times = transfer_times(1000, 0.5, [10, 20], 100)
    assert (times.tokens, times.seconds) == ((10, 20), (1.5, 2.5))
    for rate, latency in ((0, 0.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(InvalidArgument):
            transfer_times(rate, latency, [1], 1)


@pytest.mark.parametrize(("mib", "rounds"), [(0, 1), (1, 0), (5000, 1), (1, 101)])
def test_sizes_out_of_range_are_refused_before_anything_happens(mib: int, rounds: int) -> None:
    with pytest.raises(InvalidArgument, match="can't be measured"):
        measure(None, "a", mib=mib, rounds=rounds)  # type: ignore[arg-type]


CONFIG = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG | {"dtype": "float16"}, (30, 3, 256)),
        (CONFIG | {"torch_dtype": "bfloat16", "head_dim": 128}, (30, 3, 512)),
        (CONFIG | {"num_key_value_heads": None}, (30, 9, 512)),
        ({"text_config": CONFIG}, (30, 3, 512)),
    ],
)
def test_a_models_configuration_says_what_its_cache_is(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert geometry(tmp_path) == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps(CONFIG | {"dtype": "int3"}), json.dumps(CONFIG | {"num_hidden_layers": -1})]
)
def test_a_configuration_that_does_not_say_it_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        geometry(tmp_path)
    with pytest.raises(InvalidArgument, match="can't be read"):
        geometry(tmp_path / "none")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--serve", "--from", "a"),
        ("--from", "a", "--layers", "3"),
        ("--from", "a", "--layers", "3", "--model", "x"),
        ("--from", "a", "--mib", "0"),
    ],
)
def test_wrong_usage_ends_with_2(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["profile", "link", "--socket", "/none", *args])
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize(
    ("rate", "text"),
    [(25e6, "200 mbit"), (1.25e9, "10.0 gbit"), (1000, "8.0 kbit"), (1, "8 bit"), (12.5e9, "100 gbit")],
)
def test_rates_are_short(rate: float, text: str) -> None:
    assert speed(rate) == text
