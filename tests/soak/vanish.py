"""A process that opens a transfer and is gone; in a module of its own, so that it can be spawned."""

from __future__ import annotations

import contextlib
import os
import signal

from kvd_client import Client
from kvd_client.errors import KvdError
from tests.integration.daemons import random_layer, small_spec

SPEC = small_spec(layers=6, heads=2, entry_bytes=64)
TOKENS = 96


def vanish(socket: str, request: str) -> None:
    """A process that opens a transfer and is gone."""
    with contextlib.suppress(KvdError):
        client = Client(socket, name="vanishing")
        client.prefill(request, SPEC, [TOKENS]).put_layer(0, entries=random_layer(0, 1, TOKENS, 2, 64))
    os.kill(os.getpid(), signal.SIGKILL)
