"""The handshake of a peer session, as objects without IO: bytes in, events and bytes out.

A connection begins with a preface of fixed form in every version: magic, wire version, kind. It is checked before
anything else is decoded. What follows are frames of at most 4 KiB. Each side checks what it receives; the first
that objects sends a :class:`Reject`, so that both know the reason. To foreign bytes nothing is answered.

Control connection, dialler's side::

    state          receives       sends                  next
    (made)         -              preface, Hello         AWAIT_PREFACE
    AWAIT_PREFACE  preface        -                      AWAIT_HELLO
    AWAIT_HELLO    Hello          Proof                  AWAIT_WELCOME
    AWAIT_WELCOME  Welcome        -                      AWAIT_PROOF
    AWAIT_PROOF    Proof          Ready                  DONE: Established

Control connection, acceptor's side::

    AWAIT_PREFACE  preface        -                      AWAIT_HELLO
    AWAIT_HELLO    Hello          preface, Hello         AWAIT_PROOF
    AWAIT_PROOF    Proof          Welcome, Proof         AWAIT_READY (the lane key exists from here on)
    AWAIT_READY    Ready          -                      DONE: Established

Lane stream, dialler's side, then acceptor's::

    (made)         -              preface, LaneHello     AWAIT_PREFACE
    AWAIT_PREFACE  preface        -                      AWAIT_HELLO
    AWAIT_HELLO    LaneChallenge  Proof                  AWAIT_PROOF
    AWAIT_PROOF    Proof          -                      DONE: LaneEstablished

    AWAIT_PREFACE  preface        -                      AWAIT_HELLO
    AWAIT_HELLO    LaneHello      preface, LaneChallenge AWAIT_PROOF
    AWAIT_PROOF    Proof          Proof                  DONE: LaneEstablished

In every state a Reject, a message that is not due, or a failed check leads to FAILED: Failed.

Version history: 1, first version; 2, a key share in each Hello.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.errors import ProtocolError
from kvd.types import Lane, NodeId
from kvd.wire import auth
from kvd.wire.hello import (
    Hello,
    Identity,
    Kind,
    LaneChallenge,
    LaneHello,
    Proof,
    Ready,
    Welcome,
    check_hello,
    compare_fingerprints,
    compare_versions,
    make_hello,
    other_node,
)
from kvd.wire.keys import KeyShare
from kvd.wire.machine import Established, Handshake, LaneEstablished, State
from kvd.wire.messages import WIRE_VERSION


class _DiallerSide(Handshake):
    def _check_version(self, version: int) -> None:
        compare_versions(WIRE_VERSION, version)

    def _check_kind(self, kind: int) -> None:
        if kind != Kind.ANSWER:
            raise ProtocolError(f"{self._them} answered with a preface of kind {kind}, which is a dialler's")


class Dialler(_DiallerSide):
    """The side that opened a control connection, to a node that should be ``expect``.

    ``nonce``: 32 random bytes, never used before. Raises :class:`InvalidArgument` if what ``identity`` says does not
    fit a message.
    """

    def __init__(self, identity: Identity, *, expect: NodeId, nonce: bytes) -> None:
        super().__init__(f"node {identity.node}", f"node {expect}")
        self._identity, self._expect, self._nonce = identity, expect, nonce
        self._peer: Hello | None = None
        self._welcome: Welcome | None = None
        self._key = identity.keys[0] if identity.keys else None
        self._share = KeyShare() if identity.keys else None
        self._send_preface(Kind.CONTROL)
        self._send(make_hello(identity, nonce, expect, _public(self._share)))

    def _expects(self) -> dict[State, tuple[type, Callable[[Any, bytes], None]]]:
        return {
            State.AWAIT_HELLO: (Hello, self._on_hello),
            State.AWAIT_WELCOME: (Welcome, self._on_welcome),
            State.AWAIT_PROOF: (Proof, self._on_proof),
        }

    def _on_hello(self, hello: Hello, transcript: bytes) -> None:
        check_hello(self._identity, self._nonce, hello)
        if hello.node != self._expect:
            raise other_node(self._identity.node, self._expect, hello.node)
        self._peer = hello
        proof = auth.prove(self._key, auth.DIALLER, self._digest.digest()) if self._key else b""
        self._send(Proof(proof=proof))
        self.state = State.AWAIT_WELCOME

    def _on_welcome(self, welcome: Welcome, transcript: bytes) -> None:
        self._welcome = welcome
        self.state = State.AWAIT_PROOF

    def _on_proof(self, proof: Proof, transcript: bytes) -> None:
        hello, welcome = self._peer, self._welcome
        assert hello is not None
        assert welcome is not None
        # The acceptor proves with the key that it found in our proof, so a rotation works in any order of nodes.
        if not _proven((self._key,) if self._key else (), auth.ACCEPTOR, transcript, proof)[0]:
            raise auth.failure(self._us, self._them)
        if len(welcome.token) != (0 if self._key else auth.LANE_KEY_BYTES):
            raise ProtocolError(f"{self._them} sent a session token of {len(welcome.token)} bytes")
        compare_fingerprints(self._identity, hello)
        if welcome.fabric not in self._identity.fabrics:
            raise ProtocolError(f"{self._them} chose the fabric {welcome.fabric!r}, which was not offered")
        key = welcome.token
        if self._key is not None and self._share is not None:
            key = auth.lane_key(self._key, self._digest.digest(), self._share.agree(hello.share))
        self._send(Ready())
        self._finish(_established(hello, welcome, key, self._key is not None))


class LaneDialler(_DiallerSide):
    """The side that opened a stream for ``lane`` of an established session. ``nonce``: 32 fresh random bytes."""

    def __init__(self, us: NodeId, session: Established, *, lane: Lane, nonce: bytes) -> None:
        super().__init__(f"node {us}", f"node {session.node}")
        self._session, self._lane = session, lane
        self._send_preface(Kind.LANE)
        self._send(LaneHello(session=session.session, lane=lane, nonce=nonce))

    def _expects(self) -> dict[State, tuple[type, Callable[[Any, bytes], None]]]:
        return {
            State.AWAIT_HELLO: (LaneChallenge, self._on_challenge),
            State.AWAIT_PROOF: (Proof, self._on_proof),
        }

    def _on_challenge(self, challenge: LaneChallenge, transcript: bytes) -> None:
        self._prove_lane(self._session.lane_key, auth.LANE_DIALLER)
        self.state = State.AWAIT_PROOF

    def _on_proof(self, proof: Proof, transcript: bytes) -> None:
        self._check_lane(self._session.lane_key, auth.LANE_ACCEPTOR, transcript, proof)
        self._finish(LaneEstablished(self._session.session, self._lane))


class Acceptor(Handshake):
    """The side that was dialled, for connections of both kinds.

    ``nonce`` (32), ``session`` (16) and ``token`` (32) are random bytes never used before; the latter two are
    for a session if this becomes one. ``find_lane(session, lane)`` gives the lane key of a session that still waits
    for a stream of this lane, or ``None``.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        nonce: bytes,
        session: bytes,
        token: bytes,
        find_lane: Callable[[bytes, Lane], bytes | None],
    ) -> None:
        super().__init__(f"node {identity.node}", "the dialler")
        self._identity, self._nonce, self._session, self._token = identity, nonce, session, token
        self._find_lane = find_lane
        self._share: KeyShare | None = None
        """Made for a dialler that has said a proper hello."""
        self._kind = Kind.CONTROL
        self._peer: Hello | None = None
        self._welcome: Welcome | None = None
        self._lane = Lane.URGENT
        self._authenticated = False
        self.lane_key: bytes | None = None
        """Set as soon as the dialler has proven itself: its lanes may come before its :class:`Ready`."""
        self.fabric = ""
        """What the two sides have agreed on; set as ``lane_key`` is."""

    @property
    def stray(self) -> bool:
        """It is a lane of no session that is here: of one that was refused a moment ago, or a stranger's. The dialler
        is told that its proof fails, as for a wrong key."""
        return self._kind is Kind.LANE and self.lane_key is None

    def _check_version(self, version: int) -> None:
        compare_versions(version, WIRE_VERSION)

    def _check_kind(self, kind: int) -> None:
        if kind not in (Kind.CONTROL, Kind.LANE):
            raise ProtocolError(f"{self._them} opened a connection of unknown kind {kind}")
        self._kind = Kind(kind)

    def _expects(self) -> dict[State, tuple[type, Callable[[Any, bytes], None]]]:
        if self._kind is Kind.LANE:
            return {
                State.AWAIT_HELLO: (LaneHello, self._on_lane_hello),
                State.AWAIT_PROOF: (Proof, self._on_lane_proof),
            }
        return {
            State.AWAIT_HELLO: (Hello, self._on_hello),
            State.AWAIT_PROOF: (Proof, self._on_proof),
            State.AWAIT_READY: (Ready, self._on_ready),
        }

    def _on_hello(self, hello: Hello, transcript: bytes) -> None:
        self._them = f"node {hello.node}"
        if hello.expect != self._identity.node:
            raise other_node(hello.node, hello.expect, self._identity.node)
        check_hello(self._identity, self._nonce, hello)
        self._peer = hello
        self._send_preface(Kind.ANSWER)
        if self._identity.keys:
            self._share = KeyShare()
        self._send(make_hello(self._identity, self._nonce, "", _public(self._share)))
        self.state = State.AWAIT_PROOF

    def _on_proof(self, proof: Proof, transcript: bytes) -> None:
        hello = self._peer
        assert hello is not None
        proven, key = _proven(self._identity.keys, auth.DIALLER, transcript, proof)
        if not proven:
            raise auth.failure(self._us, self._them)
        compare_fingerprints(self._identity, hello)
        self.fabric = next(name for name in hello.fabrics if name in self._identity.fabrics)
        self._welcome = Welcome(fabric=self.fabric, session=self._session, token=b"" if key else self._token)
        self._send(self._welcome)
        self._send(Proof(proof=auth.prove(key, auth.ACCEPTOR, self._digest.digest()) if key else b""))
        self._authenticated = key is not None
        self.lane_key = self._token
        if key is not None and self._share is not None:
            self.lane_key = auth.lane_key(key, self._digest.digest(), self._share.agree(hello.share))
        self.state = State.AWAIT_READY

    def _on_ready(self, ready: Ready, transcript: bytes) -> None:
        assert self._peer is not None
        assert self._welcome is not None
        assert self.lane_key is not None
        self._finish(_established(self._peer, self._welcome, self.lane_key, self._authenticated))

    def _on_lane_hello(self, hello: LaneHello, transcript: bytes) -> None:
        self._session, self._lane = hello.session, hello.lane
        # An unknown session is challenged, too, and fails at its proof: a stranger learns nothing by trying.
        self.lane_key = self._find_lane(hello.session, hello.lane)
        self._send_preface(Kind.ANSWER)
        self._send(LaneChallenge(nonce=self._nonce))
        self.state = State.AWAIT_PROOF

    def _on_lane_proof(self, proof: Proof, transcript: bytes) -> None:
        key = self.lane_key
        self._check_lane(key if key is not None else self._token, auth.LANE_DIALLER, transcript, proof)
        if key is None:
            raise auth.failure(self._us, self._them)
        self._prove_lane(key, auth.LANE_ACCEPTOR)
        self._finish(LaneEstablished(self._session, self._lane))


def _public(share: KeyShare | None) -> bytes:
    return b"" if share is None else share.public


def _proven(keys: tuple[bytes, ...], role: bytes, transcript: bytes, proof: Proof) -> tuple[bool, bytes | None]:
    if not keys:
        return proof.proof == b"", None
    key = auth.matching_key(keys, role, transcript, proof.proof)
    return key is not None, key


def _established(hello: Hello, welcome: Welcome, key: bytes, authenticated: bool) -> Established:
    return Established(hello.node, hello.boot, hello.address, welcome.fabric, welcome.session, key, authenticated)
