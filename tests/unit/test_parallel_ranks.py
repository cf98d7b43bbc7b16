"""Degrees of tensor parallelism that differ: who gets which heads from whom, and every byte in its place, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import Aborted, DeadlineExceeded, InvalidArgument, KvdError, UnsupportedLayout
from kvd.layout.execute import regroup
from kvd.layout.geometry import Geometry
from kvd.placing import tensor_map
from kvd.tensors import Route, Tensors, on_device
from kvd_client.client import Client
from kvd_client.layouts import Placement
from kvd_client.parallel import ParallelDecode, Piece, decode, divide, heads_of
from kvd_client.spec import KVSpec, PartLayout, TokenRange
from kvd_client.tensors import DeviceTensors

DEGREES = st.sampled_from([1, 2, 4])


def test_two_ranks_to_four_and_back() -> None:
    assert divide(8, 2, 4) == (Piece(0, 0, 0, 2), Piece(0, 1, 2, 2), Piece(1, 2, 4, 2), Piece(1, 3, 6, 2))
    assert divide(8, 4, 2) == (Piece(0, 0, 0, 2), Piece(1, 0, 2, 2), Piece(2, 1, 4, 2), Piece(3, 1, 6, 2))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_equal_degrees_pair_rank_with_rank(ranks: int) -> None:
    pieces = divide(8, ranks, ranks)
    assert [(p.source, p.sink) for p in pieces] == [(rank, rank) for rank in range(ranks)]
    assert [(p.head_start, p.heads) for p in pieces] == [heads_of(8, rank, ranks) for rank in range(ranks)]


@given(heads=st.sampled_from([1, 2, 6, 8]), source=st.integers(1, 32), sink=st.integers(1, 32))
@settings(max_examples=60, deadline=None)
def test_every_rank_of_the_sink_gets_each_of_its_heads_once(heads: int, source: int, sink: int) -> None:
    if any(heads % ranks and ranks % heads for ranks in (source, sink)):
        with pytest.raises(UnsupportedLayout, match="can't be divided among"):
            divide(heads, source, sink)
        return
    pieces = divide(heads, source, sink)
    for rank in range(sink):
        start, count = heads_of(heads, rank, sink)
        got = [h for p in pieces if p.sink == rank for h in range(p.head_start, p.head_start + p.heads)]
        assert got == list(range(start, start + count))
    for piece in pieces:
        start, count = heads_of(heads, piece.source, source)
        assert start <= piece.head_start < piece.head_start + piece.heads <= start + count
    if source > heads and sink >= source:  # no rank of the source sends for another that has the same head
        assert {piece.source for piece in pieces} == set(range(source))


def test_ranks_that_do_not_exist() -> None:
    with pytest.raises(InvalidArgument, match="rank 2 of 2"):
        heads_of(8, 2, 2)


class Rank:
    """The tensors of one rank: its cache's memory, with more blocks than the request has."""

    def __init__(self, placement: Placement, layout: PartLayout, head: int, channels: int, seed: int) -> None:
        self.placement, self.layout, self.head, self.channels = placement, layout, head, channels
        each = -(-layout.capacity // placement.block_tokens)
        self.blocks = layout.rows * each + 2
        rng = np.random.default_rng(seed)
        self.table = rng.permutation(self.blocks)[: layout.rows * each].reshape(layout.rows, each)
        whole = self.part(layout, head)
        geometry = Geometry(whole.rows[0])
        self.map = tensor_map(whole.rows[0], _Memory(geometry.bases), self.blocks)  # type: ignore[arg-type]
        self.banks: list[Any] = [np.full(geometry.channel_bytes, 0xEE, np.uint8) for _ in range(channels)]

    def part(self, layout: PartLayout, head_start: int) -> Tensors:
        """Those of its heads that a piece has."""
        alignment = 32 if self.placement.layout == "tenstorrent" else 1
        return on_device(
            layout, [layout.capacity] * layout.rows, head_start, self.placement, channels=self.channels,
            alignment=alignment, blocks=self.blocks, table=self.table,
            heads=(self.layout.heads, head_start - self.head),
        )  # fmt: skip

    def tensors(self) -> DeviceTensors:
        return DeviceTensors(self.map, self.banks, self.layout, self.table)


class _Memory:
    origin = offset = nbytes = 0

    def __init__(self, bases: Any) -> None:
        self.bases = bases


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, int]:
    layout = draw(st.sampled_from(["vllm-lbnhc", "vllm-lhbnc", "vllm-bhlnc", "nhd", "hnd-blocks", "tenstorrent"]))
    channels = draw(st.integers(1, 12)) if layout == "tenstorrent" else 1
    block = draw(st.sampled_from([16, 32, 64] if layout != "tenstorrent" else [32, 64]))
    return Placement(layout=layout, block_tokens=block), channels


@given(
    heads=st.sampled_from([2, 4]),
    degrees=st.tuples(DEGREES, DEGREES),
    ends=st.tuples(placements(), placements()),
    tokens=st.integers(1, 100),
)
@settings(max_examples=15, deadline=None)
def test_every_byte_gets_to_its_place_and_none_is_written_twice(
    heads: int, degrees: tuple[int, int], ends: tuple[tuple[Placement, int], ...], tokens: int
) -> None:
    """Whatever both ends' layouts, block sizes and degrees are, K and V packed or apart."""
    whole = PartLayout(layers=2, heads=heads, entry_bytes=64, rows=2, capacity=tokens)
    rng = np.random.default_rng(tokens)
    values = rng.integers(0, 256, (2, 2, tokens, heads, 64), dtype=np.uint8)
    ranks: list[list[Rank]] = []
    for (placement, channels), count in zip(ends, degrees, strict=True):
        held = [heads_of(heads, rank, count) for rank in range(count)]
        ranks.append(
            [
                Rank(placement, _replace(whole, number), start, channels, seed=7 * start)
                for start, number in held
            ]
        )  # fmt: skip
    sources, sinks = ranks
    for source in sources:
        mine = values[:, :, :, source.head : source.head + source.layout.heads].reshape(2, -1, 64)
        for layer in range(2):
            source.tensors().scatter(layer, np.arange(len(mine[layer])), mine[layer])
    written = [[np.zeros(len(bank), np.uint8) for bank in sink.banks] for sink in sinks]
    for piece in divide(heads, *degrees):
        source, sink = sources[piece.source], sinks[piece.sink]
        layout, go = _replace(whole, piece.heads), (piece.head_start, piece.head_start + piece.heads)
        route = Route(source.part(layout, go[0]), sink.part(layout, go[0]), go)
        for layer in range(2):
            for plan in route.plan([(layer, [TokenRange(row, 0, tokens) for row in range(2)])]):
                staging: Any = np.zeros(plan.staging_bytes, np.uint8)
                regroup(plan, source.banks, staging)
                for start, channel, to, length in plan.requests.tolist():
                    sink.banks[channel][to : to + length] = staging[start : start + length]
                    written[piece.sink][channel][to : to + length] += 1
    for sink, counts in zip(sinks, written, strict=True):
        assert max(int(one.max()) for one in counts) == 1
        for layer in range(2):
            wanted = values[layer, :, :, sink.head : sink.head + sink.layout.heads]
            assert np.array_equal(sink.tensors().read(layer), wanted)
        for bank, one in zip(sink.banks, counts, strict=True):
            assert (bank[one == 0] == 0xEE).all()


def _replace(layout: PartLayout, heads: int) -> PartLayout:
    return PartLayout(
        layers=layout.layers, heads=heads, entry_bytes=layout.entry_bytes, rows=layout.rows, capacity=layout.capacity
    )


def test_heads_that_the_tensors_do_not_have() -> None:
    rank = Rank(Placement(layout="hnd"), PartLayout(layers=1, heads=2, entry_bytes=64, rows=1, capacity=9), 2, 1, 0)
    with pytest.raises(InvalidArgument, match="can't begin at head 1 of tensors of 2"):
        rank.part(rank.layout, 3)
    with pytest.raises(InvalidArgument, match="can't begin at head -1"):
        rank.part(rank.layout, 1)


# --- waiting for several pieces ---------------------------------------------------------------------------------------


class Waited:
    """A piece's transfer: what each wait for it ends with, None: it is ready. The last one stays."""

    def __init__(self, *ends: KvdError | None) -> None:
        self.ends, self.turns, self.aborted = list(ends), 0, ""

    def wait_ready(self, layer: int | None, timeout_s: float | None) -> None:
        self.turns += 1
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if end is not None:
            raise end

    def abort(self, reason: str) -> None:
        self.aborted = reason


TURN = DeadlineExceeded("not yet", timeout_s=0.5)
"""What a wait raises whose time is up."""


def waiting(*parts: Waited) -> ParallelDecode:
    layout = PartLayout(layers=1, heads=len(parts), entry_bytes=64, rows=1, capacity=9)
    pieces: list[Any] = [(Piece(0, 0, head, 1), part) for head, part in enumerate(parts)]
    return ParallelDecode(layout, 0, pieces, None, (), False)


def test_a_piece_that_fails_is_heard_of_while_another_is_waited_for() -> None:
    slow, failed, done = Waited(TURN), Waited(TURN, Aborted("its source is gone")), Waited(None)
    with pytest.raises(Aborted, match="source is gone"):
        waiting(slow, failed, done).wait_ready()
    assert (slow.turns, failed.turns, done.turns) == (2, 2, 1)
    assert "source is gone" in slow.aborted


def test_a_wait_takes_as_long_as_its_pieces_and_no_longer_than_asked() -> None:
    slow, slower, done = Waited(TURN, TURN, None), Waited(TURN, TURN, None), Waited(None)
    waiting(slow, slower, done).wait_ready()
    assert (slow.turns, slower.turns, done.turns) == (3, 3, 1)
    for parts in ((Waited(TURN), Waited(None)), (Waited(TURN), Waited(TURN))):
        with pytest.raises(DeadlineExceeded, match="not yet"):
            waiting(*parts).wait_ready(timeout_s=0)
        assert not any(part.aborted for part in parts)  # it goes on


def test_a_transfer_whose_own_deadline_has_passed_has_failed() -> None:
    passed, other = Waited(DeadlineExceeded("too late", request="r")), Waited(TURN)
    with pytest.raises(DeadlineExceeded, match="too late"):
        waiting(passed, other).wait_ready()
    assert other.aborted


@pytest.mark.parametrize(
    "wrong",
    [
        {"spec": None}, {"lengths": 4}, {"lengths": None}, {"lengths": ["4"]}, {"rank": "0"}, {"ranks": "1"},
        {"peer_ranks": None}, {"peer_ranks": 1 << 40}, {"source": 5}, {"held": 5}, {"blocks": [[0]]}, {"cache": 5},
        {"placement": 5}, {"placement": Placement(layout="tenstorrent", block_tokens=0)},
        {"placement": Placement(layout="tenstorrent", block_tokens="32")},
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_arguments_are_named_before_anything_is_opened(wrong):
    spec = KVSpec(layers=1, kv_heads=2, entry_bytes=16, dtype="float16", model="test")
    right = {"request": "r", "spec": spec, "lengths": [4], "rank": 0, "ranks": 1, "peer_ranks": 2}
    with pytest.raises(InvalidArgument):
        decode(Client("/nonexistent"), **(right | wrong))
