"""Bugs to plant, each of which the worlds must find: ``python -m tests.simulation.run --count 1000 --plant NAME``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from . import queue_pairs, selective, tensors, transfers

PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    **transfers.PLANTED,
    **selective.PLANTED,
    **tensors.PLANTED,
    **queue_pairs.PLANTED,
}
"""Each with what the worlds say of it: a regular expression."""
