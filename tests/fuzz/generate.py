"""Random messages: of the right form with nonsense in them, nearly of the right form, and of no form at all.

Everything follows from a seed. What is well formed gets past the parsers and tries the code behind them; what is broken
tries the parsers, and ends its connection.
"""

from __future__ import annotations

import functools
import random
import struct
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from kvd.fabric.frames import HEADER, Header, Kind, pack_header
from kvd.fabric.regions import Refusal
from kvd.fabric.seals import Seal
from kvd.wire import messages as wire
from kvd_client import protocol as api
from kvd_client.protocol import LENGTH
from kvd_client.ring import RING_EVENT

CORPUS = Path(__file__).parent / "corpus"

NUMBERS = (0, 1, 2, 7, 63, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -1, -(1 << 31), -(1 << 63))
TEXTS = ("", "a", "r1", "model", "float16", "full", "../../etc", "\0", "é" * 20, "x" * 300, "prefill", "%s%n{}")

API = tuple(kind for kind in typing.get_args(api.Request) if kind is not api.Hello)
CONTROL = tuple(kind for kind in typing.get_args(wire.PeerMessage))
NOTIFICATIONS = typing.get_args(wire.Notification)


@functools.cache
def corpus(target: str) -> list[bytes]:
    """The seeds of a target, and what was found with it, in the order of the files' names."""
    return [file.read_bytes() for file in sorted((CORPUS / target).iterdir())]


@functools.cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


class Fuzz:
    """A stream of random messages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    # --- values of a type ---------------------------------------------------------------------------------------------

    def value(self, kind: Any) -> Any:
        """A value of an annotated type, in the form that msgpack has for it."""
        rng = self.random
        origin = typing.get_origin(kind)
        if origin is typing.Annotated:
            return self.value(typing.get_args(kind)[0])
        if origin in (typing.Union, types.UnionType):
            return self.value(rng.choice(typing.get_args(kind)))
        if origin in (list, tuple):
            inner = typing.get_args(kind)[0]
            return [self.value(inner) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
        if origin is dict:
            _, inner = typing.get_args(kind)
            return {self.value(str): self.value(inner) for _ in range(rng.randrange(3))}
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return rng.choice(NUMBERS[:6]) if rng.random() < 0.7 else rng.choice((*NUMBERS, rng.getrandbits(20)))
        if kind is float:
            return rng.choice((0.0, 0.01, 1.0, 30.0, -1.0, 1e300, float("nan"), float("inf")))
        if kind is str:
            return rng.choice(TEXTS)
        if kind is bytes:
            return rng.randbytes(rng.choice((0, 4, 8, 16, 16, 64)))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(kind)
        return self.tree(2)

    def struct(self, kind: type[msgspec.Struct]) -> Any:
        """A struct's fields, some of the optional ones left out, as a map or an array with its tag."""
        config = kind.__struct_config__
        hints = _hints(kind)
        fields = msgspec.structs.fields(kind)
        if config.array_like:
            tag = [config.tag] if config.tag is not None else []
            return tag + [self.value(hints[field.name]) for field in fields]
        tree: dict[str, Any] = {} if config.tag is None else {config.tag_field or "type": config.tag}
        for field in fields:
            if field.required or self.random.random() < 0.5:
                tree[field.encode_name] = self.value(hints[field.name])
        return tree

    def tree(self, depth: int) -> Any:
        """Any msgpack value."""
        rng = self.random
        if depth and rng.random() < 0.4:
            if rng.random() < 0.5:
                return [self.tree(depth - 1) for _ in range(rng.randrange(4))]
            return {rng.choice(TEXTS): self.tree(depth - 1) for _ in range(rng.randrange(4))}
        kinds = (int, float, str, bytes, bool)
        return None if rng.random() < 0.1 else self.value(rng.choice(kinds))

    # --- messages -----------------------------------------------------------------------------------------------------

    def well_formed(self, kinds: Sequence[type[msgspec.Struct]]) -> bytes:
        """A message that one of ``kinds`` parses from, most likely."""
        return bytes(msgpack.packb(self.struct(self.random.choice(kinds))))

    def broken(self, seeds: Sequence[bytes]) -> bytes:
        """A changed, cut, lengthened or doubled seed, or noise."""
        rng = self.random
        if rng.random() < 0.2:
            return rng.randbytes(rng.choice((1, 4, 20, 200)))
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(5):
                case 0:
                    del data[at : at + rng.choice((1, 4, 50))]
                case 1:
                    data[at:at] = rng.randbytes(rng.choice((1, 4, 50)))
                case 2:
                    data[at:at] = data[at : at + 30]
                case 3 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case _:
                    data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 0xFFFFFFFF, 1 << 31, 1 << 20)))
        return bytes(data) or b"\0"

    def api_frame(self) -> bytes:
        body = self.well_formed(API)
        return LENGTH.pack(len(body)) + body

    def ring_event(self, transfers: Sequence[int]) -> bytes:
        rng = self.random
        transfer = rng.choice(transfers) if transfers and rng.random() < 0.5 else rng.getrandbits(32)
        numbers = [rng.choice((0, 1, 3, 50, 0xFFFFFFFF, rng.getrandbits(32))) for _ in range(3)]
        return RING_EVENT.pack(rng.choice((1, 2, 3)), rng.choice((0, 1, 3)), transfer, *numbers)

    def lane_frame(self, number: int, seal: Seal, count: int) -> tuple[bytes, bool]:
        """A frame with right checks, the ``count``-th of its lane, and whether it has the number ``number``.

        Tokens are guesses, so whatever it wants is refused."""
        rng = self.random
        kind = rng.choice((Kind.WRITE, Kind.WRITE, Kind.THEN, Kind.READ, Kind.READ, Kind.NOTIFY))
        runs = [
            (rng.choice((0, 8, 4096, 1 << 40, (1 << 62))), rng.choice((1, 8, 512)))
            for _ in range(rng.choice((1, 1, 3)))
        ]
        if kind is Kind.NOTIFY:
            runs = []
        body = rng.randbytes(sum(length for _, length in runs)) if kind is not Kind.READ else b""
        size = sum(length for _, length in runs)
        low, high = rng.choice(((0, 1 << 62), (0, 4096), (5, 4), (-1, 10), (1 << 40, 1 << 41)))
        numbered = kind is not Kind.READ
        header = Header(
            kind,
            len(runs),
            # A new operation each time, so that the refusal of an earlier one says nothing about it.
            count + 1,
            size,
            low,
            high,
            rng.randbytes(16),
            number if numbered else 0,
            rng.random() < 0.3,
        )
        return pack_frame(header, runs, body, seal, count), numbered

    def broken_lane_frame(self, number: int, seal: Seal, count: int) -> bytes:
        """A frame that ends its connection: fields that can't be, with right checks, or wrong checks, or noise."""
        rng = self.random
        match rng.randrange(4):
            case 0:
                return rng.randbytes(200)
            case 1:
                fields = bytearray(HEADER.size)
                pack_header(fields, 0, Header(Kind.WRITE, 1, 1, 8, 0, 8, bytes(16), number))
                fields[rng.randrange(12)] ^= 1 << rng.randrange(8)
                return seal_header(bytes(fields), b"", seal, count)
            case 2:
                kind = rng.choice((Kind.ACK, Kind.DATA, Kind.ANSWER, Kind.REFUSED, Kind.MESSAGE))
                wanted = rng.choice((1, 7, 1 << 40))
                reason = int(rng.choice(list(Refusal)))
                payload = rng.choice((0, 1, 100)) if kind in (Kind.DATA, Kind.MESSAGE) else 0
                header = Header(kind, 0, 9, payload, 0, 0, bytes(16), wanted if kind is Kind.ACK else reason)
                return pack_frame(header, [], rng.randbytes(payload), seal, count)
            case _:
                header = Header(Kind.WRITE, 2, 1, 8, 0, 8, bytes(16), number)
                return pack_frame(header, [(0, 1 << 62), (0, -5)], b"", seal, count)


def seal_header(header: bytes, body: bytes, seal: Seal, count: int) -> bytes:
    """A header with its checks."""
    head = header + (seal.body(count, [body]) if body else bytes(seal.check_bytes))
    return head + seal.head(count, head)


def pack_frame(header: Header, runs: Sequence[tuple[int, int]], body: bytes, seal: Seal, count: int) -> bytes:
    """A whole frame, as :mod:`kvd.fabric.frames` has it."""
    packed = bytearray(HEADER.size)
    pack_header(packed, 0, header)
    rows = b"".join(struct.pack("<qq", *run) for run in runs)
    return seal_header(bytes(packed), body, seal, count) + rows + (seal.runs(count, rows) if rows else b"") + body
