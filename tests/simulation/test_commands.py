"""The commands: many seeds on several processes, and a day of load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.transfer.book import Book
from kvd.transfer.part import Part

from .day import Day

ROOT = Path(__file__).parents[2]


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.simulation.run", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_number_of_processes_changes_nothing() -> None:
    """The same first seed fails, and its story has the command that shows it again."""
    options = ["--seed", "5", "--count", "100", "--plant", "fetch_of_a_layer_that_is_not_computed"]
    running = [start(*options, "--processes", number) for number in ("1", "2")]
    printed = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [1, 1], printed
    one, two = (re.sub(r"[\d.]+ s:", "s:", out) for out, _ in printed)
    assert one == two
    assert re.search(
        r"^replay: python -m tests\.simulation\.run --seed \d+ --plant fetch_of_a_layer_that_is_not_computed$",
        one,
        re.MULTILINE,
    ), one


def test_hours_of_load_leave_nothing() -> None:
    day = Day(seed=3, rate=0.03)
    hours = [day.hour() for _ in range(2)]
    day.close()
    assert day.grown() == []
    assert all(hour.requests > 50 and hour.restarts for hour in hours)
    assert all((hour.leases, hour.parts) == (0, 0) for hour in hours)
    assert day.most_leases > 0


def test_a_core_that_remembers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no rule forbids, and what only grows."""

    def forget(self: Any, part: Part) -> None:
        properly(self, part)
        self.remembered = [*getattr(self, "remembered", ()), part]

    properly = Book.forget
    monkeypatch.setattr(Book, "forget", forget)
    day = Day(seed=3, rate=0.03)
    day.endings = ()
    for _ in range(2):
        day.hour()
    assert len(day.grown()) == len(day.nodes)
