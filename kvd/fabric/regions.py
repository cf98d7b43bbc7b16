"""Registered regions, their grants, and the check of what a peer asks for; for fabrics that check in software."""

from __future__ import annotations

import enum
import secrets

import numpy as np

from kvd.errors import ChecksumMismatch, FabricError, InvalidArgument, RemoteAccessError
from kvd.fabric.base import Grant, Region

TOKEN_BYTES = 16


class Refusal(enum.IntEnum):
    """Why an access to granted memory is refused; the numbers cross the wire."""

    UNKNOWN_TOKEN = 1
    NOT_WRITABLE = 2
    NOT_READABLE = 3
    OUT_OF_RANGE = 4
    REVOKED = 5
    DAMAGED = 6

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Refusal.UNKNOWN_TOKEN: "its token is not, or no longer, that of a grant",
    Refusal.NOT_WRITABLE: "the grant is not writable",
    Refusal.NOT_READABLE: "the grant is not readable",
    Refusal.OUT_OF_RANGE: "it reaches outside the grant",
    Refusal.REVOKED: "the grant was revoked on the way",
    Refusal.DAMAGED: "its bytes arrived otherwise than they were sent",
}


def access_error(what: str, refusal: Refusal, low: int, high: int) -> FabricError:
    """The error of an operation (``what``: "write" or "read") on remote bytes ``low`` to ``high``."""
    if refusal is Refusal.DAMAGED:
        return damaged(what, low, high)
    return RemoteAccessError(
        f"the peer refused a {what} of the bytes from {low} to {high} of its grant: {refusal.sentence}; open the "
        "transfer again to get a valid grant",
        reason=refusal.name.lower(),
        low=low,
        high=high,
    )


def damaged(what: str, low: int, high: int) -> ChecksumMismatch:
    """The error of an operation whose bytes did not pass their check at the side that received them."""
    return ChecksumMismatch(
        f"a {what} of the bytes from {low} to {high} of a grant arrived damaged, and none of them counts as in place; "
        "open the transfer again, and if it happens again look for a faulty link, adapter or memory between the nodes",
        reason="damaged",
        low=low,
        high=high,
    )


class RegionTable:
    """The regions and grants of one fabric."""

    def __init__(self) -> None:
        self._addresses: dict[int, int] = {}
        self._grants: dict[bytes, Grant] = {}
        self._last_id = 0

    def register(self, memory: memoryview, address: int | None = None) -> Region:
        """See :meth:`kvd.fabric.base.Fabric.register`; raises :class:`InvalidArgument` for unusable memory.
        ``address``: where it begins for the device, if not where it does for this process."""
        if memory.readonly or not memory.c_contiguous or memory.format != "B" or memory.nbytes == 0:
            raise InvalidArgument(
                f"memory of format {memory.format!r} and {memory.nbytes} bytes (read-only: {memory.readonly}) can't be "
                "registered; give a writable, contiguous, non-empty view of format 'B'",
                nbytes=memory.nbytes,
            )
        self._last_id += 1
        region = Region(self._last_id, memory)
        self._addresses[region.id] = address_of(memory) if address is None else address
        return region

    def deregister(self, region: Region) -> None:
        """Forget ``region``; raises :class:`InvalidArgument` while a grant of it is open."""
        if any(grant.region is region for grant in self._grants.values()):
            raise InvalidArgument(f"region {region.id} still has open grants; revoke them first", region=region.id)
        self._addresses.pop(region.id, None)

    def address(self, region: Region) -> int:
        """Where the region's memory begins; raises :class:`InvalidArgument` if it is not registered here."""
        try:
            return self._addresses[region.id]
        except KeyError:
            raise InvalidArgument(
                f"region {region.id} is not registered with this fabric (any more); register it first", region=region.id
            ) from None

    def grant(self, region: Region, offset: int, length: int, *, writable: bool, readable: bool) -> Grant:
        """See :meth:`kvd.fabric.base.Fabric.grant`; raises :class:`InvalidArgument` outside of the region."""
        self.address(region)
        if offset < 0 or length < 0 or offset + length > region.nbytes:
            raise InvalidArgument(
                f"a grant of {length} bytes at {offset} leaves region {region.id} of {region.nbytes} bytes; offset and "
                "length must be at least 0 and end inside the region",
                offset=offset,
                length=length,
                region=region.id,
            )
        grant = Grant(region, offset, length, writable, readable, secrets.token_bytes(TOKEN_BYTES))
        self._grants[grant.token] = grant
        return grant

    def revoke(self, grant: Grant) -> None:
        self._grants.pop(grant.token, None)

    def is_open(self, grant: Grant) -> bool:
        return grant.token in self._grants

    def clear(self) -> None:
        self._grants.clear()
        self._addresses.clear()

    def check(self, token: bytes, low: int, high: int, *, write: bool) -> Grant | Refusal:
        """The grant behind ``token`` if it permits the bytes from ``low`` to ``high``, else why not."""
        grant = self._grants.get(token)
        if grant is None:
            return Refusal.UNKNOWN_TOKEN
        if write and not grant.writable:
            return Refusal.NOT_WRITABLE
        if not write and not grant.readable:
            return Refusal.NOT_READABLE
        if not 0 <= low <= high <= grant.length:
            return Refusal.OUT_OF_RANGE
        return grant


def address_of(memory: memoryview | bytearray) -> int:
    """The address of writable memory. It stays valid as long as the memory's owner is not resized or closed."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
