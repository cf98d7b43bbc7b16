"""Reading what a user names, which may be anything that can be opened."""

from __future__ import annotations

import io
import os

from kvd.errors import InvalidArgument

MAX_TEXT = 64 << 20
"""Bytes of a text; all that Shakespeare wrote has 5 MiB."""


def read_bounded(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> bytes:
    """A file's bytes, or a pipe's until its end, which one that nobody has open for writing is at already: to wait for
    somebody could not be interrupted everywhere. Raises :class:`InvalidArgument` for more than ``limit`` of them, of
    which no more are read: /dev/zero has no end. And what the system says, an :class:`OSError` or :class:`ValueError`.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        data = file.read(limit + 1)
    if len(data) > limit:
        name = os.fspath(path)
        raise InvalidArgument(f"{name}: has more than {limit >> 20} MiB, the most that is read", file=name, limit=limit)
    return data


def read_text(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> str:
    """UTF-8 text, with any system's line ends as newlines; raises as :func:`read_bounded`, and
    :class:`UnicodeDecodeError`."""
    return io.StringIO(read_bounded(path, limit).decode("utf-8"), newline=None).read()
