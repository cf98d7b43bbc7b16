"""Logging: one structlog pipeline for the daemon's events and for whatever libraries say through ``logging``.

On a terminal: one coloured line an event. Everywhere else: one JSON object a line, with an ISO 8601 time in UTC.
Where systemd's journal reads the stream, each line starts with its priority (``<4>``), which the journal takes off,
so that ``journalctl -p warning`` works.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvd.errors import KvdError
from kvd.lograte import Repeated
from kvd.logstream import PatientHandler

_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}


def configure(
    format: Literal["auto", "console", "json"] = "auto",
    level: Literal["debug", "info", "warning", "error"] = "info",
    stream: TextIO | None = None,
) -> None:
    """Set up logging of the whole process; a second call replaces the first. ``stream``: standard error."""
    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty()
    console = format == "console" or (format == "auto" and terminal)
    number = logging.getLevelNamesMapping()[level.upper()]

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    last: list[Processor]
    if console:
        last = [_error_to_text, _console(terminal)]
    else:
        to_line = _with_priority if _read_by_journal(stream) else _to_json
        last = [_error_to_fields, _traceback, to_line]

    handler = _handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[Repeated(), *shared[:-1], structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def trouble() -> str:
    """What keeps the log from its reader, in one sentence; empty: nothing."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PatientHandler):
            if handler.waiting:
                return f"log: nobody reads it; {handler.waiting} lines wait, {handler.dropped} were dropped"
            if handler.error:
                return f"log: lines are lost, since they can't be written: {handler.error.lower()}"
    return ""


def _handler(stream: TextIO) -> logging.Handler:
    try:
        return PatientHandler(stream)
    except OSError:  # a text in memory
        return logging.StreamHandler(stream)


# no local variables: among them are keys
_traceback = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def _console(terminal: bool) -> Processor:
    return structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=structlog.dev.plain_traceback)


def _with_priority(logger: WrappedLogger, method: str, event: EventDict) -> str:
    priority = _PRIORITIES.get(event.get("level", "info"), 6)
    return f"<{priority}>{_to_json(logger, method, event)}"


def _error_to_fields(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, KvdError):
            event[key] = {"code": value.code, "message": value.message, **value.fields}
    return event


def _error_to_text(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, KvdError):
            event[key] = str(value)
    return event


def _to_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    # the keys that every line has come first, for those who read JSON with their eyes
    line = {key: event.pop(key) for key in ("timestamp", "level", "logger", "event") if key in event}
    line.update(event)
    try:
        return _encode(line)
    except (TypeError, ValueError, RecursionError):
        return _encode({key: _encodable(value) for key, value in line.items()})


def _encode(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _encodable(value: Any) -> Any:
    """The value if JSON can have it, else its repr: a line with a strange value is better than no line."""
    try:
        _encode(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, BaseException | os.PathLike) else repr(value)


def _read_by_journal(stream: TextIO) -> bool:
    """Whether the stream is the one that systemd says the journal reads."""
    try:
        device, inode = os.environ.get("JOURNAL_STREAM", "").split(":")
        found = os.fstat(stream.fileno())
        return (found.st_dev, found.st_ino) == (int(device), int(inode))
    except (ValueError, OSError):
        return False
