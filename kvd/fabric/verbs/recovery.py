"""A queue pair that failed is rebuilt from the same objects, together with the peer, and its lane resumes.

Both ends must reset, since the packets' sequence numbers begin anew, and they agree on it outside the queue pair::

    LIVE      a completion fails, or the peer tells Rebuild: the queue pair goes to the error state
    DRAINING  until the device has given every request back
    RESET     tell Rebuild: the new first number, and which frames have come; until the peer has told its own
    READY     connected anew, receive buffers posted; tell Rebuilt; until the peer has
    LIVE      what did not reach the peer is posted again, in order

Nothing is executed twice that can be told apart: writes of the same bytes are repeated, frames are counted.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import secrets
from collections.abc import Callable

import msgspec

from kvd.errors import FabricError, ProtocolError
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.device import Device
from kvd.fabric.verbs.lane import VerbsLane
from kvd.fabric.verbs.wire import Hello, Rebuild, Rebuilt
from kvd.types import Lane
from kvd.wire.hello import MAX_REASON, printable

PATIENCE_S = 5.0
"""How long a lane may fail without anything getting through before its connection is given up. The session's own
heartbeat, over its control connection, may end it earlier."""
AGAIN_S = 0.1
"""After this long, a peer whose address the system could not resolve is tried again."""
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Phase(enum.Enum):
    """See the module."""

    LIVE = "live"
    DRAINING = "draining"
    RESET = "reset"
    READY = "ready"


class Recovery:
    """Of one lane. ``tell`` reaches the peer outside the lanes; ``on_live`` is called when the lane works again;
    ``give_up`` with the first failure's reason and status when it does not, and the connection must end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device: Device,
        lane: VerbsLane,
        mine: Hello,
        peer: Hello,
        tell: Callable[[Rebuild | Rebuilt], None],
        on_live: Callable[[], None],
        give_up: Callable[[str, int], None],
    ) -> None:
        self.phase = Phase.LIVE
        self.epoch = 0
        """How often the queue pair was rebuilt, or is about to be."""
        self._loop, self._device, self._lane = loop, device, lane
        self._mine, self._peer = mine, peer
        self._tell, self._on_live, self._give_up = tell, on_live, give_up
        self._psn = 0
        self._theirs: Rebuild | None = None
        self._peer_ready = False
        self._since: float | None = None
        """When the lane failed first since the last sign of progress."""
        self._reason, self._status = "", ib.FLUSHED
        self._timer: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def why(self) -> str:
        """What failed first, while the lane is down; empty otherwise."""
        return "" if self.phase is Phase.LIVE else self._reason

    def progress(self) -> None:
        """A request was completed: whatever was wrong is over."""
        if self.phase is Phase.LIVE:
            self._since = None
            self._reason, self._status = "", ib.FLUSHED

    def failed(self, reason: str, status: int) -> None:
        """A request came back with ``status``. The first one since the last progress says why; what is flushed after
        it, or before it on the other queue, says nothing."""
        if not self._reason or (self._status == ib.FLUSHED and status != ib.FLUSHED):
            self._reason, self._status = reason, status
        if self.phase in (Phase.LIVE, Phase.READY):
            self._begin()
        self._step()

    def told(self, message: Rebuild | Rebuilt) -> None:
        """Raises :class:`ProtocolError` for what can't come now."""
        if isinstance(message, Rebuild):
            if message.epoch == self.epoch + 1 and self.phase in (Phase.LIVE, Phase.READY):
                if self._status == ib.FLUSHED:
                    self._reason = f"the peer's queue pair failed: {printable(message.reason)}"
                self._begin()
            elif message.epoch == self.epoch + 1 and self._trying:
                self._announce(message.epoch)  # it failed again while this side could not yet reach it
            elif message.epoch != self.epoch or self.phase in (Phase.LIVE, Phase.READY) or self._theirs is not None:
                raise self._unexpected(message)
            self._lane.check(message.received)
            self._theirs = message
            self._step()
        elif message.epoch == self.epoch and (self.phase is Phase.READY or self._trying):
            self._peer_ready = True
            if self.phase is Phase.READY:
                self._live()
        elif message.epoch >= self.epoch:
            raise self._unexpected(message)

    def close(self) -> None:
        """The lane is about to be destroyed."""
        self._closed = True
        self._stop_timer()

    @property
    def _trying(self) -> bool:
        """Whether both ends are reset, and this side has not got further since the peer can't be reached."""
        return self.phase is Phase.RESET and self._theirs is not None

    def _stop_timer(self) -> None:
        for timer in (self._timer, self._again):
            if timer is not None:
                timer.cancel()
        self._timer = self._again = None

    def _begin(self) -> None:
        now = self._loop.time()
        if self._since is None:
            self._since = now
        left = self._since + PATIENCE_S - now
        if left <= 0:
            self._expired()
            return
        self.epoch += 1
        self.phase = Phase.DRAINING
        self._theirs = None
        self._peer_ready = False
        self._lane.stop()
        if self._timer is None:
            self._timer = self._loop.call_later(left, self._expired)
        self._guarded(lambda: self._device.fail(self._lane.qp))

    def _step(self) -> None:
        """Go as far as the device and the peer permit."""
        if self.phase is Phase.DRAINING and not self._closed and self._lane.drained:
            self._guarded(self._reset)
        if self._trying and not self._closed:
            self._guarded(self._build)

    def _reset(self) -> None:
        self._device.reset(self._lane.qp)
        self.phase = Phase.RESET
        self._announce(self.epoch)

    def _announce(self, epoch: int) -> None:
        self.epoch, self._peer_ready = epoch, False
        self._psn = secrets.randbits(24)
        self._tell(Rebuild(int(self._lane.lane), self.epoch, self._psn, self._lane.received, self._reason[:MAX_REASON]))

    def _build(self) -> None:
        theirs, lane = self._theirs, self._lane
        assert theirs is not None
        if not self._device.can_reach(self._peer):
            self._try_again()
            return
        lane.restore(theirs.received)
        self._device.initialise(lane.qp)
        lane.post_receives()
        try:
            mine, peer = self._with(self._mine, self._psn), self._with(self._peer, theirs.psn)
            self._device.connect(lane.qp, lane.lane, mine, peer)
        except FabricError as error:
            if error.fields.get("errno") not in _UNREACHABLE:
                raise
            self._device.reset(lane.qp)
            lane.forget_receives()
            self._try_again()
            return
        self.phase = Phase.READY
        self._tell(Rebuilt(int(lane.lane), self.epoch))
        if self._peer_ready:
            self._live()

    def _try_again(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = self._loop.call_later(AGAIN_S, self._step)

    def _with(self, hello: Hello, psn: int) -> Hello:
        numbers = (psn, hello.psns[1]) if self._lane.lane is Lane.URGENT else (hello.psns[0], psn)
        return msgspec.structs.replace(hello, psns=numbers)

    def _live(self) -> None:
        self.phase = Phase.LIVE
        self._stop_timer()
        self._lane.start()
        self._on_live()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (ib.PyverbsError, FabricError) as error:
            self._give_up(f"{self._reason}; the queue pair can't be rebuilt: {error}", self._status)

    def _expired(self) -> None:
        self._give_up(f"{self._reason}; it did not recover within {PATIENCE_S:g} s", self._status)

    def _unexpected(self, message: Rebuild | Rebuilt) -> ProtocolError:
        return ProtocolError(
            f"the peer told {type(message).__name__} {message.epoch} of lane {self._lane.lane.name.lower()}, which is "
            f"{self.phase.value} in its time {self.epoch}; run the same release of kvd at both ends",
            epoch=message.epoch,
        )
