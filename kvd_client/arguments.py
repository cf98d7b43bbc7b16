"""Callers' arguments: numbers of any library as plain ones, and one sentence for what is none.

A wrong type has to be found here: the daemon ends a connection over which something of another form arrives, and with
it transfers that have nothing to do with the mistake.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable

from kvd_client.errors import InvalidArgument


def whole(name: str, value: object) -> int:
    """``value`` as an int if it is a whole number, Python's or another's. Raises :class:`InvalidArgument`."""
    if type(value) is int:
        return value
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"{name} is {_shown(value)}; it must be a whole number", argument=name) from None


def whole_numbers(name: str, values: object) -> list[int]:
    """A sequence, array or iterator of whole numbers as a list. Raises :class:`InvalidArgument`."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        try:
            return [whole(f"{name}[{at}]", value) for at, value in enumerate(values)]
        except TypeError:  # an array without axes has __iter__ all the same
            pass
    raise InvalidArgument(f"{name} is {_shown(values)}; it must be a list of whole numbers", argument=name)


def position(name: str, value: object, count: int) -> int:
    """``value`` as the number of one of ``count`` things. Raises :class:`InvalidArgument`."""
    number = whole(name, value)
    if not 0 <= number < count:
        raise InvalidArgument(f"{name} {number} does not exist; it must be from 0 to {count - 1}", **{name: number})
    return number


def seconds(name: str, value: object) -> float:
    """``value`` as a number of seconds, infinity included. Raises :class:`InvalidArgument`, for NaN as well."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if isinstance(value, str | bytes) or found != found:
        raise InvalidArgument(f"{name} is {_shown(value)}; it must be a number of seconds", argument=name)
    return found


def deadline_of(timeout_s: float | None) -> float | None:
    """When a wait that begins now ends, on the monotonic clock. Raises :class:`InvalidArgument`."""
    return None if timeout_s is None else time.monotonic() + seconds("timeout_s", timeout_s)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
