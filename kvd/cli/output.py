"""What commands write: lines and tables for people, safe for a terminal and plain where there is none."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 80
"""Columns where no terminal says otherwise."""


def printable(text: str) -> str:
    """The text with ``?`` for what would steer a terminal: names come from files, processes and hosts of others."""
    return "".join(c if c.isprintable() else "?" for c in text)


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
