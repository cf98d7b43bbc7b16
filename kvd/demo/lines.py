"""How the demo's processes talk: one JSON object a line, commands on standard input, events on standard
output."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from kvd_client.errors import KvdError


class Line:
    """The child's end. Standard output belongs to it: what libraries print goes to standard error instead."""

    def __init__(self, *, cleans_up: bool = False) -> None:
        self._cleans_up = cleans_up
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def emit(self, event: str, **fields: Any) -> None:
        """Send an event to the parent."""
        with self._lock:
            self._out.write(json.dumps({"event": event, **fields}) + "\n")
            self._out.flush()

    def command(self) -> dict[str, Any]:
        """The parent's next command; blocks."""
        return self._commands.get()

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        # The parent has gone, or wants this process to go; the main thread may be deep in a kernel.
        if not self._cleans_up:
            os._exit(0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def run_child(body: Callable[[Line], None], *, cleans_up: bool = False) -> None:
    """Run a child's ``body``; an error becomes a ``failed`` event with one sentence, and exit code 1. When
    the parent closes standard input the process ends where it is, or, if it ``cleans_up``, by
    :class:`KeyboardInterrupt`."""
    line = Line(cleans_up=cleans_up)
    try:
        body(line)
    except KvdError as error:
        line.emit("failed", message=error.message, code=error.code)
    except Exception as error:  # whatever a model directory can make of torch and transformers
        import traceback

        traceback.print_exc()
        line.emit("failed", message=f"{type(error).__name__}: {_first_line(error)}", code="")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    else:
        return
    sys.exit(1)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
