"""The tcp fabric's frames: what crosses a lane's byte stream. Pure; the same on both lanes.

A frame is a header of 64 bytes, little-endian, then ``runs`` descriptors of 16 bytes (remote offset, length), then
``payload`` bytes (``READ`` excepted: there ``payload`` says how many bytes are asked for). Where the two sides agreed
on checks (:mod:`kvd.fabric.seals`), one of the payload and one of the header follow the header, and one of the
descriptors follows them if there are any; each has 8 or 16 bytes::

    header | payload's check | check of both | descriptors | their check | payload

    kind u8 | urge u8 | zero u16 | runs u32 | op u64 | payload u64 | low i64 | high u64 | token 16 bytes | number u64

``urge`` is 1 in a frame whose ACK the sender waits for; without it the ACK may wait for later frames. ``op`` names
the operation among those that the sender has begun on this lane. ``low`` and ``high`` bound all of
the operation's remote bytes, in each of its frames, so that an operation is refused before its first byte lands.

==========  =====================================  ================================================================
kind        descriptors, payload                   meaning
==========  =====================================  ================================================================
WRITE       some, bytes                            place these bytes; ``number`` is the frame's, counted from 1
THEN        some, bytes                            place these bytes when all of the operation's WRITEs are in place
MESSAGE     0, bytes                               deliver the bytes
NOTIFY      0, bytes                               deliver the bytes unless the operation was refused
READ        some, bytes wanted                     send these bytes back: one DATA (or none) and one ANSWER
DATA        0, bytes                               what a READ asked for, valid only if the ANSWER is positive
ANSWER      0, 0                                   ``number`` is 0, or says why the READ was refused
ACK         0, 0                                   all WRITE, THEN, MESSAGE, NOTIFY up to ``number`` are dealt with
REFUSED     0, 0                                   the write was refused; ``number`` says why; precedes its ACK
==========  =====================================  ================================================================

Limits hold the memory that a peer can make this side spend: see the constants. Frames outside of them, and any
other malformed bytes, raise :class:`ProtocolError`, which ends the endpoint.

Version history: 1, first version; 2, checks.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.errors import FabricError, ProtocolError
from kvd.fabric.regions import Refusal

VERSION = 2
HEADER = struct.Struct("<BBHIQQqQ16sQ")
HEADER_BYTES = HEADER.size
RUN = struct.Struct("<qq")
RUN_BYTES = RUN.size

MAX_RUNS = 1000
"""Most descriptors of a frame; with the frame's header fewer than the 1024 pieces that one system call takes."""
MAX_PAYLOAD = 4 << 20
"""Most payload bytes of a frame."""
MAX_MESSAGE = 64 << 10
"""Most payload bytes of a frame that is not received straight into place: THEN, MESSAGE, NOTIFY."""
MAX_UNACKED = 1024
"""Most frames that a side sends ahead of their ACK."""
MAX_READS = 128
"""Most READs that a side sends ahead of their ANSWER."""

MAX_CHECK_BYTES = 16
"""Most bytes of one check."""

NO_TOKEN = bytes(16)


class Kind(enum.IntEnum):
    """See the module's table."""

    WRITE = 1
    THEN = 2
    MESSAGE = 3
    NOTIFY = 4
    READ = 5
    DATA = 6
    ANSWER = 7
    ACK = 8
    REFUSED = 9


_WITH_RUNS = frozenset({Kind.WRITE, Kind.THEN, Kind.READ})
_MOST_PAYLOAD = {
    Kind.WRITE: MAX_PAYLOAD,
    Kind.THEN: MAX_MESSAGE,
    Kind.MESSAGE: MAX_MESSAGE,
    Kind.NOTIFY: MAX_MESSAGE,
    Kind.READ: MAX_PAYLOAD,
    Kind.DATA: MAX_PAYLOAD,
    Kind.ANSWER: 0,
    Kind.ACK: 0,
    Kind.REFUSED: 0,
}
_KINDS = {int(kind): kind for kind in Kind}
_REFUSALS = {int(refusal): refusal for refusal in Refusal}


class Header(NamedTuple):
    """A frame's header; the fields are explained in the module."""

    kind: Kind
    runs: int = 0
    op: int = 0
    payload: int = 0
    low: int = 0
    high: int = 0
    token: bytes = NO_TOKEN
    number: int = 0
    urge: bool = False


def pack_header(buffer: bytearray, offset: int, header: Header) -> None:
    """Write ``header`` at ``offset`` of ``buffer``."""
    kind, runs, op, payload, low, high, token, number, urge = header
    HEADER.pack_into(buffer, offset, kind, urge, 0, runs, op, payload, low, high, token, number)


def unpack_header(buffer: bytes | bytearray, offset: int = 0) -> Header:
    """The header at ``offset``, or :class:`ProtocolError` naming what no sender of this version writes."""
    number_of_kind, urge, zeros, runs, op, payload, low, high, token, number = HEADER.unpack_from(buffer, offset)
    kind = _KINDS.get(number_of_kind)
    if kind is None or urge > 1 or zeros:
        raise _malformed(f"a frame begins with the bytes {bytes(buffer[offset : offset + 4]).hex()}")
    if runs > (MAX_RUNS if kind in _WITH_RUNS else 0):
        raise _malformed(f"a {kind.name} frame announces {runs} descriptors", runs=runs)
    if payload > _MOST_PAYLOAD[kind]:
        raise _malformed(f"a {kind.name} frame announces a payload of {payload} bytes", payload=payload)
    reasoned = kind is Kind.REFUSED or (kind is Kind.ANSWER and number != 0)
    if reasoned and number not in _REFUSALS:
        raise _malformed(f"a {kind.name} frame gives the reason {number}", reason_number=number)
    return Header(kind, runs, op, payload, low, high, token, number, urge == 1)


def refusal_of(header: Header) -> Refusal | None:
    """Why an ANSWER or REFUSED says no; None for a positive ANSWER."""
    return _REFUSALS.get(header.number)


def pack_runs(buffer: bytearray, offset: int, rows: npt.NDArray[np.int64]) -> int:
    """Write the remote offsets and lengths of ``rows`` (as in ``Descriptors``) at ``offset``; the end of it."""
    end = offset + len(rows) * RUN_BYTES
    if len(rows) == 1:
        RUN.pack_into(buffer, offset, *rows[0, 1:].tolist())
        return end
    np.frombuffer(buffer, "<i8", len(rows) * 2, offset).reshape(-1, 2)[:] = rows[:, 1:]
    return end


def unpack_runs(buffer: bytearray, offset: int, header: Header) -> npt.NDArray[np.int64]:
    """A copy of the frame's descriptors, int64 (runs, 2): offset, length.

    Raises :class:`ProtocolError` unless the lengths are positive and add up to the payload. Offsets are not judged:
    see :func:`inside`.
    """
    runs = np.frombuffer(buffer, "<i8", header.runs * 2, offset).reshape(-1, 2).astype(np.int64)
    lengths = runs[:, 1]
    total = least = most = 0
    if header.runs == 1:
        total = least = most = int(lengths[0])
    elif header.runs:
        least, most = int(np.minimum.reduce(lengths)), int(np.maximum.reduce(lengths))
        total = int(np.add.reduce(lengths))  # can't overflow if none exceeds the payload
    if header.runs and not 0 < least <= most <= header.payload:
        raise _malformed(f"a {header.kind.name} frame has a descriptor with a length that can't be")
    if total != header.payload:
        raise _malformed(
            f"a {header.kind.name} frame announces {header.payload} bytes, its descriptors {total}",
            payload=header.payload,
        )
    return runs


def inside(runs: npt.NDArray[np.int64], low: int, high: int) -> bool:
    """Whether all unpacked descriptors lie within ``low`` to ``high``, itself within a grant."""
    if len(runs) == 1:
        offset, length = runs[0].tolist()
        return bool(low <= offset <= high - length)
    if not len(runs):
        return True
    # high - length can't overflow: a length is at most MAX_PAYLOAD here.
    return int(np.minimum.reduce(runs[:, 0])) >= low and bool((runs[:, 0] <= high - runs[:, 1]).all())


_HELLO = struct.Struct("<4sHHIII")
_MAGIC = b"KVDF"


class Protection(enum.IntEnum):
    """What keeps the frames of a connection from harm; both sides use the same."""

    NONE = 0
    CHECKSUM = 1
    AUTHENTIC = 2
    SECRET = 3


def pack_hello(protection: Protection = Protection.CHECKSUM) -> bytes:
    """What the two sides exchange before the first frame: the version and the limits that both must have."""
    return _HELLO.pack(_MAGIC, VERSION, protection, MAX_RUNS, MAX_PAYLOAD, MAX_MESSAGE)


def check_hello(theirs: bytes, protection: Protection = Protection.CHECKSUM) -> None:
    """Raise :class:`FabricError` unless the peer's fabric speaks as this one does."""
    if theirs == pack_hello(protection):
        return
    if len(theirs) == _HELLO.size and theirs.startswith(_MAGIC):
        _, version, other, *_ = _HELLO.unpack(theirs)
        if version == VERSION and other != protection:
            named = Protection(other).name if other in list(Protection) else str(other)
            raise FabricError(
                f"the peer's tcp fabric protects its frames by {named}, this one by {protection.name}; set the same "
                "security.level and security.checksums on both nodes",
                protections=[protection.name, named],
            )
        raise FabricError(
            f"the peer's tcp fabric has version {version}, this one {VERSION} (or other limits); run the same kvd "
            "version on both nodes",
            versions=[VERSION, version],
        )
    raise FabricError(
        f"the peer answered the tcp fabric with {theirs[:16]!r}; it seems to use another fabric; configure the same "
        "one on both nodes"
    )


def _malformed(what: str, **fields: object) -> ProtocolError:
    return ProtocolError(f"{what}, which no kvd sends; the connection is closed", **fields)
