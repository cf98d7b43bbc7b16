"""The frame codec of the tcp fabric."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import FabricError, KvdError, ProtocolError
from kvd.fabric import frames
from kvd.fabric.frames import HEADER, HEADER_BYTES, Header, Kind
from kvd.fabric.regions import Refusal

U64 = st.integers(0, 2**64 - 1)
WITH_RUNS = [Kind.WRITE, Kind.THEN, Kind.READ]


@st.composite
def headers(draw):
    kind = draw(st.sampled_from(Kind))
    runs = draw(st.integers(0, frames.MAX_RUNS)) if kind in WITH_RUNS else 0
    payload = draw(st.integers(0, frames.MAX_MESSAGE)) if kind <= Kind.DATA else 0
    number = draw(U64)
    if kind in (Kind.ANSWER, Kind.REFUSED):
        number = draw(st.sampled_from(Refusal))
    low = draw(st.integers(-(2**63), 2**63 - 1))
    return Header(kind, runs, draw(U64), payload, low, draw(U64), draw(st.binary(min_size=16, max_size=16)), number)


@given(header=headers(), offset=st.integers(0, 7), urge=st.booleans())
def test_header_round_trip(header, offset, urge):
    buffer = bytearray(HEADER_BYTES + 7)
    frames.pack_header(buffer, offset, header._replace(urge=urge))
    assert frames.unpack_header(buffer, offset) == header._replace(urge=urge)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_foreign_header(data):
    """Any 64 bytes are a header within the limits or a ProtocolError."""
    try:
        header = frames.unpack_header(data)
    except ProtocolError:
        return
    assert header.runs <= frames.MAX_RUNS
    assert header.payload <= frames.MAX_PAYLOAD


@pytest.mark.parametrize(
    "fields",
    [
        (0, 0, 0, 0, 0, 0),
        (10, 0, 0, 0, 0, 0),
        (Kind.MESSAGE, 2, 0, 0, 0, 0),
        (Kind.MESSAGE, 0, 1, 0, 0, 0),
        (Kind.MESSAGE, 0, 0, 1, 0, 0),
        (Kind.MESSAGE, 0, 0, 0, frames.MAX_MESSAGE + 1, 0),
        (Kind.NOTIFY, 0, 0, 0, 2**64 - 1, 0),
        (Kind.WRITE, 0, 0, frames.MAX_RUNS + 1, 0, 0),
        (Kind.WRITE, 0, 0, 2**32 - 1, 0, 0),
        (Kind.WRITE, 0, 0, 1, frames.MAX_PAYLOAD + 1, 0),
        (Kind.THEN, 0, 0, 1, frames.MAX_MESSAGE + 1, 0),
        (Kind.READ, 0, 0, 1, frames.MAX_PAYLOAD + 1, 0),
        (Kind.DATA, 0, 0, 1, 1, 0),
        (Kind.ACK, 0, 0, 0, 1, 0),
        (Kind.ANSWER, 0, 0, 0, 0, 7),
        (Kind.REFUSED, 0, 0, 0, 0, 0),
        (Kind.REFUSED, 0, 0, 0, 0, 7),
    ],
)
def test_malformed_header(fields):
    kind, urge, zero, runs, payload, number = fields
    data = HEADER.pack(kind, urge, zero, runs, 1, payload, 0, 0, bytes(16), number)
    with pytest.raises(ProtocolError):
        frames.unpack_header(data)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 4000)), max_size=frames.MAX_RUNS))
def test_runs_round_trip(runs):
    rows = np.array([(0, *run) for run in runs], np.int64).reshape(-1, 3)
    buffer = bytearray(3 + 16 * len(runs))
    assert frames.pack_runs(buffer, 3, rows) == len(buffer)
    header = Header(Kind.WRITE, len(runs), payload=sum(length for _, length in runs))
    assert (frames.unpack_runs(buffer, 3, header) == rows[:, 1:]).all()


INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-5, 5000), st.sampled_from([2**62, 2**63 - 1]))


@given(
    runs=st.lists(st.tuples(INT64, INT64), min_size=1, max_size=5),
    payload=st.integers(0, frames.MAX_PAYLOAD),
    low=st.integers(0, 4000),
    size=st.integers(0, 8000),
)
def test_no_run_escapes(runs, payload, low, size):
    """What is accepted as inside lies inside and has the payload's size, in Python's integers."""
    buffer = bytearray(16 * len(runs))
    rows = np.array([(0, *run) for run in runs], np.int64)
    frames.pack_runs(buffer, 0, rows)
    right = all(0 < length <= payload for _, length in runs) and sum(length for _, length in runs) == payload
    try:
        decoded = frames.unpack_runs(buffer, 0, Header(Kind.WRITE, len(runs), payload=payload))
    except ProtocolError:
        assert not right
        return
    assert right
    high = low + size
    assert frames.inside(decoded, low, high) == all(low <= at and at + length <= high for at, length in runs)


def test_lengths_that_overflow_to_the_payload():
    """Four lengths whose sum is the payload modulo 2**64."""
    rows = np.array([[0, 0, 2**62], [0, 0, 2**62], [0, 0, 2**62], [0, 0, 2**62], [0, 0, 100]], np.int64)
    buffer = bytearray(16 * len(rows))
    frames.pack_runs(buffer, 0, rows)
    with pytest.raises(ProtocolError):
        frames.unpack_runs(buffer, 0, Header(Kind.WRITE, len(rows), payload=100))


def test_hello():
    frames.check_hello(frames.pack_hello())
    other = bytearray(frames.pack_hello())
    other[4] += 1
    with pytest.raises(FabricError, match="has version 3, this one 2"):
        frames.check_hello(bytes(other))


@given(st.binary(max_size=64))
def test_foreign_hello(data):
    if data != frames.pack_hello():
        with pytest.raises(KvdError):
            frames.check_hello(data)
