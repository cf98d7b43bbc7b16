"""An operation of the verbs fabric, and how it is cut into work requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container

from kvd.errors import KvdError
from kvd.fabric.operations import PendingOperation, aborted
from kvd.fabric.regions import Refusal
from kvd.fabric.runs import Runs
from kvd.fabric.verbs import binding as ib
from kvd.fabric.verbs.device import INLINE_BYTES
from kvd.fabric.verbs.wire import Token


class VerbsOperation(PendingOperation):
    """A write, read or message from its submission to its end.

    Its parts (the data, then ``then``) are posted first, then its message, in pieces of one receive buffer each.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        kind: str,
        *,
        token: Token | None = None,
        address: int = 0,
        lkeys: list[int] | None = None,
        parts: list[Runs] | None = None,
        message: bytes | None = None,
    ) -> None:
        super().__init__(loop)
        self.kind = kind
        self.token = token
        self.parts = [part for part in parts or [] if part.nbytes]
        self.message = message
        self.sent = 0
        """Bytes of the message that are posted."""
        self.begun = False
        """Whether a piece of the message is posted; the rest has to follow then."""
        self.arrived = False
        """Whether a piece of the message has reached the peer."""
        self.outstanding = 0
        self.posted = False
        """Whether everything is posted."""
        self.delivery = 0
        """For a message of its own: how many frames the peer has taken once it is delivered."""
        self.nbytes = 0
        self.inline = True
        """Whether a CPU may read the region at its addresses: small writes carry their bytes themselves then."""
        self.error: KvdError | None = None
        self.on_end: Callable[[VerbsOperation], None] = lambda operation: None
        self._address = address
        self._lkeys = lkeys or []
        self._position = 0
        filled = self.parts
        self.low = min((part.low for part in filled), default=0)
        self.high = max((part.high for part in filled), default=0)

    def refusal(self, revoked: Container[bytes]) -> Refusal | None:
        """Why the peer's device would refuse it, as far as this side can tell; ``revoked``: grants by their ids."""
        if self.token is None:
            return Refusal.UNKNOWN_TOKEN
        if self.token.id in revoked:
            return Refusal.REVOKED
        if self.kind == "write" and not self.token.writable:
            return Refusal.NOT_WRITABLE
        if self.kind == "read" and not self.token.readable:
            return Refusal.NOT_READABLE
        if not 0 <= self.low <= self.high <= self.token.length:
            return Refusal.OUT_OF_RANGE
        return None

    def take(self, most_items: int, most_bytes: int, chunk: int, span: int) -> tuple[list[ib.Item], int]:
        """The next work requests for the data, none longer than ``chunk``, and their bytes. Every next ``span`` bytes
        of the region have an lkey of their own."""
        assert self.token is not None
        items: list[ib.Item] = []
        total = 0
        opcode = ib.READ if self.kind == "read" else ib.WRITE
        while self.parts and len(items) < most_items and total < most_bytes:
            part = self.parts[0]
            rows, _ = part.cut(self._position, most_bytes - total, most_items - len(items))
            for local, remote, length in rows.tolist():
                done = 0
                while done < length and len(items) < most_items:
                    at, lkey = local + done, self._lkeys[0]
                    size = min(chunk, length - done)
                    if len(self._lkeys) > 1:
                        lkey = self._lkeys[at // span]
                        size = min(size, span - at % span)
                    small = self.inline and size <= INLINE_BYTES and opcode == ib.WRITE
                    items.append(
                        (
                            opcode,
                            ib.INLINE if small else 0,
                            self._address + at,
                            size,
                            lkey,
                            self.token.address + remote + done,
                            self.token.rkey,
                        )
                    )
                    done += size
                total += done
                self._position += done
            if self._position == part.nbytes:
                del self.parts[0]
                self._position = 0
        return items, total

    @property
    def dropped(self) -> bool:
        """Whether nothing more of it shall be posted."""
        return self.error is not None and not self.begun

    def fail(self, error: KvdError) -> None:
        """Post nothing more, and settle with ``error`` once nothing is outstanding."""
        if self.settled or self.error is not None:
            return
        self.error = error
        self.finish()

    def finish(self) -> None:
        """Settle the operation if that is due."""
        if self.settled or self.outstanding or not (self.posted or self.dropped):
            return
        if self.error is None and self.delivery:
            return  # until the peer has it
        self.settle(self.error)

    def settle(self, error: KvdError | None = None) -> None:
        if self.settled:
            return
        self.parts = []
        super().settle(error)
        self.on_end(self)

    def cancel(self) -> None:
        self.fail(aborted(self.kind))
