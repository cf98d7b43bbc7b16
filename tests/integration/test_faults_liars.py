"""Processes that lie: about shapes, places, counts, and about what belongs to whom.

While one lies, an honest transfer between the same daemons is under way and must get every byte.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvd_client.doorbell import Doorbell
from kvd_client.errors import KvdError
from kvd_client.framing import encode
from kvd_client.protocol import PROTOCOL_VERSION, Abort, Fetch, Finish, Hello, OpenSink, OpenSource, Release
from kvd_client.ring import EVENT_IDLE, EVENT_LAYER_READY, EVENT_METADATA_READY, RING_EVENTS, RING_HEAD_OFFSET
from kvd_client.spec import KVSpec, MetadataSpec, TokenRange
from tests.integration.fault_helpers import (
    LONG,
    SHORT,
    SPEC,
    WAIT_S,
    Both,
    Told,
    eventually,
    saw,
    tell,
)
from tests.integration.liars import Keyed, honest_transfer, keyed_daemons

HUGE = 1 << 62


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed_daemons(tmp_path_factory.mktemp("liars")) as pair:
        yield pair


@pytest.fixture
def honest(pair: Keyed, request: pytest.FixtureRequest) -> Iterator[Both]:
    with honest_transfer(pair, request.node.name) as both:
        yield both


SPEC_FIELDS = {"layers": 4, "kv_heads": 2, "entry_bytes": 64, "dtype": "float16", "model": "test"}


def spec(**changes: Any) -> KVSpec:
    return KVSpec(**{**SPEC_FIELDS, **changes})


OPENS: list[tuple[str, dict[str, Any]]] = [
    ("no layers", {"spec": spec(layers=0)}),
    ("a million layers", {"spec": spec(layers=1_000_000)}),
    ("negative heads", {"spec": spec(kv_heads=-1)}),
    ("entries of an exabyte", {"spec": spec(entry_bytes=HUGE)}),
    ("windows for other layers", {"spec": spec(windows=(1, 2))}),
    ("no rows", {"lengths": []}),
    ("ten thousand rows", {"lengths": [1] * 10_000}),
    ("rows longer than the capacity", {"lengths": [11]}),
    ("a negative row", {"lengths": [-1]}),
    ("all the tokens there are", {"lengths": [10], "capacity": HUGE}),
    ("heads that do not exist", {"head_start": 1, "head_count": 2}),
    ("negative head count", {"head_count": -2}),
    ("rank beyond ranks", {"rank": 3, "ranks": 2}),
    ("metadata of an exabyte", {"metadata": (MetadataSpec(name="m", layer_bytes=HUGE),)}),
    ("metadata twice", {"metadata": (MetadataSpec(name="m", layer_bytes=1), MetadataSpec(name="m", layer_bytes=1))}),
    ("a deadline that is no number", {"deadline_s": float("nan")}),
    ("a mode that does not exist", {"mode": "everything"}),
    ("a cache that does not exist", {"cache": 77, "table": b"\0" * 400}),
    ("a table without a cache, cut off", {"cache": 1, "table": b"\0" * 3}),
    ("the whole pool and more", {"spec": spec(layers=1024, kv_heads=1024, entry_bytes=1 << 20)}),
]


@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_process_lies_about_its_shapes(pair: Keyed, honest: Both, side: str) -> None:
    """Each lie is answered with an error that is named, nothing is taken for it, and the connection works on."""
    kind = OpenSource if side == "source" else OpenSink
    daemon = pair.prefill if side == "source" else pair.decode
    with daemon.client("liar") as client:
        connection = client._connected()
        lies = list(OPENS)
        if side == "sink":
            lies += [
                ("holds tokens that do not exist", {"held": [TokenRange(0, 0, 11)]}),
                ("holds tokens of another row", {"held": [TokenRange(7, 0, 1)]}),
                ("lands more than there is", {"landing_entries": 11, "landing_slots": 1}),
                ("a million landing slots", {"landing_entries": 1, "landing_slots": 1_000_000}),
                ("a handle that is none", {"handle": "nonsense"}),
            ]
        codes = set()
        before = client.status().memory.leases
        for number, (what, lie) in enumerate(lies):
            fields = {"request": f"lie {number}", "spec": spec(), "lengths": [10], "capacity": 10, **lie}
            told = tell(lambda fields=fields: connection.request(kind(**fields)))  # type: ignore[misc]
            assert told.code in ("INVALID_ARGUMENT", "OUT_OF_MEMORY", "NOT_FOUND", "UNSUPPORTED_LAYOUT"), (what, told)
            codes.add(told.code)
        saw(f"{side} lies about its shapes", f"open, {len(lies)} ways", liar=told)
        assert client.status().memory.leases == before
    assert "INTERNAL" not in codes


def test_two_processes_that_disagree_on_shapes(pair: Keyed, honest: Both) -> None:
    """The sink is told what differs; a source that fits nobody goes on waiting."""
    lies: list[tuple[dict[str, Any], str]] = [
        ({"spec": spec(entry_bytes=128)}, "FINGERPRINT_MISMATCH"),
        ({"spec": spec(model="other")}, "FINGERPRINT_MISMATCH"),
        ({"lengths": [9]}, "UNSUPPORTED_LAYOUT"),
        ({"lengths": [10, 10]}, "UNSUPPORTED_LAYOUT"),
        ({"heads": (0, 1)}, "UNSUPPORTED_LAYOUT"),
        ({"metadata": (MetadataSpec(name="m", layer_bytes=1),)}, "UNSUPPORTED_LAYOUT"),
    ]
    for number, (lie, code) in enumerate(lies):
        fields: dict[str, Any] = {"spec": spec(), "lengths": [10], **lie}
        name = f"disagree {number}"
        with pair.prefill.client() as a, pair.decode.client() as b:
            source = a.prefill(name, spec(), [10])
            sink = b.decode(name, source="prefill", **fields)
            told = tell(lambda sink=sink: sink.wait_ready(timeout_s=WAIT_S))  # type: ignore[misc]
            assert told.code == code
            assert told.fields["differ"]
            sink.release()
            # Held and refused for nothing: a sink that fits is served.
            with b.decode(name, spec(), [10], source="prefill") as fits:
                entries = np.full((1, 10, 2, 64), number, np.uint8)
                for layer in range(4):
                    source.put_layer(layer, entries=entries)
                fits.wait_ready(timeout_s=WAIT_S)
                assert (fits.layer(3) == number).all()
            source.release()
    saw("the two processes disagree", "pairing, 6 ways", sink=told)


class RawProcess:
    """A process that speaks the local API by hand."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(path)
        self.sock.sendall(encode(Hello(id=1, version=PROTOCOL_VERSION, name="raw")))
        _, ancillary, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(3 * 4))
        self.fds = array.array("i", ancillary[0][2])
        self.bell = Doorbell(self.fds[0], self.fds[1])

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.sock.close()

    def wait_closed(self) -> None:
        """Return when the daemon has ended the connection."""
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 16):
                pass


def paired(pair: Keyed, request: str) -> bool:
    with pair.prefill.client("look") as client:
        return any(t.request == request and t.peer == "decode" for t in client.status().transfers)


RING_LIES = {
    "a layer that does not exist": (EVENT_LAYER_READY, 6, 0, 0, SHORT),
    "a row that does not exist": (EVENT_LAYER_READY, 1, 9, 0, SHORT),
    "tokens that do not exist": (EVENT_LAYER_READY, 1, 0, 0, 0xFFFFFFFF),
    "tokens backwards": (EVENT_LAYER_READY, 1, 0, 200, 100),
    "metadata without any": (EVENT_METADATA_READY, 1, 0, 0, 0),
    "an idle window of a source": (EVENT_IDLE, 60_000, 0, 0, 0),
}


@pytest.mark.parametrize("lie", RING_LIES)
def test_a_source_rings_what_does_not_exist(pair: Keyed, honest: Both, lie: str) -> None:
    """Its own transfer ends for both, with what was wrong, or the event means nothing; no byte that is not there."""
    with Both(pair, lie) as both:
        both.bring_to("paired")
        kind, layer, row, start, stop = RING_LIES[lie]
        since = time.monotonic()
        assert both.source._connection.doorbell.ring(kind, layer, both.source.id, row, start, stop)
        both.source_client.status()  # makes the daemon look at the ring
        with contextlib.suppress(KvdError):
            both.put(range(1, SPEC.layers))
        told = both.ends(since)
        saw(f"source rings {lie}", "paired", **told)
        want = "OK" if kind == EVENT_IDLE else "INVALID_ARGUMENT"
        assert (told["source"].code, told["sink"].code) == (want, want)


def test_a_process_touches_what_belongs_to_another(pair: Keyed, honest: Both) -> None:
    """Every request that names the honest transfer is refused as if it were not there; rings about it mean nothing."""
    mine, theirs = honest.source.id, honest.sink.id
    counts, index = np.zeros(4, np.int32).tobytes(), b""
    for daemon, number in ((pair.prefill, mine), (pair.decode, theirs)):
        raw = RawProcess(daemon.socket)
        with daemon.client("thief") as thief:
            connection = thief._connected()
            for message in (
                Abort(transfer=number, reason="mine now"),
                Finish(transfer=number),
                Fetch(transfer=number, layer=1, slot=0, counts=counts, index=index),
            ):
                told = tell(lambda message=message, to=connection: to.request(message))  # type: ignore[misc]
                assert told.code in ("NOT_FOUND", "OK"), (message, told)
            tell(lambda to=connection, number=number: to.request(Release(transfer=number)))  # type: ignore[misc]
            for layer in range(SPEC.layers):
                raw.bell.ring(EVENT_LAYER_READY, layer, number, 0, 0, LONG)
            thief.status()
        raw.close()
    saw("process names another's transfer", "mid-way", liar=told)


@pytest.mark.parametrize("garbage", ["head far ahead", "unknown kind", "noise"])
def test_a_process_fills_its_ring_with_garbage(pair: Keyed, honest: Both, garbage: str) -> None:
    """Its connection ends, its transfer with it, and nobody else's."""
    raw = RawProcess(pair.prefill.socket)
    try:
        raw.sock.sendall(encode(OpenSource(id=2, request="garbage", spec=SPEC, lengths=[SHORT], capacity=SHORT)))
        with pair.decode.client("sink") as client, client.decode("garbage", SPEC, [SHORT], source="prefill") as sink:
            eventually("both are paired", lambda: paired(pair, "garbage"))
            since = time.monotonic()
            if garbage == "head far ahead":
                raw.bell._u64[RING_HEAD_OFFSET // 8] = RING_EVENTS + 1
            elif garbage == "unknown kind":
                raw.bell.ring(99, 0, 1, 0, 0, 1)
            else:
                raw.bell._bytes[4096 : 4096 + 64] = b"\xff" * 64
                raw.bell._u64[RING_HEAD_OFFSET // 8] = 2
            raw.bell.wake()
            raw.wait_closed()
            told = Told("(closed)", time.monotonic() - since)
            lost = tell(lambda: sink.wait_ready(timeout_s=WAIT_S), since)
            saw(f"ring: {garbage}", "paired", liar=told, sink=lost)
            assert lost.code == "PROCESS_LOST"
            sink.abort()
    finally:
        raw.close()
