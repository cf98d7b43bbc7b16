"""Encrypted control frames: what passes, and everything that must not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ProtocolError
from kvd.types import Lane
from kvd.wire import guard, keys
from kvd.wire.guard import GuardParser, GuardWriter, guards
from kvd.wire.keys import Keys, KeyShare, direction_key
from kvd_client.protocol import MAX_FRAME

SECRET = b"s" * 32


def pair():
    """What one end writes with, and the other end reads with."""
    return guards(SECRET, dialled=True)[0], guards(SECRET, dialled=False)[1]


def read(parser, data):
    parser.feed(data)
    found = []
    while (body := parser.next()) is not None:
        found.append(body)
    return found


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), st.data())
def test_frames_cross_in_any_pieces(bodies, data):
    writer, parser = pair()
    stream = b"".join(map(writer.frame, bodies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += read(parser, stream[start:stop])
    assert found == bodies


@given(st.integers(0), st.integers(0, 7))
def test_no_changed_bit_passes(at, bit):
    writer, parser = pair()
    stream = bytearray(b"".join(map(writer.frame, (b"one", b"two" * 100, b"three"))))
    at %= len(stream)
    stream[at] ^= 1 << bit
    parser.feed(stream)
    found = []
    refused = None
    while refused is None:
        try:
            body = parser.next()
        except ProtocolError as error:
            refused = error.message
            continue
        assert body is not None, "the receiver waits for bytes that nobody sent"
        found.append(body)
    assert "changed it on the way" in refused
    assert found == [b"one", b"two" * 100][: len(found)]


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0), (0, 2)], ids=["twice", "dropped", "swapped", "left out"])
def test_frames_that_come_twice_or_in_another_place(order):
    writer, parser = pair()
    frames = [writer.frame(b"body %d" % n) for n in range(3)]
    with pytest.raises(ProtocolError):
        read(parser, b"".join(frames[n] for n in order))


def test_a_frame_does_not_pass_in_the_other_direction_nor_in_another_session():
    frame = pair()[0].frame(b"body")
    for parser in (guards(SECRET, dialled=True)[1], guards(b"t" * 32, dialled=False)[1]):
        with pytest.raises(ProtocolError):
            read(parser, frame)


def test_nothing_of_the_body_is_shown():
    assert b"a secret body" not in pair()[0].frame(b"a secret body")


def test_sizes():
    writer, parser = pair()
    for body in (b"", bytes(MAX_FRAME + 1)):
        with pytest.raises(ProtocolError):
            writer.frame(body)
    assert read(parser, writer.frame(bytes(MAX_FRAME))) == [bytes(MAX_FRAME)]


def test_keys_change_in_step(monkeypatch):
    monkeypatch.setattr(guard, "PER_KEY", 3)
    writer, parser = GuardWriter(b"k" * 16), GuardParser(b"k" * 16)
    bodies = [b"%d" % n for n in range(20)]
    assert read(parser, b"".join(map(writer.frame, bodies))) == bodies
    assert writer._keys.key == parser._keys.key != b"k" * 16
    assert len({Keys(b"k" * 16, 3).at(n).encrypt(bytes(12), b"", b"") for n in (1, 3, 6, 9)}) == 4


def test_every_use_has_a_key_of_its_own():
    found = {direction_key(SECRET, b"frames", lane, side) for lane in (None, *Lane) for side in (True, False)}
    found |= {direction_key(SECRET, b"control", None, side) for side in (True, False)}
    assert len(found) == 8


def test_key_shares_agree_and_bad_ones_are_refused():
    one, two = KeyShare(), KeyShare()
    assert one.agree(two.public) == two.agree(one.public)
    assert one.agree(two.public) != one.agree(KeyShare().public)
    for share in (b"", b"short", bytes(keys.SHARE_BYTES), b"\1" + bytes(31)):  # the last two give the same to everybody
        with pytest.raises(ProtocolError, match="key share"):
            one.agree(share)
