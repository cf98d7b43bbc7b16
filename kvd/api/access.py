"""Who is at the other end of the socket, and may they be."""

from __future__ import annotations

import array
import dataclasses
import grp
import os
import pwd
import socket
import struct

from kvd.errors import ConfigError, PermissionDenied

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
_MAX_GROUPS = 65536


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, as the kernel recorded it at ``connect``."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]
    """Supplementary groups of the process; empty where the kernel does not tell."""


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid, gid, _supplementary(sock))


def _supplementary(sock: socket.socket) -> frozenset[int]:
    size = 64
    while size <= _MAX_GROUPS:
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size * 4)
        except OSError:
            # Either the list is longer, or the kernel does not know the option; then the loop ends soon, too.
            size *= 8
            continue
        return frozenset(array.array("I", raw))
    return frozenset()


def group_id(name: str) -> int:
    """The configured group's number; raises :class:`ConfigError` for a group that does not exist."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"api.group: there is no group {name!r} on this machine; create it, or name another",
            key="api.group",
        ) from None


def _members(gid: int) -> list[str]:
    try:
        return grp.getgrgid(gid).gr_mem
    except KeyError:
        return []


def check_access(peer: Peer, group: str, gid: int) -> None:
    """Raise :class:`PermissionDenied` unless the peer is root, the daemon's own user, or in ``group``, number ``gid``.

    Membership counts as the process has it now (its groups as the kernel knows them), or as the user database says.
    """
    if peer.uid in (0, os.geteuid()) or gid == peer.gid or gid in peer.groups:
        return
    try:
        user = pwd.getpwuid(peer.uid)
    except KeyError:
        user = None
    if user is not None and (user.pw_gid == gid or user.pw_name in _members(gid)):
        return
    name = user.pw_name if user is not None else str(peer.uid)
    raise PermissionDenied(
        f"user {name} is not in the group {group}, whose members may use this daemon; "
        f"add it with `usermod -aG {group} {name}`",
        uid=peer.uid,
        gid=peer.gid,
        group=group,
    )
