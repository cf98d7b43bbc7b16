"""`kvd doctor` on hosts made of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd.cli import config as configuration
from kvd.errors import ConfigError
from kvd.fabric.verbs import doctor
from kvd.fabric.verbs.doctor import Finding


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trial", lambda *args, **others: Finding("verbs work"))


def host(folder: Path, *, devices: tuple[str, ...] = (), files: tuple[str, ...] = (), gpu: bool = False) -> Any:
    for name in devices:
        (folder / "sys/class/infiniband" / name).mkdir(parents=True)
    (folder / "dev/infiniband").mkdir(parents=True)
    for name in files:
        (folder / "dev/infiniband" / name).touch()
    if gpu:
        (folder / "dev/nvidiactl").touch()
    return {"sys": folder / "sys", "dev": folder / "dev"}


def problems(**options: Any) -> list[str]:
    found = doctor.examine(**{"pool": 1 << 30, "memlock": None, **options})
    return [f"{finding.what}; {finding.fix}" for finding in found if not finding.ok]


def test_a_good_host(tmp_path: Path) -> None:
    assert problems(**host(tmp_path, devices=("mlx5_0",), files=("uverbs0",))) == []


def test_everything_at_once(tmp_path: Path) -> None:
    found = problems(**host(tmp_path, devices=("mlx5_0",), gpu=True), device="mlx5_1", memlock=65536)
    assert len(found) == 4
    assert "set fabric.device to one of mlx5_0" in found[0]
    assert "DeviceAllow=char-infiniband_verbs" in found[1]
    assert "65536 bytes, but the pool has 1073741824; raise it: LimitMEMLOCK=infinity" in found[2]
    assert "modprobe nvidia-peermem" in found[3]


def test_no_device(tmp_path: Path) -> None:
    (found,) = problems(**host(tmp_path))
    assert "no RDMA device in the kernel" in found


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (found,) = problems(**host(tmp_path, devices=("mlx5_0",), files=("uverbs0",)))
    assert "no permission on" in found
    assert "group (usually rdma)" in found


def test_an_error_of_the_fabric_is_split_into_what_and_fix() -> None:
    assert doctor._split(doctor.FabricError("a; b; do this")) == Finding("a; b", "do this", "fabric.name")


@pytest.mark.parametrize(("dmabufs", "cards", "fix"), [(True, True, ""), (False, False, ""), (False, True, "tcp")])
def test_a_device_without_dma_bufs_matters_where_a_card_is_to_be_reached(dmabufs: bool, cards: bool, fix: str) -> None:
    found = doctor._worked("rxe0 port 1", "any size", dmabufs, cards)
    assert ("takes no dma-bufs" in found.what) == (not dmabufs)
    assert fix in found.fix
    assert found.ok == (not fix)


@pytest.mark.parametrize("name", ["verbs", "auto", "tcp"])
def test_config_check_tries_what_the_configuration_wants(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With verbs a cause is an error, with auto a warning, and tcp looks for no device."""
    findings = [Finding("no RDMA device", "load the driver", "fabric.name"), Finding("no peer memory", "modprobe it")]
    monkeypatch.setattr(doctor, "examine", lambda **options: iter(findings))
    path = tmp_path / "kvd.toml"
    path.write_text(f'[node]\nid = "a"\n[memory]\npool = "64MiB"\narena = "16MiB"\n[fabric]\nname = "{name}"\n')
    if name == "verbs":
        with pytest.raises(ConfigError, match=r"\$\.fabric\.name: no RDMA device; load the driver"):
            configuration.check(path)
    else:
        assert configuration.check(path) == 0
    said = capsys.readouterr().err
    assert said.count("warning") == {"verbs": 1, "auto": 2, "tcp": 0}[name]
    assert ("auto means tcp here: no RDMA device; load the driver" in said) == (name == "auto")
