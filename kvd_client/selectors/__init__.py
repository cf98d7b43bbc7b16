"""KV selection algorithms: which entries of a layer a decode step needs.

Each has a name, and is made by :func:`create`. Packages can add their own by an entry point of the group
``kvd.selectors``, whose name is the algorithm's and whose object is a :class:`Selector` class. Nothing here imports
torch before an algorithm works with tensors.
"""

from __future__ import annotations

import dataclasses
import os
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Chunk, Selector, Shape, top_k
from kvd_client.selectors.exact import Exact
from kvd_client.selectors.hata import Hata
from kvd_client.selectors.infinigen import InfiniGen
from kvd_client.selectors.quest import Quest
from kvd_client.selectors.streaming import Streaming
from kvd_client.selectors.uniform import Random
from kvd_client.selectors.weights import Weights, read

__all__ = ["GROUP", "Chunk", "Selector", "Shape", "Weights", "create", "kind_of", "names", "parse", "top_k"]

GROUP = "kvd.selectors"
"""The entry-point group of algorithms from other packages."""

_OWN: dict[str, type[Selector]] = {kind.name: kind for kind in (Exact, Hata, InfiniGen, Quest, Random, Streaming)}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def names() -> list[str]:
    """Every name that :func:`create` knows, those of installed packages included."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})


def kind_of(name: str) -> type[Selector]:
    """The class behind a name. Raises :class:`InvalidArgument` for an unknown one, and for one whose package can't be
    used."""
    return _OWN.get(name) or _installed(name)


def create(name: str, *, weights: Weights | str | os.PathLike[str] | None = None, **parameters: Any) -> Selector:
    """The algorithm of that name with these parameters; the rest as the algorithm has them by default.

    ``weights``, for algorithms that are trained: what training made, or its file. Raises :class:`InvalidArgument` for
    an unknown name or parameter, :class:`InvalidProfile` for a damaged file, and :class:`FingerprintMismatch` for
    weights of another algorithm.
    """
    kind = kind_of(name)
    if weights is not None:
        if not kind.trained:
            raise InvalidArgument(f"selector {name!r} takes no weights", name=name)
        parameters["weights"] = weights if isinstance(weights, Weights) else read(weights)
    try:
        return kind(**parameters)
    except TypeError as error:
        raise InvalidArgument(f"selector {name!r} does not take these parameters: {error}", name=name) from None


def parse(text: str, *, weights: Weights | str | os.PathLike[str] | None = None) -> Selector:
    """The algorithm that a user wrote: a name, alone or with parameters, as in ``hata:bits=128,ahead=true``.

    Raises as :func:`create` does, and :class:`InvalidArgument` for values that are no such parameter's.
    """
    name, _, rest = text.partition(":")
    kind = kind_of(name)
    known: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    fields = {field.name: field for field in known if field.name != "weights"}
    parameters: dict[str, Any] = {}
    for each in filter(None, rest.split(",")):
        key, equals, value = each.partition("=")
        if key not in fields or not equals:
            raise InvalidArgument(
                f"{each!r} is no parameter of selector {name!r}; it has {', '.join(fields) or 'none'}, given as "
                f"{name}:PARAMETER=VALUE",
                name=name,
            )
        parameters[key] = _value(name, key, value, fields[key].default)
    return create(name, weights=weights, **parameters)


def _value(name: str, key: str, text: str, default: object) -> object:
    try:
        return _TRUTH[text.lower()] if isinstance(default, bool) else type(default)(text)  # type: ignore[call-arg]
    except (ValueError, KeyError):
        raise InvalidArgument(
            f"{key}={text} of selector {name!r} is no {type(default).__name__}; the default is {default}", name=name
        ) from None


def _installed(name: str) -> type[Selector]:
    for entry in entry_points(group=GROUP, name=name):
        return _loaded(name, entry)
    raise InvalidArgument(f"there is no selector {name!r}; there are {', '.join(names())}", name=name)


def _loaded(name: str, entry: EntryPoint) -> type[Selector]:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package"
    try:
        found = entry.load()
    except Exception as error:  # whatever another's module raises while it is imported
        said = (str(error).strip().splitlines() or [""])[0]
        raise InvalidArgument(
            f"selector {name!r} can't be loaded from {entry.value} of {package}: {type(error).__name__}: {said}; "
            "update or uninstall that package",
            name=name,
        ) from None
    if not (isinstance(found, type) and issubclass(found, Selector)):
        raise InvalidArgument(
            f"{entry.value} of {package}, installed as selector {name!r}, is no Selector class; update or uninstall "
            "that package",
            name=name,
        )
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise InvalidArgument(
            f"{entry.value} of {package}, installed as selector {name!r}, lacks {', '.join(missing)}; update or "
            "uninstall that package",
            name=name,
        )
    return found
