"""A caller's mistakes: told in one sentence, at once, and without harm to the process's other transfers."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from kvd_client import Client, KVSpec
from kvd_client.errors import DeadlineExceeded, InvalidArgument
from tests.integration.api_harness import WAIT_S, ServerThread

SPEC = KVSpec(layers=2, kv_heads=2, entry_bytes=16, dtype="float16", model="test")
KV = np.ones((1, 2, 4, 4), np.float16)


@pytest.fixture
def client(tmp_path):
    with ServerThread(tmp_path / "api.sock") as server, Client(server.path, name="test") as client:
        yield client


@pytest.fixture
def pair(client):
    with client.decode("good", SPEC, [4]) as sink, client.prefill("good", SPEC, [4]) as source:
        yield source, sink
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=KV, v=KV)
        sink.wait_ready(timeout_s=WAIT_S)
        assert (sink.k(1, "float16")[:, :4] == 1).all()
    assert client.status().memory.leases == 0


def spec(**changed):
    return KVSpec(**({name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | changed))


@pytest.mark.parametrize(
    "wrong",
    [
        {"request": 5}, {"request": None}, {"request": b"r"}, {"request": "\udcff"},
        {"spec": None}, {"spec": spec(layers="2")}, {"spec": spec(dtype=None)}, {"spec": spec(windows="ab")},
        {"lengths": 4}, {"lengths": None}, {"lengths": "44"}, {"lengths": [1.5]}, {"lengths": [math.nan]},
        {"capacity": "9"}, {"capacity": 4.5}, {"rank": 0.5}, {"heads": 1}, {"heads": (0, 1, 2)}, {"heads": "ab"},
        {"selector": 3}, {"deadline_s": "5"}, {"metadata": "abc"}, {"metadata": None}, {"cache": "x"},
        {"blocks": 3}, {"blocks": [["x"]]}, {"blocks": [[1 << 40]]}, {"placement": "tenstorrent"},
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_arguments_of_an_open_are_refused_and_harm_no_other_transfer(client, pair, wrong):
    with pytest.raises(InvalidArgument):
        client.prefill(**({"request": "bad", "spec": SPEC, "lengths": [4]} | wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"held": 5},
        {"held": None},
        {"mask": None},
        {"cache_head": -1},
        {"held": "abc"},
        {"held": [(0, 1)]},
        {"held": [(0, 0.5, 1)]},
        {"landing_entries": "x"},
        {"handle": 1},
    ],
    ids=repr,
)
def test_wrong_arguments_of_a_sink_are_refused_and_harm_no_other_transfer(client, pair, wrong):
    with pytest.raises(InvalidArgument):
        client.decode(**({"request": "bad", "spec": SPEC, "lengths": [4]} | wrong))


def test_lengths_may_be_an_array(client):
    with client.prefill("r", SPEC, np.array([4, 3]), capacity=np.int64(5), heads=np.array([0, 1])) as source:
        assert (source.lengths, source.layout.capacity, source.layout.heads) == ((4, 3), 5, 1)
        source.abort()


def test_wrong_arguments_of_calls_are_refused(pair):
    source, sink = pair
    mistakes = [
        lambda: source.put_layer("0", k=KV, v=KV),
        lambda: source.put_layer(0.0, k=KV, v=KV),
        lambda: source.put_layer(0, k=KV.astype(object), v=KV),
        lambda: source.put_layer(0, k=[[1], [1, 2]], v=KV),
        lambda: source.put_layer(0, k=KV, v=KV, start=1.5),
        lambda: source.put_layer(0, k=KV, v=KV, row="x"),
        lambda: source.layer_ready(0, 0.5),
        lambda: source.layer_ready(0, 0, "2"),
        lambda: source.rank(0, "x"),
        lambda: source.rank(0, [[1.0]], weight="x"),
        lambda: source.rank(0, [[1j]]),
        lambda: pickle.dumps(source),
        lambda: copy.copy(sink),
        lambda: source.wait_delivered("x"),
        lambda: sink.k(0, "nope"),
        lambda: sink.k(0, None),
        lambda: sink.k(0, object),
        lambda: sink.k(0, "nope", as_torch=True),
        lambda: sink.poll_ready("0"),
        lambda: sink.wait_ready(1.5),
        lambda: sink.idle(None),
        lambda: sink.k(0, "V"),
        lambda: sink.k(0, "(2,)f2"),
        lambda: sink.k(0, "\ud800"),
        lambda: sink.put_held(0, 0, "x", np.zeros((1, 2, 16), np.uint8)),
        lambda: sink.put_held(0, 0, 0.0, np.zeros((1, 2, 16), np.uint8)),
        lambda: sink.mark_held(0, 0, None),
        lambda: sink.mark_held(0, 0.0, 1.0),
        lambda: sink.select("0", np.zeros((2, 1), np.int32)),
        lambda: sink.select(0, np.zeros((2, 1), np.int32), slot="0"),
        lambda: sink.begin_fetch(0, 0.0, np.ones(2, np.int32), np.ones(2, np.int32)),
        lambda: sink.count_selections("x"),
    ]
    for mistake in mistakes:
        with pytest.raises(InvalidArgument):
            mistake()


def test_a_timeout_that_is_no_number_leaves_the_connection_usable(client, pair):
    _, sink = pair
    for wrong in (math.nan, "x"):
        with pytest.raises(InvalidArgument, match="timeout_s is"):
            sink.wait_ready(0, timeout_s=wrong)
    with pytest.raises(DeadlineExceeded):
        sink.wait_ready(0, timeout_s=-1)
    assert client.status().node  # whoever pumps the socket has handed it on


@pytest.mark.parametrize(
    "wrong", [{"timeout_s": math.nan}, {"timeout_s": "x"}, {"socket_path": 5}, {"socket_path": "\ud800"}]
)
def test_a_client_with_wrong_arguments_is_not_made(wrong):
    with pytest.raises(InvalidArgument):
        Client(**wrong)


def test_a_client_is_for_its_process_alone(client):
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InvalidArgument, match="let it make a Client of its own"):
            leave(client)


def test_no_reason_is_too_long_to_abort_with(client):
    with client.prefill("r", SPEC, [4]) as source:
        source.abort("\udcff" + "x" * 10**6)
    assert client.status().memory.leases == 0


@pytest.mark.parametrize("reason", [5, None, b"x"])
def test_any_reason_will_do_to_abort(client, reason):
    with client.prefill("r", SPEC, [4]) as source:
        source.abort(reason)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64])
def test_numbers_of_numpy_name_layers_rows_and_tokens(client, kind):
    spec = KVSpec(layers=kind(40), kv_heads=kind(2), entry_bytes=kind(64), dtype="float16", model="test")
    with (
        client.decode("n", spec, np.array([100], kind), capacity=kind(120), held=[(kind(0), kind(0), kind(1))]) as sink,
        client.prefill("n", spec, np.array([100], kind), capacity=kind(120)) as source,
    ):
        for layer in range(40):
            kv = np.full((1, 2, 100, 16), layer, np.float16)
            source.put_layer(kind(layer), k=kv, v=kv, start=kind(0), row=kind(0))
            sink.put_held(kind(layer), kind(0), kind(0), np.full((1, 2, 32), layer, np.float16).view(np.uint8))
        sink.wait_ready(timeout_s=WAIT_S)
        assert all((sink.k(kind(layer), "float16")[0, :100] == layer).all() for layer in range(40))


def test_a_cache_of_another_client_is_refused(client):
    other = Client(client.socket_path)
    from kvd_client.cache import Cache

    cache = Cache.__new__(Cache)
    cache._connection = other._connected()
    cache._opened = type("Opened", (), {"cache": 1})()
    with other, pytest.raises(InvalidArgument, match="another client's"):
        client.decode("r", SPEC, [4], cache=cache, blocks=[[0]])
