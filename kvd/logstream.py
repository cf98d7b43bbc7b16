"""A log whose reader may stand still: a terminal at Ctrl-S, a pager, a collector that is restarted.

The daemon logs on its event loop, so a write that waits would hold up every transfer, until its peers and the watchdog
give it up. Nothing here waits: lines that find no room stay in memory, up to :data:`KEPT_BYTES`, and leave with the
next line that does; what is beyond that is counted and given up.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
from typing import TextIO

KEPT_BYTES = 1 << 20
_AT_ONCE = select.PIPE_BUF
"""Bytes that a pipe with room takes without waiting."""
LAST_S = 1.0
"""How long the last lines of a process wait for their reader."""


class PatientHandler(logging.Handler):
    """Writes to the descriptor of ``stream``; raises :class:`OSError` where it has none."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        """Lines that were given up because nobody read those before."""
        self.error = ""
        """Why the last line could not be written; empty: it could."""
        self._told = 0
        self._stream, self._fd = stream, stream.fileno()
        self._kept: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)

    @property
    def waiting(self) -> int:
        """Lines that nobody has read yet."""
        return len(self._kept)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)  # as every handler does with what can't be formatted
            return
        self._write(0)
        if self._kept and self._bytes + len(line) > KEPT_BYTES:
            self.dropped += 1
            return
        self._kept.append(line)
        self._bytes += len(line)
        self._write(0)
        if not self._kept and self._told < self.dropped:
            lines, self._told = self.dropped - self._told, self.dropped
            logging.getLogger("kvd.log").warning("lines were dropped: nobody read the log", extra={"lines": lines})

    def flush(self) -> None:
        """The process ends, or somebody asks: give what is left a moment."""
        with contextlib.suppress(ValueError, OSError):
            self._write(int(LAST_S * 1000))

    def _write(self, timeout_ms: int) -> None:
        while self._kept and self._poll.poll(timeout_ms):
            line = self._kept[0]
            try:
                count = os.write(self._fd, line[:_AT_ONCE])
            except BlockingIOError:  # somebody has made it so that it does not wait, and it is full after all
                return
            except OSError as error:  # a full disk, or nobody there: this line goes, others may do better
                count, self.error = len(line), error.strerror or str(error)
            else:
                self.error = ""
            self._bytes -= min(count, len(line))
            if count < len(line):
                self._kept[0] = line[count:]
            else:
                self._kept.popleft()
