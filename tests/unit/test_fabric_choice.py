"""Which fabric the daemon takes, with and without verbs."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.errors import ConfigError, FabricError, InvalidArgument
from kvd.fabric import choice, registry
from kvd.fabric.frames import Protection
from kvd.fabric.loopback import LoopbackFabric
from kvd.fabric.tcp import TcpFabric


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})


def choose(name: str, log: Log | None = None) -> Any:
    return choice.choose(name, rate=1e6, device="mlx5_0", port=2, gid_index=3, memory=1 << 30, log=log or Log())


def with_verbs(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    original = registry.factory
    monkeypatch.setattr(registry, "factory", lambda name: make if name == "verbs" else original(name))


def no_device(**options: Any) -> Any:
    raise FabricError("there is no RDMA device; load the driver")


def test_tcp_never_makes_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verbs(monkeypatch, lambda **options: pytest.fail("verbs was made"))
    (fabric,) = choose("tcp")
    assert isinstance(fabric, TcpFabric)
    assert fabric.rate == 1e6


def test_tcp_gets_its_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verbs(monkeypatch, no_device)
    options: Any = {"rate": 0.0, "device": "", "port": 1, "gid_index": -1, "log": Log()}
    for name in ("tcp", "auto"):
        for more, protection in (
            ({}, Protection.CHECKSUM),
            ({"checksums": False}, Protection.NONE),
            ({"level": "secret"}, Protection.SECRET),
        ):
            (fabric,) = choice.choose(name, **options, **more)
            assert isinstance(fabric, TcpFabric)
            assert fabric.protection is protection
    with pytest.raises(InvalidArgument, match="choose one of plain, authentic, secret"):
        choice.choose("tcp", **options, level="loud")


def test_auto_prefers_verbs_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def make(**options: Any) -> Any:
        made.append(options)
        return LoopbackFabric()

    with_verbs(monkeypatch, make)
    log = Log()
    assert [type(fabric) for fabric in choose("auto", log)] == [LoopbackFabric, TcpFabric]
    assert made == [{"rate": 1e6, "device": "mlx5_0", "port": 2, "gid_index": 3, "memory": 1 << 30}]
    assert log.lines == []


def test_auto_falls_back_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verbs(monkeypatch, no_device)
    log = Log()
    assert [type(fabric) for fabric in choose("auto", log)] == [TcpFabric]
    assert [line["reason"] for line in log.lines] == ["there is no RDMA device; load the driver"]


def test_auto_falls_back_without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(name: str) -> Any:
        if name == "verbs":
            raise ConfigError("the fabric 'verbs' can't be loaded: No module named 'pyverbs'; install what it needs")
        return TcpFabric

    monkeypatch.setattr(registry, "factory", factory)
    log = Log()
    assert [type(fabric) for fabric in choose("auto", log)] == [TcpFabric]
    assert "pyverbs" in log.lines[0]["reason"]


def test_verbs_without_a_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verbs(monkeypatch, no_device)
    with pytest.raises(FabricError, match="no RDMA device"):
        choose("verbs")
