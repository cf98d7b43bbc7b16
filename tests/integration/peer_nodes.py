"""Nodes with peer sessions on real sockets, for tests: their callbacks' queues, their log, and a peer made by hand."""

import asyncio
import contextlib
import functools
import inspect
import secrets
import socket

import msgspec
import psutil
import pytest
import structlog
import uvloop

from kvd.errors import (
    PeerLost,
)
from kvd.fabric.tcp import TcpFabric
from kvd.peers import Peers, PeersConfig, sockets
from kvd.wire import guard
from kvd.wire.handshake import Dialler
from kvd.wire.hello import Identity
from kvd.wire.messages import Delivered, Ping

KEY, OTHER = b"k" * 32, b"o" * 32
FINGERPRINT = {"layout": 1}
SHOWN = {**FINGERPRINT, "security": "plain"}
REFUSED = "connection of a peer refused"


def both_loops(test):
    """Run an async test on a fresh loop of each kind; its ``start`` makes nodes that are closed in the end."""
    signature = inspect.signature(test)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "start"]
    factory = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(test)
    def run(*, loop_factory, **arguments):
        async def main():
            async with contextlib.AsyncExitStack() as stack:
                if "start" in signature.parameters:
                    arguments["start"] = starter(stack)
                await test(**arguments)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())

    run.__signature__ = signature.replace(parameters=[*kept, factory])
    loops = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop_factory", loops, ids=["asyncio", "uvloop"])(run)


def starter(stack):
    """Makes nodes that listen, each knowing the ones made before it, until ``stack`` closes them."""
    nodes = []

    async def start(name, **config):
        known = {node.name: node.address for node in nodes if node.address} | config.pop("peers", {})
        node = Node(name, peers=known, **config)
        await node.peers.start()
        stack.push_async_callback(node.close)
        nodes.append(node)
        return node

    return start


class Node:
    """A daemon's peer sessions, with what its callbacks were told in queues."""

    def __init__(self, name, *, boot=None, fingerprint=FINGERPRINT, fabrics=None, **config):
        config = {"listen": "127.0.0.1:0", "keys": [KEY]} | config
        self.name, self.messages, self.notes, self.losses = (
            name,
            asyncio.Queue(),
            asyncio.Queue(),
            asyncio.Queue(),
        )
        self.fabrics = fabrics or [TcpFabric()]
        self.fabric = self.fabrics[0]
        self.peers = Peers(
            node=name,
            boot=boot or f"{name}-{secrets.token_hex(4)}",
            config=PeersConfig(**config),
            fabrics=self.fabrics,
            fingerprint=fingerprint,
            on_message=lambda session, message: self.messages.put_nowait((session, message)),
            on_fabric_message=lambda session, lane, note: self.notes.put_nowait((session, lane, note)),
            on_lost=lambda session, error: self.losses.put_nowait((session, error)),
            log=structlog.get_logger(),
        )

    @property
    def address(self):
        return self.peers.listening

    async def close(self):
        await self.peers.close()
        for fabric in self.fabrics:
            await fabric.close()


class Logged:
    """What was logged, and a way to wait for a line."""

    def __init__(self):
        self.entries, self._methods, self._more = [], [], asyncio.Event()

    def __call__(self, logger, method, entry):
        self.entries.append(entry)
        self._methods.append(method)
        self._more.set()
        raise structlog.DropEvent

    def levels(self, event):
        """Those of the lines of this event."""
        return [method for entry, method in zip(self.entries, self._methods, strict=True) if entry["event"] == event]

    async def lines(self, event, count=1, **fields):
        """The first ``count`` entries of this event with these fields, as soon as there are so many."""
        wanted = {"event": event, **fields}.items()
        while len(found := [entry for entry in self.entries if wanted <= entry.items()]) < count:
            self._more.clear()
            await self._more.wait()
        return found[:count]

    async def reason(self, event):
        """The reason in the first line of this event."""
        (line,) = await self.lines(event)
        return line["reason"]


async def pair(start, **config):
    """Two nodes and the session that a dialled, seen from both."""
    b = await start("b", **config)
    a = await start("a", **config)
    at_a = await a.peers.session("b")
    at_a.send(Ping(number=0))
    at_a.send(Delivered(transfer=0))
    at_b, _ = await b.messages.get()
    return a, b, at_a, at_b


def sockets_open():
    return len([fd for fd in psutil.Process().net_connections("tcp") if fd.status != "NONE"])


async def lost(node, session, error):
    """The next loss must be this session's, with this error; nothing of it is left open."""
    ended, reason = await node.losses.get()
    assert ended is session
    assert type(reason) is error
    assert session.error is reason
    await session.wait_closed()
    assert session not in node.peers.sessions()
    with pytest.raises(PeerLost):
        session.send(Delivered(transfer=0))
    return reason


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Puppet:
    """A peer that goes through the handshake and does nothing by itself afterwards, as a stopped process would."""

    def __init__(self, name, target, *, keys=(KEY,), fabric="none"):
        self.identity = Identity(node=name, boot="p", address="", fingerprint=SHOWN, fabrics=(fabric,), keys=keys)
        self.target = target

    async def connect(self):
        self.control = await sockets.dial("b", self.target, 5)
        machine = Dialler(self.identity, expect="b", nonce=secrets.token_bytes(32))
        established = await sockets.negotiate(self.control, machine)
        self.writer, self.parser = guard.guards(established.lane_key, dialled=True)

    async def send(self, message):
        await self.write(self.writer.frame(msgspec.msgpack.encode(message)))

    async def write(self, data):
        await asyncio.get_running_loop().sock_sendall(self.control, data)

    def close(self):
        self.control.close()
