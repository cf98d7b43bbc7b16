"""What commands write: lines and tables for people, safe for a terminal and plain where there is none."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 80
"""Columns where no terminal says otherwise."""


def printable(text: str) -> str:
    """The text with ``?`` for what would steer a terminal: names come from files, processes and hosts of others."""
    return "".join(c if c.isprintable() else "?" for c in text)


def check_output(path: Path | None) -> None:
    """Raise :class:`InvalidArgument` where a file can't be written, before the minutes or hours whose result it is to
    hold. None: there is none to write."""
    if path is None:
        return
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise InvalidArgument(f"{target} is not a file; give the name of a file to write", file=str(target))
        if not target.parent.is_dir():
            raise InvalidArgument(f"{target.parent} is no folder; make it first", file=str(target))
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise InvalidArgument(f"{target.parent} can't be written to by this user", file=str(target))
    except (OSError, ValueError) as error:  # names that are too long, or have a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgument(f"{str(path)!r} can't be written: {reason.lower()}", file=str(path)) from None


def write_parts(parts: Iterable[str | Table]) -> None:
    """Lines as they are, tables as wide as the terminal; plain text where none is."""
    from rich.console import Console

    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    console: Console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Numbers: every column but the first to the right."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, head in enumerate(heads):
        made.add_column(head, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def number(value: float | None) -> str:
    """Three decimals; a dash for what is not defined."""
    return "-" if value is None else f"{value:.3f}"


def seconds(value: float) -> str:
    """``0.8ms``, ``125ms``, ``3.2s``: three digits or fewer."""
    if value < 0.9995:
        return f"{1e3 * value:.1f}ms" if value < 0.00995 else f"{1e3 * value:.0f}ms"
    return f"{value:.1f}s" if value < 99.95 else f"{value:.0f}s"
