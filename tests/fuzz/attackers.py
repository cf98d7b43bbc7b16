"""Attackers on a daemon's listeners, each with a thread of its own.

A local process that speaks nonsense on the Unix socket, one that writes nonsense into its ring, strangers on the peers'
port, and a peer that holds the shared key and has gone mad, on its control connection and on its data connections.
"""

from __future__ import annotations

import abc
import array
import asyncio
import contextlib
import os
import secrets
import select
import socket
import time

import msgspec

from kvd.config import Config
from kvd.daemon import fingerprint
from kvd.fabric.frames import pack_hello
from kvd.fabric.seals import Checksum
from kvd.peers import sockets
from kvd.types import Lane
from kvd.wire.guard import GuardParser, GuardWriter, guards
from kvd.wire.handshake import Dialler, LaneDialler
from kvd.wire.hello import Identity
from kvd.wire.machine import Established
from kvd.wire.messages import FabricBlob
from kvd_client.doorbell import Doorbell
from kvd_client.errors import AuthenticationFailed, FingerprintMismatch, KvdError, VersionMismatch
from kvd_client.framing import encode
from kvd_client.protocol import PROTOCOL_VERSION, GetStatus, Hello, OpenSource
from kvd_client.ring import RING_EVENTS, RING_EVENTS_OFFSET, RING_HEAD_OFFSET, RING_TAIL_OFFSET
from tests.fuzz.generate import CONTROL, Fuzz, corpus
from tests.integration.daemons import DaemonProcess, small_spec

SPEC = small_spec()
PATIENCE_S = 60.0
MUTE = 100
BATCH = 200
"""Well-formed messages before one that ends its connection."""


class Attack(abc.ABC):
    """One attacker: sends until ``budget`` messages are out. ``run`` is its thread."""

    name = ""

    def __init__(self, daemon: DaemonProcess, address: tuple[str, int], key: bytes, seed: int, budget: int) -> None:
        self.daemon, self.address, self.key, self.budget = daemon, address, key, budget
        self.fuzz = Fuzz(seed)
        self.messages = self.connections = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            mute, before = 0, -1
            while self.messages < self.budget:
                self.connections += 1
                # One that never gets past the door would go on for ever, and show nothing.
                mute = mute + 1 if self.messages == before else 0
                before = self.messages
                assert mute < MUTE, f"{MUTE} connections in a row ended before a message was sent"
                with contextlib.suppress(OSError):  # the daemon ends connections: that is the point
                    self.attack()
        except BaseException as error:  # shown in the report
            self.error = error

    @abc.abstractmethod
    def attack(self) -> None:
        """One connection."""


def drain(sock: socket.socket) -> bool:
    """Throw away what has come; False once the daemon has closed."""
    sock.setblocking(False)
    try:
        while True:
            if not sock.recv(1 << 16):
                return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def send(sock: socket.socket, data: bytes) -> None:
    """Send all, reading meanwhile: a daemon that can't answer does not listen."""
    view = memoryview(data)
    until = time.monotonic() + PATIENCE_S
    while True:
        if not drain(sock):
            raise ConnectionResetError
        if not view:
            return
        _, room, _ = select.select([sock], [sock], [], 1.0)
        if room:
            with contextlib.suppress(BlockingIOError):
                view = view[sock.send(view) :]
        elif time.monotonic() > until:
            raise AssertionError("the daemon took nothing for a minute")


def settle(sock: socket.socket) -> None:
    """Wait until the daemon has closed the connection."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(PATIENCE_S)
        while sock.recv(1 << 16):
            pass


class ApiAttack(Attack):
    """The local API's Unix socket."""

    name = "unix socket"

    def attack(self) -> None:
        fuzz = self.fuzz
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self.daemon.socket)
            frames = []
            if fuzz.random.random() < 0.9:
                frames = [encode(Hello(id=1, version=PROTOCOL_VERSION, name="fuzz"))]
                frames += [fuzz.api_frame() for _ in range(fuzz.random.choice((1, BATCH)))]
            frames.append(fuzz.broken(corpus("api")))
            send(sock, b"".join(frames))
            self.messages += len(frames)
            settle(sock)


class RingAttack(Attack):
    """The contents of the shared ring, some of it about a transfer that is the attacker's own."""

    name = "ring"

    def attack(self) -> None:
        rng = self.fuzz.random
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self.daemon.socket)
            sock.sendall(encode(Hello(id=1, version=PROTOCOL_VERSION, name="fuzz")))
            _, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(3 * 4))
            fds = array.array("i", ancillary[0][2])
            try:
                bell = Doorbell(fds[0], fds[1])
                name = f"ring {rng.getrandbits(64)}"
                sock.sendall(encode(OpenSource(id=2, request=name, spec=SPEC, lengths=[50], capacity=50)))
                self.fill(bell, sock)
            finally:
                for fd in fds:
                    os.close(fd)
            settle(sock)

    def fill(self, bell: Doorbell, sock: socket.socket) -> None:
        rng = self.fuzz.random
        head = 0
        for _ in range(rng.choice((1, 5, 20))):
            events = [self.fuzz.ring_event([rng.randrange(200)]) for _ in range(rng.choice((1, 64, 1024)))]
            for event in events:
                at = RING_EVENTS_OFFSET + head % RING_EVENTS * len(event)
                bell._bytes[at : at + len(event)] = event
                head += 1
            bell._u64[RING_HEAD_OFFSET // 8] = head
            bell.wake()
            self.messages += len(events)
            sock.setblocking(True)
            sock.sendall(encode(GetStatus(id=3)))
            until = time.monotonic() + PATIENCE_S
            while bell._u64[RING_TAIL_OFFSET // 8] != head:
                if not drain(sock) or time.monotonic() > until:
                    return
                time.sleep(0)
        # At last something that no honest process does.
        self.messages += 1
        if rng.random() < 0.5:
            bell._u64[RING_HEAD_OFFSET // 8] = rng.getrandbits(64)
        else:
            bell._bytes[RING_EVENTS_OFFSET + head % RING_EVENTS * 32 :][:32] = rng.randbytes(32)
            bell._u64[RING_HEAD_OFFSET // 8] = head + 1
        bell.wake()
        sock.setblocking(True)
        sock.sendall(encode(GetStatus(id=4)))


class StrangerAttack(Attack):
    """The peers' port, without the key."""

    name = "tcp, strangers"

    def attack(self) -> None:
        with socket.create_connection(self.address, PATIENCE_S) as sock:
            sock.sendall(self.fuzz.broken(corpus("handshake")))
            self.messages += 1
            settle(sock)


class PeerAttack(Attack):
    """A peer with the key: brings a session up as it should, then sends nonsense."""

    def __init__(self, daemon: DaemonProcess, address: tuple[str, int], key: bytes, seed: int, budget: int) -> None:
        super().__init__(daemon, address, key, seed, budget)
        self.node = f"fuzz-{self.name.split()[1]}"

    def attack(self) -> None:
        # A loop of its own: what is driven here is the daemon's own handshake.
        with asyncio.Runner() as runner:
            runner.run(self.session())

    async def session(self) -> None:
        opened: list[socket.socket] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                control, lanes, writer, parser = await self.connect(opened)
            for sock in opened:
                sock.setblocking(True)
            self.abuse(control, lanes, writer)
            del parser
        except (FingerprintMismatch, VersionMismatch, AuthenticationFailed):
            raise  # no attack at all, and the next one would fare no better
        except (KvdError, TimeoutError):
            return
        finally:
            for sock in opened:
                sock.close()

    async def connect(
        self, opened: list[socket.socket]
    ) -> tuple[socket.socket, dict[Lane, socket.socket], GuardWriter, GuardParser]:
        equal = {**fingerprint(Config()), "security": "plain"}
        identity = Identity(self.node, secrets.token_hex(8), "", equal, ("tcp",), (self.key,))
        control = await sockets.connect(socket.AF_INET, self.address)
        opened.append(control)
        session = await sockets.negotiate(
            control, Dialler(identity, expect=self.daemon.node, nonce=secrets.token_bytes(32))
        )
        assert isinstance(session, Established)
        lanes = {}
        for lane in Lane:
            lanes[lane] = await sockets.connect(socket.AF_INET, self.address)
            opened.append(lanes[lane])
            nonce = secrets.token_bytes(32)
            await sockets.negotiate(lanes[lane], LaneDialler(self.node, session, lane=lane, nonce=nonce))
        writer, parser = guards(session.lane_key, dialled=True)
        hello = writer.frame(msgspec.msgpack.encode(FabricBlob(blob=pack_hello())))
        await asyncio.get_running_loop().sock_sendall(control, hello)
        return control, lanes, writer, parser

    @abc.abstractmethod
    def abuse(self, control: socket.socket, lanes: dict[Lane, socket.socket], writer: GuardWriter) -> None:
        """What follows on a session that is up."""


class ControlAttack(PeerAttack):
    name = "tcp control"

    def abuse(self, control: socket.socket, lanes: dict[Lane, socket.socket], writer: GuardWriter) -> None:
        fuzz = self.fuzz
        for _ in range(fuzz.random.choice((1, 3))):
            bodies = [fuzz.well_formed(CONTROL) for _ in range(fuzz.random.choice((1, BATCH)))]
            send(control, b"".join(map(writer.frame, bodies)))
            self.messages += len(bodies)
        last = fuzz.broken(corpus("control"))
        send(control, writer.frame(last) if fuzz.random.random() < 0.8 else last)
        self.messages += 1
        settle(control)


class LaneAttack(PeerAttack):
    name = "tcp data"

    def abuse(self, control: socket.socket, lanes: dict[Lane, socket.socket], writer: GuardWriter) -> None:
        fuzz = self.fuzz
        lane = fuzz.random.choice(list(Lane))
        sock, seal, count, number = lanes[lane], Checksum(), 0, 1
        for _ in range(fuzz.random.choice((1, 5))):
            batch = []
            for _ in range(fuzz.random.choice((1, BATCH // 2))):
                count += 1
                frame, numbered = fuzz.lane_frame(number, seal, count)
                number += numbered
                batch.append(frame)
            send(sock, b"".join(batch))
            self.messages += len(batch)
        send(sock, fuzz.broken_lane_frame(number, seal, count + 1))
        self.messages += 1
        settle(sock)


ATTACKS: dict[type[Attack], float] = {
    ApiAttack: 0.3,
    RingAttack: 0.3,
    StrangerAttack: 0.01,
    ControlAttack: 0.2,
    LaneAttack: 0.19,
}
"""Each attacker's share of the messages: those that need a connection for each are slow."""
