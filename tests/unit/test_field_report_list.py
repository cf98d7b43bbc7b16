"""Every row of the list of reports names tests that exist, or says what is missing."""

import ast
from pathlib import Path

import pytest

from tests.field_reports import ROWS

TESTS = Path(__file__).parents[1]


def found(name):
    """Whether ``file::Class::test`` is defined."""
    file, *path = name.split("::")
    nodes = ast.parse((TESTS / file).read_text()).body
    for step in path:
        match = [node for node in nodes if getattr(node, "name", None) == step]
        if not match:
            return False
        nodes = match[0].body
    return True


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row.reports) for row in ROWS])
def test_row(row):
    assert bool(row.tests) != bool(row.missing)
    for name in row.tests:
        assert found(name), name


def test_no_report_is_listed_twice():
    reports = [report for row in ROWS for report in row.reports]
    assert len(reports) == len(set(reports)) == 47
    assert len(ROWS) == 24


def test_a_test_that_is_not_there_is_noticed():
    assert not found("unit/test_field_report_list.py::test_that_nobody_wrote")
    assert found("unit/test_field_report_list.py::test_row")
