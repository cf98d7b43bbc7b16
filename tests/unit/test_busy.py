"""Overload is said early, with a hint when to come back: every place that says BUSY gives one."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def calls():
    """By name, (file and line, keywords) of each call of a plain name in the sources."""
    found = defaultdict(list)
    for folder in ("kvd", "kvd_client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found[node.func.id].append((where, {keyword.arg for keyword in node.keywords}))
    return found


def test_every_busy_has_a_hint():
    places = dict(calls()["Busy"])
    assert len(places) > 8
    assert [where for where, keywords in places.items() if "retry_after_s" not in keywords] == []


@pytest.mark.parametrize("name", ["Busy", "OutOfMemory", "DeadlineExceeded", "RendezvousTimeout"])
def test_the_search_finds_what_is_there(name):
    assert name in calls()
