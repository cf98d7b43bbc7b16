"""Layouts as text, TOML and messages.

Text: an *order*, and for each axis its digits; an axis that is not factored is one ``*`` digit of its own name::

    order = "l kv || B h T D | F G r c"
    axes = { t = "B:* T:1 F:2 r:16", d = "D:* G:2 c:16" }

TOML adds ``name``, ``codec``, ``padding``, ``table`` and a ``[placement]``. Messages are plain maps of the same fields,
checked and bounded when they are read; the fingerprint covers all but the name.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvd.errors import InvalidArgument
from kvd.layout.descriptor import Digit, Layout, Placed, Placement, Table

MAX_TEXT = 4096
MAX_BLOCKS = 1 << 22
"""Of a block table or a list of bases in a message."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,15}")
_LAYOUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLACEMENT = {"kind": str, "channels": int, "alignment": int, "shard_pages": int}
_LAYOUT = {
    "name": str,
    "order": str,
    "axes": dict,
    "codec": str,
    "padding": bool,
    "table": str,
    "placement": dict,
}


def layout(
    name: str,
    order: str,
    axes: Mapping[str, str] | None = None,
    *,
    codec: str,
    placement: Placement = Placement(),  # noqa: B008 - immutable
    table: str = "",
    padding: bool = False,
) -> Layout:
    """A layout from its text; :class:`InvalidArgument` names what can't be read.

    ``order`` has at most one ``||`` and one ``|``; without ``|`` a tensor is a single page.
    """
    if not _LAYOUT_NAME.fullmatch(name):
        raise InvalidArgument(f"{name[:64]!r} is no name for a layout; use letters, digits, dots, dashes", field="name")
    if len(order) > MAX_TEXT:
        raise InvalidArgument(f"the order of layout {name!r} has {len(order)} characters; {MAX_TEXT} is the most")
    tensors, bar, rest = order.partition("||")
    if not bar:
        tensors, rest = "", order
    pages, bar, inner = rest.partition("|")
    if not bar:
        pages, inner = "", rest
    groups = tuple(tuple(part.split()) for part in (tensors, pages, inner))
    for word in (word for group in groups for word in group):
        if not _NAME.fullmatch(word):
            raise InvalidArgument(
                f"the order of layout {name!r} has {word[:32]!r}; it consists of digits' names, one || and one |",
                layout=name,
                field="order",
            )
    factored = {axis: _digits(name, axis, text) for axis, text in (axes or {}).items()}
    known = {digit.name for digits in factored.values() for digit in digits}
    plain = [word for group in groups for word in group if word not in known]
    if again := [word for word in plain if word in factored]:
        raise InvalidArgument(
            f"axis {again[0]} of layout {name!r} is factored, so that its order has the axis's digits instead",
            layout=name,
            field="order",
        )
    return Layout(
        name=name,
        axes=tuple({**{axis: (Digit(axis, 0),) for axis in plain}, **factored}.items()),
        tensors=groups[0],
        pages=groups[1],
        inner=groups[2],
        codec=codec,
        placement=placement,
        table=table,
        padding=padding,
    )


def order_text(made: Layout) -> str:
    """The order as :func:`layout` reads it."""
    text = " ".join(made.inner)
    if made.pages or not made.inner:
        text = f"{' '.join(made.pages)} | {text}"
    return f"{' '.join(made.tensors)} || {text}" if made.tensors else text


def axes_text(made: Layout) -> dict[str, str]:
    """The factored axes as :func:`layout` reads them."""
    return {
        axis: " ".join(f"{digit.name}:{digit.radix or '*'}" for digit in digits)
        for axis, digits in made.axes
        if digits != (Digit(axis, 0),)
    }


def from_toml(text: str) -> Layout:
    """A user's layout; raises :class:`InvalidArgument` with the line or the key that is wrong."""
    if len(text) > 16 * MAX_TEXT:
        raise InvalidArgument(f"a layout of {len(text)} characters is too long; {16 * MAX_TEXT} is the most")
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"the layout is not TOML: {error}", field="toml") from None
    except RecursionError:
        raise InvalidArgument("the layout is not TOML: its brackets are nested too deeply", field="toml") from None
    except ValueError:  # what Python refuses of a number that the grammar allows
        raise InvalidArgument("the layout is not TOML: a number has thousands of digits", field="toml") from None
    return from_wire(fields)


def to_toml(made: Layout) -> str:
    """What :func:`from_toml` reads: a layout for a file, or for a placement."""
    fields = to_wire(made)
    lines = [f'{name} = "{fields[name]}"' for name in ("name", "order", "codec", "table")]
    lines.append(f"padding = {str(made.padding).lower()}")
    for table in ("axes", "placement"):
        lines.append(f"\n[{table}]")
        lines += [f'{name} = "{it}"' if isinstance(it, str) else f"{name} = {it}" for name, it in fields[table].items()]
    return "\n".join(lines) + "\n"


def to_wire(made: Layout) -> dict[str, Any]:
    """A map of plain values, msgpack-able; :func:`from_wire` reads it."""
    placed = made.placement
    return {
        "name": made.name,
        "order": order_text(made),
        "axes": axes_text(made),
        "codec": made.codec,
        "padding": made.padding,
        "table": made.table,
        "placement": {name: getattr(placed, name) for name in _PLACEMENT},
    }


def from_wire(fields: object) -> Layout:
    """Raises :class:`InvalidArgument` for anything but a layout."""
    found = _fields("a layout", fields, _LAYOUT, {"name", "order", "codec"})
    placement = _fields("a placement", found.get("placement", {}), _PLACEMENT, set())
    axes = found.get("axes", {})
    for axis, text in axes.items():
        if not isinstance(axis, str) or not isinstance(text, str):
            raise InvalidArgument("axes of a layout are text: an axis, and its digits", field="axes")
    return layout(
        found["name"],
        found["order"],
        axes,
        codec=found["codec"],
        placement=Placement(**placement),
        table=found.get("table", ""),
        padding=found.get("padding", False),
    )


def fingerprint(made: Layout) -> str:
    """32 hexadecimal digits of everything but the name: what two sides compare."""
    fields = to_wire(made)
    del fields["name"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def placed_to_wire(placed: Placed) -> dict[str, Any]:
    """A map of plain values, msgpack-able; tables are little-endian int64."""
    return {
        "layout": to_wire(placed.layout),
        "held": {axis: list(pair) for axis, pair in placed.held.items()},
        "room": dict(placed.room),
        "table": None if placed.table is None else placed.table.astype("<i8").tobytes(),
        "bases": None if placed.bases is None else placed.bases.astype("<i8").tobytes(),
    }


def placed_from_wire(fields: object) -> Placed:
    """Raises :class:`InvalidArgument` for anything but one side's numbers that fit their layout."""
    kinds = {"layout": dict, "held": dict, "room": dict, "table": (bytes, type(None)), "bases": (bytes, type(None))}
    found = _fields("a placed layout", fields, kinds, {"layout", "held"})
    held: dict[str, tuple[int, int]] = {}
    for axis, pair in found["held"].items():
        if not isinstance(axis, str) or not isinstance(pair, list | tuple) or [type(one) for one in pair] != [int, int]:
            raise InvalidArgument("held maps axes to pairs of integers, a start and a stop", field="held")
        held[axis] = (pair[0], pair[1])
    room = found.get("room", {})
    if any(not isinstance(name, str) or type(size) is not int for name, size in room.items()):
        raise InvalidArgument("room maps digits to integers", field="room")
    return Placed(
        from_wire(found["layout"]),
        held,
        room,
        _table("table", found.get("table")),
        _table("bases", found.get("bases")),
    )


def _digits(name: str, axis: str, text: str) -> tuple[Digit, ...]:
    if not _NAME.fullmatch(axis) or len(text) > MAX_TEXT:
        raise InvalidArgument(f"{axis[:32]!r} is no name for an axis of layout {name!r}; use letters", field="axes")
    digits = []
    for word in text.split():
        digit, colon, radix = word.partition(":")
        if not colon or not _NAME.fullmatch(digit) or not re.fullmatch(r"\*|[1-9][0-9]{0,8}", radix):
            raise InvalidArgument(
                f"axis {axis} of layout {name!r} has {word[:32]!r}; a digit is a name, a colon and a size or *",
                layout=name,
                field=axis,
            )
        digits.append(Digit(digit, 0 if radix == "*" else int(radix)))
    if not digits:
        raise InvalidArgument(f"axis {axis} of layout {name!r} has no digits; leave it out, or name some", field=axis)
    return tuple(digits)


def _fields(what: str, given: object, kinds: Mapping[str, Any], needed: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidArgument(f"{what} is a map of fields, not {type(given).__name__}", field=what)
    if missing := needed - set(given):
        raise InvalidArgument(f"{what} needs {min(missing)}", field=min(missing))
    for name, value in given.items():
        if name not in kinds:
            raise InvalidArgument(
                f"{what} has no field {str(name)[:64]!r}; there are {', '.join(kinds)}", field=str(name)[:64]
            )
        if not isinstance(value, kinds[name]) or (kinds[name] is int and isinstance(value, bool)):
            raise InvalidArgument(f"{name} of {what} can't be a {type(value).__name__}", field=name)
        if isinstance(value, int) and abs(value) >= 1 << 63:  # which might be too long to be shown, too
            raise InvalidArgument(f"{name} of {what} is a number of more than 64 bits", field=name)
    return given


def _table(name: str, given: bytes | None) -> Table | None:
    if given is None:
        return None
    if len(given) % 8 or len(given) > 8 * MAX_BLOCKS:
        raise InvalidArgument(f"{name} has {len(given)} bytes; it is int64 numbers, {MAX_BLOCKS} at most", field=name)
    return np.frombuffer(given, "<i8").astype(np.int64)
