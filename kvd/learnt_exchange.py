"""What the daemon has learnt, while it runs: told to the sources, heard of other sinks, and written down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from kvd.errors import InvalidArgument, KvdError
from kvd.learnt import Learner
from kvd.profiling.files import replace_file
from kvd.transfer.parties import Session
from kvd.wire.messages import Learnt

log = structlog.get_logger("kvd.learnt")

TELL_S, SAVE_S = 1.0, 30.0
"""How often sources are told what was learnt, and how often it is written down."""


class LearntExchange:
    """Between a learner and ``sessions``, those with peers that live when it is called."""

    def __init__(self, learner: Learner, sessions: Callable[[], Iterable[Session]]) -> None:
        self._learner = learner
        self._sessions = sessions
        self._running: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[str] | None = None
        self.trouble = ""
        """Why what was learnt could not be written down, in a sentence, until it can; status shows it."""

    def start(self) -> None:
        self._running = asyncio.create_task(self.run())

    async def close(self) -> None:
        """Write down what is new. Does nothing without a :meth:`start`."""
        if self._running is None:
            return
        self._running.cancel()
        await asyncio.wait([self._running, *([self._saving] if self._saving else [])])
        _save(self._learner.unsaved())

    def hear(self, session: Session, message: Learnt) -> None:
        """Take what a peer has learnt; what can't be used is counted and logged."""
        try:
            self._learner.hear(session.node, message, time.time())
        except InvalidArgument as error:
            self._learner.counters["learnt_refused"] += 1
            log.warning("what a peer learnt is not used", peer=session.node, reason=error.message)

    async def run(self) -> None:
        """Tell the sources what was learnt, and now and then write it down, until cancelled."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(TELL_S)
            self._tell()
            if time.monotonic() - saved >= SAVE_S:
                saved = time.monotonic()
                self._saving = asyncio.create_task(asyncio.to_thread(_save, self._learner.unsaved()))
                self.trouble = await asyncio.shield(self._saving)

    def _tell(self) -> None:
        if not self._learner.waiting:
            return
        live = {session.node: session for session in self._sessions()}
        for node, message in self._learner.outgoing():
            if node in live:
                with contextlib.suppress(KvdError):  # its session has ended; it learns what comes next
                    live[node].send(message)


def _save(unsaved: list[tuple[Path, bytes]]) -> str:
    """Write state files, each in one step; what went wrong, in a sentence, or nothing."""
    trouble = ""
    for path, data in unsaved:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
        except (OSError, InvalidArgument) as error:
            log.warning("learnt importance not saved", file=str(path), reason=str(error))
            trouble = f"what was learnt is not saved and would not outlive a restart: {error}"
    return trouble
