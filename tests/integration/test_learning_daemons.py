"""Daemons that learn: importance follows the workload, the source hears of it, and a restart forgets nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.demo.orders import on_demand_ratio
from kvd.importance.counts import SelectionCounts
from kvd.importance.matrix import ALWAYS_LAYERS, ImportanceMatrix
from kvd.profiling import files
from kvd.profiling.recorder import Recorder
from kvd_client import PrefillTransfer
from kvd_client.errors import InvalidArgument, NotFound
from kvd_client.protocol import RankBlocks
from tests.integration.daemons import DaemonProcess, small_spec, two_daemons
from tests.waiting import eventually

WAIT_S = 30.0
SPEC = small_spec(layers=6)
TOKENS, BLOCKS, K, STEPS = 256, 64, 51, 3
HALF_LIFE = 8


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    folder = tmp_path_factory.mktemp("learning")
    with two_daemons(
        folder,
        selective={"mode": "parallel", "blocks": BLOCKS},
        profile={"half_life": f"{HALF_LIFE} requests"},
    ) as pair:
        yield pair


class Workload:
    """Requests whose tokens are selected by a likelihood of their own; ``name`` is its seed."""

    def __init__(self, name: str) -> None:
        self._rng = np.random.default_rng(sum(name.encode()))
        rough = self._rng.random((SPEC.layers, BLOCKS)) ** 4 + 0.02
        self._likely = np.repeat(rough, TOKENS // BLOCKS, axis=1)
        self._likely /= self._likely.sum(axis=1, keepdims=True)

    def request(self) -> list[list[Any]]:
        """Of each step and layer a KV index; a request has a liking of its own on top."""
        likely = self._likely * self._rng.uniform(0.3, 1.7, self._likely.shape)
        likely /= likely.sum(axis=1, keepdims=True)

        def index(layer: int) -> Any:
            rows = [self._rng.choice(TOKENS, K, replace=False, p=likely[layer]) for _ in range(SPEC.kv_heads)]
            return np.sort(np.array(rows, np.int32), axis=1)

        return [[index(layer) for layer in range(SPEC.layers)] for _ in range(STEPS)]


def counts_of(steps: list[list[Any]]) -> Any:
    found = np.zeros((SPEC.layers, BLOCKS), np.int64)
    for step in steps:
        for layer in range(ALWAYS_LAYERS, SPEC.layers):
            np.add.at(found[layer], step[layer].ravel() * BLOCKS // TOKENS, 1)
    return found


def fresh_profile(workload: Workload, requests: int = 30) -> ImportanceMatrix:
    counts = SelectionCounts(SPEC.layers, BLOCKS)
    for _ in range(requests):
        steps = workload.request()
        for layer, row in enumerate(counts_of(steps)):
            counts.add(layer, row, length=TOKENS, heads=SPEC.kv_heads, steps=STEPS)
    return counts.matrix()


NUMBERS = itertools.count()


def serve(clients: tuple[Any, Any], steps: list[list[Any]]) -> None:
    """One request from its opening to its release, with what its decode selects."""
    number = next(NUMBERS)
    how: dict[str, Any] = {"selector": "quest"}
    with (
        clients[1].decode(f"r{number}", SPEC, [TOKENS], source="prefill", landing_entries=K, **how) as decode,
        clients[0].prefill(f"r{number}", SPEC, [TOKENS], **how) as prefill,
    ):
        for layer in range(SPEC.layers):
            prefill.layer_ready(layer)
        prefill.finish(wait=False)
        for layer in range(ALWAYS_LAYERS):
            decode.wait_ready(layer, timeout_s=WAIT_S)
        for step in steps:
            for layer in range(ALWAYS_LAYERS, SPEC.layers):
                decode.select(layer, step[layer], timeout_s=WAIT_S)
        decode.release()


def learnt(client: Any, steps: list[list[Any]]) -> float:
    """The on-demand ratio with half of the blocks sent by what the daemon has learnt."""
    profile = files.decode(client.export_profile("test", "quest", learnt=True))
    return ratio(profile.importance.nearest(TOKENS).matrix, steps)


def ratio(matrix: ImportanceMatrix, steps: list[list[Any]]) -> float:
    found = on_demand_ratio(counts_of(steps), matrix.order())
    assert found is not None
    return found


def test_importance_follows_the_workload(daemons: tuple[DaemonProcess, DaemonProcess], tmp_path: Path) -> None:
    code, dialogue = Workload("code"), Workload("dialogue")
    fresh, before = fresh_profile(dialogue), fresh_profile(code)
    recorder = Recorder(SPEC.layers, blocks=BLOCKS)
    with recorder.batch([TOKENS]) as recording:
        for _ in range(20):
            for step in code.request():
                for layer in range(ALWAYS_LAYERS, SPEC.layers):
                    recording.add(layer, step[layer])
    start = recorder.profile(SPEC, selector="quest", created=datetime.now(UTC))
    with daemons[0].client() as source, daemons[1].client() as sink:
        for client in (source, sink):
            client.install_profile(files.encode(start))
        with pytest.raises(NotFound):
            sink.export_profile("test", "quest", learnt=True)
        for _ in range(3):
            serve((source, sink), code.request())
        # The workload changes.
        test = [dialogue.request() for _ in range(20)]

        def mean(of: Callable[[list[list[Any]]], float]) -> float:
            return float(np.mean([of(steps) for steps in test]))

        aim, stale = mean(lambda steps: ratio(fresh, steps)), mean(lambda steps: ratio(before, steps))
        assert stale > 1.3 * aim  # else there is nothing to learn
        needed, now = 0, mean(lambda steps: learnt(sink, steps))
        assert now > 1.2 * aim
        while now > 1.05 * aim:
            assert needed < 6 * HALF_LIFE, f"{now:.3f} after {needed} requests, {aim:.3f} with a fresh profile"
            serve((source, sink), dialogue.request())
            needed += 1
            now = mean(lambda steps: learnt(sink, steps))
        print(f"stale {stale:.3f}, fresh {aim:.3f}, within 5 % after {needed} requests")
        # The source ranks, and so it has to know.
        eventually(
            "the source hears of it",
            lambda: source.status().counters.get("learnt_heard", 0) and source.status().learnt[0].heard == 3 + needed,
        )
        assert mean(lambda steps: learnt(source, steps)) < 1.1 * aim
        (status,) = sink.status().learnt
        assert (status.model, status.selector, status.low, status.high) == ("test", "quest", 256, 512)
        assert (status.requests, status.heard, status.tokens) == (3 + needed, 0, (3 + needed) * STEPS)
        assert sink.status().recordings == []
    shown = CliRunner().invoke(app, ["status", "--socket", daemons[1].socket]).stdout
    assert "LEARNT  SELECTOR  PROMPT TOKENS  REQUESTS  OF PEERS" in shown
    file = tmp_path / "learnt.kvdprofile"
    ask = ["profile", "export", "--model-id", "test", "--socket", daemons[1].socket, "-o", str(file)]
    done = CliRunner().invoke(app, [*ask, "--selector", "quest"])
    assert done.exit_code == 0, done.output
    assert f"{file}: written, learnt from {3 + needed} requests" in done.stdout
    assert CliRunner().invoke(app, ["profile", "check", str(file)]).exit_code == 0
    missing = CliRunner().invoke(app, [*ask, "--selector", "hata"])
    assert missing.exit_code == 1
    assert "learnt so far: test (quest)" in missing.stderr


def test_a_restart_forgets_nothing_and_damage_is_begun_anew(tmp_path: Path) -> None:
    state = tmp_path / "state"
    steps = Workload("prose").request()
    with two_daemons(tmp_path, selective={"mode": "parallel", "blocks": BLOCKS}, profile={"state": str(state)}) as pair:
        # Both daemons of this test would write the same folder; the source learns nothing before the sink has saved.
        with pair[0].client() as source, pair[1].client() as sink:
            serve((source, sink), steps)
            known = sink.status().learnt
            before = learnt(sink, steps)
        assert pair[0].stop() == 0
        assert pair[1].stop() == 0
        (file,) = state.glob("*.kvdlearnt")
        pair[1].start()
        with pair[1].client() as sink:
            (again,) = sink.status().learnt
            assert (again.requests, again.tokens) == (known[0].requests, known[0].tokens)
            assert learnt(sink, steps) == before
        assert pair[1].stop() == 0
        file.write_bytes(file.read_bytes()[:-7])
        pair[1].start()
        with pair[1].client() as sink:
            status = sink.status()
            assert status.learnt == []
            assert (status.health, status.counters["learnt_damaged"]) == ("ok", 1)
        said = [line for line in pair[1].log.read_text().splitlines() if "begun anew" in line]
        assert len(said) == 1
        assert str(file) in said[0]


def test_who_does_not_want_it_has_nobody_count(tmp_path: Path) -> None:
    with (
        two_daemons(tmp_path, selective={"mode": "parallel"}, profile={"learn": False}) as pair,
        pair[0].client() as source,
        pair[1].client() as sink,
    ):
        serve((source, sink), Workload("prose").request())
        assert sink.status().learnt == source.status().learnt == []
        with pytest.raises(NotFound, match="does not learn"):
            sink.export_profile("test", "quest", learnt=True)


def test_a_ranking_through_the_daemon(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    with daemons[0].client() as source, daemons[1].client() as sink:
        shares = np.zeros((1, 8), np.float32)
        shares[0, 3] = 1
        for mode, wanted in (("full", False), ("parallel", True)):
            with sink.decode(mode, SPEC, [TOKENS], source="prefill", mode=mode) as decode:
                prefill = source.prefill(mode, SPEC, [TOKENS])
                assert prefill.rank(2, shares) in (True, wanted)  # it may not be paired yet
                for layer in range(2):
                    prefill.layer_ready(layer)
                decode.wait_ready(1, timeout_s=WAIT_S)
                assert prefill.rank(3, shares) is wanted
                with pytest.raises(InvalidArgument, match="layer 6"):
                    prefill.rank(6, shares)
                with pytest.raises(InvalidArgument, match=r"\(1, blocks\)"):
                    prefill.rank(2, np.zeros((3, 8)))
                with pytest.raises(InvalidArgument, match="block 3"):
                    prefill.rank(2, 2 * shares)
                with pytest.raises(InvalidArgument, match="weight"):
                    prefill.rank(2, shares, weight=-1)
                fields: dict[str, Any] = {"layer": 2, "blocks": 8, "shares": bytes(32), "weight": 0.5}
                connection = prefill._connection
                with pytest.raises(InvalidArgument, match="31 bytes"):
                    connection.request(RankBlocks(transfer=prefill.id, **(fields | {"shares": bytes(31)})))
                with pytest.raises(NotFound):
                    connection.request(RankBlocks(transfer=999, **fields))
                status = next(t for t in source.status().transfers if t.request == mode)
                assert (status.paths.get("ranked", 0) > 0) is wanted
            prefill.release()


def test_a_ranking_that_nobody_waits_for(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    with daemons[0].client() as source, daemons[1].client() as sink:
        shares = np.full((1, 8), 0.5, np.float32)
        for mode, wanted in (("full", False), ("parallel", True)):
            with sink.decode(mode, SPEC, [TOKENS], source="prefill", mode=mode) as decode:
                prefill = source.prefill(mode, SPEC, [TOKENS])
                for layer in range(2):
                    prefill.layer_ready(layer)
                decode.wait_ready(1, timeout_s=WAIT_S)

                def told(prefill: PrefillTransfer = prefill, **how: Any) -> bool:
                    return prefill.rank(3, shares, wait=False, **how)

                eventually("the answer is known", lambda told=told, wanted=wanted: told() is wanted, WAIT_S)
                source.status()  # by then all have been answered
                assert told() is wanted

                def refused(told: Callable[..., bool] = told) -> None:
                    told(weight=-1)
                    eventually("the error is known", lambda: told() is None, WAIT_S)

                with pytest.raises(InvalidArgument, match="weight"):
                    refused()
                for _ in range(50):
                    told()
            prefill.release()
            source.status()
            assert source._connection._replies == {}, "nobody looks at the last answers"
