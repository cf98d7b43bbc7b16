"""What an inference process imports to move KV caches through its node's daemon.

Importing this needs neither torch nor NumPy; opening a transfer imports NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.client import Client
from kvd_client.errors import KvdError
from kvd_client.spec import KVSpec, MetadataSpec, PartLayout, TokenRange

if TYPE_CHECKING:
    from kvd_client.transfer import DecodeTransfer, PrefillTransfer

__all__ = [
    "Client",
    "DecodeTransfer",
    "KVSpec",
    "KvdError",
    "MetadataSpec",
    "PartLayout",
    "PrefillTransfer",
    "TokenRange",
]


def __getattr__(name: str) -> object:
    if name in ("DecodeTransfer", "PrefillTransfer"):
        from kvd_client import transfer

        return getattr(transfer, name)
    raise AttributeError(f"module 'kvd_client' has no attribute {name!r}")
