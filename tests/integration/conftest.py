"""What the fault matrix has seen, at the end of a run. Fixtures: the log of peer sessions, an API server, a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from kvd_client import Client
from tests.integration.api_harness import ServerThread
from tests.integration.fault_helpers import SEEN, table
from tests.integration.peer_nodes import Logged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    with ServerThread(tmp_path / "api.sock") as server:
        yield server
        assert server.log.exceptions == []


@pytest.fixture
def client(server: ServerThread) -> Iterator[Client]:
    with Client(server.path, name="test") as client:
        yield client
