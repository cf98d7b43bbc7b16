"""Overload is said early, with a hint when to come back: every place that says BUSY gives one."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def raised(name):
    """(file, line, keywords) of each place in the sources where the error is made."""
    for folder in ("kvd", "kvd_client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", {keyword.arg for keyword in node.keywords}


def test_every_busy_has_a_hint():
    places = dict(raised("Busy"))
    assert len(places) > 8
    assert [where for where, keywords in places.items() if "retry_after_s" not in keywords] == []


@pytest.mark.parametrize("name", ["Busy", "OutOfMemory", "DeadlineExceeded", "RendezvousTimeout"])
def test_the_search_finds_what_is_there(name):
    assert list(raised(name))
