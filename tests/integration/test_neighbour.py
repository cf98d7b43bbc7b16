"""What the kernel says of a neighbour, in a network namespace: where nobody answers, and where somebody does."""

from __future__ import annotations

import json
import subprocess
import sys

from kvd.fabric.verbs import neighbour
from tests.integration.netns import needs_netns, two_hosts
from tests.waiting import eventually

pytestmark = needs_netns

ASK = """
import json, sys
from kvd.fabric.verbs.neighbour import known
interface, source, *peers = sys.argv[1:]
print(json.dumps([known(interface, "::ffff:" + source, "::ffff:" + peer) for peer in peers]))
"""


def test_only_an_unresolved_neighbour_is_not_known() -> None:
    with two_hosts() as (host, other):

        def known(*peers: str) -> list[bool]:
            command = [*host.prefix, sys.executable, "-c", ASK, host.link, host.address, *peers]
            return list(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

        nobody, routed = "10.77.0.9", "10.78.0.1"
        host.run("ip", "route", "add", "10.78.0.0/24", "via", nobody)
        assert known(host.address, nobody, routed) == [True, False, False]
        host.run("ip", "neighbour", "replace", nobody, "lladdr", "02:00:00:00:00:01", "dev", host.link)
        assert known(nobody, routed) == [True, True]  # the gateway's address counts
        eventually("the question has made the kernel ask for it", lambda: known(other.address) == [True])


def test_what_can_not_be_asked_counts_as_known() -> None:
    assert neighbour.known("no such link", "::ffff:10.0.0.1", "::ffff:10.0.0.2")
    assert neighbour.known("lo", "::ffff:127.0.0.1", "::1")
