"""What crosses to the peer's verbs fabric: the bring-up blob, what is told out of band, grants' tokens, and frames."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

from kvd.errors import FabricError, KvdError, ProtocolError
from kvd.types import Lane

VERSION = 3
"""2: queue pairs are rebuilt, which both ends must know how to. 3: the path is tried before it is used."""
KEY_BYTES = 32
ID_BYTES = 16
_MAC_BYTES = 16


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """How to reach an endpoint: one queue pair a lane, urgent first."""

    version: int
    gid: str
    lid: int
    infiniband: bool
    mtu: int
    qpns: tuple[int, int]
    psns: tuple[int, int]
    reads: int
    """Reads that the device answers at a time."""
    slots: int
    """Receive buffers for messages, a lane."""
    slot_bytes: int
    key: bytes
    """Under which the tokens of this fabric are authenticated."""
    scratch: tuple[int, int] = (0, 0)
    """Address and rkey of the memory that the peer tries the path with (:mod:`kvd.fabric.verbs.probe`)."""

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)


Decoded = TypeVar("Decoded")


def decode(blob: bytes, kind: type[Decoded], what: str, failure: type[KvdError] = FabricError) -> Decoded:
    """What the peer has packed, in words ``what``; raises ``failure`` for anything else."""
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except msgspec.MsgspecError as error:
        raise failure(f"{what} can't be read: {error}; run the same release of kvd at both ends") from None


def unpack_hello(blob: bytes) -> Hello:
    """Raises :class:`FabricError` for what is not a bring-up blob of this version."""
    hello = decode(blob, Hello, "the peer's bring-up blob")
    if hello.version != VERSION or hello.slots < 1 or hello.slot_bytes <= HEADER.size or len(hello.key) != KEY_BYTES:
        raise FabricError(
            f"the peer's verbs fabric speaks version {hello.version} with {hello.slots} buffers of "
            f"{hello.slot_bytes} bytes, this one version {VERSION}; run the same release of kvd at both ends",
            version=hello.version,
        )
    address, rkey = hello.scratch
    numbers = (*hello.qpns, *hello.psns)
    if not (1 <= hello.mtu <= 5 and address >= 0 and 0 <= rkey < 1 << 32 and all(0 <= n < 1 << 24 for n in numbers)):
        raise FabricError(
            f"the peer's bring-up blob has numbers that can't be (MTU {hello.mtu}, queue pairs {hello.qpns}, sequence "
            f"{hello.psns}, scratch memory {hello.scratch}); run the same release of kvd at both ends"
        )
    return hello


class Rebuild(msgspec.Struct, array_like=True, frozen=True, tag="rebuild"):
    """This side's queue pair of a lane is reset, and has given back every request."""

    lane: int
    epoch: int
    """The how many-eth rebuilding this is."""
    psn: int
    received: int
    """Frames with a credit that came on this lane in all: those after them must be sent again."""
    reason: str
    """What this side knows of why."""


class Rebuilt(msgspec.Struct, array_like=True, frozen=True, tag="rebuilt"):
    """This side's queue pair is connected again and can receive."""

    lane: int
    epoch: int


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    """This side has given the connection up."""

    reason: str


Told = Rebuild | Rebuilt | Gone


def unpack_told(blob: bytes) -> Told:
    """Raises :class:`ProtocolError` for what a verbs fabric does not tell."""
    told: Told = decode(blob, Told, "what the peer's verbs fabric told", ProtocolError)  # type: ignore[arg-type]
    if not isinstance(told, Gone) and (told.lane not in tuple(Lane) or told.epoch < 1):
        raise ProtocolError(f"the peer's verbs fabric told of lane {told.lane} in its time {told.epoch}")
    return told


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """What a peer needs for one-sided access to a grant."""

    id: bytes
    address: int
    length: int
    rkey: int
    writable: bool
    readable: bool

    def pack(self, key: bytes) -> bytes:
        flags = self.writable | self.readable << 1
        body = _TOKEN.pack(VERSION, flags, self.rkey, self.address, self.length, self.id)
        return body + _mac(key, body)


_TOKEN = struct.Struct(f"<BBIQQ{ID_BYTES}s")


def unpack_token(token: bytes, key: bytes) -> Token | None:
    """A token of the fabric with ``key``; None if it is none."""
    if len(token) != _TOKEN.size + _MAC_BYTES:
        return None
    body = token[: _TOKEN.size]
    if not hmac.compare_digest(token[_TOKEN.size :], _mac(key, body)):
        return None
    _, flags, rkey, address, length, name = _TOKEN.unpack(body)
    return Token(name, address, length, rkey, bool(flags & 1), bool(flags & 2))


def _mac(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=key).digest()


class Kind(enum.IntEnum):
    """Frames: what a SEND carries."""

    STATE = 0
    """Nothing but the header; needs no credit."""
    MESSAGE = 1
    PART = 2
    """Part of a message, not the last."""
    REVOKE = 3
    """The body is the id of a grant: stop using it, and say when that is done."""
    REVOKED = 4
    BYE = 5
    """The sender closes; needs no credit."""


WITHOUT_CREDIT = (Kind.STATE, Kind.BYE)

HEADER = struct.Struct("<BxHIQQQQ")


@dataclasses.dataclass(slots=True)
class Header:
    """Begins every frame. All but ``kind`` and ``length`` are totals, so that any later frame makes up for a lost one.

    ``consumed``: frames that needed a credit and were taken out of their buffers on this lane. ``placed`` and
    ``fetched``: bytes written to the receiver's memory and read from it. ``refused``: operations on the receiver's
    grants that were not permitted.
    """

    kind: Kind
    length: int
    consumed: int
    placed: int
    fetched: int
    refused: int

    def pack_into(self, buffer: memoryview, offset: int) -> None:
        HEADER.pack_into(
            buffer, offset, self.kind, 0, self.length, self.consumed, self.placed, self.fetched, self.refused
        )


def unpack_frame(frame: memoryview) -> tuple[Header, bytes]:
    """A frame's header and body; raises ValueError for what is none."""
    if len(frame) < HEADER.size:
        raise ValueError(f"a frame of {len(frame)} bytes is shorter than its header")
    kind, _, length, *totals = HEADER.unpack_from(frame)
    if length != len(frame) - HEADER.size:
        raise ValueError(f"a frame of {len(frame)} bytes says that its body has {length}")
    return Header(Kind(kind), length, *totals), bytes(frame[HEADER.size :])
