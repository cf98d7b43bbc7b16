"""Transfers through the client library and the API server: what prefill and decode processes do."""

from __future__ import annotations

import math
import queue
import threading

import numpy as np
import pytest
import torch

from kvd_client import Client, KVSpec, TokenRange
from kvd_client.errors import (
    Aborted,
    AlreadyExists,
    Busy,
    DeadlineExceeded,
    InvalidArgument,
    KvdError,
    LeaseExpired,
    NotFound,
    OutOfMemory,
    ProcessLost,
)
from kvd_client.protocol import Release
from kvd_client.ring import EVENT_IDLE, RING_EVENTS, RING_SLOTS, SLOT_DELIVERED, SLOT_OPEN, WAKE_IDLE, WAKE_LAYER_READY
from kvd_client.spec import MASK_LOCAL, MASK_PADDING, MASK_REMOTE
from tests.integration.api_harness import WAIT_S, ServerThread

SPEC = KVSpec(layers=3, kv_heads=2, entry_bytes=32, dtype="float32", model="test")
DIM = 4
"""float32 values of half an entry."""


@pytest.fixture
def server(tmp_path):
    with ServerThread(tmp_path / "api.sock") as server:
        yield server
        assert server.log.exceptions == []


@pytest.fixture
def client(server):
    with Client(server.path, name="test") as client:
        yield client


def random_kv(rows, tokens, seed=0, heads=SPEC.kv_heads):
    rng = np.random.default_rng(seed)
    return [rng.random((rows, heads, tokens, DIM), dtype=np.float32) for _ in "kv"]


def check_equal(transfer, layer, k, v, lengths):
    for row, length in enumerate(lengths):
        for got, sent in ((transfer.k(layer, np.float32), k), (transfer.v(layer, np.float32), v)):
            np.testing.assert_array_equal(got[row, :length], sent[row, :, :length].transpose(1, 0, 2))


# --- moving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6], [6, 6], [1, 6, 3]])
def test_layers_arrive_byte_for_byte(client, lengths):
    data = [random_kv(len(lengths), max(lengths), seed=layer) for layer in range(SPEC.layers)]
    with client.prefill("r", SPEC, lengths) as source, client.decode("r", SPEC, lengths, capacity=9) as sink:
        assert sink.mask(0).shape == (len(lengths), 9)
        for layer, (k, v) in enumerate(data):
            assert not sink.poll_ready(layer)
            source.put_layer(layer, k=k, v=v)
            sink.wait_ready(layer, WAIT_S)
            assert sink.poll_ready(layer)
            check_equal(sink, layer, k, v, lengths)
        sink.wait_ready(timeout_s=WAIT_S)
        for row, length in enumerate(lengths):
            assert (sink.mask(0)[row, :length] == MASK_LOCAL).all()
            assert (sink.mask(0)[row, length:] == MASK_PADDING).all()
        source.finish(timeout_s=WAIT_S)


def test_chunks_and_single_rows(client):
    lengths = [7, 4]
    k, v = random_kv(2, 7)
    with client.prefill("r", SPEC, lengths) as source, client.decode("r", SPEC, lengths) as sink:
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=k[:, :, :3], v=v[:, :, :3])
            source.put_layer(layer, k=k[0, :, 3:], v=v[0, :, 3:], row=0, start=3)
            assert not sink.poll_ready(layer)
            source.put_layer(layer, k=k[1:, :, 3:], v=v[1:, :, 3:], row=1, start=3)
            sink.wait_ready(layer, WAIT_S)
            check_equal(sink, layer, k, v, lengths)


def test_padding_is_neither_copied_nor_rung(server, client):
    lengths = [2, 5]
    k, v = random_kv(2, 5)
    with client.prefill("r", SPEC, lengths) as source:
        source.put_layer(0, k=k, v=v)
        assert source.layer(0)[0, :2].any(axis=-1).all()
        assert not source.layer(0)[0, 2:].any()
        client.status()  # by its answer the events have been taken
        part = server.service.parts[source.id]
        assert part.rung == {(0, row, token) for row, length in enumerate(lengths) for token in range(length)}
        source.put_layer(0, k=k[:1, :, :3], v=v[:1, :, :3], row=0, start=2)
        client.status()
        assert len(server.service.events) == 1
        source.abort()
        source.release()


def test_bytes_written_in_place_and_rung_by_hand(client):
    with client.prefill("r", SPEC, [4, 2]) as source, client.decode("r", SPEC, [4, 2]) as sink:
        for layer in range(SPEC.layers):
            source.layer(layer)[:] = layer + 1
            source.layer_ready(layer, 0, 1)
            source.layer_ready(layer, 1, row=0)
            source.layer_ready(layer, start=1, stop=4, row=1)
        sink.wait_ready(timeout_s=WAIT_S)
        for layer in range(SPEC.layers):
            assert (sink.layer(layer)[0] == layer + 1).all()
            assert (sink.layer(layer)[1, :2] == layer + 1).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64], ids=str
)
def test_torch_tensors_of_any_dtype(client, dtype):
    dim = 16
    spec = KVSpec(layers=1, kv_heads=2, entry_bytes=2 * dim * dtype.itemsize, dtype=str(dtype), model="test")
    raw = torch.randint(0, 120, (2, 1, 5, 2, dim * dtype.itemsize), dtype=torch.uint8)
    # (rows, heads, tokens, dim) as a model has it: not contiguous, and with a gradient where there can be one.
    k, v = (half.view(dtype).transpose(1, 2) for half in raw)
    if dtype.is_floating_point and dtype.itemsize > 1:
        k.requires_grad_(True)
    with client.prefill("r", spec, [5]) as source, client.decode("r", spec, [5]) as sink:
        source.put_layer(0, k=k, v=v)
        sink.wait_ready(timeout_s=WAIT_S)
        got_k = sink.k(0, dtype, as_torch=True)
        assert got_k.dtype == dtype
        assert torch.equal(got_k.view(torch.uint8), raw[0])
        assert torch.equal(sink.v(0, str(dtype).removeprefix("torch."), as_torch=True).view(torch.uint8), raw[1])
        sink.layer(0)[0, 0, 0, 0] ^= 1
        assert got_k.view(torch.uint8)[0, 0, 0, 0] == raw[0][0, 0, 0, 0] ^ 1, "torch has a copy"
        del got_k


def test_opaque_entries_of_odd_size(client):
    spec = KVSpec(layers=2, kv_heads=1, entry_bytes=33, dtype="latent", model="test")
    entries = np.random.default_rng(1).integers(0, 256, (2, 5, 1, 33), dtype=np.uint8)
    with client.prefill("r", spec, [5, 4]) as source, client.decode("r", spec, [5, 4]) as sink:
        for layer in range(2):
            source.put_layer(layer, entries[:, :2])
            source.put_layer(layer, torch.from_numpy(entries[:, 2:]), start=2)
        sink.wait_ready(timeout_s=WAIT_S)
        np.testing.assert_array_equal(sink.layer(1)[0], entries[0])
        np.testing.assert_array_equal(sink.layer(1)[1, :4], entries[1, :4])
        with pytest.raises(InvalidArgument, match="equal size"):
            sink.k(0, np.uint8)


def test_ranks_have_their_heads(client):
    spec = KVSpec(layers=1, kv_heads=4, entry_bytes=32, dtype="float32", model="test")
    k, v = random_kv(1, 3, heads=4)
    with client.prefill("r", spec, [3], heads=(1, 2), rank=1, ranks=2) as source:
        assert source.layer(0).shape == (1, 3, 2, 32)
        with pytest.raises(InvalidArgument, match="heads"):
            source.put_layer(0, k=k, v=v)
        with client.decode("r", spec, [3], heads=(1, 2), rank=1, ranks=2) as sink:
            source.put_layer(0, k=k[:, 1:3], v=v[:, 1:3])
            sink.wait_ready(timeout_s=WAIT_S)
            check_equal(sink, 0, k[:, 1:3], v[:, 1:3], [3])


def test_held_tokens_are_put_in_place_by_their_process(client):
    k, v = random_kv(1, 6)
    mine = np.full((2, SPEC.kv_heads, SPEC.entry_bytes), 7, np.uint8)
    held = [(0, 0, 2), TokenRange(row=0, start=2, stop=4)]
    with client.prefill("r", SPEC, [6]) as source, client.decode("r", SPEC, [6], held=held) as sink:
        for layer in range(SPEC.layers):
            sink.put_held(layer, 0, 0, mine)
            assert list(sink.mask(layer)[0]) == [MASK_LOCAL] * 2 + [MASK_REMOTE] * 4
            sink.layer(layer)[0, 2:4] = 9
        sink.mark_held(0, 2, 4)
        assert not sink.poll_ready(0)
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=k, v=v)
        sink.wait_ready(timeout_s=WAIT_S)
        assert (sink.layer(0)[0, :2] == 7).all()
        assert (sink.layer(0)[0, 2:4] == 9).all()
        np.testing.assert_array_equal(sink.k(0, np.float32)[0, 4:], k[0, :, 4:].transpose(1, 0, 2))
        for start, stop in ((3, 5), (4, 5), (-1, 1)):
            with pytest.raises(InvalidArgument, match="announced"):
                sink.mark_held(0, start, stop)
        with pytest.raises(InvalidArgument, match="announced"):
            sink.put_held(0, 0, 3, mine)


def test_putting_held_tokens_wakes_a_waiting_thread(server, client):
    with client.decode("r", SPEC, [2], held=[(0, 0, 2)]) as sink:
        waiting = threading.Thread(target=sink.wait_ready, args=(None, WAIT_S))
        waiting.start()
        sink.mark_held(0, 0, 2)
        waiting.join()
        assert sink.poll_ready(2)


# --- waiting --------------------------------------------------------------------------------------------------------


def test_two_threads_wait_for_different_layers_and_a_third_asks(client):
    k, v = random_kv(1, 5)
    done: queue.Queue[int] = queue.Queue()
    with client.prefill("r", SPEC, [5]) as source, client.decode("r", SPEC, [5]) as sink:

        def wait(layer):
            sink.wait_ready(layer, WAIT_S)
            done.put(layer)

        threads = [threading.Thread(target=wait, args=(layer,)) for layer in (0, 1, 1, 2)]
        for thread in threads:
            thread.start()
        for layer, count in ((2, 1), (0, 1), (1, 2)):
            assert client.status().node == "test"
            source.put_layer(layer, k=k, v=v)
            assert [done.get(timeout=WAIT_S) for _ in range(count)] == [layer] * count
        for thread in threads:
            thread.join()


def test_replies_find_their_callers_among_many_threads(server, client):
    server.service.padding = "x" * 20_000
    problems: list[object] = []

    def ask(thread):
        for i in range(20):
            try:
                if i % 2:
                    assert client.status().reasons == [server.service.padding]
                else:
                    client.reject(handle=f"{thread}-{i}")
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert {r.handle for r in server.service.rejected} == {f"{t}-{i}" for t in range(8) for i in range(0, 20, 2)}


def test_waiting_ends_at_its_timeout_and_the_transfer_goes_on(client):
    k, v = random_kv(1, 5)
    with client.prefill("r", SPEC, [5]) as source, client.decode("r", SPEC, [5]) as sink:
        with pytest.raises(DeadlineExceeded, match="layer 1"):
            sink.wait_ready(1, timeout_s=0.01)
        for layer in range(SPEC.layers):
            source.layer(layer)[:] = 1
        with pytest.raises(InvalidArgument, match="have not been rung"):
            source.finish()
        with pytest.raises(DeadlineExceeded, match="goes on"):
            source.wait_delivered(timeout_s=0.01)
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=k, v=v)
        sink.wait_ready(timeout_s=WAIT_S)


def test_finish_without_waiting(client):
    with Client(client.socket_path, timeout_s=math.inf) as patient, patient.prefill("r", SPEC, [1]) as source:
        for layer in range(SPEC.layers):
            source.layer_ready(layer)
        source.finish(wait=False)
        with client.decode("r", SPEC, [1]) as sink:
            sink.wait_ready(timeout_s=math.inf)
        source.wait_delivered(WAIT_S)


def test_a_request_that_takes_long_holds_up_nobody(server, client):
    def hold():
        import asyncio

        server.service.hold = asyncio.Event()

    server.call(hold)
    answered = threading.Event()

    def ask():
        client.status()
        answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    k, v = random_kv(1, 2)
    with client.prefill("r", SPEC, [2]) as source, client.decode("r", SPEC, [2]) as sink:
        for layer in range(SPEC.layers):
            source.put_layer(layer, k=k, v=v)
        sink.wait_ready(timeout_s=WAIT_S)
        assert not answered.is_set()
        server.call(lambda: server.service.hold.set())
        assert answered.wait(WAIT_S)
        asking.join()


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["source", "sink"])
def test_abort_ends_both_sides_with_a_named_error(client, by):
    with client.prefill("r", SPEC, [3]) as source, client.decode("r", SPEC, [3]) as sink:
        (source if by == "source" else sink).abort("changed my mind")
        for do in (
            lambda: sink.wait_ready(0, WAIT_S),
            lambda: sink.poll_ready(0),
            lambda: source.wait_delivered(WAIT_S),
            lambda: source.layer_ready(0),
            lambda: source.finish(),
        ):
            with pytest.raises(Aborted, match="changed my mind"):
                do()
        sink.abort()
        source.abort()
        source.release()


def test_an_exception_in_the_block_aborts(client):
    with client.decode("r", SPEC, [3]) as sink:
        with pytest.raises(ZeroDivisionError), client.prefill("r", SPEC, [3]) as source:
            raise ZeroDivisionError("prefill broke")
        assert source.released
        with pytest.raises(Aborted, match="prefill broke"):
            sink.wait_ready(0, WAIT_S)


def test_the_block_finishes_and_raises_what_is_missing(client):
    with pytest.raises(InvalidArgument, match="have not been rung"), client.prefill("r", SPEC, [3]) as source:
        source.layer_ready(0)
    assert source.released
    with client.prefill("r", SPEC, [3]) as source:
        source.release()


def test_release_is_idempotent_and_gives_the_memory_back(server, client):
    for _ in range(3):
        source = client.prefill("r", SPEC, [3])
        source.release()
        source.release()
        source.abort()
        assert server.service.parts == {}
    for do in (
        lambda: source.layer(0),
        lambda: source.layer_ready(0),
        lambda: source.put_layer(0, np.zeros((1, 3, 2, 32), np.uint8)),
        source.finish,
        lambda: source.wait_delivered(WAIT_S),
    ):
        with pytest.raises(LeaseExpired):
            do()


def test_release_of_one_side_tells_the_other(client):
    with client.prefill("r", SPEC, [3]) as source:
        client.decode("r", SPEC, [3]).release()
        with pytest.raises(Aborted):
            source.wait_delivered(WAIT_S)
        source.release()


def test_views_read_zeros_after_release_and_never_the_next_requests_bytes(server, client):
    first = client.prefill("first", SPEC, [64])
    offset = server.service.parts[first.id].offset
    view, again = first.layer(0), first.layer(1)
    view[:] = 1
    again[:] = 2
    tensor = torch.from_numpy(again)
    first.release()
    assert not view.any()
    assert not tensor.any()
    server.service.free.sort()
    second = client.prefill("second", SPEC, [64])
    assert server.service.parts[second.id].offset == offset, "the test needs the same memory again"
    second.layer(0)[:] = 5
    assert not view.any()
    view[:] = 9
    assert (second.layer(0) == 5).all()
    second.release()


def test_a_dropped_transfer_is_given_back_with_its_last_view(server, client):
    view = client.prefill("r", SPEC, [3]).layer(0)
    client.status()
    assert len(server.service.parts) == 1
    view[:] = 1
    del view
    client.status()
    assert server.service.parts == {}


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("kvd-test-pool" in line for line in maps)


def test_memory_is_unmapped_with_the_last_view(server, client):
    # The server of this test lives in the same process and maps the pool, too.
    before = mappings()
    source = client.prefill("r", SPEC, [3])
    assert mappings() == before + 1
    source.release()
    assert mappings() == before


def test_slots_tell_the_state_without_a_round_trip(server, client):
    k, v = random_kv(1, 2)
    with client.prefill("r", SPEC, [2]) as source:
        doorbell, slot = source._connection.doorbell, source._part.slot
        assert doorbell.state(slot) == SLOT_OPEN
        assert doorbell.generation(slot) == source.id
        with client.decode("r", SPEC, [2]) as sink:
            for layer in range(SPEC.layers):
                source.put_layer(layer, k=k, v=v)
            sink.wait_ready(timeout_s=WAIT_S)
            source.wait_delivered(WAIT_S)
            assert doorbell.state(slot) == SLOT_DELIVERED


def test_slots_run_out_with_a_named_error_and_come_back(server, client):
    connection = client._connected()
    session = server.server.clients[0]
    taken = server.call(lambda: [session.take_slot() for _ in range(RING_SLOTS)])
    with pytest.raises(Busy, match="release some"):
        client.prefill("r", SPEC, [1])
    server.call(lambda: [session.free_slot(slot) for slot in taken])
    client.prefill("r", SPEC, [1]).release()
    assert client._connected() is connection


# --- the ring from above --------------------------------------------------------------------------------------------


def test_idle_is_rung_only_when_wanted(server, client):
    with client.decode("r", SPEC, [1]) as sink:
        sink.idle(0)
        client.status()
        assert server.service.events == []
        server.call(lambda: server.server.clients[0].set_wake(WAKE_LAYER_READY | WAKE_IDLE))
        seen: queue.Queue[tuple[int, ...]] = queue.Queue()
        server.service.on_event = lambda client, *event: seen.put(event)
        sink.idle(2)
        assert seen.get(timeout=WAIT_S)[:3] == (EVENT_IDLE, 2, sink.id)


def test_more_events_than_the_ring_holds(server, client):
    # The server is kept busy until the ring is full and the writer waits for room.
    gate = threading.Event()
    with client.prefill("r", SPEC, [1]) as source:
        server.service.on_event = lambda *_: gate.wait(WAIT_S)
        connection, count = source._connection, 0
        while connection.doorbell.has_room():
            source.layer_ready(0)
            count += 1

        def fill():
            for _ in range(100):
                source.layer_ready(0)

        filling = threading.Thread(target=fill)
        filling.start()
        while not connection._pumper:
            filling.join(0.001)
        gate.set()
        filling.join()
        client.status()
        assert count >= RING_EVENTS
        assert len(server.service.events) == count + 100
        source.abort()
        source.release()


def ring_twice_the_ring(source):
    for _ in range(2 * RING_EVENTS):
        source.layer_ready(0)


def test_a_daemon_that_takes_no_events_is_busy(server):
    gate = threading.Event()
    with Client(server.path, timeout_s=1.0) as client:
        source = client.prefill("r", SPEC, [1])
        server.service.on_event = lambda *_: gate.wait(WAIT_S)
        try:
            with pytest.raises(Busy, match="has not taken an event"):
                ring_twice_the_ring(source)
        finally:
            server.service.on_event = None
            gate.set()


# --- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "options", "match"),
    [
        ([], {}, "lengths"),
        ([0, 0], {}, "lengths"),
        ([3, -1], {}, "lengths"),
        ([3], {"capacity": 2}, "capacity"),
        ([3], {"heads": (1, 2)}, "heads"),
        ([3], {"heads": (-1, 2)}, "heads"),
        ([3], {"heads": (0, 0)}, "heads"),
        ([1 << 25], {}, "capacity"),
    ],
)
def test_arguments_that_make_no_sense_are_named(client, lengths, options, match):
    for open_ in (client.prefill, client.decode):
        with pytest.raises(InvalidArgument, match=match):
            open_("r", SPEC, lengths, **options)


def test_shapes_that_do_not_fit_change_nothing(server, client):
    with client.prefill("r", SPEC, [3]) as source:
        good, short = np.zeros((1, 2, 3, DIM), np.float32), np.zeros((1, 2, 3, DIM - 1), np.float32)
        entries = np.zeros((1, 3, 2, 32), np.uint8)
        for put in (
            lambda: source.put_layer(0),
            lambda: source.put_layer(0, k=good),
            lambda: source.put_layer(0, entries, k=good, v=good),
            lambda: source.put_layer(0, k=good, v=short),
            lambda: source.put_layer(0, k=good, v=good[:, :, :2]),
            lambda: source.put_layer(0, k=good[:, :1], v=good[:, :1]),
            lambda: source.put_layer(0, k=good[0], v=good[0]),
            lambda: source.put_layer(0, k=good, v=good.astype(np.float64)),
            lambda: source.put_layer(0, entries[0]),
            lambda: source.put_layer(0, 5),
            lambda: source.put_layer(0, torch.tensor(5)),
            lambda: source.put_layer(3, entries),
            lambda: source.put_layer(-1, entries),
            lambda: source.put_layer(0, entries, row=1),
            lambda: source.put_layer(0, entries, start=-1),
            lambda: source.layer_ready(0, 2, 1),
            lambda: source.layer_ready(0, row=1),
            lambda: source.layer(3),
        ):
            with pytest.raises(InvalidArgument):
                put()
        source.put_layer(0, entries, start=3)
        source.put_layer(0, entries[:, :0])
        client.status()
        assert server.service.events == []
        source.abort()
        source.release()


def test_the_daemons_errors_arrive_with_their_class_and_fields(client):
    with pytest.raises(NotFound) as found:
        client._connected().request(Release(transfer=77))
    assert found.value.fields == {"transfer": 77}
    source = client.prefill("r", SPEC, [1])
    with pytest.raises(AlreadyExists):
        client.prefill("r", SPEC, [1])
    with pytest.raises(OutOfMemory) as found:
        client.prefill("huge", SPEC, [1 << 20])
    assert found.value.fields["need"] > found.value.fields["free"]
    source.release()
    with pytest.raises(InvalidArgument, match="reject needs"):
        client.reject(request="r")


def test_a_bug_of_the_service_is_one_failed_request(server):
    with Client(server.path) as client:
        with pytest.raises(KvdError, match="ZeroDivisionError") as found:
            client.reject(handle="bug")
        assert found.value.code == "INTERNAL"
        assert client.status().node == "test"
        assert [event for event, _ in server.log.exceptions] == ["request failed"]
        server.log.exceptions.clear()


def test_another_clients_transfer_is_out_of_reach(server, client):
    with client.prefill("r", SPEC, [1]) as source, Client(server.path) as other:
        with pytest.raises(NotFound):
            other._connected().request(Release(transfer=source.id))
        other._connected().doorbell.ring(1, 0, source.id, 0, 0, 1)
        other.status()
        assert server.service.parts[source.id].rung == set()
        source.abort()
        source.release()


def test_the_other_process_leaving_is_told(server, client):
    with client.prefill("r", SPEC, [1]) as source:
        with Client(server.path) as other:
            other.decode("r", SPEC, [1])
        with pytest.raises(ProcessLost):
            source.wait_delivered(WAIT_S)
        source.release()
