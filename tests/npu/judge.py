"""Asks Tenstorrent's library, where there is a Python that has it.

``KVD_TTNN_PYTHON`` names that Python; else ``.cache/ttnn`` is tried, a virtual environment of Python 3.12 with what
``pip install --no-deps ttnn numpy`` puts there.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def python() -> str:
    """The Python to ask, or skip the test."""
    found = os.environ.get("KVD_TTNN_PYTHON") or str(ROOT / ".cache" / "ttnn" / "bin" / "python")
    if not Path(found).exists():
        pytest.skip("no Python with ttnn: set KVD_TTNN_PYTHON, or put a virtual environment into .cache/ttnn")
    probe = subprocess.run(
        [found, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('ttnn') is None)"],
        capture_output=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"{found} has no ttnn: run pip install --no-deps ttnn numpy there (Python 3.12)")
    return found


def ask(folder: Path, tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ttnn says of each tensor: ``shape``, ``dtype``, ``layout``, ``raw`` or ``given``, as in ``ttnn_judge``."""
    asked, answers = folder / "asked.npz", folder / "answers.npz"
    fields = {f"{name}_{number}": value for number, one in enumerate(tensors) for name, value in one.items()}
    np.savez(asked, **fields)
    script = Path(__file__).with_name("ttnn_judge.py")
    done = subprocess.run(
        [python(), str(script), str(asked), str(answers)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.load(answers)
    return [
        {name: found[f"{name}_{number}"] for name in ("values", "encoded") if f"{name}_{number}" in found.files}
        for number in range(len(tensors))
    ]


def in_page_order(banks: list[Any], stride: int, pages: int, page_bytes: int) -> Any:
    """An interleaved tensor's pages as the host has them: page ``p`` is in bank ``p % banks``."""
    parts = [banks[page % len(banks)][page // len(banks) * stride :][:page_bytes] for page in range(pages)]
    return np.concatenate(parts)
