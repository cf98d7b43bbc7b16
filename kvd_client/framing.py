"""The local API's messages as frames of bytes, and back, under limits.

msgpack checks the bytes against hard limits (:func:`unpack`), then msgspec checks the types (:func:`decode_request`,
:func:`decode_reply`).
"""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat

import msgpack
import msgspec

from kvd_client.errors import InvalidArgument, ProtocolError
from kvd_client.protocol import LENGTH, MAX_DEPTH, MAX_FRAME, Message, Reply, Request

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """A message as one frame; raises :class:`ProtocolError` if it exceeds :data:`MAX_FRAME`."""
    return _framed(message, _encode(message))


def _framed(message: Message, body: bytes) -> bytes:
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes exceeds the frame limit of {MAX_FRAME}; "
            "split the request",
            size=len(body),
        )
    return LENGTH.pack(len(body)) + body


def encode_request(message: Request) -> bytes:
    """A process's request as one frame. Numbers of NumPy's or a tensor's become plain ones.

    Raises :class:`InvalidArgument` naming the field that the daemon would refuse: it refuses by ending the connection,
    and with it transfers that have nothing to do with the mistake; and for a request of more than :data:`MAX_FRAME`.
    """
    try:
        body = _encode_numbers(message)
        frame = _framed(message, body)
        decode_request(body)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"{type(message).__name__} can't be sent: {error}") from None
    except ProtocolError as error:
        what = str(error.message).removeprefix(_WRONG).replace("`", "")
        what, _, field = what.partition(" - at $.")
        raise InvalidArgument(f"{field or type(message).__name__} can't be sent: {what}", field=field) from None
    return frame


def _plain_number(value: Any) -> int | float:
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, SupportsFloat):
            return float(value)
        raise TypeError(f"{type(value).__name__} is no type that a request can have") from None


_encode_numbers = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode


def unpack(body: bytes | bytearray | memoryview) -> Any:
    """msgpack bytes to plain objects under hard limits; raises :class:`ProtocolError` on anything else."""
    try:
        tree = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_str_len=1 << 16,
            max_bin_len=MAX_FRAME,
            # msgpack reserves what an array claims before it reads it: no more than the bytes can hold
            max_array_len=min(1 << 17, len(body)),
            max_map_len=min(4096, len(body)),
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises a dozen unrelated types on foreign bytes
        raise ProtocolError(f"bytes that are not msgpack within the limits: {error or type(error).__name__}") from None
    if isinstance(tree, _CONTAINERS):
        _check_depth(tree)
    return tree


_SMALL = 4096
_request = msgspec.msgpack.Decoder(Request).decode
_reply = msgspec.msgpack.Decoder(Reply).decode
_WRONG = "a message of the wrong form: "
_WRONG_FORM = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    """One frame's body to a request; raises :class:`ProtocolError` naming the field that is wrong."""
    # Requests have no field of free form, so the typed decoder builds nothing that nests, and a frame this small can't
    # reach any other limit: msgpack's pass over it would cost more than all the rest and refuse nothing more.
    if len(body) > _SMALL:
        unpack(body)
    try:
        return _request(body)
    except _WRONG_FORM as error:
        raise ProtocolError(f"{_WRONG}{error}") from None


def decode_reply(body: bytes | bytearray | memoryview) -> Reply:
    """One frame's body to a reply; raises :class:`ProtocolError` naming the field that is wrong.

    Without the limits of :func:`unpack`: they protect the daemon from processes, not a process from its daemon.
    """
    try:
        return _reply(body)
    except _WRONG_FORM as error:
        raise ProtocolError(f"{_WRONG}{error}") from None


_CONTAINERS = (dict, list)


def _check_depth(tree: Any) -> None:
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ProtocolError(f"a message nested more than {MAX_DEPTH} deep", depth=depth)
        below: list[Any] = []
        for node in level:
            for child in node.values() if isinstance(node, dict) else node:
                if isinstance(child, _CONTAINERS):
                    below.append(child)
        level = below
