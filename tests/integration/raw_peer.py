"""A peer that the test plays by hand against a real daemon: it holds the key, and says and writes what it likes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvd.fabric.frames import HEADER_BYTES, Header, Kind, unpack_header
from kvd.fabric.seals import Checksum
from kvd.types import Lane
from kvd.wire import framing
from kvd.wire.guard import GuardWriter
from kvd.wire.messages import Notification, Ping, Pong, WireMessage
from tests.fuzz.attackers import PeerAttack
from tests.fuzz.generate import pack_frame
from tests.integration.daemons import DaemonProcess
from tests.integration.fault_helpers import WAIT_S

M = TypeVar("M", bound=WireMessage)


class RawPeer(PeerAttack):
    """A live session with ``daemon`` as its peer ``node``; use it as a context."""

    name = "tcp raw"

    def __init__(self, daemon: DaemonProcess, address: str, key: bytes, node: str = "liar") -> None:
        host, port = address.rsplit(":", 1)
        super().__init__(daemon, (host, int(port)), key, 0, 0)
        self.node = node
        self._sockets: list[socket.socket] = []
        self._numbers = dict.fromkeys(Lane, 0)
        self._frames = dict.fromkeys(Lane, 0)
        self._operations = 0

    def abuse(self, control: socket.socket, lanes: dict[Lane, socket.socket], writer: GuardWriter) -> None:
        """What it does, the tests say."""

    def __enter__(self) -> RawPeer:
        with asyncio.Runner() as runner:
            self._control, self._lanes, self._writer, self._parser = runner.run(self.connect(self._sockets))
        for sock in self._sockets:
            sock.settimeout(WAIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in self._sockets:
            sock.close()

    # --- the control connection -----------------------------------------------------------------------------------

    def say(self, message: WireMessage) -> None:
        self._control.sendall(self._writer.frame(msgspec.msgpack.encode(message)))

    def hear(self, kind: type[M], where: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of a kind; pings are answered on the way, everything else is dropped. Raises
        :class:`ConnectionError` once the daemon has ended the session."""
        while True:
            while (body := self._parser.next()) is not None:
                message = framing.decode(body)
                if isinstance(message, Ping):
                    self.say(Pong(number=message.number))
                elif isinstance(message, kind) and where(message):
                    return message
            data = self._control.recv(1 << 16)
            if not data:
                raise ConnectionError("the daemon has ended the session")
            self._parser.feed(data)

    def wait_ended(self) -> None:
        """Return when the daemon has ended the session."""
        with contextlib.suppress(ConnectionError):
            self.hear(WireMessage, lambda message: False)

    # --- the lanes ------------------------------------------------------------------------------------------------

    def write(
        self,
        lane: Lane,
        token: bytes,
        runs: Sequence[tuple[int, int]],
        body: bytes,
        kind: Kind = Kind.WRITE,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """One frame of an operation of its own, urging for its ACK, with honest checks and bounds unless given."""
        self._operations += 1
        self._numbers[lane] += 1
        self._frames[lane] += 1
        low, high = bounds or (min(at for at, _ in runs), max(at + length for at, length in runs))
        header = Header(
            kind, len(runs), self._operations, len(body), low, high, token, self._numbers[lane], True
        )  # fmt: skip
        self._lanes[lane].sendall(pack_frame(header, runs, body, Checksum(), self._frames[lane]))

    def notify(self, lane: Lane, news: Notification) -> None:
        """As the end of a write: what it says has arrived."""
        self._operations += 1
        self._numbers[lane] += 1
        self._frames[lane] += 1
        body = msgspec.msgpack.encode(news)
        header = Header(Kind.NOTIFY, 0, self._operations, len(body), 0, 0, bytes(16), self._numbers[lane], True)
        self._lanes[lane].sendall(pack_frame(header, [], body, Checksum(), self._frames[lane]))

    def outcome(self, lane: Lane) -> int:
        """What became of the last frame sent on the lane: 0 if it was taken, else the number of its refusal. Only
        where nothing else comes from the daemon there."""
        refusal = 0
        while True:
            header = unpack_header(self._exactly(lane, HEADER_BYTES + 2 * Checksum.check_bytes))
            if header.kind is Kind.REFUSED and header.op == self._operations:
                refusal = header.number
            elif header.kind is Kind.ACK and header.number >= self._numbers[lane]:
                return refusal

    def _exactly(self, lane: Lane, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._lanes[lane].recv(count - len(data))
            if not more:
                raise ConnectionError("the daemon has closed the lane")
            data += more
        return data
