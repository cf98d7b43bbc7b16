"""The peer handshake between two that mean well: what they agree on, and what they tell each other when they can't."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import (
    AuthenticationFailed,
    FingerprintMismatch,
    InvalidArgument,
    ProtocolError,
    ShuttingDown,
    VersionMismatch,
)
from kvd.types import Lane
from kvd.wire import auth, handshake, machine
from kvd.wire.handshake import LaneDialler
from kvd.wire.hello import MAGIC, PREFACE, Kind
from kvd.wire.machine import Established, LaneEstablished
from kvd.wire.messages import WIRE_VERSION
from tests.unit.handshake_helpers import (
    KEY,
    OTHER,
    SESSION,
    A,
    B,
    acceptor,
    connect,
    dialler,
    plain,
    refused,
)


@pytest.mark.parametrize("keyed", [True, False])
@given(data=st.data())
def test_two_nodes_meet_however_the_stream_is_split(keyed, data):
    a, b = (A, B) if keyed else (plain(A), plain(B))

    def cut(stream):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
        return [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    at_a, at_b = connect(dialler(a), acceptor(b), cut)
    assert isinstance(at_a, Established)
    assert isinstance(at_b, Established)
    assert (at_a.node, at_a.boot, at_a.address) == ("b", "b1", "[fd00::2]:7440")
    assert (at_b.node, at_b.boot, at_b.address) == ("a", "a1", "10.0.0.1:7440")
    assert at_a.fabric == at_b.fabric == "tcp"
    assert at_a.session == at_b.session == SESSION
    assert at_a.lane_key == at_b.lane_key
    assert at_a.authenticated is at_b.authenticated is keyed


def test_a_byte_at_a_time_and_what_follows_is_kept():
    left, right = dialler(), acceptor()
    at_a, at_b = connect(left, right, lambda data: [data[i : i + 1] for i in range(len(data))])
    assert isinstance(at_a, Established)
    assert isinstance(at_b, Established)
    right.receive_data(b"first session bytes")
    right.receive_data(b", and more")
    assert right.trailing_data() == b"first session bytes, and more"


def test_reading_no_more_than_wanted_leaves_the_rest_of_the_stream():
    left, right = dialler(), acceptor()
    pipes = {left: b"", right: b""}
    events = []
    for _ in range(200):
        for me, other in ((left, right), (right, left)):
            pipes[other] += me.data_to_send()
            if left.finished and me is left and not pipes[right].endswith(b"SESSION"):
                pipes[right] += b"SESSION"
            take, pipes[me] = pipes[me][: me.wanted], pipes[me][me.wanted :]
            events += me.receive_data(take) if take else []
    assert len(events) == 2
    assert pipes == {left: b"", right: b"SESSION"}


def test_the_first_common_fabric_of_the_diallers_is_chosen():
    a = dataclasses.replace(A, fabrics=("verbs", "loopback", "tcp"))
    b = dataclasses.replace(B, fabrics=("tcp", "loopback"))
    at_a, at_b = connect(dialler(a), acceptor(b))
    assert at_a.fabric == at_b.fabric == "loopback"


@pytest.mark.parametrize(
    ("keys_a", "keys_b"),
    [((KEY,), (OTHER, KEY)), ((KEY, OTHER), (OTHER, KEY)), ((OTHER,), (KEY, OTHER)), ((KEY, OTHER), (KEY,))],
)
def test_keys_rotate_node_by_node(keys_a, keys_b):
    a, b = dataclasses.replace(A, keys=keys_a), dataclasses.replace(B, keys=keys_b)
    at_a, at_b = connect(dialler(a), acceptor(b))
    assert isinstance(at_a, Established)
    assert isinstance(at_b, Established)
    assert at_a.lane_key == at_b.lane_key


def test_each_session_has_a_lane_key_of_its_own():
    keys = {connect(dialler(nonce=bytes([n]) * 32), acceptor())[0].lane_key for n in range(4)}
    keys |= {connect(dialler(), acceptor(nonce=bytes([n]) * 32))[0].lane_key for n in range(4)}
    assert len(keys) == 8


def test_no_secret_is_shown_or_sent():
    left, right = dialler(), acceptor()
    sent = []
    at_a, at_b = connect(left, right, lambda data: (sent.append(data), [data])[1])
    stream = b"".join(sent)
    assert KEY not in stream
    assert at_a.lane_key not in stream
    for thing in (A, at_a, at_b):
        assert repr(KEY) not in repr(thing)
        assert repr(at_a.lane_key) not in repr(thing)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_without_saying_what_was_wrong():
    wrong = dataclasses.replace(A, keys=(OTHER,))
    here, there = refused(dialler(wrong), acceptor(), AuthenticationFailed)
    assert here.fields == there.fields == {}
    assert "node a" in here.message
    assert "node b" in here.message


def test_an_acceptor_that_cannot_prove_itself_is_refused_by_the_dialler(monkeypatch):
    """An impostor that skips the check of our proof does not have the key to prove itself."""
    impostor = acceptor(dataclasses.replace(B, keys=(OTHER,)))
    monkeypatch.setattr(
        handshake,
        "_proven",
        lambda keys, role, *rest: (True, OTHER) if role is auth.DIALLER else (False, None),
    )
    refused(dialler(), impostor, AuthenticationFailed, by_left=True)


@pytest.mark.parametrize(("a", "b"), [(A, plain(B)), (plain(A), B)])
def test_a_key_on_one_side_only_is_named_to_both(a, b):
    here, there = refused(dialler(a), acceptor(b), AuthenticationFailed)
    expected = {"with_key": "a" if a.keys else "b", "without_key": "b" if a.keys else "a"}
    assert here.fields == there.fields == expected


def test_differences_of_the_fingerprint_are_listed_to_both():
    b = dataclasses.replace(B, fingerprint={"lease_layout": 2, "hash": "x", "entry_order": "token-major"})
    here, there = refused(dialler(), acceptor(b), FingerprintMismatch)
    differs = {"lease_layout": {"a": 1, "b": 2}, "hash": {"a": None, "b": "x"}}
    assert here.fields["differs"] == there.fields["differs"] == differs
    assert "lease_layout: 1 on a, 2 on b" in here.message


def test_no_common_fabric_is_a_difference():
    b = dataclasses.replace(B, fabrics=("verbs",))
    here, _ = refused(dialler(), acceptor(b), FingerprintMismatch)
    assert here.fields["differs"] == {"fabrics": {"a": ["tcp"], "b": ["verbs"]}}


def test_a_stranger_learns_of_no_difference():
    wrong = dataclasses.replace(A, keys=(OTHER,), fingerprint={})
    refused(dialler(wrong), acceptor(), AuthenticationFailed)


def test_differences_too_long_to_tell_are_told_by_name():
    a = dataclasses.replace(A, fingerprint={f"field{n}": "x" * 100 for n in range(30)})
    b = dataclasses.replace(B, fingerprint={f"field{n}": "y" * 100 for n in range(30)})
    here, there = refused(dialler(a), acceptor(b), FingerprintMismatch)
    assert here.fields["differs"] == sorted(there.fields["differs"])


def test_another_node_than_the_dialled_one_names_both():
    here, there = refused(dialler(expect="c"), acceptor(), FingerprintMismatch)
    assert here.fields == there.fields == {"expected": "c", "found": "b"}


def test_the_dialler_checks_the_node_itself():
    """An acceptor that does not look at whom the dialler expects is caught all the same."""
    careless = acceptor()
    careless.receive_data(dialler(expect="b").data_to_send())
    left = dialler(expect="c")
    (event,) = left.receive_data(careless.data_to_send())
    assert isinstance(event.error, FingerprintMismatch)
    assert event.error.fields == {"expected": "c", "found": "b"}
    assert not event.remote


def test_two_nodes_of_one_name_are_refused():
    here, _ = refused(dialler(B, expect="b"), acceptor(), FingerprintMismatch)
    assert here.fields == {"node": "b"}


@pytest.mark.parametrize("newer", ["dialler", "acceptor"])
def test_another_wire_version_is_told_to_both_before_anything_is_decoded(newer, monkeypatch):
    left, right = dialler(), acceptor()
    if newer == "dialler":
        left._out[:] = PREFACE.pack(MAGIC, 9, Kind.CONTROL) + b"\xff" * 50
        monkeypatch.setattr(left, "_check_version", lambda version: handshake.compare_versions(9, version))
    else:
        for module in (handshake, machine):
            monkeypatch.setattr(module, "WIRE_VERSION", 9)
        monkeypatch.setattr(left, "_check_version", lambda version: handshake.compare_versions(WIRE_VERSION, version))
    at_left, at_right = connect(left, right)
    differs = {"wire_version": {"dialler": WIRE_VERSION, "acceptor": WIRE_VERSION} | {newer: 9}}
    for event in (at_left, at_right):
        assert isinstance(event.error, VersionMismatch)
        assert event.error.fields == {"differs": differs}


def test_a_dialler_whose_reject_comes_first_learns_the_version_from_it():
    """A reject has the same form in all versions; the preface in front of it tells the version, too."""
    right = acceptor()
    (event,) = right.receive_data(PREFACE.pack(MAGIC, 7, Kind.LANE))
    assert isinstance(event.error, VersionMismatch)
    reply = right.data_to_send()
    assert PREFACE.unpack(reply[: PREFACE.size]) == (MAGIC, WIRE_VERSION, Kind.ANSWER)
    assert b"VERSION_MISMATCH" in reply


def test_shutting_down_is_told():
    left, right = dialler(), acceptor()
    right.receive_data(left.data_to_send())
    (at_right,) = right.refuse(ShuttingDown("node b drains; use another node"))
    at_left, _ = connect(left, right)
    assert isinstance(at_left.error, ShuttingDown)
    assert at_left.remote
    assert isinstance(at_right.error, ShuttingDown)
    assert right.refuse(ProtocolError("too late")) == []


def test_what_does_not_fit_a_message_is_refused_at_once():
    with pytest.raises(InvalidArgument, match="4096"):
        dialler(dataclasses.replace(A, fingerprint={"x": "y" * 5000}))


# --- lanes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [True, False])
@given(data=st.data())
def test_lanes_join_their_session(keyed, data):
    a, b = (A, B) if keyed else (plain(A), plain(B))
    at_a, at_b = connect(dialler(a), acceptor(b))

    def cut(stream):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        return [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    for lane in Lane:
        left = LaneDialler("a", at_a, lane=lane, nonce=b"l" * 32)
        right = acceptor(b, find_lane=finder(at_b.lane_key, lane))
        assert connect(left, right, cut) == (LaneEstablished(SESSION, lane), LaneEstablished(SESSION, lane))


def finder(key, lane):
    return lambda session, asked: key if (session, asked) == (SESSION, lane) else None


def test_a_lane_can_join_as_soon_as_the_dialler_has_proven_itself():
    left, right = dialler(), acceptor()
    right.receive_data(left.data_to_send())
    assert right.lane_key is None
    left.receive_data(right.data_to_send())
    right.receive_data(left.data_to_send())
    assert right.lane_key is not None
    (established,) = left.receive_data(right.data_to_send())
    assert right.lane_key == established.lane_key


def test_lanes_of_unknown_sessions_and_of_wrong_keys_fail_alike():
    at_a, at_b = connect(dialler(), acceptor())
    forged = dataclasses.replace(at_a, lane_key=b"f" * 32)
    messages = set()
    for session, find in (
        (forged, finder(at_b.lane_key, Lane.BULK)),
        (forged, finder(at_b.lane_key, Lane.URGENT)),
        (at_a, lambda session, lane: None),
    ):
        here, _ = refused(
            LaneDialler("a", session, lane=Lane.BULK, nonce=b"l" * 32),
            acceptor(find_lane=find),
            AuthenticationFailed,
        )
        messages.add(here.message)
    assert len(messages) == 1


def test_the_token_of_an_unknown_session_opens_nothing():
    """Even a dialler that guesses the acceptor's unused token gets no lane."""
    at_a, _ = connect(dialler(), acceptor())
    guessed = dataclasses.replace(at_a, lane_key=b"t" * 32)
    refused(LaneDialler("a", guessed, lane=Lane.BULK, nonce=b"l" * 32), acceptor(), AuthenticationFailed)


def test_a_lane_acceptor_without_the_key_is_refused_by_the_dialler():
    at_a, at_b = connect(dialler(), acceptor())
    left = LaneDialler("a", at_a, lane=Lane.BULK, nonce=b"l" * 32)
    right = acceptor(find_lane=finder(at_b.lane_key, Lane.BULK))
    right.receive_data(left.data_to_send())
    left.receive_data(right.data_to_send())
    right.receive_data(left.data_to_send())
    answer = bytearray(right.data_to_send())
    answer[-1] ^= 1
    (event,) = left.receive_data(bytes(answer))
    assert isinstance(event.error, AuthenticationFailed)
