"""What two daemons say to each other in a handshake, and the checks of what is said.

The preface and :class:`Reject` have the same form in every wire version, so that any two versions can tell each
other that they don't fit. :mod:`kvd.wire.handshake` has the order of the messages.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Mapping
from typing import Annotated, Any

import msgpack
import msgspec

from kvd.errors import (
    AuthenticationFailed,
    FingerprintMismatch,
    InvalidArgument,
    KvdError,
    ProtocolError,
    VersionMismatch,
    error_from_code,
)
from kvd.types import Lane, NodeId
from kvd.wire import auth
from kvd.wire.framing import convert, frame
from kvd.wire.keys import SHARE_BYTES

MAGIC = b"\x9dKVD"
PREFACE = struct.Struct("<4sHH")
"""Magic, wire version, kind (a :class:`Kind`)."""
MAX_MESSAGE = 4096
MAX_ITEMS = 256
"""Of an array or map in a message."""
SESSION_BYTES = 16
MAX_REASON = 600
"""Characters of a text that is told to the far side, or comes from it."""


class Kind(enum.IntEnum):
    """What a connection is for, in the dialler's preface; the acceptor's says ``ANSWER``."""

    CONTROL = 1
    LANE = 2
    ANSWER = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a daemon says about itself in each handshake, and the keys that it shares with its peers."""

    node: NodeId
    boot: str
    """Names this run of the daemon."""
    address: str
    """``host:port`` at which peers reach it; empty if it doesn't listen."""
    fingerprint: Mapping[str, str | int]
    """What must be equal on both sides."""
    fabrics: tuple[str, ...]
    """Names in order of preference."""
    keys: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)
    """The first proves, each is accepted. Empty: peers are not authenticated."""


_Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=auth.NONCE_BYTES, max_length=auth.NONCE_BYTES)]
_Session = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]


class _Message(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Message, tag="hello"):
    """Who I am."""

    node: _Name
    boot: _Name
    address: _Text
    expect: Annotated[str, msgspec.Meta(max_length=64)]
    """The node that the dialler believes to have reached; empty from the acceptor."""
    keyed: bool
    """Whether I have a shared key."""
    share: Annotated[bytes, msgspec.Meta(max_length=SHARE_BYTES)]
    """My half of the key agreement; empty without a shared key."""
    nonce: _Nonce
    fingerprint: dict[str, str | int]
    fabrics: list[str]


class Proof(_Message, tag="proof"):
    """An HMAC of :mod:`kvd.wire.auth`; empty on both sides where there is no shared key."""

    proof: Annotated[bytes, msgspec.Meta(max_length=auth.PROOF_BYTES)]


class Welcome(_Message, tag="welcome"):
    """The acceptor agrees."""

    fabric: _Text
    session: _Session
    token: Annotated[bytes, msgspec.Meta(max_length=auth.LANE_KEY_BYTES)]
    """The lane key where there is no shared key to derive it from; empty otherwise."""


class Ready(_Message, tag="ready"):
    """The dialler agrees, too."""


class LaneHello(_Message, tag="lane_hello"):
    """This stream is for a lane of a session."""

    session: _Session
    lane: Lane
    nonce: _Nonce


class LaneChallenge(_Message, tag="lane_challenge"):
    """Prove it."""

    nonce: _Nonce


class Reject(_Message, tag="reject"):
    """The handshake is refused. The same form in every wire version."""

    code: str
    message: str
    fields: dict[str, Any]


HandshakeMessage = Hello | Proof | Welcome | Ready | LaneHello | LaneChallenge | Reject
_REJECT_CODES = {
    "AUTHENTICATION_FAILED",
    "BUSY",
    "FINGERPRINT_MISMATCH",
    "PROTOCOL",
    "SHUTTING_DOWN",
    "VERSION_MISMATCH",
}


def decode(body: bytes) -> HandshakeMessage:
    """A frame's body to a message; raises :class:`ProtocolError`.

    Unpacking reserves room for as many items as an array claims to have, at each depth; strangers may claim less
    than peers.
    """
    try:
        msgpack.unpackb(body, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0)
    except Exception as error:  # msgpack raises a dozen unrelated types on foreign bytes
        raise ProtocolError(f"bytes that are not msgpack within the limits: {error or type(error).__name__}") from None
    return convert(body, HandshakeMessage)  # type: ignore[no-any-return]


def make_hello(identity: Identity, nonce: bytes, expect: NodeId, share: bytes) -> Hello:
    """Raises :class:`InvalidArgument` if what ``identity`` says does not fit a message."""
    hello = Hello(
        node=identity.node,
        boot=identity.boot,
        address=identity.address,
        expect=expect,
        keyed=bool(identity.keys),
        share=share,
        nonce=nonce,
        fingerprint=dict(identity.fingerprint),
        fabrics=list(identity.fabrics),
    )
    if len(msgspec.msgpack.encode(hello)) > MAX_MESSAGE:
        raise InvalidArgument(
            f"what node {identity.node} must say in a handshake exceeds {MAX_MESSAGE} bytes; shorten its fingerprint"
        )
    return hello


def check_hello(identity: Identity, nonce: bytes, hello: Hello) -> None:
    """What can be checked before the peer has proven itself; raises the error to refuse it with."""
    us, them = identity.node, hello.node
    if hello.nonce == nonce:
        raise ProtocolError(f"node {them} sent node {us}'s own nonce back")
    if them == us:
        raise FingerprintMismatch(
            f"both ends of the connection are called node {us}; give each daemon a node id of its own",
            node=us,
        )
    if hello.keyed != bool(identity.keys):
        having, lacking = (them, us) if hello.keyed else (us, them)
        raise AuthenticationFailed(
            f"node {having} has a shared key and node {lacking} has none; give both the same key",
            with_key=having,
            without_key=lacking,
        )
    if len(hello.share) != (SHARE_BYTES if hello.keyed else 0):
        raise ProtocolError(f"node {them} sent a key share of {len(hello.share)} bytes")


def other_node(dialler: NodeId, expected: NodeId, found: NodeId) -> FingerprintMismatch:
    """The error of a dialled address at which another node answers."""
    return FingerprintMismatch(
        f"node {dialler} dialled node {expected} and reached node {found}; correct the address of {expected} in "
        f"{dialler}'s configuration, or the node id or advertised address of either",
        expected=expected,
        found=found,
    )


def compare_versions(dialler: int, acceptor: int) -> None:
    """Raises :class:`VersionMismatch`."""
    if dialler != acceptor:
        raise VersionMismatch(
            f"the dialler speaks version {dialler} of the peer protocol and the acceptor version {acceptor}; "
            "install the same release of kvd on both",
            differs={"wire_version": {"dialler": dialler, "acceptor": acceptor}},
        )


def compare_fingerprints(identity: Identity, hello: Hello) -> None:
    """Raises :class:`FingerprintMismatch` with ``differs``: for each name, the value of each node."""
    mine: dict[str, Any] = dict(identity.fingerprint)
    theirs: dict[str, Any] = dict(hello.fingerprint)
    differs = {
        name: {identity.node: mine.get(name), hello.node: theirs.get(name)}
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    }
    if not set(identity.fabrics) & set(hello.fabrics):
        differs["fabrics"] = {identity.node: list(identity.fabrics), hello.node: list(hello.fabrics)}
    if differs:
        pairs = "; ".join(
            f"{name}: " + ", ".join(f"{value!r} on {node}" for node, value in sorted(values.items()))
            for name, values in differs.items()
        )
        raise FingerprintMismatch(
            f"nodes {identity.node} and {hello.node} differ in what must be equal: {printable(pairs, 400)}",
            differs=differs,
        )


def encode_reject(error: KvdError) -> bytes:
    """The frame that tells ``error`` to the far side; fields that don't fit are shortened to their names."""
    message = printable(error.message)
    for fields in (error.fields, {"differs": sorted(error.fields.get("differs", ()))}, {}):
        body = msgspec.msgpack.encode(Reject(code=error.code, message=message, fields=fields))
        if len(body) <= MAX_MESSAGE:
            break
    return frame(body, MAX_MESSAGE)


def rejection(reject: Reject, them: str) -> KvdError:
    """The error of a :class:`Reject` that came from ``them``, who may be a stranger."""
    text = printable(reject.message)
    if reject.code not in _REJECT_CODES:
        return ProtocolError(f"{them} refused the handshake with the unknown code {printable(reject.code)}: {text}")
    return error_from_code(reject.code, text, reject.fields)


def printable(text: str, longest: int = MAX_REASON) -> str:
    """A stranger's text, fit for a log line."""
    clipped = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in clipped)


def guess(first: bytes | bytearray) -> str:
    """What foreign first bytes look like, as a remark to append."""
    if first[:1] == b"\x16":
        return " (TLS?)"
    if first[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD", b"HTTP", b"PRI "):
        return " (HTTP?)"
    return ""
