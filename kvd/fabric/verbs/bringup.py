"""The first steps of a verbs connection: what each side tells of itself, and the way to the peer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping

from kvd.fabric.verbs.device import Device
from kvd.fabric.verbs.lane import SLOT_BYTES, SLOTS, VerbsLane
from kvd.fabric.verbs.wire import VERSION, Hello
from kvd.types import Lane

RESOLVE_S = 2.0
"""How long a new connection waits for ARP or neighbour discovery; the kernel asks once a second."""
ASK_S = 0.1
"""How often it looks for the answer."""


def greeting(device: Device, lanes: Mapping[Lane, VerbsLane], key: bytes, scratch: tuple[int, int]) -> Hello:
    """How the peer reaches ``lanes``, with new first sequence numbers; ``key`` and ``scratch`` as in :class:`Hello`."""
    return Hello(
        version=VERSION,
        gid=device.gid,
        lid=device.lid,
        infiniband=device.infiniband,
        mtu=device.mtu,
        qpns=(lanes[Lane.URGENT].qp.qp_num, lanes[Lane.BULK].qp.qp_num),
        psns=(secrets.randbits(24), secrets.randbits(24)),
        reads=device.reads_in,
        slots=SLOTS,
        slot_bytes=SLOT_BYTES,
        key=key,
        scratch=scratch,
    )


async def resolved(device: Device, peer: Hello, check_open: Callable[[], None]) -> None:
    """Wait until the way to the peer is known, so that connecting does not stop everybody else until it is.

    Raises :class:`~kvd.errors.FabricError` if nobody answers, and what ``check_open`` raises.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + RESOLVE_S
    while not device.can_reach(peer):
        if loop.time() > end:
            raise device.unreachable(peer)
        await asyncio.sleep(ASK_S)
        check_open()
