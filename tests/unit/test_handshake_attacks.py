"""The peer handshake with everything that must not get through: replays, mirrors, relays, changed and foreign bytes."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import (
    AuthenticationFailed,
    PeerUnreachable,
    ProtocolError,
)
from kvd.wire import auth
from kvd.wire.framing import frame
from kvd.wire.handshake import Dialler
from kvd.wire.hello import MAGIC, MAX_MESSAGE, PREFACE, Kind
from kvd.wire.machine import Established, Failed
from kvd.wire.messages import WIRE_VERSION
from tests.unit.handshake_helpers import (
    KEY,
    OTHER,
    A,
    B,
    acceptor,
    connect,
    dialler,
    refused,
)


def test_a_nonce_that_comes_back_is_refused():
    refused(dialler(nonce=b"n" * 32), acceptor(nonce=b"n" * 32), ProtocolError)


def test_a_mirror_is_no_peer():
    left = dialler()
    (event,) = left.receive_data(left.data_to_send())
    assert isinstance(event.error, ProtocolError)


def test_an_acceptors_proof_is_no_diallers_proof():
    """Reflection: what one side of a connection proves is useless in the other role."""
    transcript = b"h" * 32
    for role in (auth.DIALLER, auth.ACCEPTOR, auth.LANE_DIALLER, auth.LANE_ACCEPTOR):
        proof = auth.prove(KEY, role, transcript)
        accepted = [
            other
            for other in (auth.DIALLER, auth.ACCEPTOR, auth.LANE_DIALLER, auth.LANE_ACCEPTOR)
            if auth.matching_key([OTHER, KEY], other, transcript, proof) == KEY
        ]
        assert accepted == [role]


def test_a_relay_of_challenges_to_the_victim_itself_fails():
    """The attacker answers the victim's challenge with a proof that it got from the victim as a dialler."""
    victim_in = acceptor(B)
    victim_out = Dialler(B, expect="a", nonce=b"v" * 32)
    mallory = Dialler(dataclasses.replace(A, keys=(OTHER,)), expect="b", nonce=b"m" * 32)
    victim_in.receive_data(mallory.data_to_send())
    challenge = victim_in.data_to_send()
    # victim_out believes to be answered by a; its proof covers its own hello, so the relayed one is wrong.
    relayed = challenge.replace(b"\xa1b", b"\xa1a", 1)
    victim_out.data_to_send()
    victim_out.receive_data(relayed)
    stolen = victim_out.data_to_send()
    (event,) = victim_in.receive_data(stolen)
    assert isinstance(event, Failed)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_changed_byte_survives(at, flip):
    """Whatever byte an attacker changes on the way to the acceptor, no session comes of it."""
    left, right = dialler(), acceptor()
    seen, events = 0, []
    for _ in range(6):
        stream = bytearray(left.data_to_send())
        if seen <= at < seen + len(stream):
            stream[at - seen] ^= flip
        seen += len(stream)
        events += right.receive_data(bytes(stream))
        left.receive_data(right.data_to_send())
    established = [event for event in events if isinstance(event, Established)]
    assert bool(established) == (at >= seen)


def test_a_recorded_handshake_cannot_be_replayed():
    left, right = dialler(), acceptor(nonce=b"1" * 32)
    record = []
    connect(left, right, lambda data: (record.append(data), [data])[1])
    again = acceptor(nonce=b"2" * 32)
    events = [event for data in record[::2] for event in again.receive_data(data)]
    assert [type(event.error) for event in events] == [AuthenticationFailed]


# --- foreign bytes ----------------------------------------------------------------------------------------------------

TLS = bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 190


@pytest.mark.parametrize(
    ("data", "hint"),
    [(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"), (TLS, "TLS"), (b"\x00", "first bytes"), (b"KVD", "kvd")],
)
@pytest.mark.parametrize("make", [acceptor, dialler])
def test_foreign_bytes_end_it_without_an_answer(make, data, hint):
    machine = make()
    machine.data_to_send()
    (event,) = machine.receive_data(data)
    assert isinstance(event.error, ProtocolError)
    assert hint in event.error.message
    assert machine.data_to_send() == b""
    assert machine.receive_data(b"more") == []


@given(st.binary(max_size=300), st.sampled_from([Kind.CONTROL, Kind.LANE]))
def test_random_bytes_behind_a_right_preface_fail_or_wait(data, kind):
    machine = acceptor()
    events = machine.receive_data(PREFACE.pack(MAGIC, WIRE_VERSION, kind) + data)
    assert all(isinstance(event, Failed) for event in events)
    assert len(machine.data_to_send()) <= PREFACE.size + MAX_MESSAGE + 4


def test_an_oversized_message_is_refused_at_its_length():
    machine = acceptor()
    (event,) = machine.receive_data(
        PREFACE.pack(MAGIC, WIRE_VERSION, Kind.CONTROL) + (MAX_MESSAGE + 1).to_bytes(4, "little")
    )
    assert isinstance(event.error, ProtocolError)
    assert event.error.fields["limit"] == MAX_MESSAGE
    assert machine.data_to_send()


def test_arrays_that_claim_too_much_are_refused_unread():
    """Each claims 131,072 items; 800 of them, nested, would have a gigabyte reserved for four thousand bytes."""
    machine = acceptor()
    (event,) = machine.receive_data(
        PREFACE.pack(MAGIC, WIRE_VERSION, Kind.CONTROL) + frame(b"\xdd\x00\x02\x00\x00" * 800)
    )
    assert isinstance(event.error, ProtocolError)
    assert "131072 exceeds" in event.error.message


def test_a_truncated_handshake_says_so():
    left, right = dialler(), acceptor()
    right.receive_data(left.data_to_send()[:-1])
    (event,) = right.receive_eof()
    assert isinstance(event.error, PeerUnreachable)
    assert right.receive_eof() == []
    (event,) = left.receive_eof()
    assert "before it sent a byte" in event.error.message


def test_a_message_that_is_not_due_is_refused():
    left, right = dialler(), acceptor()
    hello = left.data_to_send()
    right.receive_data(hello)
    right.data_to_send()
    (event,) = right.receive_data(hello[PREFACE.size :])
    assert isinstance(event.error, ProtocolError)
    assert "Proof is due" in event.error.message


def test_a_strangers_reject_is_clipped_and_its_code_checked():
    left = dialler()
    left.data_to_send()
    body = msgspec.msgpack.encode(
        {"type": "reject", "code": "OUT_OF_MEMORY", "message": "\x1b[31m" + "x" * 3000, "fields": {}}
    )
    (event,) = left.receive_data(PREFACE.pack(MAGIC, WIRE_VERSION, Kind.ANSWER) + frame(body))
    assert type(event.error) is ProtocolError
    assert event.remote
    assert "\x1b" not in event.error.message
    assert len(event.error.message) < 800
