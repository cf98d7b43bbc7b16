"""Two daemons that share a key with somebody who lies, and the honest transfer between them that goes on meanwhile."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.daemons import two_daemons
from tests.integration.fault_helpers import LONG, RATE, Both, Pair, all_is_well, key_file
from tests.integration.raw_peer import RawPeer


class Keyed(Pair):
    key: bytes

    def liar(self, daemon: Any, node: str = "liar") -> RawPeer:
        return RawPeer(daemon, daemon.listen, self.key, node)


@contextlib.contextmanager
def keyed_daemons(folder: Path) -> Iterator[Keyed]:
    key = secrets.token_hex(32)
    config: dict[str, dict[str, Any]] = {
        "peers": {"key_file": key_file(folder, key), "heartbeat_s": 0.5, "timeout_s": 10.0},
        "transfer": {"rendezvous_s": 5.0},
        "memory": {"pool": "128MiB", "arena": "64MiB"},
        "fabric": {"rate": RATE},
    }
    with two_daemons(folder, **config) as daemons:
        keyed = Keyed(daemons[0], daemons[1])
        keyed.key = key.encode()
        keyed.settle()
        yield keyed


@contextlib.contextmanager
def honest_transfer(pair: Keyed, name: str) -> Iterator[Both]:
    """One that is under way while the test of this name lies, and whole when it has."""
    with Both(pair, f"honest {name}"[:200], tokens=LONG // 8) as both:
        both.bring_to("mid-way")
        yield both
        told = both.ends(time.monotonic())
        assert {answer.code for answer in told.values()} == {"OK"}
    all_is_well(pair)
