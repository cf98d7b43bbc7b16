"""Whole transfers between real daemons: every way to meet, every byte compared, every end."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd_client import Client, KVSpec, TokenRange
from kvd_client.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PeerUnknown,
    PeerUnreachable,
    RendezvousTimeout,
    UnsupportedLayout,
)
from tests.integration.daemons import DaemonProcess, random_layer, small_spec, two_daemons

WAIT_S = 20.0
SPEC = small_spec()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    with two_daemons(tmp_path_factory.mktemp("daemons"), transfer={"rendezvous_s": 1.0}) as pair:
        yield pair


@pytest.fixture
def clients(daemons: tuple[DaemonProcess, DaemonProcess]) -> Iterator[tuple[Client, Client]]:
    with daemons[0].client("prefill") as source, daemons[1].client("decode") as sink:
        yield source, sink
        for client in (source, sink):
            status = client.status()
            assert [t for t in status.transfers if t.state != "ended" and not t.request.startswith("left")] == []
    # a closed connection gives everything back
    for daemon in daemons:
        with daemon.client("look") as look:
            memory = look.status().memory
            assert (memory.leases, memory.in_use) == (0, 0)


def put(transfer: Any, spec: KVSpec, lengths: list[int], seed: int = 0, layers: Any = None, start: int = 0) -> None:
    heads = transfer.layout.heads
    for layer in range(spec.layers) if layers is None else layers:
        entries = random_layer(seed + layer, len(lengths), max(lengths), heads, spec.entry_bytes)
        transfer.put_layer(layer, entries=entries[:, start:], start=start)


def check(transfer: Any, spec: KVSpec, lengths: list[int], seed: int = 0) -> None:
    heads = transfer.layout.heads
    for layer in range(spec.layers):
        entries = random_layer(seed + layer, len(lengths), max(lengths), heads, spec.entry_bytes)
        for row, length in enumerate(lengths):
            assert np.array_equal(transfer.layer(layer)[row, :length], entries[row, :length]), (layer, row)
            assert np.all(transfer.mask(layer)[row, :length] == 1)
            assert np.all(transfer.mask(layer)[row, length:] == 0)


def test_the_sink_opens_first(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with sink.decode("first", SPEC, [100, 37], source="prefill") as decode:
        with source.prefill("first", SPEC, [100, 37]) as prefill:
            put(prefill, SPEC, [100, 37])
            prefill.finish(timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode, SPEC, [100, 37])


def test_the_source_opens_first_and_the_capacities_differ(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("second", SPEC, [50, 80], capacity=90) as prefill:
        put(prefill, SPEC, [50, 80])
        with sink.decode("second", SPEC, [50, 80], capacity=200, source="prefill") as decode:
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode, SPEC, [50, 80])
        prefill.finish(timeout_s=WAIT_S)


def test_by_announcement(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("third", SPEC, [10], sink="decode") as prefill, sink.decode("third", SPEC, [10]) as decode:
        put(prefill, SPEC, [10])
        decode.wait_ready(timeout_s=WAIT_S)
        prefill.finish(timeout_s=WAIT_S)
        check(decode, SPEC, [10])


def test_vllm_42839_different_request_ids_meet_by_handle(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("cmpl-1", SPEC, [10]) as prefill:
        put(prefill, SPEC, [10])
        with sink.decode("other-2", SPEC, [10], handle=prefill.handle) as decode:
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode, SPEC, [10])
        prefill.finish(timeout_s=WAIT_S)
        wrong = prefill.handle[:-4] + "0000"
    with sink.decode("other-3", SPEC, [10], handle=wrong) as decode, pytest.raises(NotFound, match="prefill again"):
        decode.wait_ready(timeout_s=WAIT_S)


def test_layers_are_usable_as_they_arrive(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("layers", SPEC, [64]) as prefill, sink.decode("layers", SPEC, [64], source="prefill") as decode:
        for layer in range(SPEC.layers):
            put(prefill, SPEC, [64], layers=[layer])
            decode.wait_ready(layer, timeout_s=WAIT_S)
            assert np.array_equal(decode.layer(layer)[:, :64], random_layer(layer, 1, 64, 2, 64))
            later = [decode.mask(other)[0, :64].tolist() for other in range(layer + 1, SPEC.layers)]
            assert later == [[2] * 64] * len(later)
        prefill.finish(timeout_s=WAIT_S)


def test_chunked_prefill(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    lengths = [70, 33]
    with (
        source.prefill("chunks", SPEC, lengths) as prefill,
        sink.decode("chunks", SPEC, lengths, source="prefill") as decode,
    ):
        for start in range(0, 70, 16):
            for layer in range(SPEC.layers):
                entries = random_layer(layer, 2, 70, 2, 64)[:, start : start + 16]
                prefill.put_layer(layer, entries=entries, start=start)
        prefill.finish(timeout_s=WAIT_S)
        check(decode, SPEC, lengths)


def test_vllm_48633_held_tokens_are_local_and_never_sent(clients: tuple[Client, Client]) -> None:
    """The sink owns the first pages of one row and the last of another; both stay as the sink has them."""
    source, sink = clients
    lengths = [64, 64]
    held = [TokenRange(0, 0, 32), TokenRange(1, 48, 64)]
    before = source.status().counters["bytes_sent"]
    with source.prefill("held", SPEC, lengths) as prefill:
        with sink.decode("held", SPEC, lengths, source="prefill", held=held) as decode:
            for layer in range(SPEC.layers):
                for piece in held:
                    mine = np.full((piece.stop - piece.start, 2, 64), 7, dtype=np.uint8)
                    decode.put_held(layer, piece.row, piece.start, mine)
            put(prefill, SPEC, lengths)
            decode.wait_ready(timeout_s=WAIT_S)
            for layer in range(SPEC.layers):
                entries = random_layer(layer, 2, 64, 2, 64)
                entries[0, :32] = entries[1, 48:] = 7
                assert np.array_equal(decode.layer(layer), entries)
        prefill.finish(timeout_s=WAIT_S)
    expected = (128 - 48) * SPEC.layers * 2 * 64
    # the last confirmation may come after the sink's word that everything is there
    while source.status().counters["bytes_sent"] - before < expected:
        pass
    assert source.status().counters["bytes_sent"] - before == expected


def test_ranks_are_parts_of_one_transfer(clients: tuple[Client, Client]) -> None:
    spec = small_spec(heads=4)
    source, sink = clients
    with (
        source.prefill("tp", spec, [20], rank=0, ranks=2, heads=(0, 2)) as p0,
        source.prefill("tp", spec, [20], rank=1, ranks=2, heads=(2, 2)) as p1,
        sink.decode("tp", spec, [20], rank=0, ranks=2, heads=(0, 2), source="prefill") as d0,
        sink.decode("tp", spec, [20], rank=1, ranks=2, heads=(2, 2), source="prefill") as d1,
    ):
        put(p0, spec, [20], seed=10)
        put(p1, spec, [20], seed=20)
        for transfer in (d0, d1):
            transfer.wait_ready(timeout_s=WAIT_S)
        p0.finish(timeout_s=WAIT_S)
        p1.finish(timeout_s=WAIT_S)
        check(d0, spec, [20], seed=10)
        check(d1, spec, [20], seed=20)


def test_one_failed_rank_ends_the_others(clients: tuple[Client, Client]) -> None:
    spec = small_spec(heads=4)
    source, sink = clients
    with (
        source.prefill("tp-fails", spec, [20], rank=0, ranks=2, heads=(0, 2)) as p0,
        source.prefill("tp-fails", spec, [20], rank=1, ranks=2, heads=(2, 2)) as p1,
        sink.decode("tp-fails", spec, [20], rank=1, ranks=2, heads=(2, 2), source="prefill") as d1,
    ):
        p0.abort("the engine gave up")
        with pytest.raises(Aborted, match="gave up"):
            d1.wait_ready(timeout_s=WAIT_S)
        with pytest.raises(Aborted, match="gave up"):
            p1.finish(timeout_s=WAIT_S)


def test_source_and_sink_on_one_node(clients: tuple[Client, Client]) -> None:
    source, _ = clients
    with source.prefill("same-node", SPEC, [30]) as prefill:
        put(prefill, SPEC, [30])
        with source.decode("same-node", SPEC, [30], source="prefill") as decode:
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode, SPEC, [30])
        prefill.finish(timeout_s=WAIT_S)


def test_model_revisions_that_differ_are_named_and_the_right_sink_still_works(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    other = KVSpec(layers=4, kv_heads=2, entry_bytes=64, dtype="float16", model="test", revision="2")
    with source.prefill("rev", SPEC, [10]) as prefill:
        put(prefill, SPEC, [10])
        with (
            sink.decode("rev", other, [10], source="prefill") as decode,
            pytest.raises(FingerprintMismatch) as caught,
        ):
            decode.wait_ready(timeout_s=WAIT_S)
        assert caught.value.fields["differ"] == {"revision": ["", "2"]}
        with sink.decode("rev", SPEC, [10], source="prefill") as decode:
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode, SPEC, [10])
        prefill.finish(timeout_s=WAIT_S)


def test_vllm_14952_ranks_that_do_not_fit_are_refused(clients: tuple[Client, Client]) -> None:
    spec = small_spec(heads=4)
    source, sink = clients
    with (
        source.prefill("left-mismatch", spec, [10], rank=0, ranks=2, heads=(0, 2)) as prefill,
        sink.decode("left-mismatch", spec, [10], source="prefill") as decode,
    ):
        with pytest.raises(UnsupportedLayout) as caught:
            decode.wait_ready(timeout_s=WAIT_S)
        prefill.abort()
    assert set(caught.value.fields["differ"]) == {"ranks", "heads"}


def test_vllm_29906_abort_at_completion_twice(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("twice", SPEC, [10]) as prefill, sink.decode("twice", SPEC, [10], source="prefill") as decode:
        put(prefill, SPEC, [10])
        prefill.finish(timeout_s=WAIT_S)
        prefill.abort("late")
        prefill.abort("later")
        decode.wait_ready(timeout_s=WAIT_S)
        check(decode, SPEC, [10])
        decode.release()
        decode.release()


def test_abort_reaches_the_other_side(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    for who in ("prefill", "decode"):
        with (
            source.prefill(f"abort-{who}", SPEC, [10]) as prefill,
            sink.decode(f"abort-{who}", SPEC, [10], source="prefill") as decode,
        ):
            put(prefill, SPEC, [10], layers=[0])
            decode.wait_ready(0, timeout_s=WAIT_S)
            if who == "prefill":
                prefill.abort("changed my mind")
                with pytest.raises(Aborted, match="changed my mind"):
                    decode.wait_ready(1, timeout_s=WAIT_S)
            else:
                decode.abort("changed my mind")
                with pytest.raises(Aborted, match="changed my mind"):
                    prefill.finish(timeout_s=WAIT_S)


def test_a_decode_that_stops_early_is_a_normal_end(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("early", SPEC, [10]) as prefill:
        with sink.decode("early", SPEC, [10], source="prefill") as decode:
            put(prefill, SPEC, [10], layers=[0])
            decode.wait_ready(0, timeout_s=WAIT_S)
        put(prefill, SPEC, [10])
        prefill.finish(timeout_s=WAIT_S)


def test_vllm_41269_a_rejected_transfer_frees_the_source(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("rejected", SPEC, [10]) as prefill:
        put(prefill, SPEC, [10])
        sink.reject(handle=prefill.handle, reason="no room in the batch")
        with pytest.raises(Aborted, match="no room in the batch"):
            prefill.finish(timeout_s=WAIT_S)


def test_nobody_comes(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with sink.decode("alone", SPEC, [10], source="prefill") as decode, pytest.raises(RendezvousTimeout, match="alone"):
        decode.wait_ready(timeout_s=WAIT_S)
    with source.prefill("alone", SPEC, [10]) as prefill:
        put(prefill, SPEC, [10])
        with pytest.raises(RendezvousTimeout, match="no sink opened"):
            prefill.finish(timeout_s=WAIT_S)


def test_the_deadline_ends_both_sides(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with (
        source.prefill("late", SPEC, [10]) as prefill,
        sink.decode("late", SPEC, [10], source="prefill", deadline_s=0.3) as decode,
    ):
        put(prefill, SPEC, [10], layers=[0])
        for transfer in (decode.wait_ready, prefill.finish):
            with pytest.raises((DeadlineExceeded, InvalidArgument)):
                transfer(timeout_s=WAIT_S)


def test_finish_names_what_is_missing(clients: tuple[Client, Client]) -> None:
    source, _ = clients
    with source.prefill("gap", SPEC, [10]) as prefill:
        put(prefill, SPEC, [10], layers=[0, 1, 3])
        with pytest.raises(InvalidArgument, match="token 0 of row 0 in layer 2"):
            prefill.finish(timeout_s=WAIT_S)


def test_bad_requests_are_refused_and_nothing_else_is_disturbed(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    with source.prefill("good", SPEC, [10]) as prefill:
        with pytest.raises(AlreadyExists):
            source.prefill("good", SPEC, [10])
        with pytest.raises(OutOfMemory) as caught:
            source.prefill("huge", small_spec(layers=64, entry_bytes=4096), [4096])
        assert caught.value.fields["need"] > caught.value.fields["free"]
        with pytest.raises(InvalidArgument, match=r"held\[0\]"):
            sink.decode("bad-held", SPEC, [10], source="prefill", held=[TokenRange(0, 5, 11)])
        with pytest.raises(PeerUnknown, match="prefill"), sink.decode("x", SPEC, [10], source="nowhere") as decode:
            decode.wait_ready(timeout_s=WAIT_S)
        put(prefill, SPEC, [10])
        with sink.decode("good", SPEC, [10], source="prefill") as decode:
            decode.wait_ready(timeout_s=WAIT_S)
            check(decode, SPEC, [10])
        prefill.finish(timeout_s=WAIT_S)


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (prefill, decode):
        prefill.stop()
        with decode.client() as sink, sink.decode("r", SPEC, [4], source="prefill") as transfer:
            with pytest.raises(PeerUnreachable, match="prefill"):
                transfer.wait_ready(timeout_s=WAIT_S)
            assert sink.status().health == "degraded"


def _mixed(socket: str, role: str, sizes: list[int], start: Any, failed: Any) -> None:
    """One process's share of the mixed load: a thread for each transfer."""

    def one(client: Client, number: int, size: int) -> None:
        tokens = max(1, size // (spec.layers * spec.kv_heads * spec.entry_bytes))
        try:
            if role == "source":
                with client.prefill(f"mixed-{number}", spec, [tokens]) as transfer:
                    put(transfer, spec, [tokens], seed=number)
                    transfer.finish(timeout_s=90)
            else:
                with client.decode(f"mixed-{number}", spec, [tokens], source="prefill") as transfer:
                    transfer.wait_ready(timeout_s=90)
                    check(transfer, spec, [tokens], seed=number)
        except BaseException as error:
            failed.put(f"{role} {number} of {size} bytes: {error!r}")
            raise

    spec = small_spec(layers=8, heads=4, entry_bytes=128)
    with Client(socket, name=role) as client:
        start.wait(30)
        threads = [threading.Thread(target=one, args=(client, n, size)) for n, size in enumerate(sizes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def run_mixed_load(prefill: DaemonProcess, decode: DaemonProcess, sizes: list[int]) -> None:
    """All transfers at once from one process to another; raises what failed."""
    context = multiprocessing.get_context("spawn")
    start, failed = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_mixed, args=(daemon.socket, role, sizes, start, failed))
        for daemon, role in ((prefill, "source"), (decode, "sink"))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(110)
        assert process.exitcode == 0
    assert failed.empty(), failed.get()


def test_vllm_44238_many_transfers_at_once_keep_their_bytes(daemons: tuple[DaemonProcess, DaemonProcess]) -> None:
    sizes = [16 << 10, 200 << 10, 1 << 20, 4096] * 12 + [8 << 20] * 2
    run_mixed_load(*daemons, sizes)
    for daemon in daemons:
        with daemon.client() as client:
            assert client.status().memory.in_use == 0
