"""What is never loaded: memory and seconds of a daemon that lives beside every model, and of every client's start."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvd_client


def test_the_daemon_imports_no_model_library() -> None:
    code = (
        "import sys\n"
        "import kvd.run, kvd.cli.serve\n"
        "from kvd.fabric import registry\n"
        "[registry.create(name) for name in registry.names() if name in ('tcp', 'loopback')]\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'matplotlib', 'kvd.demo', 'kvd.profiling.run'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "loaded: []\n", done.stderr


def test_importing_the_client_imports_nothing_heavy() -> None:
    code = "import sys, kvd_client; print(sorted({'kvd', 'torch', 'uvloop', 'numpy', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_clients_names_are_all_there_and_documented() -> None:
    assert set(kvd_client.__all__) <= set(dir(kvd_client))
    undocumented = [name for name in kvd_client.__all__ if not getattr(kvd_client, name).__doc__]
    assert undocumented == []
    with pytest.raises(AttributeError, match="no attribute 'PrefilTransfer'"):
        kvd_client.PrefilTransfer  # noqa: B018


def test_every_package_is_installed() -> None:
    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [
        ".".join(folder.relative_to(root).parts)
        for package in ("kvd", "kvd_client")
        for folder in sorted(path.parent for path in (root / package).rglob("__init__.py"))
    ]
    assert sorted(listed) == sorted([*found, "kvd_kernels"])
