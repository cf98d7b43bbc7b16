"""How transfers end, as their processes see it: aborted, released, dropped, or by the other process leaving."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd_client import Client, connection
from kvd_client.errors import (
    Aborted,
    Busy,
    InvalidArgument,
    LeaseExpired,
    ProcessLost,
)
from kvd_client.ring import RING_SLOTS, SLOT_DELIVERED, SLOT_OPEN
from tests.integration.api_entries import SPEC, random_kv
from tests.integration.api_harness import WAIT_S


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


def test_what_was_opened_for_somebody_who_is_interrupted_is_given_back(server, client, monkeypatch):
    def interrupted(*_, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection, "Mapping", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.prefill("r", SPEC, [3])
    assert len(server.service.parts) == 1
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


def test_the_other_process_leaving_is_told(server, client):
    with client.prefill("r", SPEC, [1]) as source:
        with Client(server.path) as other:
            other.decode("r", SPEC, [1])
        with pytest.raises(ProcessLost):
            source.wait_delivered(WAIT_S)
        source.release()
