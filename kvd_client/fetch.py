"""Fetches: requests for KV entries that are missing, sent without waiting for the answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvd_client.arguments import deadline_of
from kvd_client.connection import Connection
from kvd_client.errors import DaemonLost, DeadlineExceeded, KvdError, ProtocolError, error_from_code
from kvd_client.parts import Part, raise_if_failed, released_error
from kvd_client.protocol import Failure, Fetch, Ok

if TYPE_CHECKING:
    from kvd_client.transfer import Index


class FetchHandle:
    """One fetch under way. Any thread may wait for it, and several at once.

    A handle that nobody waits for costs nothing; its slot can be used again once the answer has come.
    """

    def __init__(self, connection: Connection, part: Part, layer: int, slot: int, counts: Index, index: Index) -> None:
        self.layer, self.slot = layer, slot
        self.connection = connection
        self._part = part
        self._error: KvdError | None = None
        self._answered = self._forgotten = False
        self._sent_at = time.monotonic()
        self.took_s = 0.0
        """Seconds from the request until the answer was seen, once it was."""
        self._number = connection.submit(
            Fetch(transfer=part.transfer, layer=layer, slot=slot, counts=counts.tobytes(), index=index.tobytes())
        )

    def poll(self) -> bool | None:
        """True once the fetch has ended, well or badly, else None. For use as the condition of a wait on the
        connection, which reads the socket: this neither waits nor takes a lock."""
        if self._answered:
            return True
        reply = self.connection.answer(self._number)
        if reply is None:
            if self._part.released:
                self._error = released_error(self._part)
            else:
                try:
                    raise_if_failed(self._part)
                except KvdError as error:
                    self._error = error
            if self._error is None:
                return None
        elif isinstance(reply, Failure):
            self._error = error_from_code(reply.code, reply.message, reply.fields)
        elif not isinstance(reply, Ok):
            self._error = ProtocolError(f"the daemon answered a fetch with {type(reply).__name__}")
        self._answered = True
        self.took_s = time.monotonic() - self._sent_at
        return True

    @property
    def done(self) -> bool:
        """Whether the answer is known to have come; :meth:`wait` then returns or raises at once."""
        if not self.poll():
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Keep no room for the answer any more. Idempotent."""
        if not self._forgotten:
            self._forgotten = True
            self.connection.forget(self._number)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the entries are in the slot.

        Raises what the daemon answered, or what ended the transfer or the connection; :class:`DeadlineExceeded` after
        ``timeout_s`` seconds, with the fetch going on.
        """
        if not self._answered:
            try:
                if not self.connection.wait(self.poll, deadline_of(timeout_s)):
                    raise DeadlineExceeded(
                        f"entries of layer {self.layer} of transfer {self._part.transfer} were not fetched within "
                        f"{timeout_s:g} s; the fetch goes on",
                        transfer=self._part.transfer,
                        layer=self.layer,
                        slot=self.slot,
                        timeout_s=timeout_s,
                    )
            except DaemonLost as lost:
                self._error, self._answered = lost, True
            self.forget()
        if self._error is not None:
            raise self._error
