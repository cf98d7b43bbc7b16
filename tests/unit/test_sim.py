"""The planning simulator: its clock, its links, and what whole clusters come to."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvd.cli.main import app
from kvd.cli.simulate import shape_of
from kvd.errors import InvalidArgument
from kvd.sim.clock import Clock
from kvd.sim.cluster import Cluster
from kvd.sim.network import Nic, Piece
from kvd.sim.report import summarise, to_json
from kvd.sim.workload import MODELS, Scenario, Shape, requests, synthetic_importance, wanted
from kvd_client.spec import MAX_TOKENS

SMALL = Scenario(
    model="small",
    shape=Shape(8, 2, 256),
    link_rate=4e6,
    arrivals=4.0,
    duration_s=5.0,
    prompt_tokens=1000,
    output_tokens=20,
    prefill_rate=2000.0,
    step_s=0.05,
)


def test_long_prompts_are_as_long_as_was_asked() -> None:
    long = dataclasses.replace(SMALL, prompt_tokens=4 << 20, prompt_sigma=0.1)
    assert min(request.tokens for request in requests(long)) > 2 << 20
    longest = dataclasses.replace(long, prompt_tokens=MAX_TOKENS)
    assert max(request.tokens for request in requests(longest)) == MAX_TOKENS


def test_calls_come_by_time_and_then_in_the_order_asked() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.at(1.0, lambda: clock.after(0.5, seen.append, "between"))
    clock.run()
    assert seen == ["first", "second", "between", "late"]
    assert clock.now == 2.0


def test_urgent_pieces_overtake_and_a_receiver_is_shared() -> None:
    clock = Clock()
    one, two, sink = (Nic(clock, 100.0, 0.5) for _ in range(3))
    seen: list[tuple[str, float]] = []

    def piece(name: str, nbytes: int) -> Piece:
        return Piece(sink, nbytes, lambda: seen.append((name, clock.now)))

    one.send(piece("bulk", 100), urgent=False)
    one.send(piece("bulk again", 100), urgent=False)
    one.send(piece("urgent", 50), urgent=True)
    two.send(piece("another's", 100), urgent=False)
    clock.run()
    # The first bulk piece was on its way; the urgent one goes next. Both senders' first pieces end at 1.0, and the
    # receiver takes one after the other.
    assert seen == [("bulk", 1.5), ("another's", 2.5), ("urgent", 3.0), ("bulk again", 4.0)]
    assert (one.bytes_sent, one.busy_s) == (250, 2.5)


def test_a_dropped_piece_is_passed_over() -> None:
    clock = Clock()
    one, sink = Nic(clock, 100.0, 0.0), Nic(clock, 100.0, 0.0)
    seen: list[str] = []
    one.send(Piece(sink, 100, lambda: seen.append("first")), urgent=False)
    second = Piece(sink, 100, lambda: seen.append("second"))
    one.send(second, urgent=False)
    second.dropped = True
    clock.run()
    assert seen == ["first"]
    assert clock.now == 1.0


def test_what_steps_select() -> None:
    scenario = dataclasses.replace(SMALL, selected=0.2)
    known = synthetic_importance(8, 3)
    for request in requests(scenario):
        share = wanted(scenario, known, request)
        assert share.min() >= 0
        assert share.max() <= 1
        assert (share[:2] == 1).all()
        assert share[2:].mean(axis=1) == pytest.approx(np.full(6, 0.2), rel=0.01)


@pytest.mark.parametrize("mode", ["full", "partial", "profile", "parallel", "speculative"])
@pytest.mark.parametrize("speculative", ["adaptive", "windows"])
def test_every_request_ends_and_everything_is_given_back(mode: str, speculative: str) -> None:
    cluster = Cluster(dataclasses.replace(SMALL, mode=mode, speculative=speculative))
    measured = cluster.run()
    assert len(measured) == cluster.arrived == len(list(requests(SMALL))) > 5
    assert {one.code for one in measured} == {"OK"}
    for node in cluster.prefill + cluster.decode:
        assert not node.parts
        assert not node.core.unfinished
    assert cluster.running == 0
    for one in measured:
        assert 0 < one.prefill_s <= one.ttft_s + 1e-9
        assert one.ttft_s < one.ttst_s <= one.done_s


def test_one_request_alone_takes_what_arithmetic_says() -> None:
    """Full transfer: TTST = max(T_p, T_t) + a step. Selective transfer: no less than the share f that must cross."""
    alone = dataclasses.replace(
        SMALL, arrivals=1.0, duration_s=1e-9, prompt_sigma=0.0, prefill_nodes=1, decode_nodes=1, metadata=0.0
    )
    found = {}
    for mode in ("full", "speculative"):
        cluster = Cluster(dataclasses.replace(alone, mode=mode))
        cluster.clock.at(0.0, cluster._arrive, dataclasses.replace(next(requests(SMALL)), arrives_s=0.0, tokens=1000))
        (found[mode],) = cluster.run()
    transfer_s = 1000 * SMALL.token_bytes / SMALL.link_rate
    assert transfer_s > 4 * found["full"].prefill_s
    assert found["full"].ttst_s == pytest.approx(transfer_s + SMALL.step_s, rel=0.05)
    share = 2 / 8 + 0.1 * 6 / 8
    assert share * transfer_s + SMALL.step_s < found["speculative"].ttst_s < 0.75 * found["full"].ttst_s
    assert found["speculative"].local_s >= transfer_s


def test_the_same_seed_gives_the_same_figures_and_another_does_not() -> None:
    first, again = (summarise(_run(SMALL)) for _ in range(2))
    assert first == again
    assert summarise(_run(dataclasses.replace(SMALL, seed=2))) != first
    assert json.loads(json.dumps(to_json(SMALL, [first])))["modes"][0]["requests"] == first.requests
    assert first.left == 0


def _run(scenario: Scenario) -> Cluster:
    cluster = Cluster(scenario)
    cluster.run()
    return cluster


def test_more_load_than_the_nodes_can_take_waits_for_them() -> None:
    one_at_a_time = Cluster(dataclasses.replace(SMALL, batch=1, decode_nodes=1))
    one_at_a_time.run()
    assert one_at_a_time.most_running == 1
    assert summarise(one_at_a_time).queued_s[-1] > 1.0


def test_scenarios_that_make_no_sense() -> None:
    for wrong in (
        {"arrivals": 0.0}, {"selected": 1.5}, {"mode": "magic"}, {"shape": Shape(2, 1, 64)},
        {"arrivals": math.inf}, {"duration_s": math.inf}, {"link_rate": math.nan}, {"decode_nodes": 10**9},
        {"arrivals": 1e4, "duration_s": 1e4}, {"prompt_tokens": 10**12}, {"shape": Shape(10**6, 1, 64)},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            dataclasses.replace(SMALL, **wrong)  # type: ignore[arg-type]


def test_models_by_name_and_by_numbers() -> None:
    assert shape_of("llama-3.1-70b") == MODELS["llama-3.1-70b"]
    assert shape_of("4x2x128") == Shape(4, 2, 128)
    with pytest.raises(InvalidArgument, match="there is no model 'gpt'; choose one of llama"):
        shape_of("gpt")


def test_the_command(tmp_path: Path) -> None:
    small = ["--model", "8x2x256", "--link", "100mbit", "--hours", "0.001", "--rate", "3", "--output-tokens", "8"]
    picture = tmp_path / "ttst.png"
    shown = CliRunner().invoke(app, ["simulate", *small, "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "TTST p99" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    as_json = CliRunner().invoke(app, ["simulate", *small, "--json", "--mode", "full"])
    assert [mode["mode"] for mode in json.loads(as_json.output)["modes"]] == ["full"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--link", "fast"], '--link: "fast" is not a rate'),
        (["--budget", "x"], "--budget is 'x'; choose deadline or fixed"),
        (["--nodes", "2", "--prefill-nodes", "2"], "2 of 2 nodes prefill, which leaves none to decode"),
        (["--mode", "magic"], "there is no mode 'magic'"),
        (["--profile", "/nonexistent"], "/nonexistent"),
        (["--rate", "inf"], "--rate: arrivals is inf; it must be positive and finite"),
        (["--rate", "1e12"], "--rate: 1e+12 requests a second"),
        (["--hours", "nan"], "--hours: duration_s is nan"),
        (["--nodes", "1000000000"], "--prefill-nodes: prefill_nodes is 500000000"),
    ],
)
def test_mistakes_are_one_sentence(wrong: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--hours", "0.0001", *wrong])
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert "Traceback" not in result.output
