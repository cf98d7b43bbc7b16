"""The tcp fabric against a peer that the test plays by hand: slow, broken or hostile."""

import asyncio
import contextlib
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import Aborted, FabricError, KvdError, ProtocolError, RemoteAccessError
from kvd.fabric import frames
from kvd.fabric.conformance import MIB, failure, one
from kvd.fabric.frames import HEADER_BYTES, Kind
from kvd.fabric.regions import Refusal
from kvd.types import Lane
from tests.conformance.tcp_peer import against_peer, lost, settle, until

pytestmark = pytest.mark.timeout(60)


# --- placing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 63, 1000, 100_000])
async def test_frames_in_pieces(step):
    """However the stream is cut, every byte gets to its place."""
    async with against_peer() as (side, peer):
        memory, grant = side.granted(1000)
        stream = peer.frame(
            Lane.BULK, Kind.WRITE, [(500, 200), (0, 100)], b"a" * 200 + b"b" * 100, token=grant.token, low=0, high=1000
        )
        stream += peer.frame(Lane.BULK, Kind.THEN, [(999, 1), (900, 2)], b"xyz", token=grant.token)
        stream += peer.frame(Lane.BULK, Kind.NOTIFY, payload=b"notify")
        stream += peer.frame(Lane.BULK, Kind.MESSAGE, payload=b"", op=2, urge=True)
        for begin in range(0, len(stream), step):
            await peer.send(Lane.BULK, stream[begin : begin + step])
        header, _ = await peer.receive(Lane.BULK)
        while header.number < 4:
            assert header.kind is Kind.ACK
            header, _ = await peer.receive(Lane.BULK)
        expected = np.zeros(1000, np.uint8)
        expected[500:700], expected[:100] = ord("a"), ord("b")
        expected[[999, 900, 901]] = list(b"xyz")
        assert (memory == expected).all()
        assert side.messages == [(Lane.BULK, b"notify"), (Lane.BULK, b"")]


async def test_mask_waits_for_its_last_byte():
    """THEN bytes are stored when they are all there, not as they come in."""
    async with against_peer() as (side, peer):
        memory, grant = side.granted(1000)
        write = peer.frame(Lane.BULK, Kind.WRITE, [(0, 500)], b"d" * 500, token=grant.token, high=1000)
        then = peer.frame(Lane.BULK, Kind.THEN, [(500, 500)], b"m" * 500, token=grant.token, urge=True)
        await peer.send(Lane.BULK, write + then[:-1])
        await until(lambda: memory[499] == ord("d"))
        await peer.send(Lane.URGENT, peer.frame(Lane.URGENT, Kind.MESSAGE, payload=b"turn", urge=True))
        await side.until(lambda: len(side.messages) == 1)
        assert not memory[500:].any()
        await peer.send(Lane.BULK, then[-1:])
        while (await peer.receive(Lane.BULK))[0].number != 2:
            pass
        assert (memory[500:] == ord("m")).all()


async def test_acknowledgements_that_are_urged():
    """An ACK waits for what follows the frame, unless the frame urges for it."""
    async with against_peer() as (side, peer):
        sent = [peer.frame(Lane.BULK, Kind.MESSAGE, payload=b"m", urge=urge) for urge in (False, True)]
        half = peer.frame(Lane.BULK, Kind.MESSAGE, payload=b"half")
        await peer.send(Lane.BULK, sent[0] + sent[1][:-1])
        await side.until(lambda: len(side.messages) == 1)
        await peer.send(Lane.BULK, sent[1][-1:] + half[:-1])
        header, _ = await peer.receive(Lane.BULK)
        assert (header.kind, header.number) == (Kind.ACK, 2)


async def test_writes_urge_in_time():
    """The last frame of an operation urges for its ACK, and so does one in each quarter of the window."""
    async with against_peer(inflight_bytes=400_000, frame_bytes=50_000) as (side, peer):
        _, region = side.memory(250_000)
        side.endpoint.write(Lane.BULK, region, bytes(16), one(0, 0, 250_000))
        side.endpoint.send(Lane.BULK, b"last")
        urges = [(await peer.receive(Lane.BULK))[0].urge for _ in range(6)]
        assert urges == [False, True, False, True, True, True]


async def test_revoked_in_the_middle_of_a_frame():
    """``revoke`` does not wait for the peer; what comes later goes nowhere, and the connection lives on."""
    async with against_peer() as (side, peer):
        size = 4 * MIB
        memory, grant = side.granted(size)
        frame = peer.frame(Lane.BULK, Kind.WRITE, [(0, size)], b"x" * size, token=grant.token)
        await peer.send(Lane.BULK, frame[: 3 * MIB])
        await until(lambda: memory[2 * MIB] != 0)
        await side.fabric.revoke(grant)
        placed = int(np.count_nonzero(memory))
        assert 0 < placed < size
        await peer.send(Lane.BULK, frame[3 * MIB :])
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.THEN, [(0, 1)], b"y", token=grant.token))
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.NOTIFY, payload=b"never", urge=True))
        header, _ = await peer.receive(Lane.BULK)
        assert (header.kind, header.op, header.number) == (Kind.REFUSED, 1, Refusal.REVOKED)
        while (await peer.receive(Lane.BULK))[0].number != 3:
            pass
        assert np.count_nonzero(memory) == placed
        assert side.messages == []
        assert side.endpoint.counters.access_errors == 1
        other = side.fabric.grant(grant.region, 0, size)
        await peer.send(
            Lane.BULK, peer.frame(Lane.BULK, Kind.WRITE, [(5, 1)], b"z", token=other.token, op=2, urge=True)
        )
        await peer.receive(Lane.BULK)
        assert memory[5] == ord("z")


async def test_revoked_in_the_middle_of_a_mask():
    async with against_peer() as (side, peer):
        memory, grant = side.granted(1000)
        then = peer.frame(Lane.BULK, Kind.THEN, [(500, 500)], b"m" * 500, token=grant.token, urge=True)
        await peer.send(Lane.BULK, then[:-1])
        await peer.send(Lane.URGENT, peer.frame(Lane.URGENT, Kind.MESSAGE, payload=b"turn"))
        await side.until(lambda: len(side.messages) == 1)
        await side.fabric.revoke(grant)
        await peer.send(Lane.BULK, then[-1:])
        assert (await peer.receive(Lane.BULK))[0].kind is Kind.REFUSED
        assert (await peer.receive(Lane.BULK))[0].kind is Kind.ACK
        assert not memory.any()


async def test_revoked_in_the_middle_of_an_answer():
    """What a READ has not fetched yet when the grant is revoked never leaves; the ANSWER says so."""
    async with against_peer(buffer=16 << 10) as (side, peer):
        memory, grant = side.granted(MIB, fill=1)
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.READ, [(0, MIB)], token=grant.token, claim=MIB))
        head = await peer.exactly(Lane.BULK, HEADER_BYTES + 1000)
        await side.fabric.revoke(grant)
        memory[:] = 2
        body = head[HEADER_BYTES:] + await peer.exactly(Lane.BULK, MIB - 1000)
        header, _ = await peer.receive(Lane.BULK)
        assert set(body) == {0, 1}
        assert (header.kind, header.number) == (Kind.ANSWER, Refusal.REVOKED)
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.READ, [(0, 1)], token=grant.token, claim=1, op=2))
        header, _ = await peer.receive(Lane.BULK)
        assert (header.kind, header.number) == (Kind.ANSWER, Refusal.UNKNOWN_TOKEN)


@pytest.mark.parametrize(
    ("run", "low", "high"),
    [((0, 10), 5, 20), ((15, 10), 5, 20), ((-5, 10), -5, 20), ((995, 10), 0, 1005), ((0, 10), 0, 2**64 - 1)],
)
async def test_frames_that_lie_about_their_bounds(run, low, high):
    """Descriptors are held against the frame's bounds, and these against the grant."""
    async with against_peer() as (side, peer):
        memory, grant = side.granted(1000, margin=100)
        fields = {"token": grant.token, "low": low, "high": high}
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.WRITE, [run], b"x" * run[1], **fields))
        header, _ = await peer.receive(Lane.BULK)
        assert (header.kind, header.number) == (Kind.REFUSED, Refusal.OUT_OF_RANGE)
        assert (await peer.receive(Lane.BULK))[0].kind is Kind.ACK
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.READ, [run], claim=run[1], **fields))
        header, _ = await peer.receive(Lane.BULK)
        assert (header.kind, header.number) == (Kind.ANSWER, Refusal.OUT_OF_RANGE)
        assert not memory.any()


# --- bytes that are not the protocol ----------------------------------------------------------------------------------


def foreign_streams():
    """Random bytes, and frames of every kind with random fields."""
    fields = st.tuples(
        st.integers(0, 11), st.integers(0, 2), st.just(0), st.integers(0, 1100), st.integers(0, 3),
        st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)), st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16), st.integers(0, 3),
    )  # fmt: skip
    frame = st.tuples(fields, st.binary(max_size=300)).map(lambda pair: frames.HEADER.pack(*pair[0]) + pair[1])
    return st.one_of(st.binary(max_size=400), st.lists(frame, max_size=4).map(b"".join))


@settings(deadline=None, max_examples=150)
@given(data=foreign_streams(), lane=st.sampled_from(Lane))
def test_foreign_bytes(data, lane):
    """The endpoint ends with a reason, nothing is written, and what was under way fails."""

    async def check():
        async with against_peer() as (side, peer):
            memory, grant = side.granted(1000, fill=7)
            _, region = side.memory(1000, fill=5)
            operations = [
                side.endpoint.write(lane, region, grant.token, one(0, 0, 10)),
                side.endpoint.read(lane, region, grant.token, one(0, 0, 10)),
            ]
            try:
                await peer.send(lane, data)
                peer.sockets[lane].shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the endpoint has ended before the last byte
            error = await lost(side)
            assert isinstance(error, ProtocolError | FabricError)
            assert error.fields["lane"] == lane.name.lower()
            assert (memory == 7).all()
            for operation in operations:
                assert isinstance(await failure(operation), KvdError | None)

    asyncio.run(check())


UNASKED = [
    (Kind.DATA, {"claim": 0}, "did not ask"),
    (Kind.ANSWER, {}, "out of turn"),
    (Kind.ACK, {"number": 1}, "acknowledged frame 1 of 0"),
    (Kind.REFUSED, {"number": 1}, "not under way"),
    (Kind.MESSAGE, {"number": 2}, "came with the number 2"),
    (Kind.WRITE, {"number": 0}, "came with the number 0"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), UNASKED)
@pytest.mark.parametrize("lane", Lane)
async def test_frames_out_of_place(lane, kind, fields, reason):
    async with against_peer() as (side, peer):
        await peer.send(lane, peer.frame(lane, kind, **fields))
        error = await lost(side)
        assert isinstance(error, ProtocolError)
        assert reason in error.message
        assert error.fields["peer"].startswith("127.0.0.1:")


async def test_data_of_the_wrong_size():
    async with against_peer() as (side, peer):
        local, region = side.memory(1000, fill=5)
        operation = side.endpoint.read(Lane.BULK, region, bytes(16), one(0, 0, 100))
        assert (await peer.receive(Lane.BULK))[0].kind is Kind.READ
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.DATA, payload=b"x" * 101))
        assert isinstance(await lost(side), ProtocolError)
        assert type(await failure(operation)) is FabricError
        assert (local == 5).all()


async def test_answer_without_its_data():
    async with against_peer() as (side, peer):
        _, region = side.memory(1000)
        operation = side.endpoint.read(Lane.BULK, region, bytes(16), one(0, 0, 100))
        await peer.receive(Lane.BULK)
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.ANSWER))
        assert isinstance(await lost(side), ProtocolError)
        assert type(await failure(operation)) is FabricError


# --- bounds on what a peer can make us hold ---------------------------------------------------------------------------


async def test_peer_that_does_not_read():
    """No more than the window is sent ahead, per lane, whatever is queued and however much the sockets take."""
    async with against_peer(inflight_bytes=200_000, frame_bytes=50_000) as (side, peer):
        _, region = side.memory(4 * MIB)
        for lane in Lane:
            for _ in range(4):
                side.endpoint.write(lane, region, bytes(16), one(0, 0, MIB))
                side.endpoint.read(lane, region, bytes(16), one(0, 0, MIB))
        for lane in Lane:
            await peer.receive(lane)
        await settle(50)
        counters = side.endpoint.counters
        assert all(0 < count <= 250_000 for count in counters.bytes_in_flight.values())
        assert counters.bytes_sent <= 2 * 250_000
        assert side.lost == []


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
async def test_peer_that_asks_and_does_not_listen(kind):
    """Answers and refusals that the peer does not take do not pile up beyond the protocol's limit."""
    async with against_peer(buffer=16 << 10) as (side, peer):
        _, grant = side.granted(MIB)
        with contextlib.suppress(OSError):
            for op in range(1, 100):
                if kind is Kind.READ:
                    some = [peer.frame(Lane.BULK, kind, [(0, MIB)], token=grant.token, claim=MIB, op=op)]
                else:
                    some = [peer.frame(Lane.BULK, kind, op=100 * op + n) for n in range(100)]
                await peer.send(Lane.BULK, b"".join(some) * (2 if kind is Kind.READ else 1))
        error = await lost(side)
        assert isinstance(error, ProtocolError)
        assert ("reads at once" if kind is Kind.READ else "refusals pile up") in error.message


async def test_cancel_of_what_is_half_sent():
    """The frame in the batch is finished, though slowly; only then the memory is free. The rest is dropped."""
    async with against_peer(buffer=16 << 10, frame_bytes=500_000) as (side, peer):
        source, region = side.memory(2_000_000, fill=1)
        operation = side.endpoint.write(Lane.BULK, region, bytes(16), one(0, 0, 2_000_000), notify=b"never")
        head = await peer.exactly(Lane.BULK, HEADER_BYTES + frames.RUN_BYTES + 1000)
        operation.cancel()
        await settle()
        assert not operation.done.done()
        body = await peer.exactly(Lane.BULK, frames.unpack_header(head).payload - 1000)
        assert isinstance(await failure(operation), Aborted)
        source[:] = 2
        assert set(body) == {1}
        side.endpoint.send(Lane.BULK, b"next")
        header, payload = await peer.receive(Lane.BULK)
        assert (header.kind, payload) == (Kind.MESSAGE, b"next")


async def test_cancel_of_a_read_is_at_once():
    """The answer may come whenever it likes: it goes nowhere."""
    async with against_peer() as (side, peer):
        local, region = side.memory(1000, fill=5)
        operation = side.endpoint.read(Lane.BULK, region, bytes(16), one(0, 0, 1000))
        await peer.receive(Lane.BULK)
        answer = peer.frame(Lane.BULK, Kind.DATA, payload=b"x" * 1000) + peer.frame(Lane.BULK, Kind.ANSWER)
        await peer.send(Lane.BULK, answer[: HEADER_BYTES + 500])
        await until(lambda: local[0] == ord("x"))
        operation.cancel()
        assert isinstance(operation.done.exception(), Aborted)
        local[:] = 6
        await peer.send(Lane.BULK, answer[HEADER_BYTES + 500 :])
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.MESSAGE, payload=b"behind"))
        await side.until(lambda: len(side.messages) == 1)
        assert (local == 6).all()
        assert side.endpoint.counters.bytes_in_flight[Lane.BULK] == 0


async def test_refused_write_is_not_sent_to_its_end():
    async with against_peer(inflight_bytes=100_000, frame_bytes=50_000) as (side, peer):
        _, region = side.memory(MIB)
        operation = side.endpoint.write(Lane.BULK, region, bytes(16), one(0, 0, MIB), notify=b"never")
        side.endpoint.send(Lane.BULK, b"next")
        await peer.receive(Lane.BULK)
        await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.REFUSED, number=Refusal.NOT_WRITABLE))
        error = await failure(operation)
        assert isinstance(error, RemoteAccessError)
        assert error.fields["reason"] == "not_writable"
        header = None
        while header is None or header.kind is not Kind.MESSAGE:
            header, payload = await peer.receive(Lane.BULK)
            await peer.send(Lane.BULK, peer.frame(Lane.BULK, Kind.ACK, number=header.number))
        assert header.number <= 4
        assert payload == b"next"
