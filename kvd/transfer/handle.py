"""Handles: how a router names a transfer to the decode side when request ids differ between engines."""

from __future__ import annotations

import dataclasses
import re
import secrets

from kvd.errors import InvalidArgument
from kvd.types import NodeId, TransferId

_FORM = re.compile(r"([A-Za-z0-9._-]{1,64})/([0-9a-f]{16})/([0-9]{1,20})/([0-9a-f]{16})")


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """The parts of a handle: where the source is, which life of its daemon, which part, and a secret."""

    node: NodeId
    boot: str
    transfer: TransferId
    secret: str

    def __str__(self) -> str:
        return f"{self.node}/{self.boot}/{self.transfer}/{self.secret}"


def make_handle(node: NodeId, boot: str, transfer: TransferId) -> str:
    """A handle that nobody can guess from another one."""
    return str(Handle(node, boot, transfer, secrets.token_hex(8)))


def parse_handle(text: str) -> Handle:
    """Raises :class:`InvalidArgument` if ``text`` has not the form of a handle."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise InvalidArgument(
            f"{text[:100]!r} is not a handle; pass on the string that the source's transfer has as `handle`, unchanged"
        )
    return Handle(found[1], found[2], int(found[3]), found[4])
