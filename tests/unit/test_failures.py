"""The table of error codes is complete, and the README's copy is it."""

from pathlib import Path

from typer.testing import CliRunner

from kvd import errors
from kvd.cli.main import app
from kvd_client.errors import _tree
from kvd_client.failures import FAILURES, table

README = Path(__file__).parents[2] / "README.md"


def public_tree() -> dict[str, type[errors.KvdError]]:
    """The codes that cross the socket; the demo has one of its own."""
    return {code: cls for code, cls in _tree(errors.KvdError).items() if cls.__module__ == "kvd_client.errors"}


def test_every_code_has_a_row_and_no_row_is_left_over():
    tree = public_tree()
    assert FAILURES.keys() == tree.keys()
    assert all(cell for row in FAILURES.values() for cell in row)


def test_the_daemon_sees_every_error_of_the_tree():
    assert {cls.__name__ for cls in public_tree().values()} <= set(errors.__all__)


def test_kvd_errors_prints_it():
    shown = CliRunner().invoke(app, ["errors"])
    assert shown.exit_code == 0
    assert table() in shown.output


def test_the_readme_shows_this_table():
    assert table() in README.read_text()
