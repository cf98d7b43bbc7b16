"""The path of a new connection, tried before anything relies on it.

Queue pairs connect without a single packet, and what drops RoCE's packets on the way (a firewall that doesn't know UDP
port 4791, a switch with a smaller MTU) drops them silently. So each lane writes a few bytes into the peer's scratch
memory, then a whole packet of the path's MTU, and reads that back. Where it ends says what is wrong. Afterwards both
sides exchange what they found: they use the connection, or neither does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from kvd.fabric.regions import address_of
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.device import Device
from kvd.fabric.verbs.path import Finding, Trouble
from kvd.types import Lane
from kvd.wire.hello import MAX_REASON

PATIENCE_S = 2.0
"""For the whole probe; the device's own retries mostly end before."""
PACKET_BYTES = 4096
"""The largest MTU that there is."""
SMALL_BYTES = 8


_TROUBLE = (Trouble.SILENT, Trouble.SHORT, Trouble.SHORT)
"""What it means when nothing comes back after each of the steps."""
_PATTERN = 2 * len(Lane) * PACKET_BYTES
"""Where in the memory lies what is written."""


class Probe:
    """Of one endpoint. ``post`` takes a lane and a request; what becomes of it is told to :meth:`completed`."""

    def __init__(self, device: Device, post: Callable[[Lane, ib.Item], None]) -> None:
        self._post = post
        self._memory = memoryview(bytearray((2 * len(Lane) + 1) * PACKET_BYTES))
        """For each lane a place for the peer to write to and one to read back into, then what is written."""
        self._base = address_of(self._memory)
        self._memory[-PACKET_BYTES:] = secrets.token_bytes(PACKET_BYTES)
        self._registration: Any = device.register(self._base, self._memory.nbytes, remote_write=True, remote_read=True)
        self._far = (0, 0)
        self._nbytes = 0
        self._steps: dict[Lane, int] = dict.fromkeys(Lane, 0)
        """How far each lane is that is not through: the small write, the whole packet's, its reading back."""
        self._found: asyncio.Future[Finding] = asyncio.get_running_loop().create_future()

    @property
    def passed(self) -> bool:
        """Whether this side has found the path good."""
        return self._found.done() and not self._found.result().trouble

    @property
    def offer(self) -> tuple[int, int]:
        """Address and rkey of what the peer may write to."""
        return self._base, self._registration.rkey

    async def run(self, far: tuple[int, int], nbytes: int, poll: Callable[[], None]) -> Finding:
        """Try the path to the peer's ``far`` with packets of ``nbytes``. ``poll``: take the completions that are there,
        before a late timer's word is believed."""
        self._far, self._nbytes = far, nbytes
        for lane in Lane:
            self._next(lane)
        await asyncio.wait([self._found], timeout=PATIENCE_S)
        if not self._found.done():
            poll()
        if not self._found.done():
            lane, step = next(iter(self._steps.items()))
            self._end(_TROUBLE[step], f"nothing came back within {PATIENCE_S:g} s on the {lane.name.lower()} lane")
        return self._found.result()

    def completed(self, lane: Lane, status: int) -> None:
        """The request that was posted last on ``lane`` is done, or has failed."""
        step = self._steps.get(lane)
        if step is None or self._found.done():
            return
        if status != ib.SUCCESS:
            trouble = Trouble.REFUSED if status in ib.REQUEST_ERRORS else _TROUBLE[step]
            self._end(trouble, f"a request failed with {ib.describe_status(status)}")
        elif step < len(_TROUBLE) - 1:
            self._steps[lane] += 1
            self._next(lane)
        elif self._memory[self._back(lane) :][: self._nbytes] != self._memory[_PATTERN:][: self._nbytes]:
            self._end(Trouble.DAMAGED, f"{self._nbytes} bytes that were written read otherwise")
        else:
            del self._steps[lane]
            if not self._steps:
                self._end(Trouble.NONE, "")

    def abort(self, reason: str) -> None:
        """The endpoint has ended."""
        self._end(Trouble.SILENT, reason)

    def close(self) -> None:
        """The queue pairs are destroyed, or neither side uses the memory any more. Idempotent."""
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def _end(self, trouble: Trouble, reason: str) -> None:
        if not self._found.done():
            self._found.set_result(Finding(trouble, reason[:MAX_REASON]))

    def _next(self, lane: Lane) -> None:
        """Post the request of the lane's step."""
        if self._found.done():  # the device takes no requests
            return
        step = self._steps[lane]
        opcode, offset = (ib.READ, self._back(lane)) if step == len(_TROUBLE) - 1 else (ib.WRITE, _PATTERN)
        nbytes = self._nbytes if step else SMALL_BYTES
        address, rkey = self._far
        lkey = self._registration.lkey
        self._post(lane, (opcode, 0, self._base + offset, nbytes, lkey, address + lane * PACKET_BYTES, rkey))

    def _back(self, lane: Lane) -> int:
        return (len(Lane) + lane) * PACKET_BYTES
