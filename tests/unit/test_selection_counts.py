"""What selections count and report, and the metadata that they wait for."""

from __future__ import annotations

import numpy as np
import pytest

from kvd_client import Client, KVSpec, lanes
from kvd_client.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LeaseExpired,
)
from kvd_client.prefill import PrefillTransfer
from kvd_client.protocol import Release
from kvd_client.ring import EVENT_METADATA_READY
from kvd_client.spec import MASK_LOCAL, MetadataSpec
from tests.unit.selection_fakes import GARBAGE, FakeDaemon, index_of


def test_counters_by_layer_and_the_on_demand_ratio_without_the_first_two() -> None:
    daemon = FakeDaemon([8], layers=4, heads=1)
    transfer = daemon.transfer
    daemon.push(3, 0, 0, 4)
    before = transfer.selection_counters()
    assert before.on_demand_ratio == 0.0
    transfer.select(0, index_of([0, 1, 2]))
    transfer.select(3, index_of([0, 1, 6, 7]))
    transfer.select(3, index_of([0, 1, 6, 5]))
    transfer.select(2, index_of([4]))
    counters = transfer.selection_counters()
    assert counters.selects.tolist() == [1, 0, 1, 2]
    assert counters.selected.tolist() == [3, 0, 1, 8]
    assert counters.fetched.tolist() == [3, 0, 1, 3]
    assert counters.on_demand_ratio == 4 / 9
    assert (counters.wait_s[[0, 2, 3]] > 0).all()
    assert counters.wait_s[1] == 0
    assert before.selected.tolist() == [0, 0, 0, 0], "a snapshot"
    transfer.select(2, index_of([4, 5]))
    step = transfer.selection_counters().since(counters)
    assert (step.selected.tolist(), step.fetched.tolist()) == ([0, 0, 2, 0], [0, 0, 1, 0])
    assert step.plus(step).selected.tolist() == [0, 0, 4, 0]


def test_selections_are_counted_in_blocks_and_reported() -> None:
    daemon = FakeDaemon([8, 4])
    transfer, connection = daemon.transfer, daemon.connection
    transfer.report_selections()
    transfer.select(0, index_of([0], [0], [0], [0]))
    transfer.report_selections()
    assert connection.reports == [], "nobody asked for counts"
    transfer.count_selections(4)
    # Blocks of 2 tokens in row 0, of 1 token in row 1; -1 counts nowhere.
    transfer.select(2, index_of([0, 1, 7], [7, 6], [0, 1, 3], [3]))
    transfer.select(2, index_of([2], [2], [2], [2]))
    transfer.report_selections()
    (report,) = connection.reports
    assert (report.transfer, report.blocks, report.steps) == (1, 4, 2)
    counts = np.frombuffer(report.counts, np.float32).reshape(3, 4)
    assert counts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [3, 3, 2, 5]]
    transfer.report_selections()
    assert len(connection.reports) == 1, "counting began anew"
    transfer.select(1, index_of([0], [0], [0], [0]))
    transfer.release()
    assert [type(message) for message in connection.sent[-2:]] == [type(report), Release]
    with pytest.raises(LeaseExpired):
        transfer.count_selections(4)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
@pytest.mark.parametrize("lengths", [[8], [8, 5]])
def test_layers_are_counted_together_and_right(
    lengths: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of layers, of any number of entries, and whenever they are counted."""
    monkeypatch.setattr(lanes, "_COUNT_AT_ONCE", at_once)
    daemon = FakeDaemon(lengths, layers=5)
    transfer, rng = daemon.transfer, np.random.default_rng(at_once)
    transfer.count_selections(3)
    expected = np.zeros((5, 3))
    for layer in [0, 1, 2, 3, 4, 2, 3, 3, 4, 1, 0, 0, 4]:
        k = int(rng.integers(1, 5))
        index = np.full((2 * len(lengths), k), -1, np.int32)
        for at, row in enumerate(index):
            length = lengths[at // 2]
            chosen = rng.permutation(length)[: int(rng.integers(1, k + 1))]
            row[: len(chosen)] = chosen
            np.add.at(expected[layer], chosen * 3 // length, 1)
        transfer.select(layer, index)
    transfer.report_selections()
    (report,) = daemon.connection.reports
    assert np.frombuffer(report.counts, np.float32).reshape(5, 3).tolist() == expected.tolist()
    assert (report.steps, report.asked) == (3, True)


def test_a_daemon_that_learns_has_everything_counted() -> None:
    daemon = FakeDaemon([8], count_blocks=4)
    transfer, connection = daemon.transfer, daemon.connection
    transfer.select(2, index_of([0, 1], [7, 6]))
    transfer.release()
    (report,) = connection.reports
    assert (report.blocks, report.steps, report.asked) == (4, 1, False)
    assert np.frombuffer(report.counts, np.float32).reshape(3, 4)[2].tolist() == [2, 0, 0, 2]


def test_too_many_blocks_to_report_are_refused() -> None:
    daemon = FakeDaemon([8])
    for blocks in (0, 100_000):
        with pytest.raises(InvalidArgument, match="blocks"):
            daemon.transfer.count_selections(blocks)


def test_metadata_is_waited_for_by_layer() -> None:
    daemon = FakeDaemon([8], metadata=(MetadataSpec(name="a", layer_bytes=5), MetadataSpec(name="b", layer_bytes=3)))
    transfer, connection = daemon.transfer, daemon.connection
    connection.on_block = None
    for layer in (None, 1):
        with pytest.raises(DeadlineExceeded, match="metadata"):
            transfer.wait_metadata(layer, timeout_s=0.0)
    order = iter([1, 0, 2])

    def block() -> None:
        layer = next(order)
        transfer.metadata(layer, "b")[:] = layer + 1
        daemon.memory.bytes[daemon.layout.metadata_mask_offset + layer] = MASK_LOCAL

    connection.on_block = block
    transfer.wait_metadata(1)
    assert transfer.metadata(1, "b").tolist() == [2, 2, 2]
    assert transfer.metadata(1, "a").tolist() == [GARBAGE] * 5
    assert next(order) == 0, "layer 1 was all it waited for"
    daemon.memory.bytes[daemon.layout.metadata_mask_offset] = MASK_LOCAL
    transfer.wait_metadata()
    with pytest.raises(InvalidArgument, match="no metadata 'c'"):
        transfer.metadata(0, "c")
    with pytest.raises(InvalidArgument):
        transfer.wait_metadata(3)


def test_without_metadata_there_is_nothing_to_wait_for() -> None:
    daemon = FakeDaemon([8])
    daemon.connection.on_block = None
    daemon.transfer.wait_metadata()


def test_a_source_says_when_a_layers_metadata_is_complete() -> None:
    daemon = FakeDaemon([8], metadata=(MetadataSpec(name="a", layer_bytes=5),))
    source = PrefillTransfer(daemon.connection, daemon.part, daemon.layout, [8])  # type: ignore[arg-type]
    source.metadata(2, "a")[:] = 7
    source.metadata_ready(2)
    assert daemon.connection.events == [(EVENT_METADATA_READY, 2)]
    with pytest.raises(InvalidArgument):
        source.metadata_ready(3)
    bare = FakeDaemon([8])
    with pytest.raises(InvalidArgument, match="without metadata"):
        PrefillTransfer(bare.connection, bare.part, bare.layout, [8]).metadata_ready(0)  # type: ignore[arg-type]


def test_an_unknown_mode_is_refused_before_a_daemon_is_asked() -> None:
    client = Client("/nowhere/kvd.sock")
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=1, dtype="uint8", model="test")
    for open_ in (client.prefill, client.decode):
        with pytest.raises(InvalidArgument, match="no mode 'fast'; give one of full, partial"):
            open_("r", spec, [4], mode="fast")
        with pytest.raises(InvalidArgument, match="same name"):
            open_("r", spec, [4], metadata=[MetadataSpec(name="a", layer_bytes=1)] * 2)
