"""Prints what the fault matrix has seen at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.fault_helpers import SEEN, table

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    if SEEN:
        terminalreporter.section("faults: what each side was told, and how soon")
        for line in table(SEEN):
            terminalreporter.write_line(line)
