"""Frames of the control connection once both ends have proven a shared key: encrypted, in order, none twice.

A frame is the length of the rest (u32, little-endian), a tag of the length, and the body's AES-GCM ciphertext with its
tag. The nonces are twice the frame's number, and one more: a frame that was changed, repeated, dropped or put elsewhere
does not pass. The length has a tag of its own, since a changed one would keep the receiver waiting.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag

from kvd.errors import ProtocolError
from kvd.wire.framing import FrameParser, frame
from kvd.wire.keys import TAG_BYTES, Keys, direction_key
from kvd_client.protocol import LENGTH, MAX_FRAME

HEAD_BYTES = LENGTH.size + TAG_BYTES
PER_KEY = 1 << 16
"""Frames of one key: 64 GiB at most."""
_NONCE = struct.Struct("<4xQ")


class GuardWriter:
    """Encrypts what one end sends."""

    def __init__(self, key: bytes) -> None:
        self._keys = Keys(key, PER_KEY)
        self._number = 0

    def frame(self, body: bytes) -> bytes:
        """``body`` as a frame; raises :class:`ProtocolError` if it is empty or over the limit."""
        frame(body)
        self._number += 1
        aead = self._keys.at(self._number)
        length = LENGTH.pack(len(body) + TAG_BYTES)
        tag = aead.encrypt(_NONCE.pack(2 * self._number), b"", length)
        return b"".join((length, tag, aead.encrypt(_NONCE.pack(2 * self._number + 1), body, None)))


class GuardParser:
    """Takes the other end's frames apart; has the methods of :class:`~kvd.wire.framing.FrameParser` that a live
    session uses."""

    def __init__(self, key: bytes) -> None:
        self._keys = Keys(key, PER_KEY)
        self._number = 0
        self._buffer = bytearray()
        self._length = 0
        """Of the frame that has begun to arrive, verified; 0 before."""

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next complete frame's body, or ``None``. Raises :class:`ProtocolError` for what the other end has not
        sent, or not in this place; the stream is unusable from then on."""
        if not self._length:
            if len(self._buffer) < HEAD_BYTES:
                return None
            self._number += 1
            length = bytes(self._buffer[: LENGTH.size])
            self._open(2 * self._number, bytes(self._buffer[LENGTH.size : HEAD_BYTES]), length)
            (self._length,) = LENGTH.unpack(length)
            if not TAG_BYTES < self._length <= MAX_FRAME + TAG_BYTES:
                raise ProtocolError(f"a frame that claims {self._length} bytes", size=self._length, limit=MAX_FRAME)
            del self._buffer[:HEAD_BYTES]
        if len(self._buffer) < self._length:
            return None
        body = self._open(2 * self._number + 1, bytes(self._buffer[: self._length]), None)
        del self._buffer[: self._length]
        self._length = 0
        return body

    def _open(self, nonce: int, sealed: bytes, along: bytes | None) -> bytes:
        try:
            return self._keys.at(self._number).decrypt(_NONCE.pack(nonce), sealed, along)
        except InvalidTag:
            raise ProtocolError(
                f"frame {self._number} of the control connection is not what the other end sent there: somebody or "
                "something changed it on the way"
            ) from None


def guards(secret: bytes, *, dialled: bool) -> tuple[GuardWriter, GuardParser]:
    """What the end that dialled (or was dialled) sends and receives with."""
    return (
        GuardWriter(direction_key(secret, b"control", None, dialled)),
        GuardParser(direction_key(secret, b"control", None, not dialled)),
    )


class PlainWriter:
    """Frames without protection, for sessions without a shared key."""

    def frame(self, body: bytes) -> bytes:
        return frame(body)


Writer = GuardWriter | PlainWriter
Parser = GuardParser | FrameParser
