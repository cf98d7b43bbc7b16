"""Hosts of a test: network namespaces of this machine, joined by a veth pair, each with an address of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def why_not() -> str:
    """Why namespaces can't be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip (Debian: iproute2)"
    return ""


needs_netns = [pytest.mark.netns, pytest.mark.skipif(bool(why_not()), reason=why_not() or "can be made")]


@dataclasses.dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str

    @property
    def prefix(self) -> list[str]:
        """Put before a command, runs it on this host."""
        return ["ip", "netns", "exec", self.name]

    def run(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True, capture_output=True, text=True)

    def shape(self, rate: str, burst: str = "64kb", latency: str = "50ms", *, bands: bool = False) -> None:
        """Limit what leaves this host (token bucket). ``bands``: what waits is sorted by priority, as Linux does where
        the device limits the rate."""
        bucket = ["handle", "1:", "tbf", "rate", rate, "burst", burst, "latency", latency]
        self.run("tc", "qdisc", "replace", "dev", self.link, "root", *bucket)
        if bands:
            self.run("tc", "qdisc", "replace", "dev", self.link, "parent", "1:1", "pfifo_fast")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts on one link; gone afterwards, with whatever still runs in them left to its owner."""
    tag = f"{os.getpid() % 100000}"
    hosts = [Host(f"kvd{side}{tag}", f"10.77.0.{number}", f"kvd{side}{tag}") for number, side in ((1, "a"), (2, "b"))]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ip("link", "add", hosts[0].link, "type", "veth", "peer", "name", hosts[1].link)
        for host in hosts:
            ip("link", "set", host.link, "netns", host.name)
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.link)
            host.run("ip", "link", "set", host.link, "up")
            host.run("ip", "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
