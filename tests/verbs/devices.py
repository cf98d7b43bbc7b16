"""The devices of the verbs tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

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


def _ip(command: str) -> None:
    subprocess.run(["/usr/sbin/ip", *command.split()], check=True)


@contextlib.contextmanager
def link_down() -> Iterator[None]:
    """Nothing gets from one device to the other."""
    _ip("link set veth1 down")
    try:
        yield
    finally:
        _ip("link set veth1 up")
        # The routes of guest/net.sh, which went with the link.
        _ip("route replace 10.77.0.2 dev veth0 src 10.77.0.1 table 101")
        _ip("route replace 10.77.0.1 dev veth1 src 10.77.0.2 table 102")
