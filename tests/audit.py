"""``python -m tests.audit``: what the daemon depends on, and whether that is as it should be. Needs no network.

Every third-party module that the packages import is declared, every declared one is imported, each is installed in a
version that ``pyproject.toml`` allows and under a licence on the list. Known vulnerabilities need an advisory database:
where there is a network, ``pip-audit`` over the printed names and versions does that.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = {"kvd", "kvd_client", "kvd_kernels"}
FOLDERS = ("kvd", "kvd_client", "kernels")
HOSTS = {"vllm"}
"""Programs that load kvd's client into themselves, and so are not installed for its sake."""
LICENCES = re.compile(r"apache|bsd|mit\b|isc|psf|python software foundation|mpl|lgpl|zlib|linux-openib", re.IGNORECASE)


@functools.cache
def imported() -> dict[str, set[str]]:
    """Third-party modules by name, with the files that import them."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in _run(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in names:
                    top = name.split(".")[0]
                    if top and top not in sys.stdlib_module_names and top not in OURS:
                        found.setdefault(top, set()).add(str(path.relative_to(ROOT)))
    return found


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a tree, but for what only type checkers see."""
    left = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                continue
            if not isinstance(node, ast.expr):
                yield node
                left.append(node)


def declared() -> tuple[dict[str, Requirement], dict[str, Requirement]]:
    """What is always installed, and what some extra brings, by canonical name; development tools left out."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def by_name(texts: list[str]) -> dict[str, Requirement]:
        parsed = map(Requirement, texts)
        return {canonicalize_name(requirement.name): requirement for requirement in parsed}

    extras = project["optional-dependencies"]
    optional = [text for extra, texts in extras.items() if extra != "dev" for text in texts]
    # What ships for users to test their own fabrics with.
    optional += [text for text in extras["dev"] if text.startswith("pytest>")]
    return by_name(project["dependencies"]), by_name(optional)


_distributions = functools.cache(metadata.packages_distributions)  # reads the files of everything that is installed


def provider(module: str) -> str | None:
    """The installed distribution that a module comes from."""
    names = _distributions().get(module)
    return canonicalize_name(names[0]) if names else None


def licence(name: str) -> str:
    """What a distribution says about its licence."""
    about = metadata.metadata(name)
    classifiers = [text for text in about.get_all("Classifier") or [] if text.startswith("License")]
    return "; ".join(filter(None, [about.get("License-Expression"), *classifiers, (about.get("License") or "")[:80]]))


def problems() -> Iterator[str]:
    """All that is not as it should be, as sentences."""
    core, optional = declared()
    used = {}
    for module, files in imported().items():
        name = provider(module)
        if name is None:
            known = {*core, *optional, *(n.split("-")[0] for n in optional), *HOSTS}
            if canonicalize_name(module) not in known:
                yield f"{module}, imported by {sorted(files)[0]}, is neither installed nor declared"
            continue
        used[name] = files
        if name not in core and name not in optional:
            yield f"{name}, imported by {sorted(files)[0]}, is not declared in pyproject.toml"
    for name, requirement in core.items():
        if name not in used:
            yield f"{name} is declared in pyproject.toml and imported nowhere"
        version = metadata.version(name)
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{name} {version} is installed; pyproject.toml asks for {requirement.specifier}"
        if not requirement.specifier:
            yield f"{name} has no least version in pyproject.toml"
        if not LICENCES.search(licence(name)):
            yield f"{name} {version} has the licence {licence(name)!r}, which is not on the list"


def main() -> int:
    core, _ = declared()
    for name in core:
        print(f"{name:<14} {metadata.version(name):<12} {licence(name)[:60]}")
    found = list(problems())
    for problem in found:
        print("!", problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
