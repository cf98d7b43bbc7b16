"""Selective transfer through real daemons: every mode gives the tokens of one process; fetches, masks and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.profiling import files
from kvd_client import Client
from kvd_client.errors import InvalidArgument, KvdError, NotFound, UnsupportedLayout
from kvd_client.protocol import MODES, Fetch
from kvd_client.selection import select_many
from kvd_client.spec import MASK_LOCAL, MASKS, MetadataSpec
from tests.integration.daemons import DaemonProcess, free_port, nothing_is_left, random_layer, small_spec, start_all

WAIT_S = 30.0
SPEC = small_spec()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DaemonProcess]]:
    """``decode`` and two sources, ``fast`` and ``slow``: links on which prompts of these sizes take a moment."""
    folder: Path = tmp_path_factory.mktemp("daemons")
    ports = {node: free_port() for node in ("fast", "slow", "decode")}
    rates = {"fast": "16mbit", "slow": "2mbit", "decode": "100mbit"}
    found = {
        node: DaemonProcess(
            folder,
            node,
            listen=f"127.0.0.1:{port}",
            peers={other: f"127.0.0.1:{ports[other]}" for other in ports if other != node},
            config={"fabric": {"rate": rates[node]}},
        )
        for node, port in ports.items()
    }
    try:
        start_all(found.values())
        yield found
    finally:
        for daemon in found.values():
            daemon.destroy()


@pytest.fixture
def clients(daemons: dict[str, DaemonProcess]) -> Iterator[tuple[Client, Client]]:
    with daemons["fast"].client("prefill") as source, daemons["decode"].client("decode") as sink:
        yield source, sink
    nothing_is_left(daemons["fast"], daemons["decode"])


def layer_of(layer: int, lengths: list[int]) -> Any:
    return random_layer(layer, len(lengths), max(lengths), SPEC.kv_heads, SPEC.entry_bytes)


def expected(layer: int, lengths: list[int], index: Any) -> Any:
    rows = np.arange(len(index))[:, None]
    return layer_of(layer, lengths)[rows // SPEC.kv_heads, index, rows % SPEC.kv_heads]


def put_all(transfer: Any, lengths: list[int]) -> None:
    for layer in range(SPEC.layers):
        transfer.put_layer(layer, entries=layer_of(layer, lengths))


def random_index(seed: int, lengths: list[int], k: int) -> Any:
    generator = np.random.default_rng(seed)
    rows = [generator.permutation(length)[:k] for length in lengths for _ in range(SPEC.kv_heads)]
    return np.array(rows, np.int32)


def local_entries(decode: Any, layer: int) -> Any:
    """What the mask says of each entry: bool (rows, capacity, heads)."""
    local = decode.mask(layer) == MASK_LOCAL
    return local.transpose(0, 2, 1) if decode.by_head else np.repeat(local[:, :, None], SPEC.kv_heads, 2)


@pytest.mark.parametrize(
    ("mode", "by"), [*((mode, "token") for mode in MODES), *((mode, "head") for mode in ("full", *MODES[-2:]))]
)
def test_selected_entries_are_the_sources(clients: tuple[Client, Client], mode: str, by: str) -> None:
    source, sink = clients
    lengths, k = [3000, 1700], 200
    with sink.decode(mode, SPEC, lengths, source="fast", mode=mode, landing_entries=k, mask=by) as decode:
        prefill = source.prefill(mode, SPEC, lengths, mask=by)
        put_all(prefill, lengths)
        prefill.finish(wait=False)
        decode.wait_ready(0, timeout_s=WAIT_S)
        decode.wait_ready(1, timeout_s=WAIT_S)
        for step in range(4):
            for layer in (2, 3):
                index = random_index(10 * step + layer, lengths, k)
                order = np.zeros_like(index)
                decode.idle(layer)
                entries = decode.select(layer, index, slot=layer % 2, order=order, timeout_s=WAIT_S)
                assert np.array_equal(np.sort(order), np.sort(index))
                assert np.array_equal(entries, expected(layer, lengths, order))
                local = local_entries(decode, layer)
                assert np.array_equal(decode.layer(layer)[local], layer_of(layer, lengths)[local])
        counters = decode.selection_counters()
        assert counters.selected.tolist() == [0, 0, 4 * 4 * k, 4 * 4 * k]
        assert (counters.fetched <= counters.selected).all()
        assert counters.fetched.sum() > 0 or mode == "full"
        if mode == "speculative":
            while not decode.poll_ready(3):
                decode.idle(3)
                decode.select(3, random_index(1, lengths, k), timeout_s=WAIT_S)
        if mode in ("full", "speculative"):
            decode.wait_ready(timeout_s=WAIT_S)
            for layer in range(SPEC.layers):
                for row, length in enumerate(lengths):
                    assert np.array_equal(decode.layer(layer)[row, :length], layer_of(layer, lengths)[row, :length])
    prefill.release()


@pytest.mark.parametrize("by", MASKS)
def test_what_was_fetched_goes_again_with_its_token_or_not_at_all(
    daemons: dict[str, DaemonProcess], clients: tuple[Client, Client], by: str
) -> None:
    source, sink = clients
    lengths, k = [1000, 600], 150
    entry = SPEC.entry_bytes
    total = sum(lengths) * SPEC.kv_heads * entry * SPEC.layers
    # Prefill is over before the two meet: layers 0 and 1 are pushed, and what is left waits for windows.
    prefill = source.prefill(by, SPEC, lengths, mask=by)
    for layer in range(SPEC.layers):
        for row, length in enumerate(lengths):
            prefill.put_layer(layer, entries=layer_of(layer, lengths)[row, :length], row=row)
    prefill.finish(wait=False)
    with sink.decode(by, SPEC, lengths, source="fast", mode="speculative", landing_entries=k, mask=by) as decode:
        wrong: list[int] = []
        layers, stop = [layer_of(layer, lengths) for layer in range(SPEC.layers)], threading.Event()

        def look() -> None:
            """A mask byte is never 1 before its bytes are in place."""
            while not stop.wait(0.001):
                for layer, true in enumerate(layers):
                    local = local_entries(decode, layer)
                    if not np.array_equal(decode.layer(layer)[local], true[local]):
                        wrong.append(layer)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            decode.wait_ready(1, timeout_s=WAIT_S)
            decode.wait_ready(0, timeout_s=WAIT_S)
            for layer in (2, 3):
                first, second = random_index(layer, lengths, k), random_index(layer + 10, lengths, k)
                for index in (first, second, first):
                    order = np.zeros_like(index)
                    entries = decode.select(layer, index, slot=layer % 2, order=order, timeout_s=WAIT_S)
                    assert np.array_equal(entries, expected(layer, lengths, order))
                if by == "head":  # marked, each by itself, before the answer came
                    mask = decode.mask(layer).reshape(len(first), -1)
                    for index in (first, second):
                        assert (np.take_along_axis(mask, index, 1) == MASK_LOCAL).all()
            fetched = int(decode.selection_counters().fetched.sum())
            decode.idle(3)
            decode.wait_ready(timeout_s=WAIT_S)
            prefill.wait_delivered(WAIT_S)
        finally:
            stop.set()
            looking.join(WAIT_S)
        assert wrong == []
        for layer in range(SPEC.layers):
            for row, length in enumerate(lengths):
                assert np.array_equal(decode.layer(layer)[row, :length], layer_of(layer, lengths)[row, :length])
        with daemons["fast"].client("look") as there, daemons["decode"].client("look") as here:
            sent, until = there.status().transfers[0], time.monotonic() + WAIT_S
            while sent.bytes_done < total and time.monotonic() < until:  # the last confirmation may follow the delivery
                (sent,) = there.status().transfers
            (got,) = here.status().transfers
        assert (sent.mask, got.mask) == (by, by)
        assert 2 * 2 * k * SPEC.kv_heads < fetched < 2 * 2 * 2 * k * SPEC.kv_heads
        assert sent.paths["on_demand"] == got.paths["on_demand"] == fetched * entry
        assert sent.paths["proactive"] == got.paths["proactive"] == total // 2
        again = fetched * entry if by == "token" else 0
        assert sent.paths["speculative"] == got.paths["speculative"] == total // 2 - fetched * entry + again
        assert sent.bytes_done == got.bytes_done == total
    prefill.release()


def test_fetches_alone_can_complete_a_transfer_with_a_mask_by_head(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    lengths = [700]
    prefill = source.prefill("all", SPEC, lengths, mask="head")
    put_all(prefill, lengths)
    prefill.finish(wait=False)
    held = [(0, 0, 100)]
    with sink.decode(
        "all", SPEC, lengths, source="fast", mode="parallel", landing_entries=600, mask="head", held=held
    ) as decode:
        for layer in range(SPEC.layers):
            decode.put_held(layer, 0, 0, layer_of(layer, lengths)[0, :100])
        decode.wait_ready(1, timeout_s=WAIT_S)
        for layer in (2, 3):
            assert not decode.poll_ready(layer)
            index = np.tile(np.arange(100, 700, dtype=np.int32), (SPEC.kv_heads, 1))
            entries = decode.select(layer, index, timeout_s=WAIT_S)
            assert np.array_equal(entries, expected(layer, lengths, index))
            assert decode.poll_ready(layer)
        prefill.wait_delivered(WAIT_S)
    prefill.release()


def test_selections_are_counted_alike_whatever_the_mask(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    lengths, k, found = [300, 170], 40, []
    for by in MASKS:
        selector = f"by {by}"
        with sink.decode(
            selector, SPEC, lengths, source="fast", mode="parallel", landing_entries=k, selector=selector, mask=by
        ) as decode:
            prefill = source.prefill(selector, SPEC, lengths, mask=by)
            put_all(prefill, lengths)
            prefill.finish(wait=False)
            decode.count_selections(8)
            for layer in (2, 3):
                decode.select(layer, random_index(layer, lengths, k), timeout_s=WAIT_S)
        prefill.release()
        profile = files.decode(sink.export_profile("test", selector), "the profile")
        assert (profile.kv_heads, profile.groups[0].samples) == (SPEC.kv_heads, 2)
        found.append(profile.groups[0].matrix.values[2:])
    assert np.array_equal(*found)
    assert found[0].any()


def test_two_ends_with_different_masks_refuse_each_other(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    prefill = source.prefill("differ", SPEC, [10], mask="head")
    says = "mask by head at the source and by token at the sink; open both ends with the same mask"
    with pytest.raises(UnsupportedLayout, match=says), sink.decode("differ", SPEC, [10], source="fast") as decode:
        decode.wait_ready(timeout_s=WAIT_S)
    with sink.decode("differ", SPEC, [10], source="fast", mask="head") as decode:  # the source goes on waiting
        put_all(prefill, [10])
        prefill.finish(wait=False)
        decode.wait_ready(timeout_s=WAIT_S)
    prefill.release()


def test_metadata_arrives_with_its_bytes(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    arrays = (MetadataSpec(name="codes", layer_bytes=5000), MetadataSpec(name="norms", layer_bytes=77))
    with sink.decode("metadata", SPEC, [500], source="fast", metadata=arrays, mode="parallel") as decode:
        prefill = source.prefill("metadata", SPEC, [500], metadata=arrays)
        for layer in range(SPEC.layers):
            for at, array in enumerate(arrays):
                prefill.metadata(layer, array.name)[:] = 10 * layer + at + 1
            prefill.metadata_ready(layer)
            decode.wait_metadata(layer, timeout_s=WAIT_S)
            for at, array in enumerate(arrays):
                assert (decode.metadata(layer, array.name) == 10 * layer + at + 1).all()
        decode.wait_metadata(timeout_s=WAIT_S)
        prefill.release()


def test_errors_of_fetches_reach_their_caller_and_nobody_else(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    lengths = [900]
    with sink.decode("errors", SPEC, lengths, source="fast", mode="partial", landing_entries=8) as decode:
        prefill = source.prefill("errors", SPEC, lengths)
        decode.wait_metadata(timeout_s=WAIT_S)
        for layer in range(2):
            prefill.put_layer(layer, entries=layer_of(layer, lengths))
        decode.wait_ready(1, timeout_s=WAIT_S)
        connection = decode._connection

        def fetch(error: type[KvdError], says: str, **changes: Any) -> None:
            counts = changes.pop("counts", [1, 1])
            index = changes.pop("index", [3, 4])
            fields = {
                "transfer": decode.id,
                "layer": 1,
                "slot": 0,
                "counts": np.array(counts, np.int32).tobytes(),
                "index": np.array(index, np.int32).tobytes(),
            }
            with pytest.raises(error, match=says):
                connection.request(Fetch(**{**fields, **changes}))

        fetch(InvalidArgument, "900", index=[3, 900])
        fetch(InvalidArgument, "-1", index=[3, -1])
        fetch(InvalidArgument, "layer 4", layer=4)
        fetch(InvalidArgument, "slot 2", slot=2)
        fetch(InvalidArgument, "9 entries", counts=[9, 0], index=list(range(9)))
        fetch(InvalidArgument, "counts", counts=[2, 1])
        fetch(InvalidArgument, "counts", counts=[1])
        fetch(NotFound, "12345", transfer=12345)
        # A fetch of a layer that is not computed yet waits for it.
        early = decode.begin_fetch(3, 1, np.array([1, 0], np.int32), np.array([5], np.int32))
        # The same transfer goes on as if nothing had been.
        for layer in range(2, 4):
            prefill.put_layer(layer, entries=layer_of(layer, lengths))
        prefill.finish(wait=False)
        index = random_index(5, lengths, 8)
        order = np.zeros_like(index)
        entries = decode.select(3, index, order=order, timeout_s=WAIT_S)
        assert np.array_equal(entries, expected(3, lengths, order))
        early.wait(WAIT_S)
        handle = decode.begin_fetch(2, 1, np.array([1, 2], np.int32), np.array([899, 0, 7], np.int32))
        handle.wait(WAIT_S)
    fetch(NotFound, "not open")
    prefill.release()


def test_a_batch_of_two_sources_and_one_is_slow(daemons: dict[str, DaemonProcess]) -> None:
    lengths = {"fast": [2000], "slow": [1400]}
    with (
        daemons["decode"].client("decode") as sink,
        daemons["fast"].client("one") as fast,
        daemons["slow"].client("two") as slow,
    ):
        prefills = {"fast": fast, "slow": slow}
        opened, decodes = [], {}
        for node, client in prefills.items():
            decodes[node] = sink.decode(
                f"batch {node}", SPEC, lengths[node], source=node, mode="partial", landing_entries=1000
            )
            prefill = client.prefill(f"batch {node}", SPEC, lengths[node])
            opened.append(prefill)
            put_all(prefill, lengths[node])
            prefill.finish(wait=False)
        for decode in decodes.values():
            decode.wait_ready(1, timeout_s=WAIT_S)
        index = {node: random_index(7, lengths[node], 1000) for node in decodes}
        nodes = ["slow", "fast"]
        for layer in (2, 3):
            requests = [(decodes[node], layer, index[node], 0) for node in nodes]
            came = []
            for at, pending in select_many(requests, timeout_s=WAIT_S):
                came.append(nodes[at])
                entries = pending.wait()
                assert np.array_equal(entries, expected(layer, lengths[nodes[at]], pending.index))
            assert sorted(came) == ["fast", "slow"]
        assert all(decode.selection_counters().fetched.sum() > 0 for decode in decodes.values())
        for transfer in [*decodes.values(), *opened]:
            transfer.release()


def test_any_thread_may_wait_for_its_own_fetch(clients: tuple[Client, Client]) -> None:
    source, sink = clients
    lengths = [800]
    with sink.decode(
        "threads", SPEC, lengths, source="fast", mode="partial", landing_entries=50, landing_slots=6
    ) as decode:
        prefill = source.prefill("threads", SPEC, lengths)
        put_all(prefill, lengths)
        prefill.finish(wait=False)
        decode.wait_ready(1, timeout_s=WAIT_S)
        wrong: list[Any] = []

        def work(slot: int) -> None:
            for turn in range(10):
                layer = 2 + (slot + turn) % 2
                index = random_index(100 * slot + turn, lengths, 50)
                order = np.zeros_like(index)
                entries = decode.select(layer, index, slot=slot, order=order, timeout_s=WAIT_S)
                if not np.array_equal(entries, expected(layer, lengths, order)):
                    wrong.append((slot, turn))

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
    prefill.release()


@pytest.mark.parametrize("landing", [0, 4])
def test_who_waits_for_everything_gets_it(clients: tuple[Client, Client], landing: int) -> None:
    """Without a word of idle windows: waiting leaves the network unused. A sink that can't fetch is sent everything,
    whatever mode others have chosen."""
    source, sink = clients
    lengths = [1200, 700]
    with (
        sink.decode("waits", SPEC, lengths, source="fast", landing_entries=landing) as decode,
        source.prefill("waits", SPEC, lengths, mode="speculative" if landing else "profile") as prefill,
    ):
        for layer in range(SPEC.layers):
            prefill.put_layer(layer, entries=layer_of(layer, lengths)[:, :1])
        for layer in range(SPEC.layers):
            prefill.put_layer(layer, entries=layer_of(layer, lengths)[:, 1:], start=1)
        prefill.finish(wait=False)  # before most of it can have gone
        decode.wait_ready(2, timeout_s=WAIT_S)
        decode.wait_ready(timeout_s=WAIT_S)
        (status,) = (one for one in sink.status().transfers if one.request == "waits")
        assert status.mode == ("speculative" if landing else "full")
        for layer in range(SPEC.layers):
            for row, length in enumerate(lengths):
                assert np.array_equal(decode.layer(layer)[row, :length], layer_of(layer, lengths)[row, :length])
