"""Prints what the fault matrix has seen at the end of a run; and the log of peer sessions, as a fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from tests.integration.fault_helpers import SEEN, table
from tests.integration.peer_nodes import Logged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    if SEEN:
        terminalreporter.section("faults: what each side was told, and how soon")
        for line in table(SEEN):
            terminalreporter.write_line(line)


@pytest.fixture
def logged() -> Iterator[Logged]:
    logged = Logged()
    before = structlog.get_config()
    structlog.configure(processors=[logged], cache_logger_on_first_use=False)
    yield logged
    structlog.configure(**before)
