"""Fabrics by name: the built-in ones, and those that installed packages announce.

A third party announces its fabric in the entry-point group ``kvd.fabrics``::

    [project.entry-points."kvd.fabrics"]
    ucx = "my_package:UcxFabric"

The value is a factory that takes the fabric's options as keywords and returns a :class:`~kvd.fabric.base.Fabric`.
Nothing of a fabric is imported before it is asked for by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any, cast

from kvd.errors import ConfigError
from kvd.fabric.base import Fabric

FabricFactory = Callable[..., Fabric]

GROUP = "kvd.fabrics"

_BUILT_IN = {
    "loopback": "kvd.fabric.loopback:LoopbackFabric",
    "tcp": "kvd.fabric.tcp:TcpFabric",
    "verbs": "kvd.fabric.verbs.fabric:VerbsFabric",
}


def names() -> list[str]:
    """All fabrics that can be asked for, sorted."""
    return sorted(_entry_points())


def factory(name: str) -> FabricFactory:
    """The factory of fabric ``name``; raises :class:`ConfigError` if there is none or it can't be imported."""
    known = _entry_points()
    if name not in known:
        raise ConfigError(
            f"there is no fabric named {name!r}; choose one of {', '.join(sorted(known))}",
            fabric=name,
            known=sorted(known),
        )
    try:
        return cast(FabricFactory, known[name].load())
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the fabric {name!r} ({known[name].value}) can't be loaded: {error}; install what it needs or choose "
            "another fabric",
            fabric=name,
        ) from error


def create(name: str, **options: Any) -> Fabric:
    """Make the fabric ``name`` with its options; raises :class:`ConfigError` for an unknown name or option."""
    make = factory(name)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"the fabric {name!r} can't be made with the options {sorted(options)}: {error}; remove or correct them",
            fabric=name,
            options=sorted(options),
        ) from None
    return make(**options)


def _entry_points() -> dict[str, metadata.EntryPoint]:
    announced = {point.name: point for point in metadata.entry_points(group=GROUP)}
    built_in = {name: metadata.EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    return announced | built_in  # a third party can't take a built-in name over
