"""Fabrics by name."""

import subprocess
import sys
from importlib import metadata

import pytest

from kvd.errors import ConfigError
from kvd.fabric import registry
from kvd.fabric.loopback import LoopbackFabric
from kvd.fabric.tcp import TcpFabric


def test_built_in_fabrics():
    assert {"loopback", "tcp"} <= set(registry.names())
    assert isinstance(registry.create("loopback"), LoopbackFabric)
    fabric = registry.create("tcp", rate=1e6, inflight_bytes=1 << 20)
    assert isinstance(fabric, TcpFabric)
    assert fabric.rate == 1e6


def test_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"no fabric named 'ucx'.*loopback.*tcp") as caught:
        registry.create("ucx")
    assert "tcp" in caught.value.fields["known"]


def test_unknown_option():
    with pytest.raises(ConfigError, match="colour"):
        registry.create("tcp", colour="red")


def test_third_party(monkeypatch):
    """An entry point adds a fabric, a broken one says so, and none replaces a built-in one."""
    points = [
        metadata.EntryPoint("mine", "kvd.fabric.loopback:LoopbackFabric", registry.GROUP),
        metadata.EntryPoint("broken", "kvd.fabric.nowhere:Fabric", registry.GROUP),
        metadata.EntryPoint("tcp", "kvd.fabric.loopback:LoopbackFabric", registry.GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == registry.GROUP else [])
    assert isinstance(registry.create("mine"), LoopbackFabric)
    assert isinstance(registry.create("tcp"), TcpFabric)
    with pytest.raises(ConfigError, match=r"kvd\.fabric\.nowhere"):
        registry.create("broken")


def test_nothing_is_imported_before_it_is_asked_for():
    code = "import sys; from kvd.fabric import registry; registry.names(); sys.exit('kvd.fabric.tcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
