"""Moves bytes over two TCP connections a peer, one for each lane; works everywhere and is the default.

The far side's daemon receives straight into the granted memory and checks every access (:mod:`kvd.fabric.frames` is the
protocol). What may be on its way is bounded a lane, little of it sits in the bulk connection's socket, packets of the
urgent one go first where this host's queue sorts by priority, and an optional rate limit covers both lanes, with the
urgent one going first.
"""

from __future__ import annotations

import socket

from kvd.errors import FabricError, InvalidArgument
from kvd.fabric.base import Bringup, Capabilities, Endpoint, Fabric, Grant, Region
from kvd.fabric.frames import MAX_MESSAGE, MAX_PAYLOAD, Protection, check_hello, pack_hello
from kvd.fabric.iovec import MOST_PIECES
from kvd.fabric.regions import RegionTable
from kvd.fabric.tcp_endpoint import TcpEndpoint
from kvd.types import Lane

SECRET_BYTES = 32
"""Least length of what keys are derived from."""


class TcpFabric(Fabric):
    """See the module.

    ``rate`` limits what each endpoint sends, in bytes per second, headers included; 0 means no limit.
    ``inflight_bytes`` bounds what is sent on a lane and not yet placed: more than the bandwidth times the round trip
    gains nothing, and much more costs throughput, since it falls out of the CPU's cache on the way. ``frame_bytes``
    is the size at which large writes are cut: the least that is finished once it is begun. ``unsent_bytes`` bounds
    what waits in the bulk connection's socket (``TCP_NOTSENT_LOWAT``); a rate bounds it further.

    ``level`` and ``checksums`` say what protects the bytes on their way, and must be the same on both sides. ``plain``:
    a checksum of every frame, or nothing with ``checksums=False``. ``authentic``: AES-GMAC of every frame, so that
    nobody on the path can change, repeat or drop one unnoticed. ``secret``: everything encrypted by AES-GCM.
    """

    name = "tcp"
    capabilities = Capabilities(
        one_sided=False,
        max_message=MAX_MESSAGE,
        max_scatter=MOST_PIECES,
        lanes_need_streams=(Lane.URGENT, Lane.BULK),
        several_grants=True,
    )

    def __init__(
        self,
        *,
        rate: float = 0.0,
        inflight_bytes: int = 4 << 20,
        frame_bytes: int = 2 << 20,
        unsent_bytes: int = 512 << 10,
        level: str = "plain",
        checksums: bool = True,
    ) -> None:
        protections = {
            "plain": Protection.CHECKSUM if checksums else Protection.NONE,
            "authentic": Protection.AUTHENTIC,
            "secret": Protection.SECRET,
        }
        if level not in protections:
            raise InvalidArgument(
                f"level of the tcp fabric is {level!r}; choose one of {', '.join(protections)}", option="level"
            )
        self.protection = protections[level]
        _check("rate", rate, 0, 1e15)
        _check("inflight_bytes", inflight_bytes, 1, 1 << 40)
        _check("frame_bytes", frame_bytes, 1, MAX_PAYLOAD)
        _check("unsent_bytes", unsent_bytes, 1, 1 << 30)
        self.rate = rate
        self.inflight_bytes = inflight_bytes
        self.frame_bytes = frame_bytes
        self.unsent_bytes = unsent_bytes
        self.table = RegionTable()
        self.endpoints: set[TcpEndpoint] = set()
        self.past_checksum_errors = 0
        """Those of endpoints that have ended."""

    @property
    def checksum_errors(self) -> int:
        return self.past_checksum_errors + sum(endpoint.counters.checksum_errors for endpoint in self.endpoints)

    def register(self, memory: memoryview) -> Region:
        return self.table.register(memory)

    def deregister(self, region: Region) -> None:
        self.table.deregister(region)

    def grant(
        self, region: Region, offset: int, length: int, *, writable: bool = True, readable: bool = False
    ) -> Grant:
        return self.table.grant(region, offset, length, writable=writable, readable=readable)

    async def revoke(self, grant: Grant) -> None:
        # Nothing to wait for: bytes move only in callbacks of the loop, and what is under way goes elsewhere now.
        self.table.revoke(grant)
        for endpoint in self.endpoints:
            endpoint.revoke(grant)

    async def connect(self, bringup: Bringup) -> Endpoint:
        streams = dict(bringup.streams)
        try:
            missing = [lane.name.lower() for lane in self.capabilities.lanes_need_streams if lane not in streams]
            if missing:
                raise FabricError(f"the tcp fabric got no connection for the lane {' and '.join(missing)}")
            if self.protection >= Protection.AUTHENTIC and len(bringup.secret) < SECRET_BYTES:
                raise FabricError(
                    "frames can be authenticated or encrypted only where the two nodes share a key; set peers.key_file "
                    "on both, or security.level to plain"
                )
            check_hello(await bringup.exchange(pack_hello(self.protection)), self.protection)
            return TcpEndpoint(self, streams, bringup.secret, bringup.dialled)
        except OSError as error:
            _close(streams)
            raise FabricError(f"the peer's connections can't be used: {error}; connect again") from error
        except BaseException:
            _close(streams)
            raise

    async def close(self) -> None:
        for endpoint in list(self.endpoints):
            endpoint.close()
        self.table.clear()


def _close(streams: dict[Lane, socket.socket]) -> None:
    for sock in streams.values():
        sock.close()


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(
            f"{name} of the tcp fabric is {value}; it must be between {low:g} and {high:g}", option=name, value=value
        )
