"""Inference processes of a test, told what to do and asked how it went over a pipe, and killed at any moment."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from tests.integration.fault_helpers import Told

PATIENCE_S = 60.0
"""How long an answer may take: a bound for a broken program, reached by no working one."""


class Worker:
    """``target(*arguments, pipe)`` in a process of its own."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def answer(self) -> str:
        assert self._pipe.poll(PATIENCE_S), "the process did not answer"
        return str(self._pipe.recv())

    def ask(self, *command: Any) -> str:
        self.send(*command)
        return self.answer()

    def told(self, *command: Any) -> Told:
        """As :meth:`ask`, with how long it took."""
        begin = time.monotonic()
        code = self.ask(*command)
        return Told(code.replace("ok", "OK"), time.monotonic() - begin)

    def kill(self) -> None:
        """SIGKILL, and its end; nothing if it has ended."""
        self.process.kill()
        self.process.join()
