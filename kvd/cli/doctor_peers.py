"""Whether this node's peers can be reached, and would have it: each is dialled as the daemon does, up to the end of the
handshake, under another name, so that no session of a running daemon is touched."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence

from kvd.config import Config
from kvd.errors import ConfigError, KvdError
from kvd.fabric.verbs.doctor import Finding
from kvd.keys import read_keys
from kvd.peers import sockets
from kvd.wire.auth import NONCE_BYTES
from kvd.wire.handshake import Dialler
from kvd.wire.hello import Identity

NAME = "kvd-doctor"
ANSWER_S = 3.0
"""For the connection, and again for the handshake."""


def examine_peers(config: Config, fingerprint: Mapping[str, str | int]) -> list[Finding]:
    """One finding a configured peer, by name. ``fingerprint``: the daemon's own."""
    peers = config.peers
    if not peers.static:
        return []
    try:
        keys = read_keys(peers.key_file) if peers.key_file else []
    except ConfigError as error:
        return [Finding(error.message, "mend peers.key_file, or ask as a user who may read it, such as root")]
    offered = ("verbs", "tcp") if config.fabric.name == "auto" else (config.fabric.name,)
    identity = Identity(
        node=NAME,
        boot=secrets.token_hex(8),
        address="",
        fingerprint={**fingerprint, "security": config.security.level},
        fabrics=offered,
        keys=tuple(keys),
    )

    async def all_of_them() -> Sequence[Finding]:
        return await asyncio.gather(*(_examine(identity, *peer) for peer in sorted(peers.static.items())))

    return list(asyncio.run(all_of_them()))


async def _examine(identity: Identity, node: str, address: str) -> Finding:
    what = f"peer {node} at {address}"
    try:
        with await sockets.dial(node, address, ANSWER_S) as sock:
            async with asyncio.timeout(ANSWER_S):
                dialler = Dialler(identity, expect=node, nonce=secrets.token_bytes(NONCE_BYTES))
                peer = await sockets.negotiate(sock, dialler)
    except TimeoutError:
        return Finding(
            f"{what}: takes connections and does not answer within {ANSWER_S:g} s",
            "look at its log; a stopped or overloaded daemon does this, or another program on that port",
        )
    except KvdError as error:
        return Finding(f"{what}: {error.code}: {error.message}", FIXES.get(error.code, "look at its log"))
    except OSError as error:
        return Finding(f"{what}: {sockets.reason_of(error)}", "look at its log")
    return Finding(f"{what}: answers, fabric {peer.fabric}")  # type: ignore[union-attr]


FIXES = {
    "PEER_UNREACHABLE": "on that host: systemctl status kvd, and peers.listen in its kvd.toml; here: the address, the "
    "route and the firewall between the two",
    "AUTHENTICATION_FAILED": "the same key on both: compare `sha256sum` of peers.key_file",
    "FINGERPRINT_MISMATCH": "the right address here; or the same release, security.level and checksums on both, and "
    "a fabric in common",
    "VERSION_MISMATCH": "the same release on both",
    "PROTOCOL": "is it kvd that listens there?",
}
"""What to do, by code."""
