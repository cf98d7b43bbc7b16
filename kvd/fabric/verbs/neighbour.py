"""Whether the kernel knows a peer's link address, asked without waiting; needs no pyverbs.

A queue pair that goes to RTR over Ethernet carries the link address of the next hop. Where the kernel does not have it,
``ibv_modify_qp`` waits for ARP or neighbour discovery, for a second if nobody answers, and pyverbs holds the GIL
meanwhile: every other peer would stand still. So the neighbour is looked up first, over rtnetlink, which answers at
once, and resolved by a datagram, which nobody waits for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_RTM_NEWNEIGH, _RTM_GETNEIGH, _RTM_NEWROUTE, _RTM_GETROUTE = 28, 30, 24, 26
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_NLMSG = struct.Struct("=IHHII")
_RTMSG = struct.Struct("=8BI")
_NDMSG = struct.Struct("=BBHiHBB")
_ATTRIBUTE = struct.Struct("=HH")
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_VIA = 1, 2, 4, 5, 18
_NDA_DST = 1
_RTN_UNICAST = 1
_NUD_VALID = 0xDE
"""PERMANENT, NOARP, REACHABLE, PROBE, STALE, DELAY: states in which the kernel has an address to send to."""
_IP_UNICAST_IF, _IPV6_UNICAST_IF = 50, 76
_DISCARD = 9
"""The port of the datagram: nobody listens, and any answer goes unread."""


class Unanswered(Exception):
    """The kernel does not tell: an old one, or a sandbox without AF_NETLINK."""


def known(interface: str, source: str, peer: str) -> bool:
    """Whether a packet from the GID ``source`` on ``interface`` to the GID ``peer`` could leave now.

    False only where the kernel has yet to resolve the next hop's link address, which it then begins to. Everything
    else counts as known, for it makes nobody wait: a peer of this host, no route (``ibv_modify_qp`` fails at once), or
    a kernel that does not tell.
    """
    here, there = _address(source), _address(peer)
    if here.version != there.version:
        return True
    try:
        with contextlib.closing(_Kernel()) as kernel:
            index = socket.if_nametoindex(interface)
            hop, index = kernel.next_hop(here, there, index)
            if hop is None or kernel.state(hop, index) & _NUD_VALID:
                return True
        _resolve(here, there, index)
    except (OSError, Unanswered):
        return True
    return False


def interface_of(device: str, port: int, gid_index: int, sys: Path = Path("/sys")) -> str:
    """The network interface behind a GID of an RDMA device; empty if there is none."""
    try:
        return (sys / f"class/infiniband/{device}/ports/{port}/gid_attrs/ndevs/{gid_index}").read_text().strip()
    except OSError:  # an entry without an interface can't be read
        return ""


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(gid: str) -> _Address:
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def _family(address: _Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


class _Kernel:
    """Questions over rtnetlink; each is answered before it has been sent. Raises OSError and :class:`Unanswered`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)

    def next_hop(self, here: _Address, there: _Address, index: int) -> tuple[_Address | None, int]:
        """Whose link address a packet needs, and on which interface; None if it needs none."""
        bits = there.max_prefixlen
        head = _RTMSG.pack(_family(there), bits, bits, 0, 0, 0, 0, 0, 0)
        wanted = ((_RTA_DST, there.packed), (_RTA_SRC, here.packed), (_RTA_OIF, struct.pack("=I", index)))
        body = self._ask(_RTM_GETROUTE, _RTM_NEWROUTE, head + b"".join(_attribute(*pair) for pair in wanted))
        if _RTMSG.unpack_from(body)[7] != _RTN_UNICAST:
            return None, index
        told = dict(_attributes(body[_RTMSG.size :]))
        if _RTA_OIF in told:
            (index,) = struct.unpack("=I", told[_RTA_OIF])
        if _RTA_GATEWAY in told:
            return ipaddress.ip_address(told[_RTA_GATEWAY]), index
        if _RTA_VIA in told:  # a gateway of the other family, after two bytes that say which
            return ipaddress.ip_address(told[_RTA_VIA][2:]), index
        return there, index

    def state(self, hop: _Address, index: int) -> int:
        """The neighbour's state; 0 if there is none."""
        head = _NDMSG.pack(_family(hop), 0, 0, index, 0, 0, 0)
        try:
            body = self._ask(_RTM_GETNEIGH, _RTM_NEWNEIGH, head + _attribute(_NDA_DST, hop.packed))
        except FileNotFoundError:
            return 0
        return int(_NDMSG.unpack_from(body)[4])

    def _ask(self, kind: int, answer: int, body: bytes) -> bytes:
        """The body of the answer; raises OSError with what the kernel answers instead."""
        self._socket.send(_NLMSG.pack(_NLMSG.size + len(body), kind, _NLM_F_REQUEST, 1, 0) + body)
        reply = self._socket.recv(1 << 16)
        length, found, *_ = _NLMSG.unpack_from(reply)
        if found == _NLMSG_ERROR:
            number = -int.from_bytes(reply[_NLMSG.size : _NLMSG.size + 4], "little", signed=True)
            raise OSError(number, os.strerror(number))
        if found != answer:
            raise Unanswered
        return reply[_NLMSG.size : length]

    def close(self) -> None:
        self._socket.close()


def _attribute(kind: int, value: bytes) -> bytes:
    """All values here have lengths of which the next attribute needs no padding."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value


def _attributes(rest: bytes) -> Iterator[tuple[int, bytes]]:
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            raise Unanswered
        yield kind, rest[_ATTRIBUTE.size : length]
        rest = rest[(length + 3) & ~3 :]


def _resolve(here: _Address, there: _Address, index: int) -> None:
    """Send an empty datagram over the interface: the kernel keeps it until it has resolved the neighbour, or failed to.

    Raises OSError where a firewall of this host lets none out.
    """
    with socket.socket(_family(there), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
        if there.version == 4:
            asking.setsockopt(socket.IPPROTO_IP, _IP_UNICAST_IF, struct.pack("!I", index))
        else:
            asking.setsockopt(socket.IPPROTO_IPV6, _IPV6_UNICAST_IF, struct.pack("!I", index))
        asking.bind((str(here), 0))
        asking.sendto(b"", (str(there), _DISCARD))
