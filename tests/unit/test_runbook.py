"""What docs/runbook.md names must exist: metrics, error codes, commands, settings."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import typer

from kvd.cli import metrics
from kvd.cli.main import app
from kvd.config import Config
from kvd_client.failures import FAILURES
from tests.unit.test_metrics import STATUS

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", RUNBOOK)


def test_every_metric_is_one() -> None:
    written = set(re.findall(r"^# TYPE (\S+)", metrics.text_of(STATUS), re.M))
    named = set(re.findall(r"\bkvd_[a-z_]+\b", RUNBOOK)) - {"kvd_client"}
    assert len(named) >= 9
    assert named <= written


def test_every_code_is_one() -> None:
    named = {code for text in QUOTED for code in re.findall(r"\b[A-Z]{4,}(?:_[A-Z]+)*\b", text)}
    others = {"SIGSTOP", "ABRT", "NAME", "PEER", "USER", "TYPE", "LEASES", "ABORTED"}
    codes = {code for code in named if "_" in code or code in FAILURES}
    assert len(codes) >= 12
    assert codes - others <= set(FAILURES)


def test_every_command_is_one() -> None:
    group = typer.main.get_command(app)
    commands = set(re.findall(r"\bkvd ((?:status|metrics|doctor|errors|config|plan)\b[ a-z]*)", "\n".join(QUOTED)))
    assert len(commands) >= 6
    for words in commands:
        found = group
        for word in words.split()[:2]:
            assert word in getattr(found, "commands", {word: found}), words
            found = getattr(found, "commands", {word: found})[word]


@pytest.mark.parametrize(
    "key",
    sorted({text for text in QUOTED if re.fullmatch(r"(peers|memory|api|security|transfer|node)\.[a-z_]+", text)}),
)
def test_every_setting_is_one(key: str) -> None:
    section, name = key.split(".")
    fields = {field.name: field.type for field in msgspec.structs.fields(Config)}
    assert name in {field.name for field in msgspec.structs.fields(fields[section])}
