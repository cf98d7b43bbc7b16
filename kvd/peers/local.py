"""The session of a node with itself: a transfer whose source and sink are on one node crosses no network."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvd.errors import KvdError
from kvd.fabric.base import Endpoint, Fabric
from kvd.types import Lane, NodeId
from kvd.wire.messages import PeerMessage

OnMessage: TypeAlias = Callable[["LocalSession", PeerMessage], None]
OnFabricMessage: TypeAlias = Callable[["LocalSession", Lane, bytes], None]


class _Bringup:
    """Both ends are in this process: a blob goes through a queue."""

    def __init__(self, inbox: asyncio.Queue[bytes], outbox: asyncio.Queue[bytes]) -> None:
        self._inbox, self._outbox = inbox, outbox

    @property
    def streams(self) -> Mapping[Lane, socket.socket]:
        return {}

    @property
    def secret(self) -> bytes:
        return b""

    @property
    def dialled(self) -> bool:
        return False

    async def exchange(self, blob: bytes) -> bytes:
        self._outbox.put_nowait(blob)
        return await self._inbox.get()

    def tell(self, blob: bytes) -> None:
        """The loopback fabric, which alone is connected this way, has nothing to tell."""

    def listen(self, told: Callable[[bytes], None]) -> None:
        """And so there is nothing to hear."""


class LocalSession:
    """One of the two ends. Messages arrive at the other end in order, on the next turn of the loop."""

    def __init__(self, node: NodeId, fabric: Fabric, endpoint: Endpoint, on_message: OnMessage) -> None:
        self.node = node
        self.fabric = fabric
        self.endpoint = endpoint
        self.other: LocalSession = self
        self.error: KvdError | None = None
        self._on_message = on_message

    def send(self, message: PeerMessage) -> None:
        asyncio.get_running_loop().call_soon(self._on_message, self.other, message)

    def close(self, error: KvdError) -> None:
        """Messages of this daemon to itself are not foreign: an error here is a fault of kvd, and said loudly."""
        raise error


async def connect_local(
    node: NodeId, fabric: Fabric, on_message: OnMessage, on_fabric_message: OnFabricMessage
) -> LocalSession:
    """The end of a fresh pair that opens transfers (the sink's); the other end serves them."""
    one, two = asyncio.Queue[bytes](), asyncio.Queue[bytes]()
    near, far = await asyncio.gather(fabric.connect(_Bringup(one, two)), fabric.connect(_Bringup(two, one)))
    ends = [LocalSession(node, fabric, endpoint, on_message) for endpoint in (near, far)]
    ends[0].other, ends[1].other = ends[1], ends[0]
    for end in ends:
        end.endpoint.on_lost = lambda error: None
        end.endpoint.on_message = functools.partial(on_fabric_message, end)
    return ends[0]
