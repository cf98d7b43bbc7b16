"""What errors and hints tell a user to change exists: an option by a wrong name sends him searching."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvd.config import Config

ROOT = Path(__file__).parents[2]
OPTIONS = {
    section.name: {option.name for option in msgspec.structs.fields(section.type)}
    for section in msgspec.structs.fields(Config)
    if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)
}
NAME = re.compile(rf"(?<![\w./])({'|'.join(OPTIONS)})\.([a-z_]+)\b")
NO_OPTIONS = {
    "memory.max", "memory.current", "memory.stat", "memory.limit_in_bytes", "memory.usage_in_bytes",
    "memory.pages",
}  # fmt: skip
"""Files of control groups, and an event of the log."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """String literals by line, docstrings apart; of other files the lines."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    tree = ast.parse(path.read_text())
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value


def named(path: Path) -> Iterator[tuple[str, str, str]]:
    for line, text in texts(path):
        for found in NAME.finditer(text):
            if found[0] not in NO_OPTIONS:
                yield f"{path.relative_to(ROOT)}:{line}", found[1], found[2]


@pytest.mark.parametrize("package", ["kvd", "kvd_client", "kernels", "systemd"])
def test_every_option_that_is_named_exists(package: str) -> None:
    wrong = [
        f"{where}: {section}.{option}"
        for path in sorted((ROOT / package).rglob("*"))
        if path.suffix in {".py", ".toml", ".service", ".socket"}
        for where, section, option in named(path)
        if option not in OPTIONS[section]
    ]
    assert wrong == []


def test_options_are_found_in_what_is_said() -> None:
    found = {f"{section}.{option}" for _, section, option in named(ROOT / "kvd/api/server.py")}
    assert "api.max_clients" in found
