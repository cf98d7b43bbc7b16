"""The story of a seed that fails: everything that happened to the request concerned, and what its cores wanted."""

from __future__ import annotations

from typing import Any

from kvd.transfer import events as ev
from kvd.transfer import instructions as do

from .node import Node
from .world import World


def tell(seed: int, options: str = "") -> str:
    """What goes wrong with this seed, and everything that concerns the request; empty if nothing does. ``options`` go
    into the replay command."""
    story: list[tuple[float, Node | None, str, Any]] = []
    world: World | None = None
    try:
        world = World(seed, story)
        world.run()
    except AssertionError as violation:
        request, wrong = getattr(violation, "request", ""), str(violation)
    except Exception as error:  # a core that raises is as wrong as one that answers wrongly
        request, wrong = "", f"{type(error).__name__}: {error}"
    else:
        return ""
    lines = [_line(*entry) for entry in story]
    if request and world is not None:
        about = _numbers(story, request)
        lines = [
            line
            for line, (_, node, _, thing) in zip(lines, story, strict=True)
            if node is None or _concerns(thing, node, request, about)
        ]
    shown = lines[-400:]
    return "\n".join(
        [
            f"seed {seed}: {wrong}",
            f"replay: python -m tests.simulation.run --seed {seed}{options}",
            f"story of {request or 'everything'} (<- what happened to a core, -> what it wanted), last {len(shown)}:",
            *shown,
        ]
    )


def _numbers(story: list[tuple[float, Node | None, str, Any]], request: str) -> set[tuple[str, int]]:
    same = {request, request.replace("r", "other-")}
    return {
        (node.name, thing.transfer)
        for _, node, _, thing in story
        if node is not None and isinstance(thing, ev.PartOpened) and thing.request in same
    }


def _concerns(thing: Any, node: Node, request: str, about: set[tuple[str, int]]) -> bool:
    if isinstance(thing, str | ev.SessionLost | ev.DrainRequested | ev.StopRequested):
        return True
    message = getattr(thing, "message", None)
    if getattr(message, "request", None) == request or getattr(thing, "transfer", None) is not None:
        return getattr(message, "request", None) == request or (node.name, thing.transfer) in about
    inner = message if message is not None else getattr(thing, "arrived", None)
    number = getattr(inner, "transfer", getattr(inner, "sink", None))
    if isinstance(thing, do.SendMessage):  # names the receiver's part
        return any(name != node.name and number == its for name, its in about)
    return (node.name, number) in about


def _line(time: float, node: Node | None, what: str, thing: Any) -> str:
    text = thing if isinstance(thing, str) else repr(thing)
    if isinstance(thing, do.ReportEnd):
        text = f"ReportEnd(transfer={thing.transfer}, code={thing.code!r}, message={thing.message!r})"
    return f"{time:9.4f} {node.name if node else '-'} {what} {text}"[:400]
