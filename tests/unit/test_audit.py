"""The audit of dependencies, and that it finds what it looks for."""

from packaging.requirements import Requirement

from tests import audit


def test_dependencies_are_as_they_should_be():
    assert list(audit.problems()) == []


def test_what_is_imported_and_not_declared_is_found(monkeypatch):
    core, optional = audit.declared()
    less = {name: requirement for name, requirement in core.items() if name != "xxhash"}
    monkeypatch.setattr(audit, "declared", lambda: (less, optional))
    assert any(problem.startswith("xxhash, imported by kvd/fabric/seals.py") for problem in audit.problems())


def test_what_is_declared_and_not_imported_too_old_or_oddly_licensed_is_found(monkeypatch):
    more = {"pytest-timeout": Requirement("pytest-timeout>=99"), "hypothesis": Requirement("hypothesis")}
    monkeypatch.setattr(audit, "declared", lambda: (more, {}))
    monkeypatch.setattr(audit, "imported", dict)
    monkeypatch.setattr(audit, "licence", lambda name: "Proprietary")
    found = list(audit.problems())
    assert "pytest-timeout is declared in pyproject.toml and imported nowhere" in found
    assert any("asks for >=99" in problem for problem in found)
    assert "hypothesis has no least version in pyproject.toml" in found
    assert any("'Proprietary'" in problem for problem in found)
