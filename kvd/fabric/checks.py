"""What a lane receives is compared with its checks: head and descriptors before anything is placed, payload after."""

from __future__ import annotations

from hmac import compare_digest

from kvd.errors import ChecksumMismatch
from kvd.fabric.base import EndpointCounters
from kvd.fabric.frames import HEADER_BYTES
from kvd.fabric.seals import Offsets, Seal, pieces


class Checks:
    """Of the frames of one direction of a lane. Nothing is compared where the seal has no checks."""

    __slots__ = ("_body", "_counters", "_seal", "frames", "nbytes")

    def __init__(self, seal: Seal, counters: EndpointCounters) -> None:
        self.frames = 0
        """Frames begun, of every kind: the number that their checks are made with. The owner counts."""
        self.nbytes = seal.check_bytes
        """Of one check; 0: there are none."""
        self._seal = seal
        self._counters = counters
        self._body = b""

    def head(self, staging: bytearray, at: int) -> None:
        """The header of the next frame lies at ``at``, with the check of its payload, which is kept, and its own behind
        it. Raises :class:`ChecksumMismatch` if they are not as they were sent."""
        if not self.nbytes:
            return
        middle = at + HEADER_BYTES + self.nbytes
        expected = staging[middle : middle + self.nbytes]
        if not compare_digest(self._seal.head(self.frames + 1, bytes(staging[at:middle])), expected):
            raise _out_of_step(self.frames + 1, "header")
        self._body = bytes(staging[at + HEADER_BYTES : middle])

    def runs(self, staging: bytearray, at: int, nbytes: int) -> None:
        """The same for the frame's packed descriptors, with their check behind them, if there are any."""
        if not self.nbytes or not nbytes:
            return
        expected = staging[at + nbytes : at + nbytes + self.nbytes]
        if not compare_digest(self._seal.runs(self.frames, bytes(staging[at : at + nbytes])), expected):
            raise _out_of_step(self.frames, "descriptors")

    def damaged(self, body: tuple[memoryview, Offsets, Offsets] | None) -> bool:
        """Whether the frame's payload, in these pieces of memory, does not pass its check. Counted."""
        if body is None or not self.nbytes or compare_digest(self._seal.body(self.frames, pieces(*body)), self._body):
            return False
        self._counters.checksum_errors += 1
        return True


def _out_of_step(frame: int, what: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"the {what} of frame {frame} of the lane arrived damaged; the connection is closed, since nothing says where "
        "the next frame begins",
        reason="damaged",
    )
