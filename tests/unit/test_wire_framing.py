"""Frames and messages of the control connection."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ProtocolError
from kvd.wire import framing
from kvd.wire.framing import FrameParser
from kvd.wire.messages import Accepted, Closing, FabricBlob, Open, Ping, Refused
from kvd_client.protocol import LENGTH, MAX_FRAME
from kvd_client.spec import KVSpec, TokenRange, part_layout

SPEC = KVSpec(layers=2, kv_heads=3, entry_bytes=128, dtype="fp16", model="m", windows=(0, 16))
MESSAGES = [
    Ping(number=7),
    Accepted(transfer=1, source=2),
    Refused(transfer=1, code="BUSY", message="later", fields={"retry_after_s": 0.5, "of": ["a", 1]}),
    Closing(code="SHUTTING_DOWN", message="the daemon drains"),
    FabricBlob(blob=b"\x00\xff"),
    Open(
        sink=1,
        request="r",
        handle="",
        rank=0,
        ranks=1,
        head_start=0,
        spec=SPEC,
        layout=part_layout(SPEC, heads=3, rows=2, capacity=9),
        lengths=[9, 4],
        held=[TokenRange(0, 0, 3)],
        grant=b"g" * 32,
        deadline_s=30.0,
    ),
]


def frames(parser: FrameParser) -> list[bytes]:
    found = []
    while (body := parser.next()) is not None:
        found.append(body)
    return found


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.data())
def test_any_split_of_the_stream_gives_the_messages(messages, data):
    stream = b"".join(framing.encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    parser, got = FrameParser(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        parser.feed(stream[start:stop])
        got += [framing.decode(body) for body in frames(parser)]
    assert got == messages
    assert parser.rest() == b""


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1), st.binary(max_size=20))
def test_reading_what_is_wanted_takes_exactly_the_frames(bodies, behind):
    """Who reads ``wanted`` bytes at a time leaves every byte behind the last frame in the stream."""
    stream = b"".join(framing.frame(body) for body in bodies) + behind
    parser, at, got = FrameParser(), 0, []
    while len(got) < len(bodies):
        wanted = parser.wanted
        assert wanted > 0
        parser.feed(stream[at : at + wanted])
        at += wanted
        got += frames(parser)
    assert got == bodies
    assert stream[at:] == behind


def test_many_small_frames_in_one_piece_are_cut_in_linear_time_and_memory():
    parser = FrameParser()
    parser.feed(framing.encode(Ping(number=1)) * 50_000)
    assert len(frames(parser)) == 50_000
    assert parser.rest() == b""


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_length_outside_the_limits_is_refused_before_its_body(length):
    parser = FrameParser()
    parser.feed(LENGTH.pack(length))
    with pytest.raises(ProtocolError, match=str(length)):
        parser.next()


def test_the_limit_is_the_parsers_own():
    parser = FrameParser(max_frame=8)
    parser.feed(framing.frame(b"x" * 8) + LENGTH.pack(9))
    assert parser.next() == b"x" * 8
    with pytest.raises(ProtocolError, match="9 bytes"):
        parser.next()


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="does not fit"):
        framing.encode(FabricBlob(blob=bytes(MAX_FRAME)))


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"type": "ping"}, "number"),
        ({"type": "ping", "number": "1"}, "Expected `int`"),
        ({"type": "ping", "number": 1, "more": 2}, "more"),
        ({"type": "exec", "number": 1}, "exec"),
        ([1, 2], "array"),
        ({"type": "closing", "code": "X", "message": b"bytes"}, "Expected `str`"),
    ],
)
def test_a_message_of_the_wrong_form_names_the_field(tree, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        framing.decode(msgpack.packb(tree))


@given(st.binary(min_size=1, max_size=200))
def test_foreign_bodies_are_protocol_errors_and_nothing_else(body):
    with pytest.raises(ProtocolError):
        framing.decode(body)


@given(st.binary(max_size=400))
def test_a_foreign_stream_gives_bodies_or_a_protocol_error(stream):
    parser = FrameParser(max_frame=64)
    parser.feed(stream)
    try:
        for body in frames(parser):
            assert 0 < len(body) <= 64
    except ProtocolError:
        pass
