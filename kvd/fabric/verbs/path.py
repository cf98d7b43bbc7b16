"""What the probe of a path may find (:mod:`kvd.fabric.verbs.probe`), and what to do then; needs no pyverbs."""

from __future__ import annotations

import enum

import msgspec

from kvd.errors import FabricError
from kvd.fabric.verbs.wire import Hello, decode
from kvd.wire.hello import printable


class Trouble(enum.StrEnum):
    """What a path is found to do."""

    NONE = ""
    SILENT = "silent"
    """Not even a small packet is answered."""
    SHORT = "short"
    """Small packets pass, one of the MTU does not."""
    DAMAGED = "damaged"
    """Everything passes, and comes back changed."""
    REFUSED = "refused"
    """The peer's device answers that it can't do it."""


class Finding(msgspec.Struct, array_like=True, frozen=True):
    """What one side's probe found."""

    trouble: Trouble = Trouble.NONE
    reason: str = ""
    """What the device said of it."""

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)


def unpack_finding(blob: bytes) -> Finding:
    """Raises :class:`FabricError` for what is none."""
    finding = decode(blob, Finding, "what the peer found on the path")
    return Finding(finding.trouble, printable(finding.reason))


def path_error(mine: Hello, peer: Hello, own: Finding, theirs: Finding) -> FabricError | None:
    """What both sides' findings come to, with the trouble as its field ``path``; None if the path is good. This side's
    own finding counts first."""
    finding, who = (own, "") if own.trouble else (theirs, "the peer found that ")
    if not finding.trouble:
        return None
    nbytes = packet_bytes(mine, peer)
    infiniband = mine.infiniband and peer.infiniband
    what = {
        Trouble.SILENT: "carries nothing",
        Trouble.SHORT: f"carries small packets, but none of {nbytes} bytes",
        Trouble.DAMAGED: "changes what it carries",
        Trouble.REFUSED: "leads to a device that does not execute requests",
    }[finding.trouble]
    fix = {
        Trouble.SILENT: "look at the subnet manager and the cables (ibstat, ibping)"
        if infiniband
        else "let UDP port 4791 through between the two addresses (firewall, security group, switch), or choose others "
        "with fabric.gid_index",
        Trouble.SHORT: "give every interface and switch on the way the same MTU, or the interfaces at both ends a "
        "smaller one, and restart the daemons",
        Trouble.DAMAGED: "look for a faulty adapter, cable or switch",
        Trouble.REFUSED: "look at the kernel logs of both nodes",
    }[finding.trouble]
    return FabricError(
        f'the RDMA path from {mine.gid} to {peer.gid} {what}: {who}{finding.reason}; {fix}, or set fabric.name = "tcp"',
        path=finding.trouble.value,
        gid=mine.gid,
        peer_gid=peer.gid,
    )


def packet_bytes(mine: Hello, peer: Hello) -> int:
    """Payload of the largest packet between two ends."""
    return 128 << min(mine.mtu, peer.mtu)
