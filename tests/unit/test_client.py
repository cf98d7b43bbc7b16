"""Where a client looks for its daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd_client import client as module
from kvd_client.client import default_socket


def test_the_default_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = tmp_path / "system.sock"
    monkeypatch.setattr(module, "SYSTEM_SOCKET", str(system))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    assert default_socket() == str(system)
    own = tmp_path / "kvd" / "kvd.sock"
    own.parent.mkdir()
    own.touch()
    assert default_socket() == str(own)
    system.touch()
    assert default_socket() == str(system)
    monkeypatch.setenv("KVD_SOCKET", "/elsewhere")
    assert default_socket() == "/elsewhere"
