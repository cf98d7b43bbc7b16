"""Raw TCP sockets of peer sessions: addresses, dialling, and carrying a handshake's bytes.

A handshake is read in pieces of exactly the size that its next step needs, so that the socket can be handed to a
transport or a fabric afterwards with no byte lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Any

from kvd.addresses import split_address
from kvd.errors import AddressInUse, ConfigError, PeerUnreachable
from kvd.types import NodeId
from kvd.wire.machine import Established, Failed, Handshake, LaneEstablished

BACKLOG = 512
LINGER_S = 0.5
"""How long a refused connection is kept, so that the reason reaches the far side ahead of a reset."""


def parse_address(text: str, key: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"``; raises :class:`ConfigError` that names the ``key``."""
    try:
        return split_address(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", key=key) from None


def address_text(address: Any) -> str:
    """A socket address as ``host:port``, IPv6 in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(error: OSError) -> str:
    """The system's words. Event loops put the address in their place, which the callers' sentences name already."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "this node's daemon has too many open files; raise its limit (systemd: LimitNOFILE=)"
    if error.errno is None or isinstance(error, socket.gaierror):
        return (error.strerror or str(error)).lower()
    return os.strerror(error.errno).lower()


async def resolve(host: str, port: int, flags: int = 0) -> list[Any]:
    """As ``getaddrinfo`` for streams; raises what it raises."""
    if "%" in host:  # uvloop's own forgets the interface of a link-local address; there is no name to be looked up here
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICHOST)
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


async def listen(text: str) -> list[socket.socket]:
    """Listening sockets for every address that the host of ``text`` means, all on one port.

    Raises :class:`AddressInUse` naming host and port, and :class:`ConfigError` for a host or port that can't be had.
    """
    host, port = parse_address(text, "peers.listen")
    opened: list[socket.socket] = []
    try:
        found = await resolve(host, port, socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            listener = socket.socket(family, socket.SOCK_STREAM)
            opened.append(listener)
            listener.setblocking(False)
            # A restarted daemon listens at once, though its old connections are still being wound up.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Port 0 is any free one, but the same for all addresses.
            listener.bind((address[0], port, *address[2:]))
            port = listener.getsockname()[1]
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in opened:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{text} is taken by another process; stop it, or set another port in peers.listen",
                address=text,
            ) from None
        # At boot, an address or a name server may be there a moment later.
        passing = error.errno in (errno.EADDRNOTAVAIL, socket.EAI_AGAIN)
        raise ConfigError(
            f"peers.listen: can't listen on {text}: {reason_of(error)}; give an address of this host and a free port",
            key="peers.listen",
            address=text,
            **({"passing": True} if passing else {}),
        ) from None
    return opened


async def dial(node: NodeId, text: str, timeout_s: float) -> socket.socket:
    """A connected, non-blocking socket to the first address of ``text`` that answers, each tried for its share of
    ``timeout_s``. Raises :class:`PeerUnreachable` with the address and the reason."""
    host, port = parse_address(text, f"peers.static.{node}")
    reasons: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            found = list(dict.fromkeys(await resolve(host, port)))
            for family, _, _, _, address in found:
                try:
                    async with asyncio.timeout(timeout_s / len(found)):
                        return await connect(family, address)
                except TimeoutError:
                    reasons.append(f"no answer from {address_text(address)}")
                except OSError as error:
                    # What a name stands for may be out of date.
                    at = address_text(address)
                    reasons.append(reason_of(error) if at == text else f"{at}: {reason_of(error)}")
    except TimeoutError:
        reasons.append(f"no connection within {timeout_s:g} s")
    except OSError as error:
        reasons.append(reason_of(error))
    reason = "; ".join(dict.fromkeys(reasons))
    raise PeerUnreachable(
        f"node {node} can't be reached at {text}: {reason}; look whether its kvd runs and listens there",
        peer=node,
        address=text,
        reason=reason,
    )


async def connect(family: int, address: Any) -> socket.socket:
    """A connected, non-blocking socket to one socket address; raises :class:`OSError`."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6 and address[3]:
            await _connect_on_interface(sock, address)
        else:
            await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_on_interface(sock: socket.socket, address: Any) -> None:
    """As ``sock_connect``, which forgets the interface of a link-local address under uvloop, too."""
    try:
        sock.connect(address)
    except BlockingIOError:
        loop = asyncio.get_running_loop()
        writable = asyncio.Event()
        loop.add_writer(sock.fileno(), writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sock.fileno())
        if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number)) from None


def give_up_after(sock: socket.socket, seconds: float) -> None:
    """Let the system end a connection whose bytes nobody has acknowledged for so long. Its own patience is a quarter of
    an hour, and heartbeats are no help where small packets pass and large ones do not."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


async def negotiate(sock: socket.socket, machine: Handshake) -> Established | LaneEstablished:
    """Carry ``machine``'s handshake over ``sock``. Raises its error (after having told the far side if it is ours),
    and :class:`OSError`. Closes nothing; on success no byte behind the handshake has been read."""
    loop = asyncio.get_running_loop()
    while True:
        if out := machine.data_to_send():
            await loop.sock_sendall(sock, out)
        data = await loop.sock_recv(sock, machine.wanted)
        for event in machine.receive_data(data) if data else machine.receive_eof():
            out = machine.data_to_send()
            if isinstance(event, Failed):
                if out:
                    await _say_last(sock, out)
                raise event.error
            if out:
                await loop.sock_sendall(sock, out)
            return event


async def _say_last(sock: socket.socket, data: bytes) -> None:
    """Send, then wait a little for the far side to close: closing with unread bytes would reset the connection,
    and the reset might overtake ``data``."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 4096):
                pass
