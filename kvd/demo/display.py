"""What the user sees while the demo runs: progress on standard error, the decoded text and the table on
standard output, and control characters only where a terminal reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

Rows = Sequence[Sequence[str]]


class Report(Protocol):
    """What a run of the demo ends with."""

    def to_json(self) -> str: ...
    def rows(self) -> list[tuple[str, str]]: ...
    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]: ...


class Display:
    """Plain lines. ``as_json`` keeps standard output free for the one JSON object."""

    def __init__(self, *, as_json: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._as_json = as_json
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._tenths: dict[str, int] = {}
        self._in_text = False

    def say(self, text: str) -> None:
        """One line about what happens now."""
        self._end_text()
        print(text, file=self._err, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` of a named piece of work; a total of 0 is unknown."""
        tenth = 10 * done // total if total else 0
        if self._tenths.get(what) == tenth:
            return
        self._tenths[what] = tenth
        self.say(f"{what}: {done} of {total}" if total else what)

    def text(self, piece: str) -> None:
        """More decoded text, as it comes."""
        self._in_text = True
        print(printable(piece), end="", file=self._err if self._as_json else self._out, flush=True)

    def report(self, report: Report) -> None:
        """The end: the table, or the JSON object."""
        self.close()
        if self._as_json:
            print(report.to_json(), file=self._out, flush=True)
        else:
            self._table(report)

    def close(self) -> None:
        """Leave the output in order, whatever came before. Idempotent."""
        self._end_text()

    def _table(self, report: Report) -> None:
        print(f"\n{aligned(report.rows())}", file=self._out, flush=True)
        for title, heads, rows in report.tables():
            print(f"\n{title}\n{aligned([heads, *rows], numbers=True)}", file=self._out, flush=True)

    def _end_text(self) -> None:
        if self._in_text:
            self._in_text = False
            print(file=self._err if self._as_json else self._out, flush=True)


class TerminalDisplay(Display):
    """Bars on a terminal's standard error, and a drawn table if standard output is one, too."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def say(self, text: str) -> None:
        self.close()
        super().say(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self._end_text()
        if self._bars is None:
            self._bars = started_bars(self._err)
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total or None)
        self._bars.update(self._tasks[what], completed=done, total=total or None)

    def text(self, piece: str) -> None:
        self._stop_bars()
        super().text(piece)

    def close(self) -> None:
        self._stop_bars()
        super().close()

    def _table(self, report: Report) -> None:
        if not self._out.isatty():
            super()._table(report)
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False)
        for name, value in report.rows():
            table.add_row(name, value)
        console = Console(file=self._out, highlight=False, markup=False)
        console.print()
        console.print(table)
        for title, heads, rows in report.tables():
            table = Table(title=title, title_justify="left")
            for at, head in enumerate(heads):
                table.add_column(head, justify="right" if at else "left")
            for row in rows:
                table.add_row(*row)
            console.print()
            console.print(table)

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()


def started_bars(file: TextIO, *, remaining: bool = False) -> Any:
    """Bars on a terminal, begun (rich.progress.Progress); with the time that is left, if it makes sense."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    if remaining:
        columns.append(TimeRemainingColumn())
    bars = Progress(*columns, console=Console(file=file))
    bars.start()
    return bars


def aligned(rows: Rows, *, numbers: bool = False) -> str:
    """Rows as lines with columns; of ``numbers``, all but the first column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = enumerate(zip(row, widths, strict=True))
        cells = [text.rjust(width) if numbers and at else text.ljust(width) for at, (text, width) in padded]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def display(*, as_json: bool) -> Display:
    """The one that fits where standard error goes."""
    return TerminalDisplay(as_json=as_json) if sys.stderr.isatty() else Display(as_json=as_json)


def printable(text: str) -> str:
    """The text without what would steer a terminal: a model may say anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
