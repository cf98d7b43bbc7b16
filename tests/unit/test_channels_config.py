"""Devices of channels in the configuration file, in ``kvd status`` and in ``kvd doctor``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.cli.status import render, to_json
from kvd.config import Npu, parse, resolve, to_toml
from kvd.config_check import check
from kvd.errors import ConfigError
from kvd_client.statuses import DeviceStatus
from tests.unit.test_cli_status import STATUS

CARD = """
[npu.card0]
backing = "tenstorrent"
path = "/dev/tenstorrent/0"
channels = 2
channel_bytes = "3GiB"
origin = "512MiB"
noc = ["17-14", "17-15"]

[npu."wormhole.like"]
channels = 12
channel_bytes = "1MiB"
alignment = 32
"""


def problems(text: str) -> list[str]:
    return [str(problem) for problem in check(resolve(parse(text))) if problem.key.startswith("$.npu")]


def test_devices_are_read_written_and_read_again() -> None:
    config = parse(CARD)
    assert list(config.npu) == ["card0", "wormhole.like"]
    assert config.npu["wormhole.like"] == Npu(channels=12, channel_bytes=1 << 20, alignment=32)
    assert config.npu["card0"].noc == ["17-14", "17-15"]
    assert parse(to_toml(config)) == config
    assert problems(CARD) == []
    assert parse("").npu == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('backing = "tpu"', '"tpu" is none of "host", "tenstorrent"'),
        ("channel = 3", "no such key; did you mean channels?"),
        ("channels = 0", "channels: expected `?int`? >= 1"),
        ('channel_bytes = "1G"', '"1G" is not a size'),
        ("noc = [17]", "noc"),
    ],
)
def test_what_is_no_device_is_refused_by_key(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse(f"[npu.card0]\n{line}\n")
    assert "npu" in caught.value.fields["key"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('channel_bytes = "100B"', "$.npu.x.channel_bytes: 100B is no multiple of alignment, 64"),
        ('channel_bytes = "32B"', "$.npu.x.channel_bytes: 32B is no multiple of alignment, 64"),
        ('channel_bytes = "1TiB"', "$.npu.x.channel_bytes: 8 channels and memory.pool are together more than"),
        ('backing = "tenstorrent"', "$.npu.x.path: name the card's file, such as /dev/tenstorrent/0"),
        ('backing = "tenstorrent"', "$.npu.x.noc: 0 tiles for 8 channels; give the tile of each bank"),
        ('backing = "tenstorrent"\nnoc = ["x"]', '$.npu.x.noc: "x" is not a tile\'s coordinates, such as "17-14"'),
        ('backing = "tenstorrent"\norigin = "33B"', "$.npu.x.origin: 33 is no multiple of the page size, "),
        ('backing = "tenstorrent"\norigin = "64B"', "$.npu.x.origin: 64 is no multiple of the page size, "),
        (
            'backing = "tenstorrent"\norigin = "4GiB"',
            "$.npu.x.origin: channels from 4294967296 to 4563402752 don't fit into the card's windows of 4GiB",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(lines: str, said: str) -> None:
    assert any(problem.startswith(said) for problem in problems(f"[npu.x]\n{lines}\n")), problems(f"[npu.x]\n{lines}")


def test_status_has_used_and_free_of_each_channel() -> None:
    half = DeviceStatus(
        name="card0",
        backing="host",
        channel_bytes=256 << 20,
        alignment=64,
        leases=3,
        used=[0, 64 << 20, 64 << 20, 1 << 20],
        largest_free=[256 << 20, 100 << 20, 100 << 20, 255 << 20],
        largest_common=100 << 20,
    )
    status = msgspec.structs.replace(STATUS, devices=[half])
    lines = list(render(status, width=80))
    at = next(i for i, line in enumerate(lines) if line.startswith("DEVICE"))
    assert [line.split() for line in lines[at : at + 4]] == [
        ["DEVICE", "BACKING", "CHANNEL", "USED", "FREE", "LARGEST", "LEASES"],
        ["card0", "host", "0", "0", "B", "256", "MiB", "256", "MiB", "3"],
        ["1-2", "64.0", "MiB", "192", "MiB", "100", "MiB"],
        ["3", "1.0", "MiB", "255", "MiB", "255", "MiB"],
    ]
    assert '"used":[0,67108864,67108864,1048576]' in to_json(status)
    assert not any(line.startswith("DEVICE") for line in render(STATUS))


@pytest.mark.skipif(Path("/dev/tenstorrent").exists(), reason="there is a card")
def test_doctor_misses_only_a_card_that_is_configured(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text("")
    without = CliRunner().invoke(app, ["doctor", "--config", str(file)]).stdout
    assert "ok   no Tenstorrent card: there is no /dev/tenstorrent/*\n" in without
    file.write_text(CARD)
    lines = CliRunner().invoke(app, ["doctor", "--config", str(file)]).stdout.splitlines()
    at = lines.index("FIX  no Tenstorrent card: there is no /dev/tenstorrent/*")
    assert lines[at + 1].startswith("     -> load the driver (modprobe tenstorrent")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[npu.a]\nchannels = 2\n[npu.b]\nchannels = 0", "$.npu.b.channels: expected int >= 1"),
        ("npu.a.channels = 1\nnpu.b = 3", "$.npu.b: expected table, got int"),
    ],
)
def test_of_several_devices_the_wrong_one_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in caught.value.message


ONE_BANK = 'backing = "tenstorrent"\npath = "/dev/tenstorrent/0"\nchannels = 1\nchannel_bytes = "1MiB"\n'


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ('noc = ["17-14"]', 'noc = ["17-14"]', True),
        ('noc = ["17-14"]', 'noc = ["17-14"]\norigin = "512KiB"', True),
        ('noc = ["17-14"]', 'noc = ["17-14"]\norigin = "1MiB"', False),
        ('noc = ["17-14"]', 'noc = ["17-15"]', False),
    ],
)
def test_two_devices_never_give_out_the_same_bytes_of_a_card(first: str, second: str, wrong: bool) -> None:
    found = problems(f"[npu.a]\n{ONE_BANK}{first}\n[npu.b]\n{ONE_BANK}{second}\n")
    said = [problem for problem in found if "is managed by a already" in problem]
    assert (len(said) == 1, [problem for problem in found if problem not in said]) == (wrong, [])


def test_what_only_a_card_has_does_nothing_for_host_memory() -> None:
    assert problems('[npu.x]\nchannel_bytes = "1MiB"\nnoc = ["17-14"]\n') == [
        '$.npu.x.noc: does nothing with backing = "host"'
    ]
