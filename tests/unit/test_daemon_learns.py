"""A daemon and what its peers say they have learnt: used, refused with a reason, or nobody's business."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.config import parse, resolve
from kvd.daemon import Daemon
from kvd.errors import PeerLost
from kvd.importance.matrix import ImportanceMatrix
from kvd.learnt_exchange import LearntExchange, _save
from kvd.wire.messages import Learnt
from kvd_client.spec import KVSpec

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


async def test_a_session_that_ends_meanwhile_does_not_end_the_telling(tmp_path: Path, monkeypatch: Any) -> None:
    one, told, heard = daemon(tmp_path, True), [], asyncio.Event()
    learner = one._profiles.learner
    assert learner is not None
    exchange = LearntExchange(learner, lambda: [SimpleNamespace(node="p", send=send)])  # type: ignore[list-item]

    def send(message: Any) -> None:
        told.append(message)
        heard.set()
        raise PeerLost("the session has ended")

    monkeypatch.setattr("kvd.learnt_exchange.TELL_S", 0.0)
    telling = asyncio.create_task(exchange.run())
    spec = KVSpec(layers=4, kv_heads=2, entry_bytes=64, dtype="float16", model="m")
    for _ in range(2):
        rates = ImportanceMatrix(np.full((4, 4), 0.5, np.float32))
        learner.report(spec, "quest", 100, rates, requests=1.0, tokens=1.0, source="p", now=1.0)
        await asyncio.wait([telling, asyncio.ensure_future(heard.wait())], return_when=asyncio.FIRST_COMPLETED)
        heard.clear()
    assert len(told) == 2
    telling.cancel()
    one._pool.close()


async def test_a_full_disk_shows_in_the_status_until_it_is_written(tmp_path: Path) -> None:
    one = daemon(tmp_path, True)
    assert one._learnt is not None
    (tmp_path / "file").write_text("no folder")
    one._learnt.trouble = _save([(tmp_path / "file/state", b"x"), (tmp_path / "good", b"y")])
    assert (tmp_path / "good").read_bytes() == b"y"
    (reason,) = one.status().reasons
    assert reason.startswith("what was learnt is not saved and would not outlive a restart: ")
    one._learnt.trouble = _save([(tmp_path / "good", b"z")])
    assert (one.status().reasons, one.status().health) == ([], "ok")
    one._pool.close()
