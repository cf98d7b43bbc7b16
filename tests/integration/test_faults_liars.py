"""Processes and peers that lie: about shapes, places, counts, and about what belongs to whom.

While one lies, an honest transfer between the same daemons is under way and must get every byte.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.fabric.frames import Kind
from kvd.fabric.regions import Refusal
from kvd.types import Lane
from kvd.wire import messages as wire
from kvd_client.doorbell import Doorbell
from kvd_client.errors import KvdError
from kvd_client.framing import encode
from kvd_client.protocol import PROTOCOL_VERSION, Abort, Fetch, Finish, Hello, OpenSink, OpenSource, Release
from kvd_client.ring import EVENT_IDLE, EVENT_LAYER_READY, EVENT_METADATA_READY, RING_EVENTS, RING_HEAD_OFFSET
from kvd_client.spec import KVSpec, MetadataSpec, PartLayout, TokenRange
from tests.integration.daemons import two_daemons
from tests.integration.fault_helpers import (
    LONG,
    RATE,
    SHORT,
    SPEC,
    WAIT_S,
    Both,
    Pair,
    Told,
    all_is_well,
    eventually,
    key_file,
    saw,
    tell,
)
from tests.integration.raw_peer import RawPeer

HUGE = 1 << 62


class Keyed(Pair):
    key: bytes

    def liar(self, daemon: Any, node: str = "liar") -> RawPeer:
        return RawPeer(daemon, daemon.listen, self.key, node)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("liars")
    key = secrets.token_hex(32)
    config: dict[str, dict[str, Any]] = {
        "peers": {"key_file": key_file(folder, key), "heartbeat_s": 0.5, "timeout_s": 10.0},
        "transfer": {"rendezvous_s": 5.0},
        "memory": {"pool": "128MiB", "arena": "64MiB"},
        "fabric": {"rate": RATE},
    }
    with two_daemons(folder, **config) as daemons:
        keyed = Keyed(daemons[0], daemons[1])
        keyed.key = key.encode()
        keyed.settle()
        yield keyed


@pytest.fixture
def honest(pair: Keyed, request: pytest.FixtureRequest) -> Iterator[Both]:
    """A transfer that is under way while the test lies, and whole when it has."""
    with Both(pair, f"honest {request.node.name}"[:200], tokens=LONG // 8) as both:
        both.bring_to("mid-way")
        yield both
        told = both.ends(time.monotonic())
        assert {answer.code for answer in told.values()} == {"OK"}
    all_is_well(pair)


# --- processes -------------------------------------------------------------------------------------------------------

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


# --- peers that are sources ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sink_of_a_liar(pair: Keyed, liar: RawPeer, request: str, **options: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A sink on ``decode`` whose source is the liar, and the open that the liar got for it."""
    with pair.decode.client("victim") as client:
        sink = client.decode(request, SPEC, [SHORT], source=liar.node, landing_entries=4, deadline_s=8.0, **options)
        opened = liar.hear(wire.Open, lambda message: message.request == request)
        liar.say(wire.Accepted(transfer=opened.sink, source=1))
        # Taken now: a transfer that has failed gives none, but its memory stays until the release.
        yield sink, opened, [sink.mask(layer)[0] for layer in range(SPEC.layers)]
        sink.release()


def test_a_peer_writes_where_it_must_not(pair: Keyed, honest: Both) -> None:
    """Refused by frame, with a reason; not one byte lands; the session goes on and the transfer can still be served."""
    with pair.liar(pair.decode) as liar, sink_of_a_liar(pair, liar, "out of range") as (sink, opened, _):
        before = [sink.layer(layer).copy() for layer in range(SPEC.layers)]
        token, lane = opened.grant, Lane.BULK
        since = time.monotonic()
        for runs, bounds in (
            ([(HUGE, 8)], None),
            ([(-8, 8)], None),
            ([(0, 8), (1 << 40, 8)], None),
            ([(1 << 40, 8)], (0, 8)),
            ([(-64, 8)], (0, 8)),
            ([(0, 8)], (0, HUGE)),
            ([(8, 8)], (16, 8)),
        ):
            for kind in (Kind.WRITE, Kind.THEN):
                body = b"\xee" * sum(length for _, length in runs)
                liar.write(lane, token, runs, body, kind, bounds)
                assert liar.outcome(lane) == Refusal.OUT_OF_RANGE, (runs, bounds, kind)
        for wrong in (bytes(16), secrets.token_bytes(16), token[:-1] + bytes([token[-1] ^ 1])):
            liar.write(lane, wrong, [(0, 8)], b"\xee" * 8)
            assert liar.outcome(lane) == Refusal.UNKNOWN_TOKEN
        for layer, memory in enumerate(before):
            assert np.array_equal(sink.layer(layer), memory)
        saw("peer writes outside its grant", "paired, 17 ways", sink=tell(lambda: sink.poll_ready(0), since))
        # What it may write it still can.
        liar.write(lane, token, [(0, 8)], b"\x01" * 8)
        assert liar.outcome(lane) == 0
        assert sink.layer(0).ravel()[:8].tolist() == [1] * 8


def test_a_peer_writes_after_the_sink_has_released(pair: Keyed, honest: Both) -> None:
    """The memory is another transfer's by now; its old token opens nothing."""
    with pair.liar(pair.decode) as liar:
        with sink_of_a_liar(pair, liar, "late") as (_, opened, _):
            liar.write(Lane.BULK, opened.grant, [(0, 8)], b"\x01" * 8)
            assert liar.outcome(Lane.BULK) == 0
        with Both(pair, "next in this memory") as both:
            both.bring_to("paired")
            for at in range(0, opened.layout.masks_offset, 64 << 10):
                liar.write(Lane.BULK, opened.grant, [(at, 8)], b"\xee" * 8)
                assert liar.outcome(Lane.BULK) == Refusal.UNKNOWN_TOKEN
            both.put(range(1, SPEC.layers))
            told = both.ends(time.monotonic())
            saw("peer writes with an old grant", "released", **told)
            assert told["sink"].code == "OK"


ARRIVALS = {
    "a layer that does not exist": ("layer", [TokenRange(0, 0, 1)], 99),
    "a row that does not exist": ("row", [TokenRange(3, 0, 1)], 0),
    "tokens that do not exist": ("tokens", [TokenRange(0, 0, 1 << 40)], 0),
    "tokens backwards": ("backwards", [TokenRange(0, 10, 5)], 0),
    "negative tokens": ("negative", [TokenRange(0, -5, 5)], 0),
}


@pytest.mark.parametrize("lie", ARRIVALS)
def test_a_peer_says_that_what_does_not_exist_has_arrived(pair: Keyed, honest: Both, lie: str) -> None:
    """Its session ends, and the sink is told PEER_LOST; nothing counts as arrived."""
    with pair.liar(pair.decode) as liar, sink_of_a_liar(pair, liar, lie) as (sink, opened, masks):
        since = time.monotonic()
        _, ranges, layer = ARRIVALS[lie]
        liar.notify(Lane.BULK, wire.Arrived(opened.sink, layer, ranges))
        told = tell(lambda: sink.wait_ready(timeout_s=WAIT_S), since)
        saw(f"peer: {lie} arrived", "paired", sink=told)
        assert told.code == "PEER_LOST"
        assert all((mask[:SHORT] == 2).all() for mask in masks)
        liar.wait_ended()


def test_a_peer_says_that_all_has_arrived_and_has_sent_nothing(pair: Keyed, honest: Both) -> None:
    """The masks know better. The sink must not wait beyond its deadline for bytes that nobody will send."""
    with pair.liar(pair.decode) as liar, sink_of_a_liar(pair, liar, "empty words") as (sink, opened, masks):
        since = time.monotonic()
        for layer in range(SPEC.layers):
            liar.notify(Lane.BULK, wire.Arrived(opened.sink, layer, [TokenRange(0, 0, SHORT)]))
        told = tell(lambda: sink.wait_ready(timeout_s=WAIT_S), since)
        saw("peer: all arrived, none sent", "paired", sink=told)
        assert told.code == "PROTOCOL"
        assert told.fields["peer"] == "liar"
        assert all((mask[:SHORT] == 2).all() for mask in masks)
        assert liar.hear(wire.Abort).code == "PROTOCOL"


def test_a_peer_names_transfers_that_are_not_its_own(pair: Keyed, honest: Both) -> None:
    """Whatever it says about the honest transfer, at either end, nobody listens."""
    for daemon, number in ((pair.decode, honest.sink.id), (pair.prefill, honest.source.id)):
        with pair.liar(daemon) as liar:
            error: dict[str, Any] = {"code": "ABORTED", "message": "mine now", "fields": {}}
            for message in (
                wire.Abort(transfer=number, **error),
                wire.Refused(transfer=number, **error),
                wire.Withdraw(sink=number, **error),
                wire.Delivered(transfer=number),
                wire.Accepted(transfer=number, source=1),
                wire.Idle(transfer=number, windows=1),
                wire.FetchFailed(transfer=number, fetch=1, **error),
                wire.Pulled(transfer=number, stage=1),
                wire.Retract(request=honest.request, rank=0),
                wire.RejectHandle(handle="", request=honest.request, reason="not wanted"),
                wire.RejectHandle(handle=honest.source._part.handle, request="", reason="not wanted"),
                wire.Announce(source=number, request=honest.request, rank=0),
                wire.Ping(number=12),
            ):
                liar.say(message)
            liar.hear(wire.Pong, lambda message: message.number == 12)
            for news in (
                wire.Arrived(number, 0, [TokenRange(0, 0, LONG // 8)]),
                wire.MetadataArrived(number, 0),
                wire.FetchArrived(number, 1),
            ):
                liar.notify(Lane.URGENT, news)
                assert liar.outcome(Lane.URGENT) == 0
    saw("peer names another's transfers", "mid-way", sink=tell(lambda: honest.sink.poll_ready(0)))


# --- peers that are sinks --------------------------------------------------------------------------------------------


def an_open(request: str, **changes: Any) -> wire.Open:
    """What an honest sink of ``request`` says, but for ``changes``."""
    layout = PartLayout(
        layers=SPEC.layers, heads=SPEC.kv_heads, entry_bytes=SPEC.entry_bytes, rows=1, capacity=SHORT
    )  # fmt: skip
    fields: dict[str, Any] = {
        "sink": 7, "request": request, "handle": "", "rank": 0, "ranks": 1, "head_start": 0, "spec": SPEC,
        "layout": layout, "lengths": [SHORT], "held": [], "grant": secrets.token_bytes(16), "deadline_s": 30.0,
    }  # fmt: skip
    for name in list(changes):
        if name in ("capacity", "rows", "heads", "layers", "entry_bytes", "landing_entries"):
            layout = msgspec.structs.replace(layout, **{name: changes.pop(name)})
            fields["layout"] = layout
    return wire.Open(**{**fields, **changes})


SINK_LIES: dict[str, dict[str, Any]] = {
    "capacity": {"capacity": HUGE},
    "small capacity": {"capacity": 1},
    "rows": {"rows": 1 << 40},
    "heads": {"heads": 1 << 40},
    "layers": {"layers": -1},
    "entries": {"entry_bytes": HUGE},
    "landing": {"landing_entries": HUGE},
    "lengths": {"lengths": [1 << 40]},
    "no lengths": {"lengths": []},
    "held": {"held": [TokenRange(0, 0, HUGE)]},
    "held row": {"held": [TokenRange(-1, 0, 1)]},
    "ranks": {"rank": 0, "ranks": 1 << 40},
    "mode": {"mode": "everything"},
}


def test_a_peer_opens_with_shapes_that_can_not_be(pair: Keyed, honest: Both) -> None:
    """Refused by name, each; the source waits on for a sink that fits."""
    with (
        pair.liar(pair.prefill) as liar,
        pair.prefill.client("source") as client,
        client.prefill("lies", SPEC, [SHORT]) as source,
    ):
        since = time.monotonic()
        for what, lie in SINK_LIES.items():
            liar.say(an_open("lies", **lie))
            refused = liar.hear(wire.Refused)
            assert refused.code in ("UNSUPPORTED_LAYOUT", "INVALID_ARGUMENT", "FINGERPRINT_MISMATCH"), (what, refused)
        with pair.decode.client("sink") as other, other.decode("lies", SPEC, [SHORT], source="prefill") as sink:
            for layer in range(SPEC.layers):
                source.put_layer(layer, entries=np.full((1, SHORT, 4, 256), layer, np.uint8))
            told = tell(lambda: sink.wait_ready(timeout_s=WAIT_S), since)
            assert (sink.layer(5) == 5).all()
            source.finish(timeout_s=WAIT_S)
        saw("peer opens with false shapes", f"pairing, {len(SINK_LIES)} ways", sink=told)


def test_a_peer_fetches_what_does_not_exist(pair: Keyed, honest: Both) -> None:
    """FETCH_FAILED with the reason, each; then the liar reads nothing of what it is sent, and the source's deadline
    ends the transfer."""
    with (
        pair.liar(pair.prefill) as liar,
        pair.prefill.client("source") as client,
        client.prefill("fetches", SPEC, [SHORT], deadline_s=3.0) as source,
    ):
        since = time.monotonic()
        liar.say(an_open("fetches", mode="partial", landing_entries=4))
        accepted = liar.hear(wire.Accepted)
        for layer in range(SPEC.layers):
            source.put_layer(layer, entries=np.zeros((1, SHORT, 4, 256), np.uint8))

        def fetch(number: int, **lie: Any) -> wire.Fetch:
            counts = np.array(lie.pop("counts", [1, 0, 0, 0]), np.int32).tobytes()
            index = np.array(lie.pop("index", [3]), np.int32).tobytes()
            fields = {"layer": 0, "offset": 0, "stride": 1024, **lie}
            return wire.Fetch(
                transfer=accepted.source, sink=7, fetch=number, counts=counts, index=index, **fields
            )  # fmt: skip

        lies: list[dict[str, Any]] = [
            {"layer": -1},
            {"layer": 1 << 40},
            {"index": [SHORT]},
            {"index": [-1]},
            {"counts": [2, 0, 0, 0]},
            {"counts": [-1, 2, 0, 0]},
            {"counts": [0x7FFFFFFF, 0, 0, 0]},
            {"counts": [1]},
            {"counts": []},
            {"offset": -1},
            {"offset": 1 << 63 - 1},
            {"stride": 0},
            {"stride": HUGE},
        ]
        for number, lie in enumerate(lies):
            liar.say(fetch(number, **lie))
            failed = liar.hear(wire.FetchFailed)
            assert (failed.fetch, failed.code) == (number, "INVALID_ARGUMENT"), (lie, failed)
        liar.say(wire.Idle(transfer=accepted.source, windows=HUGE))
        told = tell(lambda: source.finish(timeout_s=WAIT_S), since)
        saw("peer fetches what is not there", f"paired, {len(lies)} ways", source=told)
        assert told.code in ("DEADLINE_EXCEEDED", "PEER_LOST")


def test_a_peer_that_opens_and_never_reads_its_data(pair: Keyed, honest: Both) -> None:
    """It answers pings, so the session lives; the transfer's deadline ends it, and what was queued is dropped."""
    with (
        pair.liar(pair.prefill) as liar,
        pair.prefill.client("source") as client,
        client.prefill("unread", SPEC, [LONG], deadline_s=2.0) as source,
    ):
        liar.say(an_open("unread", lengths=[LONG], capacity=LONG))
        liar.hear(wire.Accepted)
        since = time.monotonic()
        for layer in range(SPEC.layers):
            source.put_layer(layer, entries=np.zeros((1, LONG, 4, 256), np.uint8))
        told_liar = liar.hear(wire.Abort)
        told = tell(lambda: source.finish(timeout_s=WAIT_S), since)
        saw("peer reads none of its data", "mid-way", source=told)
        assert (told.code, told_liar.code) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        assert "timeout_s" not in told.fields
