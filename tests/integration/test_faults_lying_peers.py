"""Peers that lie: about shapes, places, counts, and about what belongs to whom.

While one lies, an honest transfer between the same daemons is under way and must get every byte.
"""

from __future__ import annotations

import contextlib
import secrets
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
from kvd_client.spec import PartLayout, TokenRange
from tests.integration.fault_helpers import (
    LONG,
    SHORT,
    SPEC,
    WAIT_S,
    Both,
    saw,
    tell,
)
from tests.integration.liars import Keyed, honest_transfer, keyed_daemons
from tests.integration.raw_peer import RawPeer

HUGE = 1 << 62


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed_daemons(tmp_path_factory.mktemp("liars")) as pair:
        yield pair


@pytest.fixture
def honest(pair: Keyed, request: pytest.FixtureRequest) -> Iterator[Both]:
    with honest_transfer(pair, request.node.name) as both:
        yield both


# --- sources ----------------------------------------------------------------------------------------------------------


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


# --- sinks ------------------------------------------------------------------------------------------------------------


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
