"""NICs: what leaves a node goes out one piece after the other, urgent ones first; what arrives is taken in likewise.

A piece's bytes occupy the sender's NIC, then, ``delay_s`` later, the receiver's: two senders share a receiver, and a
sender shares its NIC among its receivers. A piece that is on its way out is not interrupted, which is why bulk pieces
are small. The switch between the nodes is taken to carry whatever the NICs do.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from kvd.sim.clock import Clock


@dataclasses.dataclass(slots=True, eq=False)
class Piece:
    """Bytes on their way. ``arrived`` is called at the receiver, when the last of them is there."""

    to: Nic
    nbytes: int
    arrived: Callable[[], None]
    dropped: bool = False
    """Not to be sent any more; it is passed over when its turn comes."""
    begun: bool = False


class Nic:
    """One node's, with the same rate in both directions."""

    def __init__(self, clock: Clock, rate: float, delay_s: float) -> None:
        self.rate = rate
        """Bytes a second."""
        self.delay_s = delay_s
        """One way, of a piece of no size."""
        self.bytes_sent = 0
        self.busy_s = 0.0
        """For how long it has been sending."""
        self._clock = clock
        self._urgent: collections.deque[Piece] = collections.deque()
        self._bulk: collections.deque[Piece] = collections.deque()
        self._sending = False
        self._takes_from = 0.0
        """When it has taken in all that is under way to it."""

    def send(self, piece: Piece, *, urgent: bool) -> None:
        (self._urgent if urgent else self._bulk).append(piece)
        if not self._sending:
            self._next()

    def _next(self) -> None:
        while self._urgent or self._bulk:
            piece = (self._urgent or self._bulk).popleft()
            if piece.dropped:
                continue
            piece.begun = self._sending = True
            seconds = piece.nbytes / self.rate
            self.bytes_sent += piece.nbytes
            self.busy_s += seconds
            self._clock.after(seconds, self._sent, piece)
            return
        self._sending = False

    def _sent(self, piece: Piece) -> None:
        to, now = piece.to, self._clock.now
        # Cut-through: the first byte arrived long ago, so that an idle receiver has taken it all in when the last does.
        to._takes_from = max(now + self.delay_s, to._takes_from + piece.nbytes / to.rate)
        self._clock.at(to._takes_from, piece.arrived)
        self._next()
