"""KV selection algorithms: which entries of a layer a decode step needs.

Each has a name, and is made by :func:`create`. Packages can add their own by an entry point of the group
``kvd.selectors``, whose name is the algorithm's and whose object is a :class:`Selector` class. Nothing here imports
torch before an algorithm works with tensors.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Selector, Shape, top_k
from kvd_client.selectors.exact import Exact
from kvd_client.selectors.hata import Hata
from kvd_client.selectors.quest import Quest
from kvd_client.selectors.streaming import Streaming
from kvd_client.selectors.uniform import Random

__all__ = ["GROUP", "Selector", "Shape", "create", "names", "top_k"]

GROUP = "kvd.selectors"
"""The entry-point group of algorithms from other packages."""

_OWN: dict[str, type[Selector]] = {kind.name: kind for kind in (Exact, Hata, Quest, Random, Streaming)}


def names() -> list[str]:
    """Every name that :func:`create` knows, those of installed packages included."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})


def create(name: str, **parameters: Any) -> Selector:
    """The algorithm of that name with these parameters; the rest as the algorithm has them by default.

    Raises :class:`InvalidArgument` for an unknown name or parameter.
    """
    kind = _OWN.get(name) or _installed(name)
    try:
        return kind(**parameters)
    except TypeError as error:
        raise InvalidArgument(f"selector {name!r} does not take these parameters: {error}", name=name) from None


def _installed(name: str) -> type[Selector]:
    for entry in entry_points(group=GROUP, name=name):
        found = entry.load()
        if isinstance(found, type) and issubclass(found, Selector):
            return found
        raise InvalidArgument(f"{entry.value}, installed as selector {name!r}, is no Selector class", name=name)
    raise InvalidArgument(f"there is no selector {name!r}; there are {', '.join(names())}", name=name)
