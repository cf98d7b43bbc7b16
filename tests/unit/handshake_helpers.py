"""Two machines of a handshake, wired together in memory."""

import dataclasses

from kvd.wire.handshake import Acceptor, Dialler
from kvd.wire.hello import Identity
from kvd.wire.machine import Failed

KEY, OTHER = b"k" * 32, b"o" * 32
FINGERPRINT = {"lease_layout": 1, "entry_order": "token-major"}
SESSION = b"s" * 16
A = Identity(node="a", boot="a1", address="10.0.0.1:7440", fingerprint=FINGERPRINT, fabrics=("tcp",), keys=(KEY,))
B = dataclasses.replace(A, node="b", boot="b1", address="[fd00::2]:7440")


def dialler(identity=A, expect="b", nonce=b"d" * 32):
    return Dialler(identity, expect=expect, nonce=nonce)


def acceptor(identity=B, nonce=b"a" * 32, find_lane=lambda session, lane: None):
    return Acceptor(identity, nonce=nonce, session=SESSION, token=b"t" * 32, find_lane=find_lane)


def connect(left, right, cut=lambda data: [data]):
    """Carry bytes both ways, in the pieces that ``cut`` makes, until nothing moves; each side's event."""
    events = {left: [], right: []}
    moving = True
    while moving:
        moving = False
        for sender, receiver in ((left, right), (right, left)):
            data = sender.data_to_send()
            moving = moving or bool(data)
            for piece in cut(data):
                events[receiver] += receiver.receive_data(piece)
    assert len(events[left]) <= 1
    assert len(events[right]) <= 1
    return (events[left] or [None])[0], (events[right] or [None])[0]


def plain(identity):
    return dataclasses.replace(identity, keys=())


def refused(left, right, error, *, by_left=False):
    """Both sides must fail with ``error`` and the same sentence; returns the two errors."""
    at_left, at_right = connect(left, right)
    assert isinstance(at_left, Failed)
    assert isinstance(at_right, Failed)
    assert type(at_left.error) is error
    assert type(at_right.error) is error
    assert at_left.error.message == at_right.error.message
    assert (at_left.remote, at_right.remote) == (not by_left, by_left)
    return at_left.error, at_right.error
