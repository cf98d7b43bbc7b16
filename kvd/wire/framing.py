"""Frames on the control connection: a 4-byte little-endian length and that many bytes of msgpack.

The limits are those of the local API (:func:`kvd_client.framing.unpack`): msgpack checks the bytes, msgspec the
types. No IO here; a :class:`FrameParser` takes bytes as they come.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvd.errors import KvdError, ProtocolError
from kvd.wire.messages import PeerMessage, SessionMessage, WireMessage
from kvd_client.framing import unpack
from kvd_client.protocol import LENGTH, MAX_FRAME

COMPACT_BYTES = 64 << 10
"""Consumed bytes that the parser keeps at most before it moves the rest to the front."""


class FrameParser:
    """Cuts a byte stream into frame bodies. Holds at most one frame, and what one ``feed`` brought beyond it."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._buffer = bytearray()
        self._start = 0

    @property
    def wanted(self) -> int:
        """Bytes still missing to complete the frame's length, or its body; 0 if :meth:`next` has a frame."""
        have = len(self._buffer) - self._start
        if have < LENGTH.size:
            return LENGTH.size - have
        return max(0, LENGTH.size + self._body_length() - have)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next complete frame's body, or ``None``. Raises :class:`ProtocolError` for an empty frame or one
        over the limit, as soon as its length is known; the stream is unusable from then on."""
        have = len(self._buffer) - self._start
        if have < LENGTH.size:
            self._compact()
            return None
        length = self._body_length()
        if have < LENGTH.size + length:
            self._compact()
            return None
        begin = self._start + LENGTH.size
        body = bytes(self._buffer[begin : begin + length])
        self._start = begin + length
        if self._start >= COMPACT_BYTES:
            self._compact()
        return body

    def rest(self) -> bytes:
        """The bytes that are not consumed yet, whoever they are for; the parser is empty afterwards."""
        rest = bytes(self._buffer[self._start :])
        self._buffer.clear()
        self._start = 0
        return rest

    def _body_length(self) -> int:
        (length,) = LENGTH.unpack_from(self._buffer, self._start)
        if not 0 < length <= self._max_frame:
            raise ProtocolError(
                f"a frame that claims {length} bytes; between 1 and {self._max_frame} are allowed here",
                size=length,
                limit=self._max_frame,
            )
        return int(length)

    def _compact(self) -> None:
        del self._buffer[: self._start]
        self._start = 0


def frame(body: bytes, max_frame: int = MAX_FRAME) -> bytes:
    """``body`` with its length in front; raises :class:`ProtocolError` if it is empty or over the limit."""
    if not 0 < len(body) <= max_frame:
        raise ProtocolError(
            f"a message of {len(body)} bytes does not fit a frame of at most {max_frame}; send less at once",
            size=len(body),
            limit=max_frame,
        )
    return LENGTH.pack(len(body)) + body


def encode(message: WireMessage) -> bytes:
    """A message as one frame; raises :class:`ProtocolError` if it exceeds the frame limit."""
    return frame(msgspec.msgpack.encode(message))


def decode(body: bytes) -> PeerMessage | SessionMessage:
    """A frame's body to a message; raises :class:`ProtocolError` naming the field that is wrong."""
    return convert(body, PeerMessage | SessionMessage)  # type: ignore[no-any-return]


def convert(body: bytes, union: Any) -> Any:
    """A frame's body to one of the structs of ``union``, strictly typed; errors as in :func:`decode`."""
    try:
        return msgspec.convert(unpack(body), union, strict=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a message of the wrong form: {error}") from None
    except ProtocolError:
        raise
    except (KvdError, RecursionError) as error:
        raise ProtocolError(f"a message that makes no sense: {error}") from None
