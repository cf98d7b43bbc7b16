"""Masks by head: the layout, what the client makes of it, and what a ranking by head says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.api.checks import check_open
from kvd_client import protocol as api
from kvd_client.decode import DecodeTransfer
from kvd_client.errors import InvalidArgument
from kvd_client.parts import Part
from kvd_client.prefill import PrefillTransfer
from kvd_client.protocol import Opened
from kvd_client.ring import ALL_ROWS, EVENT_LAYER_READY
from kvd_client.spec import MASK_LOCAL, MAX_ROWS, KVSpec, PartLayout, TokenRange, part_layout
from tests.unit.selection_fakes import FakeConnection, FakeDaemon, Memory

SPEC = KVSpec(layers=3, kv_heads=4, entry_bytes=16, dtype="float32", model="m")
LENGTHS = [7, 5]


def layout_of(mask: str = "head", **how: Any) -> PartLayout:
    return part_layout(SPEC, **{"heads": 4, "rows": 2, "capacity": 8, "mask": mask, **how})


def test_each_head_of_a_sequence_is_a_row() -> None:
    by_head, by_token = layout_of(), layout_of("token")
    assert (by_head.rows, by_head.heads, by_head.sequence_rows) == (8, 1, 4)
    assert (by_head.sequences, by_head.kv_heads, by_head.mask_by) == (2, 4, "head")
    assert (by_token.rows, by_token.sequences, by_token.kv_heads, by_token.mask_by) == (2, 2, 4, "token")
    assert by_head.layer_bytes == by_token.layer_bytes
    assert by_head.mask_bytes == 4 * by_token.mask_bytes
    landing = {"landing_entries": 3, "landing_slots": 2}
    assert layout_of(**landing).landing_stride == layout_of("token", **landing).landing_stride
    assert layout_of(heads=1, rows=2) == layout_of("token", heads=1, rows=2), "with one head there is no difference"


@pytest.mark.parametrize(
    ("mask", "keeps", "how"),
    [("head", True, {}), ("token", False, {}), ("token", True, {"heads": 1}), ("token", False, {"placed": True})],
)
def test_fetched_entries_are_kept_where_a_mask_byte_is_one_entry(mask: str, keeps: bool, how: dict[str, Any]) -> None:
    assert layout_of(mask, **how).keeps_fetched is keeps


@pytest.mark.parametrize(
    ("says", "make"),
    [
        ("no mask by 'layer'; choose one of token, head", lambda: layout_of("layer")),
        ("leave mask or the placement out", lambda: layout_of(placed=True)),
        (f"4 KV heads have {4 * MAX_ROWS} masks by head.* at most {MAX_ROWS}", lambda: layout_of(rows=MAX_ROWS)),
        ("can't be sequences of 3 rows", lambda: msgspec.structs.replace(layout_of(), sequence_rows=3).check()),
        ("can't be sequences of 4 rows", lambda: msgspec.structs.replace(layout_of(), heads=2).check()),
        ("sequence_rows is 0", lambda: msgspec.structs.replace(layout_of(), sequence_rows=0).check()),
    ],
)
def test_what_makes_no_sense(says: str, make: Any) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make()


def test_the_daemon_refuses_a_mask_that_it_does_not_know() -> None:
    request = api.OpenSource(request="r", spec=SPEC, lengths=[3], capacity=3, mask="bit")
    with pytest.raises(InvalidArgument, match="no mask by 'bit'"):
        check_open(request)


def opened(kind: Any, mask: str, connection: FakeConnection | None = None, *more: Any) -> Any:
    layout = layout_of(mask)
    memory = Memory(layout.nbytes)
    memory.bytes[:] = 0
    reply = Opened(transfer=1, handle="", slot=0, offset=0, nbytes=layout.nbytes, generation=1)
    return kind(connection or FakeConnection(), Part(reply, memory), layout, LENGTHS, *more)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([None, 0, 1]), st.integers(0, 8), st.integers(0, 9), st.booleans())
def test_what_a_source_puts_is_read_the_same_whatever_the_mask(
    row: int | None, start: int, tokens: int, halves: bool
) -> None:
    shape = (4, tokens, 2) if row is not None else (2, 4, tokens, 2)
    k, v = np.random.default_rng(tokens).random((2, *shape), np.float32)
    found = []
    for mask in ("token", "head"):
        transfer = opened(PrefillTransfer, mask)
        if halves:
            transfer.put_layer(1, k=k, v=v, row=row, start=start)
        else:
            entries = np.concatenate([k, v], -1).swapaxes(-3, -2)
            transfer.put_layer(1, entries=np.ascontiguousarray(entries).view(np.uint8), row=row, start=start)
        layer = transfer.layer(1)
        assert layer.shape == (2, 8, 4, 16)
        found.append(layer.copy())
    assert np.array_equal(*found)
    assert found[0].any() == (tokens > 0 and start < (max(LENGTHS) if row is None else LENGTHS[row]))


def test_layers_lie_head_by_head_and_the_views_hide_it() -> None:
    transfer = opened(DecodeTransfer, "head", None, [])
    p = transfer.layout
    values = np.arange(2 * 4 * 8 * 4, dtype=np.float32).reshape(2, 4, 8, 4)  # (rows, heads, capacity, numbers)
    transfer._memory[p.layer_offset(2) : p.layer_offset(2) + p.layer_bytes] = values.reshape(-1).view(np.uint8)
    k, v = transfer.k(2, np.float32), transfer.v(2, np.float32)
    assert np.array_equal(k, values.transpose(0, 2, 1, 3)[..., :2])
    assert np.array_equal(v, values.transpose(0, 2, 1, 3)[..., 2:])
    torch = pytest.importorskip("torch")
    assert torch.equal(transfer.k(2, "float32", as_torch=True), torch.from_numpy(k.copy()))


def test_held_tokens_are_put_and_marked_for_all_heads() -> None:
    transfer = opened(DecodeTransfer, "head", None, [TokenRange(1, 0, 3)])
    p = transfer.layout
    for layer in range(3):
        transfer._mask(layer)[:] = [[2] * length + [0] * (8 - length) for length in transfer.row_lengths]
    assert transfer.row_lengths == (7,) * 4 + (5,) * 4
    entries = np.random.default_rng(1).integers(0, 256, (2, 4, 16), dtype=np.uint8)
    transfer.put_held(1, 1, 0, entries)
    assert np.array_equal(transfer.layer(1)[1, :2], entries)
    mask = transfer.mask(1)
    assert mask.shape == (2, 4, 8)
    assert (mask[1, :, :2] == MASK_LOCAL).all()
    assert (mask == MASK_LOCAL).sum() == 8
    with pytest.raises(InvalidArgument, match=r"\(2, 1\); this part has 4 heads"):
        transfer.put_held(1, 1, 0, entries[:, :1])
    with pytest.raises(InvalidArgument, match="row 2 does not exist"):
        transfer.mark_held(2, 0, 1)
    transfer.mark_held(1, 0, 3)
    assert all((transfer.mask(layer)[1, :, :3] == MASK_LOCAL).all() for layer in range(3))
    for row in range(2):
        for head in range(4):
            assert not transfer.poll_ready(0)
            transfer.mask(0)[row, head, : LENGTHS[row]] = MASK_LOCAL
    assert transfer.poll_ready(0)
    assert (p.layers, p.rows) == (3, 8)


def test_rings_and_rankings_go_by_sequence_and_by_head() -> None:
    class Listening(FakeConnection):
        def ring(self, part: Part, kind: int, layer: int, row: int, start: int, stop: int) -> None:
            self.events.append((kind, layer, row, start, stop))  # type: ignore[arg-type]

    connection = Listening()
    transfer = opened(PrefillTransfer, "head", connection)
    transfer.layer_ready(2, row=1)
    transfer.layer_ready(2)
    assert connection.events == [(EVENT_LAYER_READY, 2, 1, 0, 5), (EVENT_LAYER_READY, 2, ALL_ROWS, 0, 7)]
    transfer.rank(2, np.zeros((8, 3)))
    assert connection.sent[-1].blocks == 3
    with pytest.raises(InvalidArgument, match=r"\(2, blocks\), or \(8, blocks\) by head, not \(4, 3\)"):
        transfer.rank(2, np.zeros((4, 3)))


def test_what_was_fetched_needs_no_memory_of_its_own() -> None:
    daemon = FakeDaemon([6], heads=2, mask="head")
    index = np.array([[1, 4], [0, 5]], np.int32)
    daemon.transfer.select(2, index)
    assert daemon.transfer.lanes._known == {}
    assert daemon.transfer.mask(2)[0].tolist() == [[2, 1, 2, 2, 1, 2], [1, 2, 2, 2, 2, 1]]
    daemon.transfer.select(2, index)
    assert len(daemon.connection.fetches) == 1


def test_shares_of_each_head_add_up_to_those_of_all() -> None:
    pytest.importorskip("torch")
    from kvd_client.engines.prompt import shares_of
    from kvd_client.selectors.base import Shape

    shape = Shape((10, 6), 2, 16, "float32")
    rng = np.random.default_rng(5)
    indices = []
    for _ in range(3):
        index = np.full((4, 3), -1, np.int32)
        for row, (length, n) in enumerate([(10, 3), (10, 3), (6, 2), (6, 2)]):
            index[row, :n] = np.sort(rng.permutation(length)[:n])
        indices.append(index)
    by_head = shares_of(shape, indices, blocks=4, by_head=True)
    assert by_head.shape == (4, 4)
    assert np.allclose(by_head.reshape(2, 2, 4).mean(1), shares_of(shape, indices, blocks=4))
    alone = Shape((6,), 1, 16, "float32")
    assert np.allclose(by_head[3], shares_of(alone, [index[3:] for index in indices], blocks=4))
