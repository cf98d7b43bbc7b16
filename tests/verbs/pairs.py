"""A connection between the two devices, for tests that need no daemon."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from kvd.fabric.conformance import Pair, connected
from tests.verbs.devices import DEVICES


def on_pair(test: Callable[[Pair], Awaitable[None]]) -> Callable[[], None]:
    """Run ``test`` with a connection between two devices."""

    def run() -> None:
        from kvd.fabric.verbs.fabric import VerbsFabric

        devices = itertools.cycle(DEVICES)

        async def body() -> None:
            async with asyncio.timeout(100), connected(lambda: VerbsFabric(device=next(devices))) as pair:
                await test(pair)

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
