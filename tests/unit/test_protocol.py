"""The local API's messages and framing: what is accepted, and that nothing else gets past."""

from __future__ import annotations

import contextlib

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvd_client import protocol, ring
from kvd_client.errors import ProtocolError
from kvd_client.framing import decode_reply, decode_request, encode, unpack
from kvd_client.protocol import (
    LENGTH,
    MAX_DEPTH,
    MAX_FRAME,
    Abort,
    Ended,
    Failure,
    Finish,
    GetStatus,
    Hello,
    Ok,
    Opened,
    OpenSink,
    OpenSource,
    Reject,
    Release,
    Welcome,
)
from kvd_client.spec import KVSpec, TokenRange

numbers = st.integers(min_value=0, max_value=2**32 - 1)
text = st.text(max_size=40)
specs = st.builds(
    KVSpec,
    layers=numbers,
    kv_heads=numbers,
    entry_bytes=numbers,
    dtype=text,
    model=text,
    revision=text,
    windows=st.lists(numbers, max_size=5).map(tuple),
)
opening = {
    "id": numbers,
    "request": text,
    "spec": specs,
    "lengths": st.lists(numbers, max_size=8),
    "capacity": numbers,
    "rank": numbers,
    "ranks": numbers,
    "head_start": numbers,
    "head_count": numbers,
    "deadline_s": st.floats(allow_nan=False),
}
ranges = st.builds(TokenRange, row=numbers, start=numbers, stop=numbers)
requests = st.one_of(
    st.builds(Hello, id=numbers, version=numbers, name=text),
    st.builds(OpenSource, **opening, sink=text),
    st.builds(OpenSink, **opening, source=text, handle=text, held=st.lists(ranges, max_size=4)),
    st.builds(Finish, id=numbers, transfer=numbers),
    st.builds(Release, id=numbers, transfer=numbers),
    st.builds(Abort, id=numbers, transfer=numbers, reason=text),
    st.builds(Reject, id=numbers, handle=text, request=text, source=text, reason=text),
    st.builds(GetStatus, id=numbers),
)
fields = st.dictionaries(text, st.one_of(numbers, text, st.lists(text, max_size=3)), max_size=4)
replies = st.one_of(
    st.builds(Welcome, id=numbers, version=numbers, node=text, boot=text),
    st.builds(
        Opened,
        id=numbers,
        transfer=numbers,
        handle=text,
        slot=numbers,
        offset=numbers,
        nbytes=numbers,
        generation=numbers,
    ),
    st.builds(Ok, id=numbers),
    st.builds(Failure, id=numbers, code=text, message=text, fields=fields),
    st.builds(Ended, transfer=numbers, code=text, message=text, fields=fields),
)
trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), text, st.binary(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=20,
)


def body_of(frame: bytes) -> bytes:
    (length,) = LENGTH.unpack_from(frame)
    assert len(frame) == LENGTH.size + length
    return frame[LENGTH.size :]


@given(requests)
def test_requests_come_back_as_they_were(request_):
    assert decode_request(body_of(encode(request_))) == request_


@given(replies)
def test_replies_come_back_as_they_were(reply):
    assert decode_reply(body_of(encode(reply))) == reply


@given(st.one_of(st.binary(max_size=200), trees.map(msgpack.packb)))
@example(b"")
@example(b"\x91" * 100)
@example(b"\x81\xa4type\xa5hello\xa7version\x01trailing")
@example(b"\x81\xa4type\xa5nobod")
def test_foreign_bytes_are_a_protocol_error_and_nothing_else(body):
    for decode in (decode_request, decode_reply):
        message = None
        with contextlib.suppress(ProtocolError):
            message = decode(body)
        assert message is None or isinstance(message, protocol.Message)


@given(st.one_of(requests.map(lambda r: body_of(encode(r))), st.binary(max_size=100)))
def test_small_frames_need_no_second_check(body):
    # What decode_request takes without looking at msgpack's limits never exceeds them.
    try:
        decode_request(body)
    except ProtocolError:
        return
    unpack(body)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transfer": "seven"}, "transfer"),
        ({"transfer": 7, "extra": 1}, "extra"),
        ({}, "transfer"),
        ({"transfer": 7, "id": 1.5}, "id"),
    ],
)
def test_the_error_names_the_field(change, named):
    with pytest.raises(ProtocolError, match=named):
        decode_request(msgpack.packb({"type": "finish", **change}))


def test_an_unknown_type_is_refused():
    with pytest.raises(ProtocolError, match="grant_me_root"):
        decode_request(msgpack.packb({"type": "grant_me_root"}))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_depth_is_limited_exactly():
    unpack(nested(MAX_DEPTH))
    with pytest.raises(ProtocolError, match="nested"):
        unpack(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize("depth", [600, 5000, 500_000])
def test_any_depth_is_an_error_and_no_crash(depth):
    for decode in (unpack, decode_request, decode_reply):
        with pytest.raises(ProtocolError):
            decode(nested(depth))


@pytest.mark.parametrize(
    "tree",
    [
        {"type": "x" * (1 << 16) + "x"},
        {str(i): i for i in range(4097)},
        [None] * ((1 << 17) + 1),
        {1: "keys must be text"},
        msgpack.ExtType(1, b"x"),
    ],
    ids=["text", "map", "array", "key", "ext"],
)
def test_limits_of_the_bytes(tree):
    with pytest.raises(ProtocolError):
        unpack(msgpack.packb(tree))


def test_an_array_header_that_promises_more_than_the_frame_holds():
    with pytest.raises(ProtocolError):
        unpack(b"\xdd\x00\x01\xff\xff" * 1000)


def test_a_message_beyond_the_frame_limit_is_not_sent():
    held = [TokenRange(row=2**31, start=2**31, stop=2**31)] * (MAX_FRAME // 12)
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=1, dtype="", model="")
    message = OpenSink(request="r", spec=spec, lengths=[1], capacity=1, held=held)
    with pytest.raises(ProtocolError, match="exceeds the frame limit"):
        encode(message)


def test_a_large_request_passes():
    held = [TokenRange(row=i, start=0, stop=16) for i in range(4000)]
    spec = KVSpec(layers=1, kv_heads=1, entry_bytes=1, dtype="", model="")
    message = OpenSink(request="r", spec=spec, lengths=[16] * 4000, capacity=16, held=held)
    assert decode_request(body_of(encode(message))) == message


def test_the_ring_is_aligned_and_nothing_overlaps():
    header = [
        ring.RING_HEAD_OFFSET,
        ring.RING_TAIL_OFFSET,
        ring.RING_WAKE_OFFSET,
        ring.RING_CLOSED_OFFSET,
    ]
    assert all(offset % 64 == 0 for offset in header)
    assert len(set(header)) == len(header)
    assert min(header) >= ring.RING_HEADER.size
    assert max(header) + 64 <= ring.RING_EVENTS_OFFSET
    assert ring.RING_EVENTS & (ring.RING_EVENTS - 1) == 0
    assert ring.RING_EVENT.size == 32
    assert ring.RING_SLOTS_OFFSET % 64 == 0
    assert ring.SLOT.size <= ring.SLOT_BYTES
    assert ring.RING_BYTES == ring.RING_SLOTS_OFFSET + ring.RING_SLOTS * ring.SLOT_BYTES


def test_every_message_has_a_type_of_its_own():
    union = [*protocol.Request.__args__, *protocol.Reply.__args__]
    tags = [msgspec.inspect.type_info(message).tag for message in union]
    assert len(set(tags)) == len(tags)
