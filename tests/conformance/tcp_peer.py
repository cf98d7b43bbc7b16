"""A peer of the tcp fabric that the test plays by hand."""

import asyncio
import contextlib
import socket
import struct

from kvd.fabric import frames
from kvd.fabric.conformance import Side, tcp_pair
from kvd.fabric.frames import HEADER_BYTES, Header, Kind, Protection
from kvd.fabric.tcp import TcpFabric
from kvd.types import Lane


class Bringup:
    """The endpoint's side of a bringup whose other side says what the test wants."""

    secret, dialled = b"", False

    def __init__(self, streams, answer):
        self.streams = streams
        self.answer = answer

    async def exchange(self, blob):
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer


class Peer:
    """The far ends of both lanes, as plain sockets."""

    def __init__(self, sockets):
        self.sockets = sockets
        self.numbers = dict.fromkeys(Lane, 0)

    async def send(self, lane, data):
        await asyncio.get_running_loop().sock_sendall(self.sockets[lane], data)

    def frame(self, lane, kind, runs=(), payload=b"", claim=None, **fields):
        """A frame's bytes, numbered as the lane's next one, with honest bounds, unless ``fields`` say otherwise."""
        runs = list(runs)
        if kind <= Kind.NOTIFY:
            self.numbers[lane] += 1
            fields.setdefault("number", self.numbers[lane])
        fields.setdefault("op", 1)
        fields["payload"] = len(payload) if claim is None else claim
        fields.setdefault("low", min((at for at, _ in runs), default=0))
        fields.setdefault("high", max((at + n for at, n in runs), default=0))
        buffer = bytearray(HEADER_BYTES)
        frames.pack_header(buffer, 0, Header(kind, len(runs), **fields))
        return bytes(buffer) + b"".join(struct.pack("<qq", *run) for run in runs) + payload

    async def receive(self, lane):
        """The next frame's header and payload."""
        header = frames.unpack_header(await self.exactly(lane, HEADER_BYTES))
        await self.exactly(lane, header.runs * frames.RUN_BYTES)
        return header, await self.exactly(lane, 0 if header.kind is Kind.READ else header.payload)

    async def exactly(self, lane, count):
        data, loop = b"", asyncio.get_running_loop()
        while len(data) < count:
            more = await loop.sock_recv(self.sockets[lane], count - len(data))
            assert more, "the endpoint closed the connection"
            data += more
        return data

    def close(self):
        for sock in self.sockets.values():
            sock.close()


@contextlib.asynccontextmanager
async def against_peer(buffer=0, **options):
    """An endpoint (with ``Side``'s records) and the peer that the test plays; small socket buffers where asked."""
    fabric = TcpFabric(checksums=False, **options)
    pairs = {lane: tcp_pair() for lane in Lane}
    for pair in pairs.values():
        for sock in pair if buffer else ():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    hello = frames.pack_hello(Protection.NONE)
    endpoint = await fabric.connect(Bringup({lane: pair[0] for lane, pair in pairs.items()}, hello))
    peer = Peer({lane: pair[1] for lane, pair in pairs.items()})
    try:
        yield Side(fabric, endpoint), peer
    finally:
        await fabric.close()
        await endpoint.wait_closed()
        peer.close()
        assert all(pair[0].fileno() == -1 for pair in pairs.values())


async def lost(side):
    await side.until(lambda: len(side.lost) > 0)
    return side.lost[0]


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await settle(1)


async def settle(turns=30):
    for _ in range(turns):
        await asyncio.sleep(0)
