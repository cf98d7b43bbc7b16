"""The devices of the verbs tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def packets_vanish() -> Iterator[None]:
    """Each device's packets leave, and are dropped where they arrive, as by a firewall; the links are up."""
    paths = [Path(f"/proc/sys/net/ipv4/conf/veth{number}/accept_local") for number in range(2)]
    for path in paths:  # guest/net.sh: both ends are this host's, so that a packet's source is an address of its own
        path.write_text("0")
    try:
        yield
    finally:
        for path in paths:
            path.write_text("1")


@contextlib.contextmanager
def large_packets_vanish() -> Iterator[None]:
    """What rxe0 sends is dropped if it is longer than Ethernet's usual MTU, as by a switch."""
    _ip("link set veth1 mtu 1500")
    try:
        yield
    finally:
        _ip("link set veth1 mtu 4500")
