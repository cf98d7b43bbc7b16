"""Transfers through the client library and the API server: what prefill and decode processes do."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvd_client import Client, KVSpec, TokenRange
from kvd_client.errors import (
    AlreadyExists,
    InvalidArgument,
    KvdError,
    NotFound,
    OutOfMemory,
)
from kvd_client.protocol import Release
from kvd_client.spec import MASK_LOCAL, MASK_PADDING, MASK_REMOTE
from tests.integration.api_entries import DIM, SPEC, check_equal, random_kv
from tests.integration.api_harness import WAIT_S


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


# --- wrong use --------------------------------------------------------------------------------------------------------


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
