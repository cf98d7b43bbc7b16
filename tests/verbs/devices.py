"""The devices of the verbs tests."""

from __future__ import annotations

import pytest

DEVICES = ("rxe0", "rxe1")


def _present() -> list[str]:
    try:
        from kvd.fabric.verbs import binding
    except ImportError:
        return []
    return binding.device_names()


needs_devices = pytest.mark.skipif(
    not set(DEVICES) <= set(_present()),
    reason="no soft-RoCE devices here: python -m tests.verbs.run -- pytest tests/verbs",
)
