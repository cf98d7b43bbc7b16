"""Fetches and their answers as the core sees them, and transfers deep enough that not all is pushed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.transfer import events as ev
from kvd.transfer import instructions as do
from kvd.transfer.part import SinkPart, SourcePart
from kvd.wire import messages as wire
from kvd_client.spec import KVSpec
from tests.unit.transfer_helpers import (
    SESSION,
    Node,
    layout,
)

SPEC = KVSpec(layers=4, kv_heads=2, entry_bytes=8, dtype="fp16", model="m")
DEEP: dict[str, Any] = {"spec": SPEC, "layout": layout(spec=SPEC)}
"""Four layers, so that two of them need not be pushed."""


def numbers(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def fetch(number: int = 7, layer: int = 1, transfer: int = 1) -> ev.FetchRequested:
    """Token 3 for the first head, tokens 0 and 2 for the second."""
    return ev.FetchRequested(transfer, number, layer, numbers(1, 2), numbers(3, 0, 2), 1000, 16)


def asked(number: int = 7, layer: int = 1, transfer: int = 1) -> wire.Fetch:
    """The same as it comes to the source."""
    return wire.Fetch(
        transfer=transfer, sink=21, fetch=number, layer=layer,
        counts=numbers(1, 2), index=numbers(3, 0, 2), offset=1000, stride=16,
    )  # fmt: skip


def arrived(number: int = 7, transfer: int = 1, session: int = SESSION) -> ev.FetchArrived:
    return ev.FetchArrived(session, wire.FetchArrived(transfer, number))


def failed(number: int = 7, code: str = "OUT_OF_MEMORY") -> wire.FetchFailed:
    return wire.FetchFailed(transfer=1, fetch=number, code=code, message="no room to gather", fields={"need": 9})


def served(number: int = 7, nbytes: int = 24, error: Any = None, transfer: int = 1, sink: int = 21) -> ev.FetchServed:
    return ev.FetchServed(transfer, SESSION, number, sink, nbytes, error)


def sink_part(node: Node) -> SinkPart:
    part = node.part()
    assert isinstance(part, SinkPart)
    return part


def settle(node: Node, out: list[do.Instruction]) -> list[do.WriteTokens | do.WriteMetadata]:
    """Complete writes until no more follow; all of them, in order."""
    writes: list[do.WriteTokens | do.WriteMetadata] = []
    while found := [i for i in out if isinstance(i, do.WriteTokens | do.WriteMetadata)]:
        writes += found
        out = [i for write in found for i in node.done(write.write, transfer=write.transfer)]
    return writes


def source_part(node: Node, transfer: int = 1) -> SourcePart:
    part = node.part(transfer)
    assert isinstance(part, SourcePart)
    return part
