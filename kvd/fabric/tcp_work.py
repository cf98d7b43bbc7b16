"""What a lane of the tcp fabric has to do: its own operations, and the peer's reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import KvdError
from kvd.fabric.base import Grant, Region
from kvd.fabric.frames import Kind
from kvd.fabric.operations import PendingOperation, aborted
from kvd.fabric.regions import Refusal
from kvd.fabric.runs import Runs
from kvd.types import Descriptors


class Sender(Protocol):
    """The sending half of a lane, as its operations know it."""

    loop: asyncio.AbstractEventLoop

    def stop(self, op: TcpOperation, error: KvdError) -> None: ...


class Stage(NamedTuple):
    """Bytes that go in frames of one kind, and what each of these says of its grant: the token, and where the first of
    the bytes lies in it, and behind the last one. Where an operation goes into one grant, of all its stages."""

    kind: Kind
    body: Runs | bytes
    token: bytes
    low: int
    high: int


class TcpOperation(PendingOperation):
    """A write, read or message. ``stages`` is what remains to be cut into frames; ``tokens`` are those of the grants
    that they go into, in the same order, where they are not all ``token``."""

    def __init__(
        self,
        out: Sender,
        stages: list[tuple[Kind, Runs | bytes]],
        region: Region | None = None,
        base: int = 0,
        token: bytes = b"",
        tokens: Sequence[bytes] = (),
    ) -> None:
        super().__init__(out.loop)
        self.out = out
        self.region = region
        """Keeps the memory at ``base`` alive."""
        self.base = base
        self.token = token
        self.what = {Kind.READ: "read", Kind.MESSAGE: "message"}.get(stages[0][0], "write")
        self.low, self.high = _bounds(body for _, body in stages)
        if tokens:
            self.stages = deque(
                Stage(*stage, each, *_bounds([stage[1]])) for stage, each in zip(stages, tokens, strict=True)
            )
        else:
            self.stages = deque(Stage(*stage, token, self.low, self.high) for stage in stages)
        self.speaks = isinstance(stages[-1][1], bytes)
        """Whether a message is delivered at its end."""
        self.id = 0
        """Assigned with the first frame; 0 before."""
        self.position = 0
        self.parts = 0
        """READs without an ANSWER yet."""
        self.stopped: KvdError | None = None
        """Why nothing more of it is sent, and what it fails with."""

    def settle(self, error: KvdError | None = None) -> None:
        self.region = None
        self.stages.clear()
        super().settle(error)

    def cancel(self) -> None:
        self.out.stop(self, aborted(self.what))


def _bounds(bodies: Iterable[Runs | bytes]) -> tuple[int, int]:
    """Where the first of their bytes lies, and behind the last one; (0, 0) without any."""
    filled = [body for body in bodies if isinstance(body, Runs) and body.nbytes]
    return min((body.low for body in filled), default=0), max((body.high for body in filled), default=0)


class ReadPart:
    """What one READ asked for: descriptors with the local offsets where its DATA goes."""

    __slots__ = ("damaged", "filled", "nbytes", "op", "rows")

    def __init__(self, op: TcpOperation, rows: Descriptors, nbytes: int) -> None:
        self.op = op
        self.rows = rows
        self.nbytes = nbytes
        self.filled = False
        self.damaged = False


class Answer(NamedTuple):
    """The peer's READ, to be answered."""

    op: int
    access: Grant | Refusal
    runs: npt.NDArray[np.int64]
    nbytes: int
