"""What both ends of a handshake have in common: states, events, frames, refusals. Without IO."""

from __future__ import annotations

import abc
import dataclasses
import enum
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from kvd.errors import KvdError, PeerUnreachable, ProtocolError
from kvd.types import Lane, NodeId
from kvd.wire import auth
from kvd.wire.framing import FrameParser, frame
from kvd.wire.hello import (
    MAGIC,
    MAX_MESSAGE,
    PREFACE,
    HandshakeMessage,
    Kind,
    Proof,
    Reject,
    decode,
    encode_reject,
    guess,
    rejection,
)
from kvd.wire.messages import WIRE_VERSION


class State(enum.Enum):
    """See the tables in :mod:`kvd.wire.handshake`."""

    AWAIT_PREFACE = enum.auto()
    AWAIT_HELLO = enum.auto()
    AWAIT_WELCOME = enum.auto()
    AWAIT_PROOF = enum.auto()
    AWAIT_READY = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


# --- events -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Established:
    """A control connection is through; session messages follow."""

    node: NodeId
    boot: str
    address: str
    """What the peer advertises."""
    fabric: str
    session: bytes
    """Names the session in the handshakes of its lanes; chosen by the acceptor."""
    lane_key: bytes = dataclasses.field(repr=False)
    """With which the session's lanes prove that they belong to it, and from which its other keys follow."""
    authenticated: bool
    """Whether the peer has proven a shared key."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaneEstablished:
    """A lane stream is through; every further byte belongs to the fabric."""

    session: bytes
    lane: Lane


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The handshake is over without success. Send ``data_to_send()``, then close the connection."""

    error: KvdError
    remote: bool
    """Whether the far side refused (its reason is the error), or this one did."""


Event = Established | LaneEstablished | Failed


# --- the machines -------------------------------------------------------------------------------------------------


class Handshake(abc.ABC):
    """One side of one connection's handshake; make a :class:`Dialler`, :class:`LaneDialler` or :class:`Acceptor`."""

    def __init__(self, us: str, them: str) -> None:
        self.state = State.AWAIT_PREFACE
        self._us, self._them = us, them
        self._parser = FrameParser(MAX_MESSAGE)
        self._preface = bytearray()
        self._preface_sent = False
        self._out = bytearray()
        self._digest = hashlib.sha256()
        self._event: Event | None = None

    @property
    def finished(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    @property
    def wanted(self) -> int:
        """Bytes that the next step needs at least: who reads no more than this takes no byte of what follows."""
        if self.finished:
            return 0
        if self.state is State.AWAIT_PREFACE:
            return PREFACE.size - len(self._preface)
        return self._parser.wanted

    def data_to_send(self) -> bytes:
        """Bytes for the far side, once."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def trailing_data(self) -> bytes:
        """What came behind the handshake's last byte; for whoever takes the connection over."""
        return self._parser.rest()

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Take bytes as they come; never raises for what they are. Returns the handshake's end, once."""
        if self.state is State.FAILED:
            return []
        try:
            rest = self._receive_preface(data) if self.state is State.AWAIT_PREFACE else data
            self._parser.feed(rest)
            while not self.finished and (body := self._parser.next()) is not None:
                self._receive(body)
        except KvdError as error:
            return self.refuse(error)
        return self._take_event()

    def receive_eof(self) -> list[Event]:
        """The far side has closed the connection."""
        if not self.finished:
            text = f"{self._them} closed the connection in the middle of the handshake"
            if not self._preface:
                text += " before it sent a byte; look at its log, and whether a kvd listens there"
            self._fail(PeerUnreachable(text, reason="closed"), remote=False)
        return self._take_event()

    def refuse(self, error: KvdError) -> list[Event]:
        """Give up for ``error``, and tell the far side unless what it sent is foreign. Nothing once finished."""
        if not self.finished:
            if self._preface.startswith(MAGIC):
                if not self._preface_sent:
                    self._send_preface(Kind.ANSWER)
                self._out += encode_reject(error)
            self._fail(error, remote=False)
        return self._take_event()

    # What the three machines share

    @abc.abstractmethod
    def _expects(self) -> dict[State, tuple[type, Callable[[Any, bytes], None]]]:
        """For each state the message that is due, and what takes it and the transcript up to it."""

    @abc.abstractmethod
    def _check_kind(self, kind: int) -> None: ...

    @abc.abstractmethod
    def _check_version(self, version: int) -> None: ...

    def _receive_preface(self, data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
        need = PREFACE.size - len(self._preface)
        self._preface += data[:need]
        if not MAGIC.startswith(self._preface[: len(MAGIC)]):
            raise ProtocolError(
                f"{self._them} does not speak kvd's peer protocol: its first bytes are "
                f"{bytes(self._preface)!r}{guess(self._preface)}"
            )
        if len(self._preface) == PREFACE.size:
            _, version, kind = PREFACE.unpack(self._preface)
            self._check_version(version)
            self._check_kind(kind)
            self._digest.update(self._preface)
            self.state = State.AWAIT_HELLO
        return data[need:]

    def _receive(self, body: bytes) -> None:
        message = decode(body)
        if isinstance(message, Reject):
            self._fail(rejection(message, self._them), remote=True)
            return
        due, handle = self._expects()[self.state]
        if type(message) is not due:
            raise ProtocolError(f"{self._them} sent a {type(message).__name__} where a {due.__name__} is due")
        transcript = self._digest.digest()
        self._digest.update(frame(body, MAX_MESSAGE))
        handle(message, transcript)

    def _send_preface(self, kind: Kind) -> None:
        preface = PREFACE.pack(MAGIC, WIRE_VERSION, kind)
        self._out += preface
        self._digest.update(preface)
        self._preface_sent = True

    def _send(self, message: HandshakeMessage) -> None:
        data = frame(msgspec.msgpack.encode(message), MAX_MESSAGE)
        self._out += data
        self._digest.update(data)

    def _finish(self, event: Established | LaneEstablished) -> None:
        self.state = State.DONE
        self._event = event

    def _fail(self, error: KvdError, *, remote: bool) -> None:
        self.state = State.FAILED
        self._event = Failed(error, remote)

    def _take_event(self) -> list[Event]:
        event, self._event = self._event, None
        return [] if event is None else [event]

    def _prove_lane(self, key: bytes, role: bytes) -> None:
        self._send(Proof(proof=auth.prove(key, role, self._digest.digest())))

    def _check_lane(self, key: bytes, role: bytes, transcript: bytes, proof: Proof) -> None:
        if auth.matching_key([key], role, transcript, proof.proof) is None:
            raise auth.failure(self._us, self._them)
