"""How a test of the suite runs: on a loop of its own, with a connected pair, and nothing may be left afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kvd.fabric.base import Fabric
from kvd.fabric.conformance.pairs import MIB, Pair, connected

LIMIT_S = 60
"""A test that takes longer hangs."""


class Suite:
    """What the suite's parts share. A subclass may set another event loop, or smaller sizes for a slow device."""

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)
    urgent_bound = 24 * MIB
    """Most bulk bytes that may be placed between the submission of an urgent message and its delivery."""
    large = 64 * MIB
    """Bytes of what is ended while it is under way, well above what the fabric keeps outstanding."""
    piece = 36 << 10
    """Bytes of each of a thousand scattered pieces. A fabric that is tested on a slow device may take less of both."""


class _Test(Protocol):
    __name__: str
    __doc__: str | None

    def __call__(self, suite: Any, pair: Pair, /) -> Awaitable[None]: ...


def on_pair(test: _Test) -> Callable[[Any, Callable[[], Fabric]], None]:
    """Run ``test`` on an event loop of its own; afterwards no task, descriptor or swallowed exception may be left."""

    def run(self: Any, make_fabric: Callable[[], Fabric]) -> None:
        async def body() -> None:
            trouble: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: trouble.append(context))
            before = open_descriptors()
            async with asyncio.timeout(LIMIT_S), connected(make_fabric) as pair:
                await test(self, pair)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert open_descriptors() == before
            assert not trouble

        with asyncio.Runner(loop_factory=type(self).loop_factory) as runner:
            runner.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], bool]) -> None:
    """Give the event loop its turns until ``condition`` holds, for what no callback tells."""
    while not condition():
        await turns(1)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
