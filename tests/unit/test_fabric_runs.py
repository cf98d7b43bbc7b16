"""Descriptor lists, their pieces, grants, and lists of memory pieces."""

import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgument
from kvd.fabric.base import Region
from kvd.fabric.iovec import MOST_PIECES, Vector
from kvd.fabric.regions import Refusal, RegionTable, address_of
from kvd.fabric.runs import checked_runs

REGION = Region(1, memoryview(bytearray(5000)))


def table_of(runs):
    return np.array(runs, np.int64).reshape(-1, 3)


@st.composite
def run_lists(draw):
    runs = []
    for _ in range(draw(st.integers(1, 30))):
        length = draw(st.integers(0, 200))
        runs.append((draw(st.integers(0, 5000 - length)), draw(st.integers(-(2**63), 2**63 - 1)), length))
    return runs


@given(runs=run_lists(), size=st.integers(1, 300), most=st.integers(1, 7))
def test_pieces_cover_the_list_in_order(runs, size, most):
    checked = checked_runs(REGION, table_of(runs))
    kept = [run for run in runs if run[2]]
    wanted = [(local + n, (remote + n) % 2**64) for local, remote, length in kept for n in range(length)]
    assert checked.nbytes == len(wanted)
    if kept:
        assert checked.low == min(remote for _, remote, _ in kept)
        if checked.low >= 0:
            assert checked.high == max(remote + length for _, remote, length in kept)
    small = all(0 <= remote < 2**62 for _, remote, _ in kept)
    if not small:
        return
    got, position = [], 0
    while position < checked.nbytes:
        rows, nbytes = checked.cut(position, size, most)
        assert 1 <= len(rows) <= most
        assert nbytes == rows[:, 2].sum() <= size
        got += [(local + n, remote + n) for local, remote, length in rows.tolist() for n in range(length)]
        position += nbytes
    assert got == wanted


@given(runs=run_lists())
def test_short_lists_are_checked_as_long_ones_are(runs):
    short = checked_runs(REGION, table_of(runs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvd.fabric.runs.FEW", 0)
        long = checked_runs(REGION, table_of(runs))
    assert (short.rows.tolist(), short.ends.tolist()) == (long.rows.tolist(), long.ends.tolist())
    assert (short.nbytes, short.low, short.high) == (long.nbytes, long.low, long.high)


@pytest.mark.parametrize(
    "wrong",
    [
        [(-1, 0, 1)],
        [(0, 0, -1)],
        [(0, 0, 10), (4999, 0, 2)],
        [(2**63 - 1, 0, 2**63 - 1)],
        [(5001, 0, 0)],
        [(0, 0, -(2**63))],
    ],
)
def test_lists_that_leave_the_region(wrong):
    with pytest.raises(InvalidArgument) as caught:
        checked_runs(REGION, table_of(wrong))
    assert caught.value.fields["descriptor"] == len(wrong) - 1


def test_other_integers_are_converted():
    assert checked_runs(REGION, [[0, 1, 2]]).rows.dtype == np.int64
    assert checked_runs(REGION, np.array([[0, 1, 2]], np.int16)).nbytes == 2
    with pytest.raises(InvalidArgument):
        checked_runs(REGION, np.array([[0, 1, 2]], np.uint64))


def test_grants():
    table = RegionTable()
    region = table.register(memoryview(bytearray(1000)))
    both = table.grant(region, 100, 200, writable=True, readable=True)
    read = table.grant(region, 100, 200, writable=False, readable=True)
    write = table.grant(region, 100, 200, writable=True, readable=False)
    assert len({both.token, read.token, write.token}) == 3
    assert table.check(both.token, 0, 200, write=True) is both
    assert table.check(both.token, 200, 200, write=False) is both
    for low, high in ((-1, 0), (0, 201), (201, 201), (5, 4), (2**63, 2**64 - 1)):
        assert table.check(both.token, low, high, write=True) is Refusal.OUT_OF_RANGE
    assert table.check(read.token, 0, 1, write=True) is Refusal.NOT_WRITABLE
    assert table.check(write.token, 0, 1, write=False) is Refusal.NOT_READABLE
    table.revoke(both)
    table.revoke(both)
    assert table.check(both.token, 0, 1, write=True) is Refusal.UNKNOWN_TOKEN
    assert not table.is_open(both)
    assert table.is_open(read)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    ready=st.integers(0, 5000),
    buffer=st.sampled_from([2048, 8192, 65536]),
)
def test_vectors_move_every_byte(lengths, ready, buffer):
    """Scattered memory to scattered memory through a small socket, a part of it from staging, the rest behind it."""
    rng = np.random.default_rng(sum(lengths))
    total, extra = sum(lengths), 64
    source = rng.integers(0, 256, total, np.uint8)
    trailer = bytes(rng.integers(0, 256, extra, np.uint8))
    target, staging = np.zeros(total + len(lengths), np.uint8), bytearray(8192)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    gaps = begins + np.arange(len(lengths))  # one byte between the pieces stays as it is
    ready = min(ready, total)
    staging[:ready] = source[:ready].tobytes()
    out, into = Vector(), Vector()
    if ready < total:
        out.add(address_of(source.data) + ready, total - ready)
    keep = bytearray(trailer)
    out.add(address_of(keep), extra)
    into.add_runs(address_of(target.data), gaps, np.array(lengths))
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        assert into.fill_from(address_of(staging), ready) == ready
        behind = 0
        while behind < extra:
            if out.remaining:
                out.send(near.fileno())
            n, surplus = into.receive(far.fileno(), address_of(staging) + behind, extra - behind)
            assert n != 0
            behind += surplus
        assert into.receive(far.fileno(), address_of(staging), 10) == (-1, 0)
    assert into.remaining == out.remaining == 0
    expected = np.zeros_like(target)
    for begin, gap, length in zip(begins, gaps, lengths, strict=True):
        expected[gap : gap + length] = source[begin : begin + length]
    assert (target == expected).all()
    assert staging[:extra] == trailer


def test_redirected_pieces():
    """What has not been sent of redirected pieces comes from elsewhere; the rest is as it was."""
    first, second, zeros = bytearray(b"a" * 10), bytearray(b"b" * 10), bytearray(10)
    vector = Vector()
    for piece in (first, second, first):
        vector.add(address_of(piece), 10)
    vector.redirect(1, 2, address_of(zeros))
    near, far = socket.socketpair()
    with near, far:
        assert vector.send(near.fileno()) == 30
        assert far.recv(100) == b"a" * 10 + bytes(10) + b"a" * 10


def test_errors_of_the_socket():
    memory = bytearray(10)
    vector = Vector()
    vector.add(address_of(memory), 10)
    near, far = socket.socketpair()
    far.close()
    with near, pytest.raises(OSError, match=os.strerror(32)):
        vector.send(near.fileno())


def test_vector_has_room_for_a_system_call():
    vector, memory = Vector(), np.zeros(MOST_PIECES, np.uint8)
    index = np.arange(MOST_PIECES)
    vector.add_runs(address_of(memory.data), index, np.ones(MOST_PIECES, np.int64))
    assert vector.room == 0
    assert vector.remaining == MOST_PIECES
