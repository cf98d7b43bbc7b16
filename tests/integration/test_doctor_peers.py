"""``kvd doctor`` about peers: each way in which one can't be had, and that a live session is left alone."""

from __future__ import annotations

import asyncio
import base64
import socket
from pathlib import Path
from typing import Any

import pytest

from kvd.cli import doctor_peers
from kvd.config import Config, parse
from tests.integration.peer_nodes import FINGERPRINT, KEY, OTHER, both_loops, free_port, pair


def config(folder: Path, peers: dict[str, str], key: bytes = KEY) -> Config:
    file = folder / "key"
    file.touch(mode=0o600)
    file.write_bytes(base64.b64encode(key) + b"\n")
    listed = "\n".join(f'{node} = "{address}"' for node, address in peers.items())
    return parse(f'[node]\nid = "a"\n[peers]\nkey_file = "{file}"\n[peers.static]\n{listed}\n')


async def lines(configuration: Config, **fingerprint: Any) -> list[tuple[bool, str]]:
    shown = {**FINGERPRINT, **fingerprint}
    found = await asyncio.to_thread(doctor_peers.examine_peers, configuration, shown)
    return [(finding.ok, f"{finding.what} -> {finding.fix}") for finding in found]


@both_loops
async def test_a_peer_that_answers_is_fine_and_its_sessions_stay(start, tmp_path):
    a, b, at_a, at_b = await pair(start, keys=[keys_of(tmp_path)[0]])
    ((ok, line),) = await lines(config(tmp_path, {"b": b.address}))
    assert ok, line
    assert line.startswith(f"peer b at {b.address}: answers, fabric tcp")
    assert (at_a.error, at_b.error) == (None, None)
    assert [status.node for status in b.peers.statuses()] == ["a"], "it left no trace"
    assert a.peers.sessions() == [at_a]


@pytest.mark.parametrize(
    ("name", "key", "fingerprint", "said", "fix"),
    [
        ("b", OTHER, {}, "AUTHENTICATION_FAILED", "sha256sum"),
        ("c", KEY, {}, "dialled node c and reached node b", "release"),
        ("b", KEY, {"layout": 9}, "FINGERPRINT_MISMATCH", "release"),
    ],
    ids=["key", "node", "fingerprint"],
)
@both_loops
async def test_what_two_nodes_disagree_on(start, tmp_path, name, key, fingerprint, said, fix):
    b = await start("b", keys=[keys_of(tmp_path)[0]])
    ((ok, line),) = await lines(config(tmp_path, {name: b.address}, key), **fingerprint)
    assert not ok
    assert said in line
    assert fix in line


@both_loops
async def test_nobody_listens_or_nobody_answers(start, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_peers, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        peers = {"deaf": f"127.0.0.1:{free_port()}", "mute": mute}
        (_, deaf), (_, never) = await lines(config(tmp_path, peers))
    assert "connection refused" in deaf
    assert "systemctl status kvd" in deaf
    assert f"peer mute at {mute}: takes connections and does not answer" in never


def keys_of(folder: Path) -> list[bytes]:
    """As the daemon reads the file of :func:`config`."""
    from kvd.keys import read_keys

    return read_keys(config(folder, {}).peers.key_file)
