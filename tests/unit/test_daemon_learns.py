"""A daemon and what its peers say they have learnt: used, refused with a reason, or nobody's business."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvd.config import parse, resolve
from kvd.daemon import Daemon
from kvd.wire.messages import Learnt

GOOD = Learnt(
    model="m", revision="", selector="quest", layers=4, kv_heads=2, entry_bytes=64, low=64, blocks=4, requests=3.0,
    tokens=30.0, scale=0.5, rates=bytes(range(16)),
)  # fmt: skip


def daemon(folder: Path, learn: bool) -> Daemon:
    text = f'[api]\nsocket = "{folder}/kvd.sock"\n[memory]\npool = "64MiB"\narena = "16MiB"\nhuge_pages = "never"\n'
    return Daemon(resolve(parse(f"{text}[profile]\nlearn = {str(learn).lower()}\n"), environ={}))


@pytest.mark.parametrize("learn", [True, False])
async def test_what_peers_have_learnt(tmp_path: Path, learn: bool) -> None:
    one, session = daemon(tmp_path, learn), SimpleNamespace(node="decode-0", error=None)
    messages: list[Any] = [GOOD, msgspec.structs.replace(GOOD, blocks=5), msgspec.structs.replace(GOOD, version=9)]
    for message in messages:
        one._peer_message(session, message)
    status = one.status()
    heard = [(learnt.model, learnt.requests, learnt.heard) for learnt in status.learnt]
    counted = {name: count for name, count in status.counters.items() if name.startswith("learnt")}
    assert heard == ([("m", 3.0, 3.0)] if learn else [])
    assert counted == ({"learnt_heard": 1, "learnt_refused": 2} if learn else {})
    assert status.health == "ok"
    one._pool.close()
